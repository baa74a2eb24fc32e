"""Where the data ends when the ranks have different numbers of batches.

An iterator's end is a place in the queue like a batch. It goes through DIST without ids and MAP with a verdict that
says so: all ranks submit the same jobs, and learn at the same batch that one of them has none. See
docs/design/pipeline.md, "Ranks with different numbers of batches".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.streamable import Pipelineable

from hybridrec._compat.torch_distributed import all_gather_single
from hybridrec.backend import HOST
from hybridrec.distributed.batch_contents import check_without_samples, kjts_of
from hybridrec.distributed.in_flight import InFlightBatch, Source
from hybridrec.distributed.verdict import agree
from hybridrec.errors import ConfigError
from hybridrec.types import UnevenRanks

logger = logging.getLogger("hybridrec")


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where the ranks of a pipeline meet."""

    host: dist.ProcessGroup
    """Of the host thread, while that has nothing to do."""
    device: dist.ProcessGroup
    """Of the training thread."""


class EndOfData:
    """A pipeline's policy, and what its ranks exchange beside the verdicts. Used by the training thread alone."""

    def __init__(
        self,
        uneven_ranks: UnevenRanks | str,
        make_empty_batch: Callable[[Any], Any] | None,
        *,
        depth: int,
        executes_all: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            uneven_ranks: Of the pipeline, like the others.
            make_empty_batch: From a batch to one without samples.
            depth: ``pipe_n_batch``.
            executes_all: ``execute_all_batches``.
            device: Of the model.

        Raises:
            ConfigError: The policy is unknown, or does not go with ``make_empty_batch``.
        """
        try:
            self._policy = UnevenRanks(uneven_ranks)
        except ValueError:
            allowed = ", ".join(repr(p.value) for p in UnevenRanks)
            raise ConfigError(f"uneven_ranks={uneven_ranks!r} is unknown. Accepted: {allowed}.") from None
        if self.drains and not callable(make_empty_batch):
            raise ConfigError(
                f"uneven_ranks='drain' with make_empty_batch={make_empty_batch!r}: a rank that ran out of batches has "
                "to feed empty ones. Pass make_empty_batch, a function from any batch to one of the same class with "
                "no samples: a KeyedJaggedTensor of stride 0, dense tensors of 0 rows."
            )
        if not self.drains and make_empty_batch is not None:
            raise ConfigError(
                "make_empty_batch has no effect with uneven_ranks='stop'. Pass uneven_ranks='drain', or leave it out."
            )
        self._make_empty_batch = make_empty_batch
        self._depth, self._executes_all, self._device = depth, executes_all, device
        self.has_met = False
        """Whether the ranks compared their settings, for the model in use."""
        self._error: Exception | None = None
        """What is wrong with the empty batch, until all ranks know."""
        self._empty: Any = None
        """Made from this rank's first batch: what others are made from, so that no full batch is kept."""

    @property
    def drains(self) -> bool:
        """Whether a rank that ran out goes on with empty batches."""
        return self._policy is UnevenRanks.DRAIN

    def saw(self, batch: Any, *, is_alone: bool) -> None:
        """This rank took a batch of its own; from the first one it tries to make an empty one.

        Args:
            batch: As the iterator gave it.
            is_alone: Whether there is no other rank; otherwise `is_over` raises what is wrong, on all of them.

        Raises:
            ConfigError: ``make_empty_batch`` gives nothing that can take the place of a batch.
        """
        if self._empty is not None or not self.drains:
            return
        try:
            made = self._made_from(batch)
            for features in kjts_of(made):
                check_without_samples(features)
            try:
                made.to(device=self._device, non_blocking=True)
            except Exception as e:
                raise ConfigError(
                    f"make_empty_batch returned a {type(made).__name__} whose to({str(self._device)!r}) raised "
                    f"{type(e).__name__}: {e}. Return a batch that goes to the device like any other."
                ) from e
        except Exception as e:
            if is_alone:
                raise
            self._error = e
        else:
            self._empty = made

    def empty_batch(self) -> Any:
        """A new batch without samples; None with "stop", and before the first batch of this rank."""
        return None if self._empty is None else self._made_from(self._empty)

    def _made_from(self, batch: Any) -> Any:
        assert self._make_empty_batch is not None
        try:
            made = self._make_empty_batch(batch)
        except Exception as e:
            raise ConfigError(
                f"make_empty_batch raised {type(e).__name__}: {e}. It gets a {type(batch).__name__}, full or empty, "
                "and returns one without samples."
            ) from e
        if not isinstance(made, (torch.Tensor, Pipelineable)):
            raise ConfigError(
                f"make_empty_batch returned a {type(made).__name__}. Return a batch of the class that it was given, "
                f"{type(batch).__name__}, without samples."
            )
        return made

    def is_over(self, source: Source, batch: InFlightBatch, groups: Groups) -> bool:
        """Whether ranks lack what comes next, so that nothing does. Collective if the ranks have to ask each other.

        They do before the first batch, where they also compare their settings; and before every batch if an end takes
        batches back whose verdict was before it (``execute_all_batches=False``).

        Args:
            source: Where the batch would be queued.
            batch: Not yet sent; without a ``host`` if this rank has none.
            groups: Where the ranks meet.

        Raises:
            ConfigError: A setting differs; a rank's empty batch is none; or ranks without a first batch are to drain.
                On all ranks alike.
        """
        without: list[int] = []
        if not self.has_met:
            without = self._meet(batch, groups.host)
            self.has_met = not without
        if not without and not self._executes_all:
            everyone = _gather([not batch.is_end], groups.device, self._device)
            without = [rank for rank, (has_own,) in enumerate(everyone) if not has_own]
        world_size = groups.host.size()
        if not without or (self.drains and len(without) < world_size):
            return False
        dropped = {rank: int(rank not in without) for rank in range(world_size)}
        self.warn(source.num_steps + len(source.queue), without, dropped)
        return True

    def _meet(self, batch: InFlightBatch, group: dist.ProcessGroup) -> list[int]:
        """Ranks that have no first batch, not even an empty one; all ranks if none has one of its own."""
        settings = {
            "pipe_n_batch": self._depth,
            "execute_all_batches": self._executes_all,
            "uneven_ranks": list(UnevenRanks).index(self._policy),
        }
        everyone = _gather([*settings.values(), batch.host is not None, batch.is_end], group, HOST)
        for column, name in enumerate(settings):
            values: list[Any] = [row[column] for row in everyone]
            if len(set(values)) > 1:
                if name == "uneven_ranks":
                    values = [list(UnevenRanks)[value].value for value in values]
                listed = ", ".join(f"rank {r}: {v!r}" for r, v in enumerate(values))
                raise ConfigError(
                    f"{name} differs between ranks ({listed}), which would wait for each other. Pass one value."
                )
        error, self._error = self._error, None
        agreed = agree(error, group)
        if agreed is not None:
            raise agreed from (None if agreed is error else error)
        without = [rank for rank, (*_, has_batch, _) in enumerate(everyone) if not has_batch]
        if all(is_end for *_, is_end in everyone):
            return list(range(len(everyone)))
        if self.drains and 0 < len(without) < len(everyone):
            raise ConfigError(
                f"the iterators of ranks {_listed(without)} of {len(everyone)} ended before their first batch, so that "
                "those ranks have nothing to make an empty batch from, which uneven_ranks='drain' needs. Give every "
                "rank a batch at first, or choose uneven_ranks='stop'. The batches that other ranks took are dropped."
            )
        return without

    def warn(self, num_steps: int, ended: Iterable[int], dropped: Mapping[int, int]) -> None:
        """Say which ranks ended first and what the others dropped; nothing if all ended alike.

        Args:
            num_steps: Batches that all ranks had.
            ended: Ranks whose iterators gave no more.
            dropped: Rank -> batches that it had taken beyond.
        """
        if not any(dropped.values()):
            return
        logger.warning(
            "the data of ranks %s ended after %d batches and that of other ranks did not: all ranks stop there. Taken "
            "and dropped: %s. Give all ranks as many batches, or choose uneven_ranks='drain'.",
            _listed(ended),
            num_steps,
            ", ".join(f"{count} of rank {rank}" for rank, count in sorted(dropped.items()) if count),
        )


def _gather(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Rank -> its values."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = mine.new_empty(group.size() * len(values))
    all_gather_single(everyone, mine, group=group)
    listed: list[list[int]] = everyone.view(group.size(), len(values)).tolist()
    return listed


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
