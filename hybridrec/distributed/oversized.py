"""Batches whose rows exceed the slots: computed exactly, in passes over transient slots, while the cache steps aside.

Forward: samples are taken together as long as their rows fit the transient slots, so every bag is summed whole.
Backward: rows are taken together as they fit, each with all its occurrences in order, so every row is stepped once, by
the sum of its gradients. Rows come from the store and go back there; a row that is in a slot too is written to both.
The kernel's class is that of ordinary batches, and a bag's sum or a row's step does not depend on what else is in a
pass: the bits are those of one pass over everything.

Where transient slots hold all rows of a batch, its rows are read once, by the forward, and stay there for the backward,
unless another batch was looked up in passes, or trained, in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.backend import DeviceBackend
from hybridrec.cache import BatchTransaction, TransactionLog
from hybridrec.cache.staging import StreamCopies
from hybridrec.distributed.table_kernels import Occurrences, TableKernels
from hybridrec.kernels.base import LookupKernel
from hybridrec.types import SlotArrays

TRANSIENT_BYTES = 64 << 20
"""Of transient slots for all tables of a collection, unless one sample needs more."""


@dataclass(frozen=True)
class _Sizes:
    """Of the tables of one kernel in one batch."""

    unique_T: Tensor
    """int64 [T]: unique rows."""
    room_T: Tensor
    """int64 [T]: transient slots."""

    @property
    def is_one_pass(self) -> bool:
        """Whether all rows fit together."""
        return self.num_passes <= 1

    @property
    def num_passes(self) -> int:
        """Of the backward: until every table's rows were in one."""
        return int(((self.unique_T + self.room_T - 1) // self.room_T).max())


class _Loaded(NamedTuple):
    """All rows of a batch are in transient slots, as they were at a time."""

    forward: int
    """Number of the `PassLookup.forward` that loaded them."""
    committed: int
    """Batches that had been trained then."""
    pending: object
    """What the kernel's backward needs."""


class _Saved(NamedTuple):
    """What `PassLookup.forward` leaves for `backward`."""

    occurrences: Sequence[Occurrences]
    sizes: Sequence[_Sizes]
    learning_rates: Sequence[float]
    loaded: Sequence[_Loaded | None]


class PassLookup:
    """Forward and backward of batches that have no slots. One caller at a time; nothing else moves rows meanwhile."""

    def __init__(
        self,
        tables: TableKernels,
        log: TransactionLog,
        backend: DeviceBackend,
        device: torch.device,
    ) -> None:
        """
        Args:
            tables: Whose slots hold the resident rows.
            log: Of the shards.
            backend: Of the device.
            device: Where the kernels are.
        """
        self._kernels, self._log, self._device = tables.kernels, log, device
        self._copies = StreamCopies(backend, device)
        self._tables_of_kernel = tables.tables_of_kernel
        self._transient: list[LookupKernel | None] = [None] * len(tables.kernels)
        self._num_tables = len(tables.tables)
        self.transient_bytes = TRANSIENT_BYTES
        """How much memory transient slots take; a sample that needs more gets more."""
        self._num_forwards = 0
        self.num_passes = 0
        """Since construction, both ways."""
        self.moved_bytes = [0] * self._num_tables
        """Per table, between store and transient slots."""

    def forward(self, transaction: BatchTransaction, occurrences: Sequence[Occurrences]) -> tuple[list[Tensor], object]:
        """Sum the rows of every bag, or look every id up.

        Args:
            transaction: Of the batch.
            occurrences: One a kernel.

        Returns:
            For each kernel float32 [B, columns], or [N, D], on the device; and what `backward` needs.
        """
        self._num_forwards += 1
        pooled, sizes, loaded = [], [], list[_Loaded | None]()
        for k, one in enumerate(occurrences):
            assert transaction.unique_counts is not None
            sizes.append(self._make_room(k, transaction.unique_counts[self._tables_of_kernel[k]], one))
            if sizes[k].is_one_pass:
                part, pending = self._forward_in_one(k, transaction, one)
                loaded.append(_Loaded(self._num_forwards, self._log.committed, pending))
            else:
                part = self._forward(k, transaction, one, sizes[k])
                loaded.append(None)
            pooled.append(part)
        saved = _Saved(occurrences, sizes, [kernel.learning_rate for kernel in self._kernels], loaded)
        return pooled, saved

    def backward(self, transaction: BatchTransaction, saved: object, grads: Sequence[Tensor], *, step: int) -> None:
        """Step every row of a batch once.

        Args:
            transaction: Of the batch.
            saved: Of `forward`.
            grads: Like the output of `forward`.
            step: 1 for the collection's first committed batch.
        """
        assert isinstance(saved, _Saved)
        for k, one in enumerate(saved.occurrences):
            transient = self._transient[k]
            assert transient is not None
            loaded = saved.loaded[k]
            if loaded is not None and loaded[:2] == (self._num_forwards, self._log.committed):
                transient.backward(loaded.pending, grads[k], step=step)
                for t, (rows, slots) in enumerate(self._rows(k, transaction)):
                    self._store(k, t, transient.slot_arrays(t), rows, slots)
                continue
            transient.learning_rate = saved.learning_rates[k]
            self._backward(k, transient, self._rows(k, transaction), one, saved.sizes[k], grads[k], step)

    def step_rows(
        self,
        k: int,
        where: Sequence[tuple[NDArray[np.uint32], NDArray[np.int64]]],
        occurrences: Occurrences,
        grad: Tensor,
        *,
        step: int,
    ) -> None:
        """Step rows of one kernel once, wherever they are, at its learning rate.

        Args:
            k: Index of the kernel.
            where: (rows, slots or -1) of the distinct rows of every table.
            occurrences: With numbers among these.
            grad: Like the output of the kernel.
            step: Of the optimizer.
        """
        sizes = self._make_room(k, torch.tensor([len(rows) for rows, _ in where]), occurrences)
        transient = self._transient[k]
        assert transient is not None
        transient.learning_rate = self._kernels[k].learning_rate
        self._backward(k, transient, where, occurrences, sizes, grad, step)

    # ---- forward -------------------------------------------------------------------------------------------------

    def _make_room(self, k: int, unique_T: Tensor, occurrences: Occurrences) -> _Sizes:
        """Transient slots for a batch; more than before only if one of its samples needs them."""
        tables, kernel = self._tables_of_kernel[k], self._kernels[k]
        longest_T = _ids_per_sample(kernel, occurrences).amax(1) if occurrences.index_N.numel() else unique_T
        share = self.transient_bytes // self._num_tables
        room_T = torch.tensor(
            [max(1, share // (4 * _record_floats(kernel.slot_arrays(t)))) for t in range(len(tables))]
        )
        room_T = torch.maximum(torch.minimum(room_T, unique_T), torch.minimum(longest_T, unique_T)).clamp(min=1)
        transient = self._transient[k]
        if transient is not None:
            room_T = torch.maximum(room_T, torch.tensor([table.num_slots for table in transient.spec.tables]))
        if transient is None or room_T.tolist() != [table.num_slots for table in transient.spec.tables]:
            self._transient[k] = None  # the memory of the one before goes first
            self._transient[k] = kernel.transient(room_T.tolist())
        return _Sizes(unique_T, room_T)

    def _forward_in_one(self, k: int, transaction: BatchTransaction, occurrences: Occurrences) -> tuple[Tensor, object]:
        transient = self._transient[k]
        assert transient is not None
        for t, (rows, _) in enumerate(self._rows(k, transaction)):
            self._load(k, t, transient.slot_arrays(t), rows)
        transient.learning_rate = self._kernels[k].learning_rate
        self.num_passes += 1
        return self._run(transient, *occurrences)

    def _forward(self, k: int, transaction: BatchTransaction, occurrences: Occurrences, sizes: _Sizes) -> Tensor:
        kernel, transient = self._kernels[k], self._transient[k]
        assert transient is not None
        num_bags = (occurrences.offsets.shape[0] - 1) // len(kernel.spec.feature_table)
        num_outputs = num_bags if kernel.spec.is_pooled else occurrences.index_N.shape[0]
        output = torch.zeros((num_outputs, kernel.spec.total_dim), device=self._device)
        table_N = table_of_occurrence(kernel, occurrences)
        rows_of_table = [rows for rows, _ in self._rows(k, transaction)]
        base_T = torch.tensor([0, *itertools.accumulate(sizes.unique_T.tolist())])
        for first, last in _samples_that_fit(_ids_per_sample(kernel, occurrences), sizes.room_T):
            positions, offsets = _of_samples(occurrences.offsets, num_bags, first, last)
            if not positions.numel():
                continue
            part_table_N = table_N[positions]
            unique_U, place_N = torch.unique(base_T[part_table_N] + occurrences.index_N[positions], return_inverse=True)
            starts_T = torch.searchsorted(unique_U, base_T)
            for t, rows in enumerate(rows_of_table):
                numbers = unique_U[starts_T[t] : starts_T[t + 1]] - base_T[t]
                self._load(k, t, transient.slot_arrays(t), rows[numbers.numpy()], weights_only=True)
            weights_N = None if occurrences.weights_N is None else occurrences.weights_N[positions]
            values = self._run(transient, place_N - starts_T[part_table_N], offsets, weights_N)[0]
            if kernel.spec.is_pooled:
                output[first:last] = values
            else:
                output.index_copy_(0, self._copies.upload([positions])[0], values)
            self.num_passes += 1
        return output

    # ---- backward ------------------------------------------------------------------------------------------------

    def _backward(
        self,
        k: int,
        transient: LookupKernel,
        where: Sequence[tuple[NDArray[np.uint32], NDArray[np.int64]]],
        occurrences: Occurrences,
        sizes: _Sizes,
        grad: Tensor,
        step: int,
    ) -> None:
        room_N = sizes.room_T[table_of_occurrence(self._kernels[k], occurrences)]
        pass_N = occurrences.index_N // room_N
        place_N = occurrences.index_N - pass_N * room_N
        for p in range(sizes.num_passes):
            is_in = pass_N == p
            positions = is_in.nonzero().flatten()
            counts = torch.zeros(is_in.shape[0] + 1, dtype=torch.int64)
            torch.cumsum(is_in, 0, out=counts[1:])
            parts = []
            for t, (rows, slots) in enumerate(where):
                room = int(sizes.room_T[t])
                parts.append((rows[p * room : (p + 1) * room], slots[p * room : (p + 1) * room]))
                self._load(k, t, transient.slot_arrays(t), parts[t][0])
            weights_N = None if occurrences.weights_N is None else occurrences.weights_N[positions]
            _, pending = self._run(transient, place_N[positions], counts[occurrences.offsets], weights_N)
            of_pass = grad if transient.spec.is_pooled else grad.index_select(0, self._copies.upload([positions])[0])
            transient.backward(pending, of_pass, step=step)
            for t, (rows, slots) in enumerate(parts):
                self._store(k, t, transient.slot_arrays(t), rows, slots)
            self.num_passes += 1

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _rows(self, k: int, transaction: BatchTransaction) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """(rows, slots or -1) of every table of a kernel."""
        return [self._log.group.batch_rows(transaction.ordinal, t) for t in self._tables_of_kernel[k]]

    def _run(
        self, transient: LookupKernel, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, object]:
        given = [slots_N, offsets, *([] if weights_N is None else [weights_N])]
        placed = self._copies.upload(given)
        return transient.forward(placed[0], placed[1], None if weights_N is None else placed[2])

    def _load(
        self, k: int, table: int, arrays: SlotArrays, rows: NDArray[np.uint32], *, weights_only: bool = False
    ) -> None:
        """Store -> the first transient slots."""
        if not len(rows):
            return
        t = self._tables_of_kernel[k][table]
        (records,) = self._copies.upload([torch.from_numpy(self._log.group.read_records(t, rows))])
        for array, columns in _columns(arrays):
            array[: len(rows)] = records[:, columns].view(len(rows), *array.shape[1:])
            if weights_only:
                break
        self.moved_bytes[t] += records.numel() * 4

    def _store(
        self, k: int, table: int, arrays: SlotArrays, rows: NDArray[np.uint32], slots: NDArray[np.int64]
    ) -> None:
        """The first transient slots -> store, and to the slots of the rows that are resident too."""
        if not len(rows):
            return
        t = self._tables_of_kernel[k][table]
        records = self._copies.fetch(
            torch.cat([array[: len(rows)].view(len(rows), -1) for array, _ in _columns(arrays)], 1)
        )
        self._log.group.write_records(t, rows, records.numpy())
        self.moved_bytes[t] += records.numel() * 4
        if (slots >= 0).any():
            resident, at = self._copies.upload(
                [torch.from_numpy(np.flatnonzero(slots >= 0)), torch.from_numpy(slots[slots >= 0])]
            )
            ours = self._kernels[k].slot_arrays(table)
            for (array, _), (slot_array, _) in zip(_columns(arrays), _columns(ours), strict=True):
                slot_array.index_copy_(0, at, array.index_select(0, resident))


def _record_floats(arrays: SlotArrays) -> int:
    """Floats of a record [weights | row states | row-wise states]."""
    return sum(columns.stop - columns.start for _, columns in _columns(arrays))


def _columns(arrays: SlotArrays) -> Iterator[tuple[Tensor, slice]]:
    """Each array, and where it is in a record."""
    column = 0
    for array in (arrays.weights, *arrays.row_states, *arrays.row_wise_states):
        width = array.shape[1] if array.dim() > 1 else 1
        yield array, slice(column, column + width)
        column += width


def table_of_occurrence(kernel: LookupKernel, occurrences: Occurrences) -> Tensor:
    """int64 [N]: index of the table within the kernel."""
    features = torch.tensor(kernel.spec.feature_table)
    num_bags = (occurrences.offsets.shape[0] - 1) // features.shape[0]
    if num_bags == 0:
        return torch.empty(0, dtype=torch.int64)
    return features.repeat_interleave(occurrences.offsets[::num_bags].diff())


def _ids_per_sample(kernel: LookupKernel, occurrences: Occurrences) -> Tensor:
    """int64 [T, B]: ids of every sample in every table."""
    features = torch.tensor(kernel.spec.feature_table)
    lengths_FB = occurrences.offsets.diff().view(features.shape[0], -1)
    counts_TB = lengths_FB.new_zeros((len(kernel.spec.tables), lengths_FB.shape[1]))
    return counts_TB.index_add_(0, features, lengths_FB)


def _samples_that_fit(ids_TB: Tensor, room_T: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of samples whose ids, distinct or not, fit the room of every table; a sample by itself always does."""
    ends = torch.zeros((ids_TB.shape[0], ids_TB.shape[1] + 1), dtype=torch.int64)
    torch.cumsum(ids_TB, 1, out=ends[:, 1:])
    first = 0
    while first < ids_TB.shape[1]:
        limits = (ends[:, first] + room_T).unsqueeze(1)
        last = int(torch.searchsorted(ends, limits, right=True).min()) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def _of_samples(offsets: Tensor, num_bags: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Positions int64 [n] of the occurrences of some samples, and the offsets int64 [F * (last - first) + 1] there."""
    starts = offsets[:-1].view(-1, num_bags)[:, first:last].reshape(-1)
    lengths = offsets.diff().view(-1, num_bags)[:, first:last].reshape(-1)
    part = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=part[1:])
    return (starts - part[:-1]).repeat_interleave(lengths) + torch.arange(int(part[-1])), part
