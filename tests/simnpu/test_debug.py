"""`hybridrec.debug` on a device that is not the host: it waits for what it reads, and nobody races with it."""

from __future__ import annotations

import pytest

from tests.distributed.scenario import Scenario
from tests.distributed.test_verification import train
from tests.distributed.test_where import asked_while_training
from tests.ranks import RankPools


@pytest.mark.parametrize(("world_size", "depth", "cache"), [(2, 3, "minimum"), (1, 0, "below")])
def test_no_false_alarm(npu_pools: RankPools, world_size: int, depth: int, cache: str) -> None:
    scenario = Scenario(steps=20, optimizer="adagrad", cache=cache, device="npu")
    for check, _ in npu_pools[world_size].run(train, scenario, depth):
        assert (check.steps, check.difference) == (20, None)


def test_where(npu_pools: RankPools) -> None:
    scenario = Scenario(steps=10, optimizer="adam", ids_per_table=400, device="npu")
    (tiers,) = npu_pools[1].run(asked_while_training, scenario, 3)
    assert {"slot", "store", "unknown"} <= tiers
