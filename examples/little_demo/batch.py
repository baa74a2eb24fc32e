"""What every data set of the demo has in common: its batches, how ranks share them, what is known of its tables."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


class DataError(ValueError):
    """The data is not what it should be. The message names the file and the line."""


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec is untyped
    """Some rows of one rank."""

    dense: Tensor
    """float32 [B, number of dense features, which may be 0], on the device."""
    ids: KeyedJaggedTensor
    """Raw int64 ids, in host memory: that is where hybridrec finds out which rows they need."""
    labels: Tensor
    """float32 [B], on the device: 1 = liked, clicked."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The dense part moves to the device, the ids stay."""
        dense = self.dense.to(device, non_blocking=non_blocking)
        return Batch(dense, self.ids, self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the dense part."""
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The dense part in page-locked memory, from which copies do not block."""
        return Batch(self.dense.pin_memory(), self.ids, self.labels.pin_memory())


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the batches one reader makes: some rows of every batch, and of the batches every ``step``-th."""

    batch_size: int
    """Most rows of a batch, over all ranks."""
    rank: int = 0
    """It reads rows ``rank``, ``rank + world_size`` .. of each batch."""
    world_size: int = 1
    first: int = 0
    """Number of the reader's first batch."""
    step: int = 1
    """Distance between its batches: more than 1 where several worker processes take turns."""


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """What is known of one table before training."""

    feature: str
    """Also the table's name."""
    ids: Tensor
    """int64 [N]: the ids of the training part, or a sample of them."""
    is_sample: bool = False
    """Whether a batch may hold ids unlike those in `ids`."""
    planned_rows: int
    """How many different ids are expected, over all ranks."""
    pooling: PoolingType = PoolingType.SUM
    is_cached: bool = True
    """Whether the device holds only a part of the rows. False: all, for tables that are small or always used."""


class DataSet(ABC):
    """Rows to train on and rows held out. The same arguments give the same batches, on any number of workers."""

    name: str
    unit: str
    """What a row is, in the plural."""
    features: tuple[str, ...]
    """Of the ids; one table each."""
    num_dense: int = 0
    """Columns of `Batch.dense`."""
    num_workers: int = 0
    """Processes a rank that make batches if there are cores for them; 0 where making them is quick."""

    @abstractmethod
    def tables(self) -> list[TableFacts]:
        """One entry a feature, in the order of `features`."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the reader: where the rows come from and how many there are."""

    @abstractmethod
    def train_batches(self, share: Share, epoch: int) -> Iterator[Batch]:
        """One pass over the rows to train on. Every rank gets the same number of batches, none of them empty.

        Raises:
            DataError: While iterating, at the row in question.
        """

    @abstractmethod
    def test_batches(self, share: Share) -> Iterator[Batch]:
        """The rows held out, cut and shared like those to train on."""

    def num_batches(self, batch_size: int) -> int | None:
        """Batches of one pass over the rows to train on. None: only the end of the pass will tell."""
        return None


class _Pass(IterableDataset[Batch | DataError]):
    """One pass, for `DataLoader`: worker w of n makes batches w, w + n .. and the loader takes turns between them.

    An error is handed on like a batch. Raised in a worker process it would come out wrapped in that process's
    traceback, and the loader would take seconds to end.
    """

    def __init__(self, data: DataSet, share: Share, epoch: int | None) -> None:
        """Read nothing yet. The epoch is None for the rows held out."""
        super().__init__()
        self._data, self._share, self._epoch = data, share, epoch

    def __iter__(self) -> Iterator[Batch | DataError]:
        worker = get_worker_info()
        share = self._share if worker is None else replace(self._share, first=worker.id, step=worker.num_workers)
        try:
            if self._epoch is None:
                yield from self._data.test_batches(share)
            else:
                yield from self._data.train_batches(share, self._epoch)
        except DataError as error:
            yield error


def load(data: DataSet, share: Share, *, epochs: range | None, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
    """The batches of some passes, one after the other; their order does not depend on the number of workers.

    Args:
        data: What to read.
        share: The rank's.
        epochs: Numbers of the passes over the rows to train on. None: one pass over those held out.
        num_workers: Processes that make the batches; 0: this one.
        pin_memory: Whether the dense part is to be in page-locked memory, for devices.

    Raises:
        DataError: While iterating, at the row in question.
    """
    for epoch in [None] if epochs is None else epochs:
        one_pass = _Pass(data, share, epoch)
        for batch in DataLoader(one_pass, batch_size=None, num_workers=num_workers, pin_memory=pin_memory):
            if isinstance(batch, DataError):
                raise batch
            yield batch


def choose_num_workers(data: DataSet, local_world_size: int) -> int:
    """Worker processes of each rank: as many as the data set would like, as far as ranks leave cores to them."""
    spare = len(os.sched_getaffinity(0)) // local_world_size - 1
    return max(0, min(data.num_workers, spare))


def expected_distinct(ids: Tensor, batch_size: int) -> float:
    """How many different ids a batch of random rows has on average.

    An id that makes up the share s of the rows is missing from a batch of B rows with probability (1 - s)^B.

    Args:
        ids: int64 [N], one id a row.
        batch_size: B.
    """
    _, counts = torch.unique(ids, return_counts=True)
    return float((1 - (1 - counts.double() / len(ids)) ** batch_size).sum())
