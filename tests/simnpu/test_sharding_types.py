"""Row-, table- and column-wise tables on the simulated NPU: the oracle's bits, and no two accesses unordered."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_sequence_oracle import SEQUENCES
from tests.distributed.test_sharding_types import MIXED
from tests.ranks import RankPool

ONE_OWNER = tuple(dataclasses.replace(table, owners=((table.dim, 1),)) for table in MIXED[:2])
OWNED_SEQUENCES = (SEQUENCES[0], *(dataclasses.replace(t, owners=((t.dim, 1),)) for t in SEQUENCES[1:]))


@pytest.mark.parametrize(
    ("world_size", "depth", "cache", "optimizer"),
    [(2, 0, "minimum", "adam"), (2, 3, "below", "adagrad"), (1, 2, "tenth", "sgd")],
)
def test_mixed(npu_pools: dict[int, RankPool], world_size: int, depth: int, cache: str, optimizer: str) -> None:
    """Depth 0: a plain loop."""
    scenario = Scenario(
        tables=MIXED, cache=cache, optimizer=optimizer, steps=12, batch_size=5, ids_per_table=200, device="npu"
    )
    if depth:
        results = npu_pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)
    else:
        results = npu_pools[world_size].run(run_against_oracle, scenario)
    for result in results:
        assert sum(s.write_backs + s.oversized for s in result["stats"]) > 0


@pytest.mark.parametrize("depth", [0, 3])
def test_a_rank_without_tables(npu_pools: dict[int, RankPool], depth: int) -> None:
    """Its staging buffers hold nothing; it takes part in every batch."""
    scenario = Scenario(
        tables=ONE_OWNER, cache="minimum", steps=12, batch_size=5, ids_per_table=200, is_weighted=True, device="npu"
    )
    if depth:
        idle, owner = npu_pools[2].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth)
    else:
        idle, owner = npu_pools[2].run(run_against_oracle, scenario)
    assert all(s.rows == s.slots == 0 for s in idle["stats"])
    assert all(s.rows > 0 and s.loads > 0 and s.write_backs > 0 for s in owner["stats"])


def test_a_table_wise_sequence(npu_pools: dict[int, RankPool]) -> None:
    scenario = Scenario(
        is_sequence=True,
        tables=OWNED_SEQUENCES,
        cache="tenth",
        optimizer="adagrad",
        dedups=True,
        steps=15,
        device="npu",
    )
    idle, owner = npu_pools[2].run(run_pipeline_against_oracle, scenario, 3, delay_seed=2)
    assert [s.rows > 0 for s in idle["stats"]] == [not t.owners for t in OWNED_SEQUENCES]
    assert all(s.write_backs > 0 for s in owner["stats"])
