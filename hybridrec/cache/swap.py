"""SWAP: move the rows that a plan names between the store and the slots.

Two ways, the same rows. A device tier that is host memory is copied to and from directly by the native core. Any other
goes through staging buffers, a record [weights | row states | row-wise states] a row, on a stream of its own::

    swap stream   wait(fence), slots -> victims' records -> D2H,     H2D -> loads' records -> slots,     ready
    this thread                               store -> loads' records               wait(D2H), victims' records -> store

The *fence* is the last use of any slot by a batch that is final: victims are slots of such batches alone. COMPUTE waits
for *ready*; nothing else on the device waits for the host or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrec.backend import DeviceBackend
from hybridrec.cache.staging import StagingRing, Uploader
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import Plan
from hybridrec.types import SlotArrays


class Swapper(Protocol):
    """Executes plans, one after the other, on one thread at a time."""

    is_half_moved: bool
    """An exception left a batch's rows claimed to be in slots where they are not: nothing can be trusted any more."""

    def swap(self, plan: Plan, fence: Any, lock: AbstractContextManager[Any]) -> None:
        """Victims out, rows in.

        Args:
            plan: Of a batch that was not moved yet.
            fence: Event behind the last use of the victims' slots on the device; None: there was none.
            lock: Held around calls of the group.
        """

    def upload(self, tensors: list[Tensor]) -> list[Tensor]:
        """Host tensors as the kernels want them: where the slots are. Ordered before `ready`."""

    def ready(self) -> Any:
        """Event behind everything that this swapper was given so far; None: it is done already."""

    def slots_are_at(self, arrays: SlotArrays) -> None:
        """A table's slots are new, or have moved there."""

    def flush(self, fence: Any, lock: AbstractContextManager[Any]) -> None:
        """Write every row that is newer in its slot back to the store. Rows stay in their slots."""


