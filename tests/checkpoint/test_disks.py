"""Disks that are full, read-only or changed by others while a snapshot is written: real ones, as far as one can."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridrec import HybridRecError, checkpoint
from hybridrec.checkpoint import files
from hybridrec.checkpoint.manifest import read_manifest
from tests.checkpoint.runs import build
from tests.distributed.pipelines import all_batches, build_oracle, mine
from tests.distributed.scenario import Scenario, compare_state, raise_together, state_of
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adagrad", steps=9, ids_per_table=30)
DISK_BYTES = 2 * 2**20
DISK_FILES = 64


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={DISK_BYTES},nr_inodes={DISK_FILES}"
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
        )
        problem = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError as e:
        problem = str(e)
    if problem:
        pytest.skip(f"no file system can be mounted here: {problem}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def full(path: Path) -> Iterator[None]:
    """Room for a part of a snapshot."""
    with open(path / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    os.truncate(path / "ballast", (path / "ballast").stat().st_size - 3 * 4096)
    yield
    (path / "ballast").unlink()


@contextlib.contextmanager
def without_inodes(path: Path) -> Iterator[None]:
    """Room for two files and folders more."""
    with contextlib.suppress(OSError):
        for number in range(DISK_FILES):
            (path / f"ballast_{number}").touch()
    ballast = sorted(path.glob("ballast_*"))
    for file in ballast[:2]:
        file.unlink()
    yield
    for file in ballast[2:]:
        file.unlink()


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)


@contextlib.contextmanager
def limited(path: Path) -> Iterator[None]:
    """Files of this process may not grow beyond 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def latest_is_a_folder(path: Path) -> Iterator[None]:
    (path / "latest").unlink()
    (path / "latest").mkdir()
    yield
    (path / "latest").rmdir()


@contextlib.contextmanager
def removed_meanwhile(path: Path) -> Iterator[None]:
    """Somebody cleans up while rows are written."""
    original = files.HashedFile.finish

    def finish(self: files.HashedFile) -> Any:
        entry = original(self)
        for folder in path.glob(".unfinished_*"):
            while folder.exists():  # other ranks make files in it, or remove it, too
                shutil.rmtree(folder, ignore_errors=True)
        return entry

    with mock.patch.object(files.HashedFile, "finish", finish):
        yield


FAULTS: dict[str, tuple[Callable[[Path], AbstractContextManager[None]], int, str]] = {
    "full": (full, 0, "No space left on device"),
    "without inodes": (without_inodes, 0, "No space left on device"),
    "read-only": (read_only, 0, "Read-only file system"),
    "limited": (limited, 1, "File too large"),
    "latest is a folder": (latest_is_a_folder, 0, "latest is a folder"),
    "removed meanwhile": (removed_meanwhile, 1, ".unfinished_step_000000000006"),
}


def save_on(scenario: Scenario, path: Path, name: str, *, in_background: bool = False) -> tuple[str, list[str]]:
    """Training beside the oracle; a snapshot before the fault, one that fails, one when the disk is well again."""
    fault, culprit, _ = FAULTS[name]
    batches = all_batches(scenario)
    dmp, pipeline = build(scenario)
    oracle, optimizer = build_oracle(scenario)
    iterator, message = iter(mine(scenario, batches)), ""
    for step, everyone in enumerate(batches):
        loss, expected = pipeline.progress(iterator).item(), oracle.step(everyone, optimizer).item()
        what = path, dmp, pipeline._optimizer
        if step in (2, 7):
            checkpoint.save(*what, pipeline=pipeline, keep=2)
        if step == 5:
            with fault(path) if dist.get_rank() == culprit else contextlib.nullcontext():
                dist.barrier()
                try:
                    if in_background:
                        saving = checkpoint.Saving(*what, pipeline=pipeline, keep=1)
                        saving.start()
                        saving.finish()
                    else:
                        checkpoint.save(*what, pipeline=pipeline, keep=1)
                except HybridRecError as e:
                    message = f"{type(e).__name__}: {e}"
                dist.barrier()
            dist.barrier()
            seen = sorted(p.name for p in path.iterdir())
        pipeline._thread.settle()
        difference = "" if loss == expected else f"loss {loss}, not {expected}"
        raise_together(difference or compare_state(scenario, oracle, state_of(dmp)), step)
    return message, seen


def check(pools: RankPools, path: Path, name: str, **kwargs: Any) -> None:
    (message, seen), other = pools[2].run(save_on, SCENARIO, path, name, **kwargs)
    _, culprit, words = FAULTS[name]
    assert (message, seen) == other
    assert words in message and message.endswith(" of 2)"), message
    if name != "removed meanwhile":  # there it depends on who comes to it first
        assert f"(on rank {culprit} of 2)" in message, message
    assert [n for n in seen if n.startswith("step_")] == ["step_000000000003"]
    if name != "read-only":  # where nothing can be removed either
        assert not [n for n in seen if n.startswith(".")], seen
    assert sorted(p.name for p in path.iterdir()) == ["latest", "step_000000000003", "step_000000000008"]
    for folder in path.glob("step_*"):
        for file in read_manifest(folder).files():
            files.verify(folder, file)


@pytest.mark.parametrize("name", ["full", "without inodes", "read-only"])
def test_a_disk_that_cannot_take_a_snapshot(pools: RankPools, disk: Path, name: str) -> None:
    check(pools, disk, name)


@pytest.mark.parametrize("name", ["limited", "latest is a folder", "removed meanwhile"])
def test_a_folder_that_cannot_take_a_snapshot(pools: RankPools, tmp_path: Path, name: str) -> None:
    check(pools, tmp_path / "snapshots", name)


def test_a_disk_that_is_full_while_rows_are_written_beside_the_steps(pools: RankPools, disk: Path) -> None:
    check(pools, disk, "full", in_background=True)
