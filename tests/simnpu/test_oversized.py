"""Batches in passes on a device that is not the host: rows and the copies in slots cross between the two."""

from __future__ import annotations

import pytest

from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, run_against_oracle
from tests.distributed.test_oversized import FEW_BYTES
from tests.ranks import RankPools


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_loop(npu_pools: RankPools, world_size: int, optimizer: str) -> None:
    scenario = Scenario(cache="below", optimizer=optimizer, transient_bytes=FEW_BYTES, steps=20, device="npu")
    for result in npu_pools[world_size].run(run_against_oracle, scenario):
        assert sum(s.oversized for s in result["stats"]) > 0 and any(s.victims for s in result["stats"])


@pytest.mark.parametrize("depth", [2, 5])
def test_pipeline(npu_pools: RankPools, depth: int) -> None:
    scenario = Scenario(cache="below", optimizer="adagrad", transient_bytes=FEW_BYTES, steps=20, device="npu")
    for result in npu_pools[2].run(run_pipeline_against_oracle, scenario, depth, delay_seed=depth):
        assert sum(s.oversized for s in result["stats"]) > 0
