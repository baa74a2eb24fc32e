"""Why a batch was refused, in words: table, rank, needed, available, remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrec.errors import CapacityError
from hybridrec.native.protocol import Plan, PlanStatus

if TYPE_CHECKING:
    from hybridrec.distributed.shard_table import ShardTable


def refusal_error(plan: Plan, table: ShardTable | None, *, rank: int, world_size: int) -> CapacityError:
    """The error for a refused plan; the caller raises it on all ranks."""
    where = f"rank {rank} of {world_size}" if table is None else f"table {table.name!r} (rank {rank} of {world_size})"
    needed, available = f"{plan.needed:,}", f"{plan.available:,}"
    if plan.status == PlanStatus.QUOTA:
        assert table is not None
        whose = "max_rows, of one rank" if table.is_owned else f"max_rows over {world_size} ranks"
        if table.spec.full_policy == "evict":
            return CapacityError(
                f"{where}: the batch needs {needed} rows, the quota is {available} ({whose}), and "
                "too few rows have been unused for 12 batches to be evicted. Raise max_rows."
            )
        return CapacityError(
            f"{where}: the batch needs {needed} rows and the quota is {available} ({whose}, "
            "full_policy='error'). Raise max_rows, or choose full_policy='evict' or 'grow'."
        )
    if plan.status == PlanStatus.HOST_BUDGET and plan.available == 0:
        return CapacityError(
            f"{where}: the system gave no host memory for the batch's rows. Give max_rows with full_policy='evict', "
            "free memory on this machine, or use more ranks."
        )
    if plan.status == PlanStatus.HOST_BUDGET:
        return CapacityError(
            f"{where}: with the batch the shards of this rank would take {needed} bytes of host memory, and the budget "
            f"is {available}. Raise host_memory_bytes in get_default_hybrid_sharders(...), give max_rows with "
            "full_policy='evict', or use more ranks."
        )
    return CapacityError(
        f"{where}: the shard holds {available} rows, all that can be numbered (2**32 - 1). Use more ranks."
    )
