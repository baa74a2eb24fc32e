"""From a table and a plan's compute kernel to what one rank allocates: slots and quota."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from hybridrec.config import TableConfig, shard_quota, shard_rows
from hybridrec.errors import ConfigError

DEFAULT_LOAD_FACTOR = 0.2
"""Share of the planned rows that a cache holds when neither ``device_rows`` nor the plan say: on a CPU topology, where
slots are ordinary memory and there is nothing to fill."""
TRANSIENT_SLOTS = 256
"""Slots that a ``fused_uvm`` table starts with; they grow to what the batches in flight need."""
MAX_SLOTS = 2**31 - 3


class Placement(str, enum.Enum):
    """Where rows live; the values are TorchRec's names of compute kernels."""

    DEVICE = "fused"
    """All planned rows in slots; rows beyond the plan live in the store."""
    CACHED = "fused_uvm_caching"
    """Rows in the store, the hot ones in slots."""
    HOST = "fused_uvm"
    """Rows in the store; slots for the batches in flight alone."""


@dataclass(frozen=True, kw_only=True)
class ShardPlacement:
    """One table on one rank."""

    placement: Placement
    num_slots: int
    """C at the start. Only `Placement.HOST` tables get more, as batches need them."""
    planned_rows: int
    """Rows expected on this rank."""
    max_rows: int
    """Quota of this rank; 0 = none."""


def place(table: TableConfig, compute_kernel: str, load_factor: float | None, world_size: int) -> ShardPlacement:
    """Size one table's shard.

    Args:
        table: The table.
        compute_kernel: Of the plan.
        load_factor: `CacheParams.load_factor` of the plan, or None.
        world_size: W.

    Raises:
        ConfigError: The compute kernel is none of ours, or the slots would not be addressable.
    """
    placed = size_shard(table, compute_kernel, load_factor, world_size)
    if placed.num_slots > MAX_SLOTS:
        raise ConfigError(
            f"table {table.name!r}: {placed.num_slots:,} slots a rank ({compute_kernel!r}, planned_rows="
            f"{table.planned_rows:,}, {world_size} ranks) are more than the {MAX_SLOTS:,} that can be numbered. Give "
            "planned_rows, the number of rows that you expect to live; num_embeddings may stay nominal."
        )
    return placed


def placement_of(table: str, compute_kernel: str, whose: str) -> Placement:
    """
    Raises:
        ConfigError: The compute kernel is none of ours.
    """
    try:
        return Placement(compute_kernel)
    except ValueError:
        allowed = ", ".join(repr(p.value) for p in Placement)
        raise ConfigError(
            f"table {table!r}: compute kernel {compute_kernel!r} {whose} does not exist for hashed tables, whose rows "
            f"are stepped inside the backward. Use one of {allowed} in ParameterConstraints(compute_kernels=[...])."
        ) from None


def size_shard(table: TableConfig, compute_kernel: str, load_factor: float | None, world_size: int) -> ShardPlacement:
    """As `place`, also if there are more slots than can be numbered: what a planner compares before it decides."""
    placement = placement_of(table.name, compute_kernel, "of the plan")
    rows = shard_rows(table.planned_rows, world_size)
    if table.max_rows is not None:
        rows = min(rows, shard_quota(table.max_rows, world_size))
    if placement is Placement.DEVICE:
        num_slots = rows
    elif placement is Placement.CACHED:
        share = DEFAULT_LOAD_FACTOR if load_factor is None else load_factor
        num_slots = table.device_rows or max(1, math.ceil(share * rows))
    else:
        num_slots = table.device_rows or min(TRANSIENT_SLOTS, rows)
    quota = 0 if table.max_rows is None else shard_quota(table.max_rows, world_size)
    return ShardPlacement(placement=placement, num_slots=num_slots, planned_rows=rows, max_rows=quota)
