"""SWAP: move the rows that a plan names between the store and the slots.

Two ways, the same rows: a device tier that is host memory is copied to and from directly by the native core; any
other goes through one staging buffer a direction, a record [weights | row states | row-wise states] a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybridrec.backend import DeviceBackend
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import Plan
from hybridrec.types import SlotArrays


class Swapper(Protocol):
    """Executes plans. Victims are written back before anything is loaded."""

    def swap(self, plan: Plan) -> None: ...


class HostMemorySwapper:
    """For slots in host memory that were given to `ShardGroup.bind_slots`."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def swap(self, plan: Plan) -> None:
        if plan.num_loads or plan.num_inits or plan.num_write_backs:
            self._group.swap(plan.ordinal)


class StagedSwapper:
    """For slots in device memory: gather -> staging -> device, and back. `swap` returns when rows have landed."""

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
            record_floats: [T], floats of a staging record of each table: D * (1 + M) + A.
            backend: Gives pinned staging memory and synchronisation.
            device: Where the slots are.
        """
        self._group = group
        self._slot_arrays = slot_arrays
        self._record_floats = list(record_floats)
        self._backend = backend
        self._device = device
        self._staging = backend.empty_staging(0)

    def swap(self, plan: Plan) -> None:
        num_loads = plan.num_loads + plan.num_inits
        if not num_loads and not plan.num_write_backs:
            return
        counts = torch.empty((len(self._record_floats), 2), dtype=torch.int64)
        self._group.swap_counts(plan.ordinal, counts)
        load_slots = torch.empty(num_loads, dtype=torch.int64)
        victim_slots = torch.empty(plan.num_write_backs, dtype=torch.int64)
        self._group.swap_slots(plan.ordinal, load_slots, victim_slots)
        loads_per_table, victims_per_table = counts.t().tolist()
        if plan.num_write_backs:
            staging = self._staging_for(victims_per_table)
            self._read_slots(victim_slots.to(self._device), victims_per_table, staging)
            self._backend.synchronize(self._device)
            self._group.scatter_victims(plan.ordinal, staging)
        if num_loads:
            staging = self._staging_for(loads_per_table)
            self._group.gather_loads(plan.ordinal, staging)
            self._write_slots(load_slots.to(self._device), loads_per_table, staging)
            self._backend.synchronize(self._device)

    def _staging_for(self, rows_per_table: Sequence[int]) -> Tensor:
        num_floats = sum(n * w for n, w in zip(rows_per_table, self._record_floats, strict=True))
        if self._staging.numel() < num_floats:
            self._staging = self._backend.empty_staging(max(num_floats, 2 * self._staging.numel()))
        return self._staging[:num_floats]

    def _read_slots(self, slots: Tensor, rows_per_table: Sequence[int], staging: Tensor) -> None:
        for records, part, arrays in self._tables(slots, rows_per_table, staging):
            columns = [a.index_select(0, part) for a in (arrays.weights, *arrays.row_states)]
            columns += [a.index_select(0, part).unsqueeze(1) for a in arrays.row_wise_states]
            records.copy_(torch.cat(columns, 1), non_blocking=True)

    def _write_slots(self, slots: Tensor, rows_per_table: Sequence[int], staging: Tensor) -> None:
        for records, part, arrays in self._tables(slots, rows_per_table, staging):
            on_device = records.to(self._device, non_blocking=True)
            dim, column = arrays.weights.shape[1], 0
            for array in (arrays.weights, *arrays.row_states):
                array.index_copy_(0, part, on_device[:, column : column + dim])
                column += dim
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
