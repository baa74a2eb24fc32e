"""`torch.profiler` shows every stage of every batch, and that batches to come are prepared while one computes."""

from __future__ import annotations

import re
import threading
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.stages import HostStages
from tests.distributed.pipelines import all_batches, build_pipelined, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPool

STEPS = 8
STAGES = ("load", "copy", "dist", "wait", "map", "swap", "stall", "forward", "backward", "optimizer")


def ranges(depth: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(stage, batch) -> (start, end), microseconds.

    The host thread maps a batch no sooner than the one before it computes, which goes on when all that was asked for
    is done. So what overlaps does not depend on how fast threads are; what the pipeline asks for too late never does.
    """
    scenario = Scenario(cache="all", steps=STEPS)  # MAP never waits for pins, nor for the end of a batch therefore
    batches = all_batches(scenario)
    _, pipeline = build_pipelined(scenario, batches, depth)
    iterator = iter(mine(scenario, batches))
    compute, map_ = PooledLookup.compute, HostStages._map
    computing = threading.Semaphore(1)

    def compute_beside(self: PooledLookup, *args: Any) -> Any:
        computing.release()
        pipeline._thread.settle()
        return compute(self, *args)

    def map_beside(self: HostStages, batch: InFlightBatch) -> None:
        computing.acquire()
        map_(self, batch)

    # By default the profiler sees the thread alone that it was started on.
    every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        mock.patch.object(PooledLookup, "compute", compute_beside),
        mock.patch.object(HostStages, "_map", map_beside),
        profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler,
    ):
        for _ in range(STEPS):
            pipeline.progress(iterator)
    found = {}
    for event in profiler.events():
        match = re.fullmatch(r"## (\w+) (\d+) ##", event.name)
        if match is not None:
            found[match[1], int(match[2])] = (event.time_range.start, event.time_range.end)
    return found


def hidden(found: dict[tuple[str, int], tuple[float, float]]) -> list[int]:
    """Batches whose MAP and SWAP happened while another batch was between forward and optimizer."""
    computing = {b: (found["forward", b][0], found["optimizer", b][1]) for b in range(STEPS)}
    return [
        b
        for b in range(STEPS)
        if any(
            start <= found["map", b][0] and found["swap", b][1] <= end
            for other, (start, end) in computing.items()
            if other != b
        )
    ]


def test_ranges_prove_the_overlap(pool_2: RankPool) -> None:
    for found in pool_2.run(ranges, 3):
        assert set(found) >= {(stage, batch) for stage in STAGES for batch in range(STEPS)}
        assert hidden(found) == list(range(1, STEPS))
        for batch in range(STEPS):
            assert found["dist", batch][0] <= found["map", batch][0] <= found["swap", batch][0]
            assert found["swap", batch][1] <= found["forward", batch][0]
    for found in pool_2.run(ranges, 1):
        assert hidden(found) == []
