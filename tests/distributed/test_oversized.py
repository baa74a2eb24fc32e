"""Batches that need more slots than there are: computed in passes, with the bits of one pass over everything."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.ranks import RankPool

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
FEW_BYTES = 700  # of transient slots: a row or a few of each table, unless one sample needs more


def check(results: list[dict[str, Any]], *, is_always: bool) -> None:
    for result in results:
        for s in result["stats"]:
            assert s.pins == 0 and s.rejected == 0
            assert s.resident <= s.slots < s.rows
        assert sum(s.oversized for s in result["stats"]) > 0
        assert all(s.oversized_bytes > 0 for s in result["stats"])  # such a batch bypasses the slots of all tables
        if is_always:
            assert all(s.loads == s.victims == s.access_hits == 0 for s in result["stats"])
        else:
            assert any(s.victims for s in result["stats"]) and any(s.access_hits for s in result["stats"])


@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum_and_mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("transient_bytes", [FEW_BYTES, None], ids=["many_passes", "one_pass"])
def test_batches_of_all_sizes(pool_1: RankPool, optimizer: str, is_weighted: bool, transient_bytes: int | None) -> None:
    scenario = Scenario(
        cache="below", optimizer=optimizer, is_weighted=is_weighted, transient_bytes=transient_bytes, steps=30
    )
    check(pool_1.run(run_against_oracle, scenario), is_always=False)


@pytest.mark.parametrize(("optimizer", "is_weighted"), [("sgd", False), ("adagrad", False), ("adam", True)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_some_ranks_only(pools: dict[int, RankPool], world_size: int, optimizer: str, is_weighted: bool) -> None:
    """Passes are local to a rank: others train the same batch in their slots."""
    scenario = Scenario(
        cache="below", optimizer=optimizer, is_weighted=is_weighted, transient_bytes=FEW_BYTES, steps=30, batch_size=5
    )
    check(pools[world_size].run(run_against_oracle, scenario), is_always=False)


def test_a_bag_is_longer_than_the_tier(pool_2: RankPool) -> None:
    """One slot a table: no batch but empty ones ever fits."""
    scenario = Scenario(cache="one", optimizer="adagrad", transient_bytes=1, steps=20)
    results = pool_2.run(run_against_oracle, scenario)
    assert all(s.slots == 1 and s.oversized_bytes for result in results for s in result["stats"])


PAIRWISE = [
    (depth, optimizer, cache, bool((i + j) % 2))
    for (i, depth), (j, (optimizer, cache)) in itertools.product(
        enumerate((1, 2, 3, 12)), enumerate([("adagrad", "below"), ("adam", "below"), ("sgd", "one")])
    )
]


@pytest.mark.parametrize(("depth", "optimizer", "cache", "is_weighted"), PAIRWISE)
def test_in_the_pipeline(pool_2: RankPool, depth: int, optimizer: str, cache: str, is_weighted: bool) -> None:
    scenario = Scenario(
        cache=cache, optimizer=optimizer, is_weighted=is_weighted, transient_bytes=FEW_BYTES, steps=24, batch_size=6
    )
    for result in pool_2.run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert all(s.rejected == 0 and s.pins == 0 for s in result["stats"])
        assert sum(s.oversized for s in result["stats"]) > 0
