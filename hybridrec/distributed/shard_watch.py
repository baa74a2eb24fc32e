"""What users are told once about the shards of a collection: rows beyond the plan, host memory near its budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridrec.distributed.placement import Placement
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.native import ShardGroup
from hybridrec.native.protocol import Plan

logger = logging.getLogger("hybridrec")

WARN_SHARE = 0.8
"""Of the host budget: what is taken beyond it is said once."""
_EVERY = 16
"""Batches; asking every table at each of them takes milliseconds where there are a thousand."""


class ShardWatch:
    """Looks at counters rarely: every so many batches that moved rows back, and after each hundredth of the budget."""

    def __init__(self, group: ShardGroup, tables: Sequence[ShardTable], *, where: str, host_budget_bytes: int) -> None:
        """
        Args:
            group: The shards.
            tables: [T], in the group's order.
            where: This rank, for messages.
            host_budget_bytes: 0 = no limit.
        """
        self._group, self._tables, self._where = group, list(tables), where
        # Tables that were planned to fit their slots and have not been seen to exceed them.
        self._fits_so_far = [t for t, s in enumerate(tables) if s.placed.placement is Placement.DEVICE]
        self._num_moved, self._look_at = 0, 1
        self._are_oversized: set[int] = set()
        self._budget_bytes = host_budget_bytes
        self._unchecked_bytes = 0
        self._largest_row_bytes = max((t.layout.store_bytes + t.layout.index_bytes for t in tables), default=0)

    def planned(self, plan: Plan) -> None:
        """A batch was planned."""
        self._num_moved += plan.num_write_backs > 0
        self._unchecked_bytes += plan.num_inits * self._largest_row_bytes

    def oversized(self, refused: Plan, *, slots: int) -> None:
        """A batch that was refused for want of slots is computed in passes instead. Said once a table."""
        self._unchecked_bytes = self._budget_bytes  # its new rows are in the store already, and no plan counts them
        t = refused.table
        if t in self._are_oversized:
            return
        self._are_oversized.add(t)
        held = f", {refused.pinned:,} of them held by forwards whose backward is to come" if refused.pinned else ""
        logger.warning(
            "table %r (%s): a batch needs %s slots of the device tier, which has %s%s. Such batches are computed in "
            "passes: the same result, more slowly. Raise device_rows (or planned_rows, or "
            "CacheParams(load_factor=...)), or make batches smaller. stats() counts them as oversized.",
            self._tables[t].name,
            self._where,
            f"{refused.needed:,}",
            f"{slots:,}",
            held,
        )

    def warn(self) -> None:
        """Say what went beyond the plan, or near the budget, in the batches so far."""
        if self._fits_so_far and self._num_moved >= self._look_at:
            self._look_at = self._num_moved + _EVERY
            self._warn_beyond_plan()
        if self._budget_bytes and self._unchecked_bytes * 100 >= self._budget_bytes:
            self._unchecked_bytes = 0
            self._warn_near_budget()

    def _warn_beyond_plan(self) -> None:
        for t in [t for t in self._fits_so_far if self._group.counters(t).write_backs]:
            self._fits_so_far.remove(t)
            logger.warning(
                "table %r (%s): more rows live than planned_rows says (%s a rank); those beyond are in host memory and "
                "move when they are needed. Raise planned_rows, or choose 'fused_uvm_caching'.",
                self._tables[t].name,
                self._where,
                f"{self._tables[t].placed.planned_rows:,}",
            )

    def _warn_near_budget(self) -> None:
        taken = sum(self._group.counters(t).host_bytes for t in range(len(self._tables)))
        if taken < WARN_SHARE * self._budget_bytes:
            return
        logger.warning(
            "%s: the shards take %s bytes of host memory, %d %% of the budget of %s; a batch beyond it is refused. "
            "Raise host_memory_bytes, give max_rows with full_policy='evict', or use more ranks.",
            self._where,
            f"{taken:,}",
            100 * taken // self._budget_bytes,
            f"{self._budget_bytes:,}",
        )
        self._budget_bytes = 0  # said once; the group keeps the budget
