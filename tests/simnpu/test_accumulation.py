"""Accumulated gradients and frozen tables on the simulated NPU, whose streams are checked access by access."""

from __future__ import annotations

import pytest

from tests.distributed import test_accumulation as accumulation
from tests.distributed import test_frozen_tables as frozen
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools


@pytest.mark.parametrize("cache", ["all", "minimum"])
def test_one_step_for_three_batches(npu_pools: RankPools, cache: str) -> None:
    scenario = Scenario(cache=cache, optimizer="adagrad", steps=13, ids_per_table=300, device="npu")
    for result in npu_pools[2].run(accumulation.run, scenario, 3, 3):
        assert result["committed"] == 13


def test_frozen_tables(npu_pools: RankPools) -> None:
    scenario = Scenario(cache="tenth", optimizer="adam", steps=24, ids_per_table=200, device="npu")
    npu_pools[2].run(frozen.run, scenario, frozen.TAKES_TURNS, 3)
