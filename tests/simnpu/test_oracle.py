"""G1 on a device that is not the host: losses, rows and states are, bit for bit, those of a plain table on the CPU."""

from __future__ import annotations

import pytest

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.ranks import RankPools

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_loop_equals_the_oracle(npu_pools: RankPools, world_size: int, optimizer: str) -> None:
    scenario = Scenario(cache="minimum", optimizer=optimizer, steps=30, device="npu")
    for result in npu_pools[world_size].run(run_against_oracle, scenario):
        assert all(s.loads > 0 and s.write_backs > 0 for s in result["stats"])
        assert not result["steps without victims"]


def test_weighted_bags_equal_the_oracle(npu_pools: RankPools) -> None:
    scenario = Scenario(is_weighted=True, cache="minimum", steps=30, device="npu")
    npu_pools[2].run(run_against_oracle, scenario)


# ---- the pipeline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_pipeline_equals_the_oracle(npu_pools: RankPools, world_size: int, depth: int) -> None:
    scenario = Scenario(cache="tenth", optimizer=OPTIMIZERS[depth % 4], steps=30, device="npu")
    for result in npu_pools[world_size].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert result["asked"] == scenario.steps + 1
        assert all(s.loads > 0 and s.write_backs > 0 for s in result["stats"])


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_other_placements_equal_the_oracle(npu_pools: RankPools, kernel: str) -> None:
    scenario = Scenario(kernel=kernel, cache="default", optimizer="adam", steps=30, device="npu")
    npu_pools[2].run(run_pipeline_against_oracle, scenario, 3, delay_seed=1)
