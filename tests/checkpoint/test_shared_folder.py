"""Two jobs that are given one folder of snapshots, and what a killed job leaves in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from hybridrec import HybridRecError, checkpoint
from hybridrec.checkpoint import files, snapshot, writer_lock
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adagrad", steps=9, ids_per_table=30)
OTHER_JOB = (
    "import sys, time; from pathlib import Path; from hybridrec.checkpoint import writer_lock;"
    "lock = writer_lock.acquire(Path(sys.argv[1])); print('writes', flush=True); time.sleep(float(sys.argv[2]));"
    "lock.release(); time.sleep(600.0)"
)


WITH_CHILD = """
import os, sys, time
from pathlib import Path
from hybridrec.checkpoint import writer_lock
writer_lock.acquire(Path(sys.argv[1]))
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(600.0)
"""


@contextmanager
def other_job(root: Path, seconds: float = 600.0) -> Iterator[subprocess.Popen[str]]:
    """A process that writes into a folder for so long, and lives on."""
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-c", OTHER_JOB, str(root), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writes\n"
        try:
            yield process
        finally:
            process.kill()


def share(scenario: Scenario, path: Path, seconds: float) -> tuple[list[str], bool]:
    """What a job is told whose folder another one writes to, and whether it can go on."""
    dmp, pipeline = build(scenario)
    batches, said = iter(mine(scenario, all_batches(scenario))), []
    pipeline.progress(batches)
    with mock.patch.object(writer_lock, "LOCK_SECONDS", seconds):
        for attempt in (
            lambda: checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline),
            lambda: checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline).close(),
        ):
            try:
                attempt()
            except HybridRecError as e:
                said.append(f"{type(e).__name__}: {e}")
    pipeline.progress(batches)
    checkpoint.save(path / "own", dmp, pipeline._optimizer, pipeline=pipeline)
    before = records_of(dmp)
    checkpoint.load(path / "own", dmp, pipeline._optimizer, pipeline=pipeline)
    return said, records_of(dmp) == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_second_job_is_refused_and_told_who_the_first_is(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    being_written = tmp_path / ".unfinished_step_000000000007"
    being_written.mkdir()
    with other_job(tmp_path) as other:
        found = pools[world_size].run(share, SCENARIO, tmp_path, 0.3)
    for said, goes_on in found:
        assert said == found[0][0] and len(said) == 2 and goes_on
        for text in said:
            assert text.startswith("StateError") and f"process {other.pid} on" in text and str(tmp_path) in text
    assert being_written.is_dir()  # of the job that lives


def test_a_job_waits_for_one_that_is_ending(pools: RankPools, tmp_path: Path) -> None:
    with other_job(tmp_path, 1.5):
        ((said, goes_on),) = pools[1].run(share, SCENARIO, tmp_path, 60.0)
    assert said == [] and goes_on
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000001"


def test_a_killed_job_keeps_nothing_locked_although_its_children_live(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WITH_CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        worker = int(job.stdout.readline())
        try:
            with (
                mock.patch.object(writer_lock, "LOCK_SECONDS", 0.0),
                pytest.raises(HybridRecError, match="another job"),
            ):
                writer_lock.acquire(tmp_path)
            job.send_signal(signal.SIGKILL)
            job.wait()
            with mock.patch.object(writer_lock, "LOCK_SECONDS", 0.0):
                writer_lock.acquire(tmp_path).release()
        finally:
            os.kill(worker, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


COUNT_UP = """
import sys, time
from pathlib import Path
from hybridrec.checkpoint import writer_lock
root = Path(sys.argv[1])
writer_lock._POLL_SECONDS = 0.001
for _ in range(50):
    lock = writer_lock.acquire(root)
    number = int((root / "number").read_text())
    time.sleep(0.001)
    (root / "number").write_text(str(number + 1))
    lock.release()
"""


def test_there_is_never_more_than_one_writer(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", COUNT_UP, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "number").read_text() == "200"
    assert [path.name for path in tmp_path.iterdir()] == ["number"]


def test_a_folder_without_locks_is_written_to(tmp_path: Path) -> None:
    with mock.patch.object(writer_lock.fcntl, "lockf", side_effect=OSError(38, os.strerror(38))):
        writer_lock.acquire(tmp_path).release()
    with (
        mock.patch.object(writer_lock.fcntl, "lockf", side_effect=OSError(5, os.strerror(5))),
        pytest.raises(OSError, match="Input/output"),
    ):
        writer_lock.acquire(tmp_path)


def test_what_a_job_left_half_removed_or_half_written_goes_with_the_next_snapshot(tmp_path: Path) -> None:
    """Also a folder that is in the way of one that is to be removed: that one would be seen half removed."""
    for name in (".unfinished_step_000000000001", ".removed.step_000000000002", "step_000000000002"):
        (tmp_path / name / "rows").mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()
    with mock.patch.object(files.shutil, "rmtree", wraps=files.shutil.rmtree) as rmtree:
        files.remove_folder(tmp_path / "step_000000000002")
    assert {call.args[0].name for call in rmtree.mock_calls} == {".removed.step_000000000002"}
    assert not (tmp_path / "step_000000000002").exists()
    (tmp_path / ".removed.step_000000000003" / "rows").mkdir(parents=True)
    name, lock = snapshot.begin(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".unfinished_step_000000000001", ".writer"]
    snapshot.give_up(tmp_path, name)
    lock.release()
    assert list(tmp_path.iterdir()) == []
