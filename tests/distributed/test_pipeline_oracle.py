"""The pipeline trains the bits of a plain, unlimited, unpipelined table, at any depth, cache size and timing."""

from __future__ import annotations

import itertools
import random

import pytest

from hybridrec.distributed.hybrid_train_pipeline import MAX_DEPTH
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import OPTIMIZERS, Scenario
from tests.ranks import RankPool

DEPTHS = tuple(range(1, MAX_DEPTH + 1))
CACHES = ("all", "tenth", "minimum", "below")
WORLD_SIZES = (1, 2, 3, 4)
Case = tuple[int, str, str, int]


def _covering(seed: int) -> list[Case]:
    """(depth, cache, optimizer, W) such that every pair of values occurs: greedily, from a seed."""
    everything = list(itertools.product(DEPTHS, CACHES, OPTIMIZERS, WORLD_SIZES))
    random.Random(seed).shuffle(everything)

    def pairs(case: Case) -> set[tuple[int, object, int, object]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}

    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


COVERING = _covering(seed=3)
REST = sorted(set(itertools.product((1, 2, 3, 5, 12), CACHES, OPTIMIZERS, (1, 2))) - set(COVERING))


def _run(pools: dict[int, RankPool], depth: int, cache: str, optimizer: str, world_size: int) -> None:
    is_small = world_size > 2
    scenario = Scenario(cache=cache, optimizer=optimizer, steps=30 if is_small else 50, batch_size=4 if is_small else 8)
    for result in pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert result["asked"] == scenario.steps + 1
        if cache == "below":
            assert sum(s.oversized for s in result["stats"]) > 0
        elif cache != "all":
            assert all(s.write_backs > 0 and s.loads > 0 for s in result["stats"])


@pytest.mark.parametrize(("depth", "cache", "optimizer", "world_size"), COVERING)
def test_pipeline_equals_the_oracle(
    pools: dict[int, RankPool], depth: int, cache: str, optimizer: str, world_size: int
) -> None:
    _run(pools, depth, cache, optimizer, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "cache", "optimizer", "world_size"), REST)
def test_pipeline_equals_the_oracle_in_every_other_case(
    pools: dict[int, RankPool], depth: int, cache: str, optimizer: str, world_size: int
) -> None:
    _run(pools, depth, cache, optimizer, world_size)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_other_placements_equal_the_oracle(pools: dict[int, RankPool], world_size: int, kernel: str) -> None:
    scenario = Scenario(kernel=kernel, cache="default", optimizer="adam", steps=60)
    pools[world_size].run(run_pipeline_against_oracle, scenario, 3, delay_seed=1)


def test_weighted_bags_equal_the_oracle(pool_2: RankPool) -> None:
    scenario = Scenario(is_weighted=True, optimizer="adagrad", steps=60)
    pool_2.run(run_pipeline_against_oracle, scenario, 4, delay_seed=1)
