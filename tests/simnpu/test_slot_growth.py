"""Slots that grow on the thread that maps ahead, while other streams compute: their memory changes hands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec.distributed.slot_growth import SlotGrowth
from tests.distributed.pipelines import all_batches, build_pipelined, mine, run_pipeline_against_oracle
from tests.distributed.scenario import Scenario, make_batch
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


def read_on_two_streams(scenario: Scenario) -> None:
    """A frozen table is read ahead of training, and by ever larger batches of evaluation between."""
    batches = all_batches(scenario)
    dmp, pipeline = build_pipelined(scenario, batches, 3)
    dmp.module.ebc.embedding_bags["item"].requires_grad_(False)
    training = iter(mine(scenario, batches))
    for step in range(scenario.steps):
        pipeline.progress(training)
        larger = replace(scenario, batch_size=4 + 8 * step)
        everyone = [make_batch(larger, step, rank, dist.get_world_size()) for rank in range(dist.get_world_size())]
        dmp.eval()
        with torch.no_grad():
            pipeline.progress(iter(mine(larger, [everyone])))
        dmp.train()


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_of_read_rows_is_of_the_streams_that_read(npu_pools: RankPools, world_size: int) -> None:
    npu_pools[world_size].run(read_on_two_streams, Scenario(ids_per_table=2000, steps=12, device="npu", batch_size=6))