class HostMemorySwapper:
    """For slots in host memory that were given to `ShardGroup.bind_slots`."""

    is_half_moved = False  # the core moves all rows of a batch, or says what is wrong before

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def swap(self, plan: Plan, fence: Any, lock: AbstractContextManager[Any]) -> None:
        if plan.num_loads or plan.num_inits or plan.num_write_backs:
            with lock:
                self._group.swap(plan.ordinal)

    def upload(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def ready(self) -> Any:
        return None

    def slots_are_at(self, arrays: SlotArrays) -> None:
        """The core is told by `ShardGroup.bind_slots`."""

    def flush(self, fence: Any, lock: AbstractContextManager[Any]) -> None:
        with lock:
            self._group.flush()


class StagedSwapper:
    """For slots in device memory. `swap` returns when the store has the victims; rows may still be on their way in."""

    def __init__(
        self,
        group: ShardGroup,
        slot_arrays: Callable[[int], SlotArrays],
        record_floats: Sequence[int],
        backend: DeviceBackend,
        device: torch.device,
    ) -> None:
        """
        Args:
            group: The shards.
            slot_arrays: table index -> its slots on the device; asked anew at every swap, since slots can grow.
            record_floats: [T], floats of a staging record of each table: words of the weights, D * M, and A.
            backend: Gives streams, events and pinned memory.
            device: Where the slots are.
        """
        self._group = group
        self._slot_arrays = slot_arrays
        self._record_floats = list(record_floats)
        self._backend = backend
        self._device = device
        self._stream = backend.make_stream(device)
        self._uploader = Uploader(backend, device, self._stream)
        self._loads = StagingRing(backend, torch.float32)
        self._victims = StagingRing(backend, torch.float32, num_buffers=1)
        self.is_half_moved = False

    def swap(self, plan: Plan, fence: Any, lock: AbstractContextManager[Any]) -> None:
        try:
            self._swap(plan, fence, lock)
        except BaseException:
            self._reclaim()
            raise

    def _reclaim(self) -> None:
        """Take back what is lent, once the device cannot look at it any more."""
        self._backend.synchronize(self._device)
        for owner in (self._loads, self._victims, self._uploader):
            owner.reclaim()

    def _swap(self, plan: Plan, fence: Any, lock: AbstractContextManager[Any]) -> None:
        num_loads = plan.num_loads + plan.num_inits
        if not num_loads:  # victims leave their slots only for rows that come
            return
        counts = torch.empty((len(self._record_floats), 2), dtype=torch.int64)
        load_slots = torch.empty(num_loads, dtype=torch.int64)
        victim_slots = torch.empty(plan.num_write_backs, dtype=torch.int64)
        with lock:
            self._group.swap_counts(plan.ordinal, counts)
            self._group.swap_slots(plan.ordinal, load_slots, victim_slots)
        loads_per_table, victims_per_table = counts.t().tolist()
        load_slots, victim_slots = self._uploader.upload([load_slots, victim_slots])
        if fence is not None:
            self._stream.wait_event(fence)
        if plan.num_write_backs:
            victims = self._victims.take(self._num_floats(victims_per_table))
            with self._backend.use_stream(self._stream):
                self._read_slots(victim_slots, victims_per_table, victims)
            written = self._backend.record_event(self._stream)
        loads = self._loads.take(self._num_floats(loads_per_table))
        self.is_half_moved = True
        with lock:
            self._group.gather_loads(plan.ordinal, loads)
        with self._backend.use_stream(self._stream):
            self._write_slots(load_slots, loads_per_table, loads)
        self._loads.give_back(self._backend.record_event(self._stream))
        if plan.num_write_backs:
            written.synchronize()
            with lock:
                self._group.scatter_victims(plan.ordinal, victims)
            self._victims.give_back(None)
        self.is_half_moved = False

    def upload(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._uploader.upload(tensors)

    def ready(self) -> Any:
        return self._backend.record_event(self._stream)

    def slots_are_at(self, arrays: SlotArrays) -> None:
        for array in (arrays.weights, *arrays.row_states, *arrays.row_wise_states):
            self._backend.record_stream(array, self._stream)

    def flush(self, fence: Any, lock: AbstractContextManager[Any]) -> None:
        counts = torch.empty(len(self._record_floats), dtype=torch.int64)
        with lock:
            self._group.flush_counts(counts)
            slots = torch.empty(int(counts.sum()), dtype=torch.int64)
            if not slots.numel():
                return
            self._group.flush_slots(slots)
        (slots,) = self._uploader.upload([slots])
        if fence is not None:
            self._stream.wait_event(fence)
        per_table = counts.tolist()
        staging = self._victims.take(self._num_floats(per_table))
        try:
            with self._backend.use_stream(self._stream):
                self._read_slots(slots, per_table, staging)
            self._backend.record_event(self._stream).synchronize()
            with lock:
                self._group.flush_records(staging)
        finally:
            self._reclaim()

    def _num_floats(self, rows_per_table: Sequence[int]) -> int:
        return sum(n * w for n, w in zip(rows_per_table, self._record_floats, strict=True))

    def _read_slots(self, slots: Tensor, rows_per_table: Sequence[int], staging: Tensor) -> None:
        for records, part, arrays in self._tables(slots, rows_per_table, staging):
            columns = [a.index_select(0, part) for a in (arrays.weights, *arrays.row_states)]
            columns += [a.index_select(0, part).unsqueeze(1) for a in arrays.row_wise_states]
            records.copy_(torch.cat(columns, 1), non_blocking=True)

    def _write_slots(self, slots: Tensor, rows_per_table: Sequence[int], staging: Tensor) -> None:
        for records, part, arrays in self._tables(slots, rows_per_table, staging):
            on_device = records.to(self._device, non_blocking=True)
            column = 0
            for array in (arrays.weights, *arrays.row_states):
                width = array.shape[1]
                array.index_copy_(0, part, on_device[:, column : column + width])
                column += width
            for array in arrays.row_wise_states:
                array.index_copy_(0, part, on_device[:, column])
                column += 1

    def _tables(
        self, slots: Tensor, rows_per_table: Sequence[int], staging: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, SlotArrays]]:
        """(records [n, width], slots [n], arrays) of every table that moves rows."""
        row = position = 0
        for table, (n, width) in enumerate(zip(rows_per_table, self._record_floats, strict=True)):
            if n:
                records = staging[position : position + n * width].view(n, width)
                yield records, slots[row : row + n], self._slot_arrays(table)
            row, position = row + n, position + n * width
