"""The hazards of a cache that is filled ahead, by name, end to end: pipeline and plain loop against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_pipeline_life
from tests.distributed.oracle import Batch, Table, owner
from tests.distributed.pipelines import check_pins
from tests.distributed.scenario import Scenario, universe
from tests.distributed.test_pipeline_life import Run
from tests.ranks import RankPool

TABLE = Table(name="t", dim=8, features=("f",))
SCENARIO = Scenario(optimizer="adam", cache="tenth", ids_per_table=80, tables=(TABLE,))
"""8 slots at one rank, 4 a rank at two."""
SEQUENCES = dataclasses.replace(SCENARIO, is_sequence=True)
A, B, C, D = range(0, 6), range(6, 12), range(12, 18), range(18, 24)
HAZARDS: dict[str, list[list[int]]] = {
    "evicted_while_in_use": [list(A), list(B), list(C), list(D)] * 4,
    "dirty_load": [list(A), list(B), list(C), list(A)] * 4,
    "stale_hit": [list(A), list(A), list(B), list(B), list(C), list(C)] * 3,
    "evicted_at_i_needed_at_i_plus_1": [list(A), list(B)] * 8,
    "same_id_a_thousand_times": [[0] * 1000, list(B), [0] * 500 + [1] * 500, list(C)] * 3,
}
"""Step -> numbers of ids; as many of a block belong to each rank."""


def numbered_ids(scenario: Scenario) -> list[int]:
    """Ids such that number n is owned by rank n % W."""
    world_size = dist.get_world_size()
    owned = [
        [i for i in universe(scenario, scenario.tables[0]) if owner(i, world_size) == r] for r in range(world_size)
    ]
    return [id_ for together in zip(*owned, strict=False) for id_ in together]


def batches_of(steps: list[list[int]], scenario: Scenario = SCENARIO) -> list[list[Batch]]:
    """Step -> rank -> batch: the ids of these numbers, dealt out to the ranks."""
    ids, world_size = numbered_ids(scenario), dist.get_world_size()

    def batch(numbers: list[int], rank: int) -> Batch:
        mine = [ids[n] for n in numbers][rank::world_size]
        half = len(mine) // 2
        bags = [[(i, 1.0) for i in mine[:half]], [(i, 1.0) for i in mine[half:]]]
        return Batch(bags={"f": bags}, labels=torch.tensor([0.0, 1.0]), num_bags=2)

    return [[batch(numbers, r) for r in range(world_size)] for numbers in steps]


def hand_made(steps: list[list[int]], depth: int, scenario: Scenario = SCENARIO) -> Run:
    """A run on these batches."""
    batches = batches_of(steps, scenario)
    with mock.patch.object(test_pipeline_life, "all_batches", lambda _: batches):
        return Run(max(1, depth), scenario)


def hazard(steps: list[list[int]], depth: int, scenario: Scenario = SCENARIO) -> dict[str, Any]:
    """Train through the pipeline, or with depth 0 the plain loop; every bit is the oracle's, and no pin stays."""
    run = hand_made(steps, depth, scenario)
    if depth:
        iterator = run.loader(0, len(steps))
        run.train(iterator, range(len(steps)))
        run.ends(iterator)
    else:
        for step in range(len(steps)):
            run.plain_step(step)
    run.check()
    check_pins(run.dmp)
    (stats,) = run.dmp.module.ebc.stats()
    return stats._asdict() if hasattr(stats, "_asdict") else vars(stats)


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_hazard(pools: dict[int, RankPool], world_size: int, name: str) -> None:
    for depth in (0, 1, 3, 6):
        for stats in pools[world_size].run(hazard, HAZARDS[name], depth):
            assert stats["victims"] > 0 and stats["write_backs"] > 0 and stats["loads"] > 0, (depth, stats)


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_hazard_of_sequences(pools: dict[int, RankPool], world_size: int, name: str) -> None:
    for depth in (0, 3):
        for stats in pools[world_size].run(hazard, HAZARDS[name], depth, SEQUENCES):
            assert stats["victims"] > 0 and stats["write_backs"] > 0 and stats["loads"] > 0, (depth, stats)


def reads_between_steps(num: int) -> list[int]:
    """Forwards under `no_grad` between training steps; the pins after each."""
    steps = HAZARDS["evicted_at_i_needed_at_i_plus_1"]
    run = hand_made(steps, 1)
    seen = []
    for k in range(num):
        run.plain_step(k % len(steps))
        with torch.no_grad():  # in training mode: no backward will ever release anything
            run.dmp(run.mine[(k + 1) % len(steps)].to(run.device))
        (stats,) = run.dmp.module.ebc.stats()
        seen.append(stats.pins)
    run.check()
    return seen


def test_no_grad_forwards_between_steps_leave_no_pins(pools: dict[int, RankPool]) -> None:
    for world_size in (1, 2):
        assert all(pins == [0] * 100 for pins in pools[world_size].run(reads_between_steps, 100))


@pytest.mark.parametrize("where", ["dist", "map", "swap", "compute"])
def test_no_pins_after_an_exception_in_a_stage(pool_1: RankPool, where: str) -> None:
    pool_1.run(test_pipeline_life.exception_in, 3, where)  # checks rows and pins


def rss_kib() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def memory_after(depth: int, num: int) -> tuple[int, int]:
    steps = HAZARDS["dirty_load"]
    run = hand_made(steps, depth)
    sizes = []
    for k in range(num):
        if depth:
            iterator = run.loader(0, len(steps))
            run.train(iterator, range(len(steps)))
        else:
            for step in range(len(steps)):
                run.plain_step(step)
                with torch.no_grad():
                    run.dmp(run.mine[step].to(run.device))
        if k in (num // 4, num - 1):
            sizes.append(rss_kib())
    return sizes[0], sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_memory_stays_flat(pool_1: RankPool, depth: int) -> None:
    ((before, after),) = pool_1.run(memory_after, depth, 120)
    assert after < 1.02 * before, (before, after)
