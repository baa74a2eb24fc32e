"""SIGTERM at any time: all ranks save after the same batch and end well. SIGINT: nothing half written is seen."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridrec import HybridTrainPipelineSparseDist, checkpoint
from hybridrec.checkpoint import files, snapshot
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.native import ShardGroup
from tests.checkpoint.jobs import Job, end_of, start_demo, strikes_in, uninterrupted
from tests.checkpoint.killed_run import SCENARIO, run
from tests.checkpoint.strikes import Strike
from tests.checkpoint.test_demo_kills import BATCHES, OPTIONS, check_as_uninterrupted
from tests.checkpoint.test_kill import check_resumed
from tests.checkpoint.test_kill import uninterrupted as uninterrupted_run
from tests.ranks import RankPools

WHEN: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "before the first batch": (HybridTrainPipelineSparseDist, "_load", 1, {}),
    "twice": (HybridTrainPipelineSparseDist, "_optimizer_step", 6, {}),
    "while saving": (files.HashedFile, "write", 7, {}),
    "while saving beside the steps": (files.HashedFile, "write", 7, {"in_background": True}),
    "while loading": (ShardGroup, "import_rows", 2, {}),
}


def run_asked_to_end(path: Path, when: str) -> dict[str, Any]:
    """The last rank is sent SIGTERM at the n-th call of something, and again at the next one."""
    owner, name, number, kwargs = WHEN[when]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if number <= calls <= number + 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    with mock.patch.object(owner, name, call):
        result = run(path, **kwargs)
    if signal.getsignal(signal.SIGTERM) is not before:
        raise AssertionError("the handler was not put back")
    if calls < number:
        raise AssertionError(f"{name} was called {calls} times")
    return result


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("when", WHEN)
def test_a_run_that_is_asked_to_end_saves_first(pools: RankPools, tmp_path: Path, when: str, world_size: int) -> None:
    expected = uninterrupted_run(pools, world_size, tmp_path)
    first = 0
    if when == "while loading":
        first = pools[world_size].run(run_asked_to_end, tmp_path, "twice")[0]["last"]
    ended = pools[world_size].run(run_asked_to_end, tmp_path, when)
    (last,) = {one["last"] for one in ended}
    assert first < last < SCENARIO.steps
    assert [one["first"] for one in ended] == [first] * world_size
    assert checkpoint.latest(tmp_path) == tmp_path / f"step_{last:012d}"
    for rank, one in enumerate(ended):
        assert one["losses"] == expected[rank]["losses"][first:last]
    check_resumed(pools, world_size, tmp_path, expected)
    check_whole(tmp_path)


def check_whole(path: Path) -> None:
    """What can be seen is complete."""
    assert snapshot.snapshots(path)
    for folder in snapshot.snapshots(path):
        for file in read_manifest(folder).files():
            files.verify(folder, file)


def install_from_outside(path: Path) -> bool:
    """A handler that Python does not know cannot be put back; what then is, ends the process."""
    with mock.patch.object(signal, "signal", side_effect=[None, None]) as set_signal:
        with checkpoint.Checkpointer(path, *built()):
            pass
        return set_signal.mock_calls[1].args == (signal.SIGTERM, signal.SIG_DFL)


def built() -> tuple[Any, Any, Any]:
    from tests.checkpoint.runs import build

    model, pipeline = build(SCENARIO)
    return model, pipeline._optimizer, pipeline


def test_a_handler_that_is_not_python_s_is_no_error(pools: RankPools, tmp_path: Path) -> None:
    assert pools[1].run(install_from_outside, tmp_path) == [True]


# ---- the Little Demo under torchrun --------------------------------------------------------------------------------


def left(job: Job, folder: Path) -> list[str]:
    """What each rank of a demo that ended left as its exit status."""
    return [(folder / f"left_{rank}").read_text() for rank in range(2)]


ASKED = {
    "one rank, computing": (Strike(stage="commit", number=14, rank=1, signal="SIGTERM"), False),
    "the launcher, computing": (Strike(stage="map", number=14, rank=0, target="launcher", signal="SIGTERM"), False),
    "the launcher, at the first batch": (
        Strike(stage="load", number=1, rank=1, target="launcher", signal="SIGTERM"),
        False,
    ),
    "all, saving": (Strike(stage="manifest", number=1, target="all", signal="SIGTERM"), False),
    "the launcher, saving beside": (
        Strike(stage="rows", number=5, rank=1, target="launcher", signal="SIGTERM"),
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", ASKED)
def test_a_demo_that_is_asked_to_end_saves_and_goes_on_later(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, who: str
) -> None:
    expected = uninterrupted(tmp_path_factory.getbasetemp(), 2, *OPTIONS)
    (strike, in_background), folder = ASKED[who], tmp_path / "job"
    start_again = functools.partial(start_demo, folder, tmp_path / "snapshots", *OPTIONS, in_background=in_background)
    job = start_again(strikes=[strike])
    status = job.wait()
    assert len(strikes_in(folder)) == 1 and "asked to end: saved after" in job.log(), job.log()
    assert left(job, folder) == ["0", "0"], job.log()
    assert status == 0 or strike.target == "launcher", job.log()  # torchrun does not end well when it is asked itself
    check_whole(tmp_path / "snapshots")
    loading = Strike(stage="import", number=1, rank=0, target="all", signal="SIGTERM")
    job = start_again(strikes=[loading])
    assert job.wait() == 0 and left(job, folder) == ["0", "0"], job.log()
    job = start_again()
    assert job.wait() == 0, job.log()
    check_as_uninterrupted(folder, expected)
    newest = checkpoint.latest(tmp_path / "snapshots")
    assert newest is not None and newest.name == f"step_{BATCHES:012d}"


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_demo_that_is_interrupted_leaves_nothing_half_written(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, in_background: bool
) -> None:
    expected = uninterrupted(tmp_path_factory.getbasetemp(), 2, *OPTIONS)
    folder = tmp_path / "job"
    start_again = functools.partial(start_demo, folder, tmp_path / "snapshots", *OPTIONS, in_background=in_background)
    stages = ("publish", "rows", "latest", "commit")
    for number, stage in enumerate(stages):
        strike = Strike(stage=stage, number=1 if stage != "commit" else 4, target="job", signal="SIGINT")
        job = start_again(strikes=[strike])
        assert job.wait() != 0, job.log()
        assert len(strikes_in(folder)) == number + 1, job.log()
        if snapshot.snapshots(tmp_path / "snapshots"):
            check_whole(tmp_path / "snapshots")
    job = start_again()
    assert job.wait() == 0, job.log()
    check_as_uninterrupted(folder, expected)
    assert not list((tmp_path / "snapshots").glob(".*"))
    assert end_of(folder, 2)[0]["batches"] == BATCHES
