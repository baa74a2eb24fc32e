"""The hazards of a cache that is filled ahead, on a device with streams of its own: pipeline and plain loop."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.test_hazards import HAZARDS, SCENARIO, hazard
from tests.ranks import RankPools


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_hazard(npu_pools: RankPools, world_size: int, name: str) -> None:
    scenario = dataclasses.replace(SCENARIO, device="npu")
    for depth in (0, 3):
        for stats in npu_pools[world_size].run(hazard, HAZARDS[name], depth, scenario):
            assert stats["victims"] > 0 and stats["write_backs"] > 0 and stats["loads"] > 0, (depth, stats)
