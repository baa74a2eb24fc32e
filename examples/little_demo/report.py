"""What the demo prints: the plan before, what the tables did after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

if TYPE_CHECKING:
    from hybridrec import PipelineStats, TableStats


def plan_lines(plan: ShardingPlan, device_rows: dict[str, int | None]) -> list[str]:
    """The plan of all tables.

    Args:
        plan: Of the whole model.
        device_rows: table -> rows that one rank keeps on its device; None: all.
    """
    lines = [f"{'collection':<12}{'table':<8}{'sharding':<12}{'kernel':<20}{'ranks':<8}device rows per rank"]
    for path, tables in plan.plan.items():
        for name, sharding in tables.items():
            ranks = ",".join(str(rank) for rank in sharding.ranks or [])
            rows = device_rows[name]
            lines.append(
                f"{path:<12}{name:<8}{sharding.sharding_type:<12}{sharding.compute_kernel:<20}{ranks:<8}"
                + ("all" if rows is None else f"{rows:,}")
            )
    return lines


def gather_stats(stats: Sequence[TableStats], group: dist.ProcessGroup) -> list[list[TableStats]]:
    """The statistics of all ranks. Collective.

    Args:
        stats: Of this rank, one a table.
        group: The host group.

    Returns:
        One list a table, with one entry a rank.
    """
    of_ranks: list[Sequence[TableStats]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, tuple(stats), group=group)
    return [list(of_table) for of_table in zip(*of_ranks, strict=True)]


def hit_rate(stats: Sequence[TableStats]) -> float:
    """Share of the ids looked up whose row was on the device already; all given tables together."""
    accesses = sum(s.accesses for s in stats)
    return sum(s.access_hits for s in stats) / accesses if accesses else float("nan")


def stats_lines(tables: Sequence[Sequence[TableStats]]) -> list[str]:
    """Where the rows are and what moved, all ranks together.

    Args:
        tables: As `gather_stats` returns them.
    """
    lines = [
        f"{'':<8}{'rows on':>9}{'rows on':>9}{'hits by':>9}{'hits by':>11}{'rows moved':>13}{'rows moved':>13}",
        f"{'table':<8}{'device':>9}{'host':>9}{'access':>9}{'unique row':>11}{'to device':>13}{'to host':>13}",
    ]
    everything = [s for ranks in tables for s in ranks]
    for name, ranks in [*((ranks[0].table, ranks) for ranks in tables), ("all", everything)]:
        uniques = sum(s.uniques for s in ranks)
        unique_rate = sum(s.unique_hits for s in ranks) / uniques if uniques else float("nan")
        resident = sum(s.resident for s in ranks)
        lines.append(
            f"{name:<8}{resident:>9,}{sum(s.rows for s in ranks) - resident:>9,}{hit_rate(ranks):>9.1%}"
            f"{unique_rate:>11.1%}{sum(s.loads for s in ranks):>13,}{sum(s.write_backs for s in ranks):>13,}"
        )
    return lines


def stage_lines(stats: PipelineStats) -> list[str]:
    """What the pipeline of one rank did (`stage_seconds`), and what its caller waited for (`stall_seconds`)."""
    num_batches = max(1, stats.batches_committed)
    stages = [*stats.stage_seconds, *(stage for stage in stats.stall_seconds if stage not in stats.stage_seconds)]
    lines = [
        f"pipeline of rank 0, depth {stats.depth}, mean of {stats.batches_committed:,} batches",
        f"{'stage':<10}{'worked, ms':>12}{'stalled, ms':>13}",
    ]
    for stage in stages:
        works = stats.stage_seconds.get(stage)
        lines.append(
            f"{stage:<10}{'' if works is None else f'{1e3 * works / num_batches:.2f}':>12}"
            f"{1e3 * stats.stall_seconds.get(stage, 0.0) / num_batches:>13.2f}"
        )
    moved = [f"{count / num_batches / 1024:,.1f} KiB" for count in (stats.load_bytes, stats.write_back_bytes)]
    lines.append(f"rows moved a batch: {moved[0]} to the device, {moved[1]} to the host")
    return lines
