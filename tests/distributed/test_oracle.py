"""G1: losses, rows and optimizer states equal, bit for bit, those of a plain unlimited table, after every step."""

from __future__ import annotations

import itertools
import math

import pytest

from hybridrec.distributed.placement import TRANSIENT_SLOTS
from tests.distributed.scenario import TABLES, Scenario, run_against_oracle
from tests.ranks import RankPool

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
CACHES = ("all", "tenth", "minimum")


def check(pool: RankPool, scenario: Scenario) -> None:
    results = pool.run(run_against_oracle, scenario)
    for rank, result in enumerate(results):
        stats = result["stats"]
        assert [s.table for s in stats] == [t.name for t in scenario.tables]
        assert all(math.isfinite(loss) for loss in result["losses"])
        for s in stats:
            assert s.rank == rank
            assert s.rows > 0 and s.inserted >= s.rows
            if scenario.cache == "all":
                assert s.write_backs == s.loads == 0
            else:  # rows really move: at least one victim a step once the cache is full
                assert s.resident <= s.slots < s.rows
                assert s.victims > scenario.steps / 2 and s.loads > 0
                assert not result["steps without victims"], result["steps without victims"]
                assert 0 < s.write_backs <= s.victims
    if len(results) > 1:
        assert results[0]["losses"] != results[1]["losses"]  # different data on every rank


@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum_and_mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cache", CACHES)
def test_one_rank(pool_1: RankPool, cache: str, optimizer: str, is_weighted: bool) -> None:
    check(pool_1, Scenario(cache=cache, optimizer=optimizer, is_weighted=is_weighted))


@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum_and_mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cache", CACHES)
def test_two_ranks(pool_2: RankPool, cache: str, optimizer: str, is_weighted: bool) -> None:
    check(pool_2, Scenario(cache=cache, optimizer=optimizer, is_weighted=is_weighted))


# Every pair of (cache, optimizer), (cache, weighted), (optimizer, weighted) occurs, at 3 and at 4 ranks.
PAIRWISE = [
    (cache, optimizer, bool((i + j) % 2))
    for (i, cache), (j, optimizer) in itertools.product(enumerate(CACHES), enumerate(OPTIMIZERS))
]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "optimizer", "is_weighted"), PAIRWISE)
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(pools: dict[int, RankPool], world_size: int, cache: str, optimizer: str, is_weighted: bool) -> None:
    check(pools[world_size], Scenario(cache=cache, optimizer=optimizer, is_weighted=is_weighted, batch_size=5))


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_minimum_cache(pools: dict[int, RankPool], world_size: int) -> None:
    check(pools[world_size], Scenario(cache="minimum", optimizer="rowwise_adagrad", steps=60, batch_size=5))


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_other_placements(pool_2: RankPool, kernel: str) -> None:
    """`fused`: all rows in slots. `fused_uvm`: with as many slots, and rows that need no slot stay all the same."""
    scenario = Scenario(kernel=kernel, cache="all", steps=60, tables=TABLES)
    for result in pool_2.run(run_against_oracle, scenario):
        for s in result["stats"]:
            assert s.pins == 0 and s.rows > 0


def test_transient_slots_grow(pool_2: RankPool) -> None:
    """`fused_uvm` without `device_rows` starts with few slots and gets what the batches need."""
    scenario = Scenario(kernel="fused_uvm", cache="default", steps=40, batch_size=200, ids_per_table=2000)
    for result in pool_2.run(run_against_oracle, scenario):
        assert all(s.slots > TRANSIENT_SLOTS for s in result["stats"])
        assert all(s.pins == 0 for s in result["stats"])
