"""An exception in any stage reaches `progress`, with its traceback, and the process can end."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybridrec.distributed.input_dist import HashInputDist
from hybridrec.distributed.lookup import PooledLookup
from tests.distributed.pipelines import PipelineBatch
from tests.distributed.test_pipeline_life import Run
from tests.ports import free_port
from tests.ranks import RankPools

STAGES = ("load", "copy", "dist", "map", "swap", "forward", "backward", "optimizer")
AT = 5


class Planted(Exception):
    """Raised by a test."""


def planted_failure(*args: Any, **kwargs: Any) -> None:
    raise Planted


def fail_in(run: Run, stage: str) -> Any:
    """From now on every call of a stage fails."""
    dense = run.dmp.module.dense
    if stage == "load":
        return mock.patch.object(Loader, "fails", True)
    if stage == "copy":
        return mock.patch.object(PipelineBatch, "to", planted_failure)
    if stage == "dist":
        return mock.patch.object(HashInputDist, "forward", planted_failure)
    if stage in ("map", "swap"):
        return mock.patch.object(PooledLookup, stage, planted_failure)
    if stage == "forward":
        return dense.register_forward_pre_hook(planted_failure)
    if stage == "backward":
        return next(dense.parameters()).register_hook(planted_failure)
    return mock.patch.object(run.pipeline._optimizer, "step", planted_failure)


class Loader:
    """Gives batches again and again."""

    fails = False

    def __init__(self, run: Run) -> None:
        self._batches, self._number = run.mine, 0

    def __next__(self) -> PipelineBatch:
        if self.fails:
            planted_failure()
        self._number += 1
        return self._batches[self._number % len(self._batches)]


def reaches_progress(stage: str) -> None:
    """Every rank fails at the same place; each has to know by itself."""
    run = Run(3)
    iterator = Loader(run)
    for _ in range(AT):
        run.pipeline.progress(iterator)
    run.pipeline._thread.settle()  # else a batch may be ahead of the fault on one rank and not on the other
    with fail_in(run, stage):
        try:
            for _ in range(4):  # batches that had the stage behind them are still good
                run.pipeline.progress(iterator)
        except Planted as e:
            assert "planted_failure" in [frame.name for frame in traceback.extract_tb(e.__traceback__)]
            return
    raise AssertionError(f"nothing was raised in {stage}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_exception_in_a_stage_reaches_progress(pools: RankPools, world_size: int, stage: str) -> None:
    pools[world_size].run(reaches_progress, stage)


SCRIPT = """
import os, sys
import torch.distributed as dist
rank, world_size, port, stage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
from tests.distributed.test_stage_failures import AT, Loader, Run, fail_in
run = Run(3)
iterator = Loader(run)
for _ in range(AT):
    run.pipeline.progress(iterator)
if rank == world_size - 1:
    with fail_in(run, stage):
        while True:
            run.pipeline.progress(iterator)
while True:
    run.pipeline.progress(iterator)
"""


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [pytest.param(w, s, marks=() if (w, s) == (2, "map") else pytest.mark.slow) for w in (1, 2) for s in STAGES],
)
def test_a_process_whose_stage_failed_ends_with_its_traceback(world_size: int, stage: str) -> None:
    """Rank 0 of two does not fail: it is told when the other is gone, and ends too."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(world_size), port, stage],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        _, err = processes[-1].communicate(timeout=300)
        assert processes[-1].returncode == 1, err[-3000:]
        assert "planted_failure" in err and "Planted" in err.splitlines()[-1], err[-3000:]
        if world_size == 2 and stage != "map":  # what MAP has against a batch is every rank's error
            _, err = processes[0].communicate(timeout=200)
            assert processes[0].returncode == 1 and "rank 1 of 2 has not been heard of" in err, err[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
