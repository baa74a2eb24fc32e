"""Slots that grow on the thread that maps ahead, while other streams compute: their memory changes hands."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from hybridrec.distributed.slot_growth import SlotGrowth
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools


def times_grown(scenario: Scenario) -> int:
    """How often a table got more slots in a pipeline that equals the oracle."""
    grow, grown = SlotGrowth.grow, 0

    def counting(self: SlotGrowth, table: int) -> bool:
        nonlocal grown
        has_grown = grow(self, table)
        grown += has_grown
        return has_grown

    patch: Any = mock.patch.object(SlotGrowth, "grow", counting)
    with patch:
        run_pipeline_against_oracle(scenario, 3)
    return grown


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_of_slots_is_of_one_stream(npu_pools: RankPools, world_size: int) -> None:
    """Else the old slots are free, for the training thread, before another stream's copy of their rows is over."""
    scenario = Scenario(kernel="fused_uvm", optimizer="adam", ids_per_table=40, steps=9, device="npu")
    assert min(npu_pools[world_size].run(times_grown, scenario)) > 0
