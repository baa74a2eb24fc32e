"""One folder of snapshots that a process knows by several paths: it is one folder, with one writer of a kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridrec import StateError, checkpoint
from hybridrec.checkpoint import files, writer_lock
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.checkpoint.snapshot import snapshots
from tests.checkpoint.runs import build, records_of
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="adagrad", steps=9, ids_per_table=30)
SPELLINGS: dict[str, Callable[[Path], str]] = {
    "relative": lambda root: root.name,
    "with a slash": lambda root: f"{root}/",
    "by a link": lambda root: f"{root}.link",
    "there and back": lambda root: f"{root}/../{root.name}",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "snapshots"
    path.mkdir()
    Path(f"{path}.link").symlink_to(path)
    return path


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """This process works in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def held(is_held: Callable[[files.HashedFile], bool]) -> Iterator[threading.Event]:
    """Files whose writing waits for an event."""
    goes_on, original = threading.Event(), files.HashedFile.write

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        if is_held(file):
            goes_on.wait(60)
        original(file, data, rows=rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.HashedFile, "write", write)
        try:
            yield goes_on
        finally:
            goes_on.set()


def check_whole(root: Path, num_snapshots: int) -> None:
    """What is there is complete, and nothing else is."""
    found = snapshots(root)
    assert sorted(p.name for p in root.iterdir()) == sorted(["latest", *(p.name for p in found)])
    assert len(found) == num_snapshots
    for folder in found:
        for file in read_manifest(folder).files():
            files.verify(folder, file)


def is_in_background(file: files.HashedFile) -> bool:
    return threading.current_thread().name == "hybridrec-save"


def save_beside(root: Path) -> None:
    """Snapshots by every other path, and a change of folder, while one is written in the background."""
    dmp, pipeline = build(SCENARIO)
    optimizer, batches = pipeline._optimizer, iter(mine(SCENARIO, all_batches(SCENARIO)))
    pipeline.progress(batches)
    expected = []
    with inside(root.parent), held(is_in_background) as go:
        saving = checkpoint.Saving(root.name, dmp, optimizer, pipeline=pipeline)
        expected.append(records_of(dmp))
        saving.start()
        for spell in SPELLINGS.values():
            pipeline.progress(batches)
            pipeline.withdraw()
            checkpoint.save(spell(root), dmp, optimizer, pipeline=pipeline)
            expected.append(records_of(dmp))
        with inside(root):
            go.set()
            assert saving.finish() == root / "step_000000000001"
    dist.barrier()
    check_whole(root, 5)
    for step, records in enumerate(expected, 1):
        checkpoint.load(root / f"step_{step:012d}", dmp, optimizer, pipeline=pipeline)
        assert records_of(dmp) == records


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_in_the_background_is_not_left_over(pools: RankPools, root: Path, world_size: int) -> None:
    pools[world_size].run(save_beside, root)


def second_checkpointer(root: Path, spelling: str) -> tuple[str, float]:
    """What a second one is told, and after how many seconds; the first one goes on, and one after it may open."""
    dmp, pipeline = build(SCENARIO)
    what = dmp, pipeline._optimizer, pipeline
    before, path = signal.getsignal(signal.SIGTERM), SPELLINGS[spelling](root)
    with inside(root.parent):
        with checkpoint.Checkpointer(root, *what, every=1) as first:
            mine_now, began = signal.getsignal(signal.SIGTERM), time.monotonic()
            with pytest.raises(StateError) as error:
                checkpoint.Checkpointer(path, *what, every=1)
            seconds = time.monotonic() - began
            assert signal.getsignal(signal.SIGTERM) == mine_now != before
            pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
            checkpoint.save(path, *what[:2], pipeline=pipeline)  # by hand one may
            first.after_batch()
        with checkpoint.Checkpointer(path, *what) as after, inside(root):
            assert after.resume() == 1
    dist.barrier()
    check_whole(root, 2)
    return str(error.value), seconds


@pytest.mark.parametrize(("world_size", "spelling"), [(2, "relative"), *((1, spelling) for spelling in SPELLINGS)])
def test_a_second_checkpointer_is_refused(pools: RankPools, root: Path, world_size: int, spelling: str) -> None:
    for said, seconds in pools[world_size].run(second_checkpointer, root, spelling):
        assert "this process has a Checkpointer for this folder" in said and f"({root})" in said, said
        assert seconds < writer_lock.LOCK_SECONDS / 2  # it does not wait for itself


def write_one_delta_twice(root: Path) -> str:
    """Two writers of one chain, one of them in the background: what the other is told; the first one's is whole."""
    dmp, pipeline = build(SCENARIO)
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)))
    writers = [
        checkpoint.DeltaWriter(path, dmp, pipeline._optimizer, pipeline=pipeline) for path in (root, f"{root}.link")
    ]
    pipeline.progress(batches)
    writers[0].save_full()
    writers[1].resume()
    pipeline.progress(batches)
    with held(lambda file: file._name.startswith("rows/")) as go:
        writers[0].start_delta()
        with pytest.raises(StateError) as error:
            writers[1].start_delta()
        writers[1].close()
        go.set()
        folder = writers[0].finish()
    expected = records_of(dmp)
    checkpoint.load(folder, dmp, pipeline._optimizer, pipeline=pipeline)
    assert records_of(dmp) == expected
    writers[0].close()
    dist.barrier()
    check_whole(root, 1)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["00000001", "newest"]
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_delta_that_is_being_written_is_not_left_over(pools: RankPools, root: Path, world_size: int) -> None:
    for said in pools[world_size].run(write_one_delta_twice, root):
        assert f"this process is writing 00000001 of {root}" in said and "deltas already" in said, said


def close_while_writing(root: Path) -> None:
    """A writer is closed whose delta was not finished."""
    dmp, pipeline = build(SCENARIO)
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)))
    writer = checkpoint.DeltaWriter(root, dmp, pipeline._optimizer, pipeline=pipeline)
    pipeline.progress(batches)
    snapshot = writer.save_full()
    pipeline.progress(batches)
    with held(lambda file: file._name.startswith("rows/")) as go:
        writer.start_delta()
        thread = writer._written.saving._thread
        writer.close()
        go.set()
        thread.join()
    check_whole(root, 1)
    assert list((snapshot / "deltas").iterdir()) == []


def test_a_writer_that_is_closed_gives_up_its_delta(pools: RankPools, root: Path) -> None:
    pools[1].run(close_while_writing, root)


def test_the_lock_of_a_folder_that_has_gone_is_not_that_of_the_one_in_its_place(tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    root.mkdir()
    lock = writer_lock.acquire(root)
    root.rename(tmp_path / "aside")
    root.mkdir()
    (root / ".writer").write_text("another job\n")
    lock.release()
    assert (root / ".writer").exists()
    lock.release()
    shutil.rmtree(tmp_path / "aside")
    again = writer_lock.acquire(root)
    assert "process" in (root / ".writer").read_text()
    again.release()
    assert list(root.iterdir()) == []


def test_one_of_a_kind_without_locks_of_the_system(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_lock, "fcntl", None)
        lock = writer_lock.acquire(tmp_path, sole="Checkpointer")
        other = writer_lock.acquire(tmp_path)
        with pytest.raises(StateError, match="has a Checkpointer for this folder"):
            writer_lock.acquire(tmp_path / ".", sole="Checkpointer")
        lock.release()
        writer_lock.acquire(tmp_path, sole="Checkpointer").release()
        other.release()
    assert writer_lock._held == {}
