"""What one table takes of one rank, in each tier: the figures that plans account."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from hybridrec.cache.staging import NUM_BUFFERS
from hybridrec.config import TableConfig
from hybridrec.distributed.placement import MAX_SLOTS, Placement, ShardPlacement, size_shard
from hybridrec.distributed.routing import ROW_WISE
from hybridrec.native import planned_host_bytes
from hybridrec.native.checks import MAX_ROWS
from hybridrec.store.row_state_layout import RowStateLayout

BATCHES_IN_FLIGHT = 3
"""The pipeline's default depth: what a table that keeps only batches in flight in slots is accounted for."""


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """Bytes of one rank."""

    device: int
    host: int


@dataclass(frozen=True, kw_only=True)
class TableDemand:
    """One table's sizes as functions of what a plan may choose. Immutable; hangs at the nominal parameter."""

    table: TableConfig
    layout: RowStateLayout
    shard_name: str = ""
    """Of a column shard."""

    @property
    def name(self) -> str:
        return self.shard_name or self.table.name

    def of_shard(self, sharding_type: str, dim: int, world_size: int) -> tuple[TableDemand, int]:
        """The demand of a shard of so many columns, and the number of ranks that share its rows."""
        num_ranks = world_size if sharding_type == ROW_WISE else 1
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, dim=dim)), num_ranks

    def placed(
        self, compute_kernel: str, world_size: int, load_factor: float | None, batch_rows: int = 0
    ) -> ShardPlacement:
        """The shard, with as many slots as it has once batches of so many rows were in flight."""
        placed = size_shard(self.table, compute_kernel, load_factor, world_size)
        if placed.placement is Placement.HOST:
            wanted = min(placed.planned_rows, BATCHES_IN_FLIGHT * batch_rows)
            placed = dataclasses.replace(placed, num_slots=max(placed.num_slots, wanted))
        return placed

    def bytes_of(self, placed: ShardPlacement) -> TierBytes:
        """When the planned rows live: slots on the device; id map, slot index and store on the host."""
        leaves_slots = placed.placement is not Placement.DEVICE and placed.num_slots < placed.planned_rows
        # The core answers for what it can hold; more is compared with capacities all the same, so it goes on in line.
        rows, slots = min(placed.planned_rows, MAX_ROWS), min(placed.num_slots, MAX_SLOTS)
        host = planned_host_bytes(
            dim=self.layout.dim,
            num_row_states=len(self.layout.row_states),
            num_row_wise_states=len(self.layout.row_wise_states),
            num_rows=rows,
            num_slots=slots,
            store_rows=rows if leaves_slots else 0,
            row_type=self.layout.row_type,
        )
        host = host * placed.planned_rows // rows
        return TierBytes(device=placed.num_slots * self.layout.slot_bytes, host=host)

    def staging_bytes(self, placed: ShardPlacement, batch_rows: int) -> TierBytes:
        """On a device with memory of its own: pinned buffers for loads and for victims, and their device sides."""
        one = min(batch_rows, placed.planned_rows) * self.layout.slot_bytes
        return TierBytes(device=2 * one, host=2 * NUM_BUFFERS * one)

    def accounted(
        self,
        compute_kernel: str,
        world_size: int,
        load_factor: float | None,
        *,
        batch_rows: int,
        is_host_memory: bool,
    ) -> TierBytes:
        """Everything that the planner adds up for one rank, inputs and outputs aside.

        Args:
            compute_kernel: A value of `Placement`.
            world_size: Ranks that share the rows.
            load_factor: `CacheParams.load_factor`, or None.
            batch_rows: Ids of one batch that a rank owns, at most as many rows.
            is_host_memory: Whether slots are ordinary host memory, which needs no staging.
        """
        placed = self.placed(compute_kernel, world_size, load_factor, batch_rows)
        rows = self.bytes_of(placed)
        if is_host_memory:
            return rows
        staging = self.staging_bytes(placed, batch_rows)
        return TierBytes(device=rows.device + staging.device, host=rows.host + staging.host)

    def smallest_cache(self, world_size: int, batch_rows: int) -> int:
        """Slots below which batches in flight would wait for each other."""
        rows = self.placed(Placement.DEVICE.value, world_size, None).planned_rows
        return min(rows, MAX_SLOTS, max(1, BATCHES_IN_FLIGHT * batch_rows))


@functools.cache
def slot_index_bytes() -> int:
    """Host memory for one slot of the device tier."""
    none = planned_host_bytes(dim=1, num_row_states=0, num_row_wise_states=0, num_rows=1, num_slots=1000, store_rows=0)
    more = planned_host_bytes(dim=1, num_row_states=0, num_row_wise_states=0, num_rows=1, num_slots=2000, store_rows=0)
    return -(-(more - none) // 1000)


def load_factor_of(num_slots: int, planned_rows: int) -> float:
    """The factor by which `size_shard` gives exactly so many slots: a little below n / rows, since it rounds up."""
    factor = (num_slots - 0.5) / planned_rows
    if math.ceil(factor * planned_rows) != num_slots:  # beyond what a float can tell apart
        factor = num_slots / planned_rows
    return factor
