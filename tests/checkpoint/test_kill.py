"""Runs that are killed anywhere, or asked to end, go on from their last snapshot and end as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridrec import ConfigError, HybridTrainPipelineSparseDist, checkpoint
from tests.checkpoint.killed_run import DELTA_STAGES, DELTAS, SCENARIO, STAGES, run
from tests.checkpoint.runs import build
from tests.ports import free_port
from tests.ranks import RankPools

ROOT = Path(__file__).parents[2]
KILL_SECONDS = 240


def run_killed(world_size: int, folder: Path, victim: int, stage: str, number: int, *options: str) -> None:
    """Start the ranks; one kills itself, the others are killed then."""
    module, port = "tests.checkpoint.killed_run", free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(world_size), str(port), str(folder)]
            + ([stage, str(number)] if rank == victim else ["none", "0"])
            + list(options),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    try:
        assert ranks[victim].wait(KILL_SECONDS) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check_resumed(
    pools: RankPools, world_size: int, folder: Path, expected: list[dict[str, Any]], **kwargs: Any
) -> int:
    """Where it resumed. ``kwargs``: of `Checkpointer`."""
    resumed = pools[world_size].run(run, folder, **kwargs)
    for before, after in zip(expected, resumed, strict=True):
        assert after["rows"] == before["rows"] and after["last"] == SCENARIO.steps
        assert after["losses"] == before["losses"][after["first"] :]
    return int(resumed[0]["first"])


_uninterrupted: dict[int, list[dict[str, Any]]] = {}


def uninterrupted(pools: RankPools, world_size: int, tmp_path: Path) -> list[dict[str, Any]]:
    if world_size not in _uninterrupted:
        _uninterrupted[world_size] = pools[world_size].run(run, tmp_path / "uninterrupted")
    return _uninterrupted[world_size]


@pytest.mark.parametrize(("stage", "number"), [("publish", 3), ("backward", 10)])
def test_a_killed_run_goes_on_from_its_last_snapshot(pools: RankPools, tmp_path: Path, stage: str, number: int) -> None:
    expected = uninterrupted(pools, 1, tmp_path)
    run_killed(1, tmp_path, 0, stage, number)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000008"
    check_resumed(pools, 1, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_in_any_stage(pools: RankPools, tmp_path: Path, stage: str, seed: int) -> None:
    """39 kills, of either rank; two in a row, so that the second run has resumed."""
    rng = random.Random(f"{stage} {seed}")
    expected = uninterrupted(pools, 2, tmp_path)
    once_a_save = ("publish", "latest", "remove")
    often = {"write": 18, "export": 8, "remove": 2}.get(stage, 4 if stage in once_a_save else 15)
    if stage == "import":
        run_killed(2, tmp_path, 0, "latest", 3)  # it is loading that is killed
    victim = 0 if stage in once_a_save else rng.randrange(2)
    run_killed(2, tmp_path, victim, stage, rng.randint(1, 2 if stage == "import" else often))
    check_resumed(pools, 2, tmp_path, expected)


@pytest.mark.parametrize(("stage", "number", "first"), [("newest", 3, 8), ("publish delta", 4, 12)])
def test_a_killed_run_goes_on_from_its_last_delta(
    pools: RankPools, tmp_path: Path, stage: str, number: int, first: int
) -> None:
    """Snapshots of steps 2, 8, 16, deltas of 4, 6, 10, 12: one is renamed and not the newest yet, one is complete."""
    expected = uninterrupted(pools, 1, tmp_path)
    run_killed(1, tmp_path, 0, stage, number, "deltas")
    assert check_resumed(pools, 1, tmp_path, expected, **DELTAS) == first


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stage", [*DELTA_STAGES, *STAGES])
def test_a_run_with_deltas_that_is_killed_in_any_stage(pools: RankPools, tmp_path: Path, stage: str, seed: int) -> None:
    rng = random.Random(f"{stage} {seed} deltas")
    expected = uninterrupted(pools, 2, tmp_path)
    once = {"publish": 3, "latest": 3, "remove": 1, "publish delta": 6, "newest": 6, "unfinished": 6}
    often = once | {"write": 40, "export": 8, "import": 2, "removed": 20}
    if stage == "import":
        run_killed(2, tmp_path, 0, "newest", 4, "deltas")  # it is loading that is killed
    victim = 0 if stage in once else rng.randrange(2)
    run_killed(2, tmp_path, victim, stage, rng.randint(1, often.get(stage, 15)), "deltas")
    check_resumed(pools, 2, tmp_path, expected, **DELTAS)


def run_asked_to_end(path: Path) -> dict[str, Any]:
    """Rank 1 is sent SIGTERM in the middle of its sixth batch."""
    original = HybridTrainPipelineSparseDist._optimizer_step
    calls = 0

    def step(self: HybridTrainPipelineSparseDist) -> None:
        nonlocal calls
        calls += 1
        if calls == 6 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    before = signal.getsignal(signal.SIGTERM)
    with mock.patch.object(HybridTrainPipelineSparseDist, "_optimizer_step", step):
        result = run(path)
    if signal.getsignal(signal.SIGTERM) is not before:
        raise AssertionError("the handler was not put back")
    return result


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_asked_to_end_saves_first(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    expected = uninterrupted(pools, world_size, tmp_path)
    ended = pools[world_size].run(run_asked_to_end, tmp_path)
    assert [one["last"] for one in ended] == [6] * world_size
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000006"
    check_resumed(pools, world_size, tmp_path, expected)


def wrong_every(path: Path) -> str:
    dmp, pipeline = build(SCENARIO)
    try:
        checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=0)
    except ConfigError as e:
        return str(e)
    return ""


def test_a_wrong_number_of_batches_is_refused(pools: RankPools, tmp_path: Path) -> None:
    assert "every=0" in pools[1].run(wrong_every, tmp_path)[0]
