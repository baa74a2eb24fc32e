"""G1 on a device that is not the host: losses, rows and states are, bit for bit, those of a plain table on the CPU."""

from __future__ import annotations

import pytest

from tests.distributed.scenario import Scenario, run_against_oracle
from tests.ranks import RankPools

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_loop_equals_the_oracle(npu_pools: RankPools, world_size: int, optimizer: str) -> None:
    scenario = Scenario(cache="minimum", optimizer=optimizer, steps=40, device="npu")
    for result in npu_pools[world_size].run(run_against_oracle, scenario):
        assert all(s.loads > 0 and s.write_backs > 0 for s in result["stats"])
        assert not result["steps without victims"]


def test_weighted_bags_equal_the_oracle(npu_pools: RankPools) -> None:
    scenario = Scenario(is_weighted=True, cache="minimum", steps=40, device="npu")
    npu_pools[2].run(run_against_oracle, scenario)
