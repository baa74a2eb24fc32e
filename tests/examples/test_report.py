"""What the Little Demo prints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from examples.little_demo import report
from hybridrec import PipelineStats, TableStats


def stats(table: str, rank: int, **counters: int) -> TableStats:
    zeros: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(TableStats)}
    return TableStats(**(zeros | {"table": table, "rank": rank} | counters))


def test_stats_are_sums_over_ranks() -> None:
    user = [
        stats("user", 0, rows=1_000, resident=100, accesses=8, access_hits=8, uniques=4, unique_hits=4, loads=1_500),
        stats("user", 1, rows=2_000, resident=300, accesses=8, access_hits=4, uniques=4, unique_hits=1, write_backs=7),
    ]
    genre = [stats("genre", 0, rows=19, resident=19, accesses=4, access_hits=3, uniques=2, unique_hits=1)]
    assert report.stats_lines([user, genre]) == [
        "          rows on  rows on  hits by    hits by   rows moved   rows moved",
        "table      device     host   access unique row    to device      to host",
        "user          400    2,600    75.0%      62.5%        1,500            7",
        "genre          19        0    75.0%      50.0%            0            0",
        "all           419    2,600    75.0%      60.0%        1,500            7",
    ]


def test_hit_rate_before_the_first_batch_is_no_number() -> None:
    assert math.isnan(report.hit_rate([stats("user", 0)]))
    assert "nan%" in report.stats_lines([[stats("user", 0)]])[-1]


def test_plan_is_one_line_a_table() -> None:
    tables = EmbeddingModuleShardingPlan(
        user=ParameterSharding(sharding_type="row_wise", compute_kernel="fused_uvm_caching", ranks=[0, 1]),
        genre=ParameterSharding(sharding_type="row_wise", compute_kernel="fused", ranks=[0, 1]),
    )
    assert report.plan_lines(ShardingPlan(plan={"ebc": tables}), {"user": 1_134, "genre": None}) == [
        "collection  table   sharding    kernel              ranks   device rows per rank",
        "ebc         user    row_wise    fused_uvm_caching   0,1     1,134",
        "ebc         genre   row_wise    fused               0,1     all",
    ]


def test_stages_are_told_a_batch() -> None:
    pipeline = PipelineStats(
        depth=3,
        batches_taken=14,
        batches_committed=10,
        batches_dropped=0,
        batches_in_flight=0,
        stage_seconds={"load": 0.01, "map": 1.25, "forward": 0.1},
        stall_seconds={"map": 0.005, "queue": 0.02},
        load_bytes=20_480,
        write_back_bytes=5_120,
        copied_bytes=0,
    )
    assert report.stage_lines(pipeline) == [
        "pipeline of rank 0, depth 3, mean of 10 batches",
        "stage       worked, ms  stalled, ms",
        "load              1.00         0.00",
        "map             125.00         0.50",
        "forward          10.00         0.00",
        "queue                          2.00",
        "rows moved a batch: 2.0 KiB to the device, 0.5 KiB to the host",
    ]
