"""Snapshots that are written while training goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from hybridrec import StateError, checkpoint
from hybridrec.checkpoint import files, points
from hybridrec.checkpoint.manifest import read_manifest
from hybridrec.distributed.model_parts import dense_tensors
from hybridrec.native import ShardGroup
from tests.checkpoint.runs import build, records_of
from tests.checkpoint.test_deltas import full_disk
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.ranks import RankPools

SCENARIO = Scenario(optimizer="rowwise_adagrad", steps=24, ids_per_table=60)


class Slow:
    """`HashedFile.write` that waits for training to go on: each write lets a batch pass, unless one waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        """The loop counts them."""
        self._is_awaited = False
        write, give_up = files.HashedFile.write, checkpoint.Saving.give_up

        def write_late(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
            seen = self.batches
            while file._name.startswith("rows/") and self.batches == seen and not self._is_awaited:
                time.sleep(0.002)
            write(file, data, rows=rows)

        def give_up_now(saving: checkpoint.Saving) -> None:
            self._is_awaited = True
            give_up(saving)

        def awaited(call: Callable[[checkpoint.Saving], Any]) -> Callable[[checkpoint.Saving], Any]:
            def now(saving: checkpoint.Saving) -> Any:
                with self.awaited():
                    return call(saving)

            return now

        patch.setattr(files.HashedFile, "write", write_late)
        patch.setattr(checkpoint.Saving, "write", awaited(checkpoint.Saving.write))
        patch.setattr(checkpoint.Saving, "finish", awaited(checkpoint.Saving.finish))
        patch.setattr(checkpoint.Saving, "give_up", give_up_now)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """No batch comes while the caller waits for the writer."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False


def dense_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in dense_tensors(dmp)}


def save_in_background(scenario: Scenario, path: Path) -> dict[str, Any]:
    dmp, pipeline = build(scenario)
    batches, expected, seen = iter(mine(scenario, all_batches(scenario))), {}, []
    with pytest.MonkeyPatch.context() as patch:
        slow = Slow(patch)
        with checkpoint.Checkpointer(
            path, dmp, pipeline._optimizer, pipeline, every=8, keep=9, in_background=True
        ) as checkpointer:
            for step in range(scenario.steps):
                pipeline.progress(batches)
                slow.batches += 1
                if (step + 1) % 8 == 0:
                    pipeline.withdraw()
                    expected[step + 1] = records_of(dmp), dense_of(dmp)
                checkpointer.after_batch()
                dist.barrier()
                newest = checkpoint.latest(path)
                seen.append("" if newest is None else newest.name)
    for step, (records, dense) in expected.items():
        again, pipeline = build(scenario)
        checkpoint.load(path / f"step_{step:012d}", again, pipeline._optimizer, pipeline=pipeline)
        if records_of(again) != records:
            raise AssertionError(f"the snapshot of step {step} is not the rows of then")
        if any(not torch.equal(tensor, dense[name]) for name, tensor in dense_of(again).items()):
            raise AssertionError(f"the snapshot of step {step} is not the dense part of then")
    return {"seen": seen, "final": records_of(dmp)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_the_state_of_its_step_and_training_goes_on(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    found = pools[world_size].run(save_in_background, SCENARIO, tmp_path)
    for one in found:
        assert one["seen"][7] == ""  # batches went by before the first one was visible
        assert "step_000000000008" in one["seen"][8:16]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000024"


def end_beside_a_snapshot(scenario: Scenario, path: Path) -> None:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario))[:8])
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.suppress(StopIteration),
        checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=8, in_background=True) as checkpointer,
    ):
        Slow(patch)
        while True:
            pipeline.progress(batches)
            checkpointer.after_batch()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_end_of_the_data_finishes_what_is_being_written(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    pools[world_size].run(end_beside_a_snapshot, SCENARIO, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000008"


def save_at_the_end(scenario: Scenario, path: Path, *, delta_every: int | None) -> None:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario))[:9])
    with (
        pytest.MonkeyPatch.context() as patch,
        checkpoint.Checkpointer(
            path, dmp, pipeline._optimizer, pipeline, every=8, delta_every=delta_every, keep=1, in_background=True
        ) as checkpointer,
    ):
        Slow(patch)
        try:
            while True:
                pipeline.progress(batches)
                checkpointer.after_batch()
        except StopIteration:
            checkpointer.save()


@pytest.mark.parametrize(("world_size", "delta_every"), [(1, None), (2, None), (2, 3)])
def test_what_is_saved_at_the_end_is_the_newest(
    pools: RankPools, tmp_path: Path, world_size: int, delta_every: int | None
) -> None:
    pools[world_size].run(save_at_the_end, SCENARIO, tmp_path, delta_every=delta_every)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000009"


def save_what_was_due(scenario: Scenario, path: Path, *, in_background: bool, delta_every: int | None) -> list[str]:
    """What is there after each of several calls of `save`."""
    dmp, pipeline = build(scenario)
    batches, found, logged = iter(mine(scenario, all_batches(scenario))[:8]), [], Logged()
    optimizer = pipeline._optimizer

    def lower_rate() -> None:
        optimizer.param_groups[0]["lr"] /= 2

    changes = (
        lambda: checkpoint.import_rows(dmp, "user", [5], torch.ones(1, 8)),
        lambda: dict(dense_tensors(dmp)).popitem()[1].detach().zero_(),
        lower_rate,
    )
    with (
        logged,
        checkpoint.Checkpointer(
            path, dmp, optimizer, pipeline, every=8, delta_every=delta_every, keep=9, in_background=in_background
        ) as checkpointer,
    ):
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                checkpointer.after_batch()
        for change in (lambda: None, *changes):
            change()
            checkpointer.save()
            checkpointer.save()
            checkpointer._finish()
            dist.barrier()
            found.append(checkpoint.latest(path).name)
        checkpointer.save(extra=1)
        checkpointer._finish()
        checkpoint.load(path, dmp, optimizer, pipeline=pipeline)
    return [*found, *logged.lines]


class Logged(logging.Handler):
    """What snapshots say of themselves inside."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [record.getMessage()] if record.getMessage().startswith(("saved", "loaded")) else []

    def __enter__(self) -> Logged:
        logger = logging.getLogger("hybridrec")
        self.before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: Any) -> None:
        logger = logging.getLogger("hybridrec")
        logger.removeHandler(self)
        logger.setLevel(self.before)


@pytest.mark.parametrize(
    ("world_size", "in_background", "delta_every"), [(1, True, None), (2, False, None), (2, True, 3)]
)
def test_what_was_saved_already_is_not_saved_again_and_is_logged(
    pools: RankPools, tmp_path: Path, world_size: int, in_background: bool, delta_every: int | None
) -> None:
    found = pools[world_size].run(
        save_what_was_due, SCENARIO, tmp_path, in_background=in_background, delta_every=delta_every
    )
    names = [f"step_000000000008{again}" for again in ("", "_2", "_3", "_4")]
    assert all(one[:4] == names for one in found)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000000008_5"
    manifest = read_manifest(tmp_path / names[1])
    rows = sum(table.rows for c in manifest.collections for table in c.tables)
    size = sum(file.bytes for file in manifest.files())
    assert any(f"{names[1]}: step 8, {rows} rows, {size} bytes, " in line for line in found[0][4:])
    assert found[0][-1].startswith(f"loaded {tmp_path}/step_000000000008_5: step 8, ")
    assert all(one[4:] == [] for one in found[1:])  # rank 0 tells


def read_what_is_there_now(scenario: Scenario, path: Path) -> None:
    """A mutant: rows are read when they are written, not when the snapshot began."""
    original = ShardGroup.export_next

    def export_next(self: ShardGroup, handle: int, ids: Any, scores: Any, records: Any) -> None:
        original(self, handle, ids, scores, records)
        table = self._exported[handle]
        self.flush()
        again, _ = self.export_begin(table)
        original(self, again, ids, scores, records)
        self.export_end(again)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "export_next", export_next)
        save_in_background(scenario, path)


def test_a_mutant_is_caught(pools: RankPools, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is not the rows of then|Accepted: 1 to"):
        pools[1].run(read_what_is_there_now, SCENARIO, tmp_path)


def fail_in_background(scenario: Scenario, path: Path) -> str:
    dmp, pipeline = build(scenario)
    batches = iter(mine(scenario, all_batches(scenario)))
    pipeline.progress(batches)

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        raise OSError(28, "No space left on device", file._name)

    saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(files.HashedFile, "write", write)
        saving.start()
        pipeline._thread.settle()
        message = ""
        try:
            saving.finish()
        except StateError as e:
            message = str(e)
    pipeline.progress(batches)
    return message


def test_a_failure_is_raised_on_all_ranks_when_it_is_finished(pools: RankPools, tmp_path: Path) -> None:
    messages = pools[2].run(fail_in_background, SCENARIO, tmp_path)
    assert messages[0] == messages[1] and "No space left on device (on rank 1 of 2)" in messages[0]
    assert checkpoint.latest(tmp_path) is None and list(tmp_path.iterdir()) == []


def who_writes(scenario: Scenario, path: Path) -> dict[str, Any]:
    """Names of written files, each with the niceness of the thread above that of this one."""
    dmp, pipeline = build(scenario)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    original, niceness = files.HashedFile.write, {}

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        niceness[file._name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        original(file, data, rows=rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.HashedFile, "write", write)
        saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline)
        at_once = list(niceness)
        saving.start()
        while not saving.is_written:
            time.sleep(0.01)
        in_background = {name: nice - os.nice(0) for name, nice in niceness.items()}
        saving.finish()
    return {"at once": at_once, "in background": in_background}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_a_thread_that_stands_back_writes_all_files(pools: RankPools, tmp_path: Path) -> None:
    (found,) = pools[1].run(who_writes, SCENARIO, tmp_path)
    assert found["at once"] == []  # the steps do not wait for the disk
    names = found["in background"]
    assert {"dense.pt", "ranks/00000.pt"} < set(names) and sum(name.startswith("rows/") for name in names) > 1
    assert set(names.values()) == {10}


def save_on_three_threads(scenario: Scenario, path: Path) -> None:
    dmp, pipeline = build(scenario)
    pipeline.progress(iter(mine(scenario, all_batches(scenario))))
    meeting, original = threading.Barrier(3, timeout=120), files.HashedFile.write

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        if rows:
            meeting.wait()
        original(file, data, rows=rows)

    verify, both = points.verify, threading.Barrier(3, timeout=120)

    def meet_and_verify(folder: Path, file: Any) -> None:
        if file.rows:
            both.wait()
        verify(folder, file)

    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # as many as there are tables
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.HashedFile, "write", write)
            patch.setattr(points, "verify", meet_and_verify)
            checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
            expected = records_of(dmp)
            checkpoint.load(path, dmp, pipeline._optimizer, pipeline=pipeline)
    finally:
        torch.set_num_threads(threads)
    if records_of(dmp) != expected:
        raise AssertionError("rows are not those that were saved")


def test_as_many_tables_at_a_time_as_torch_has_threads(pools: RankPools, tmp_path: Path) -> None:
    pools[1].run(save_on_three_threads, SCENARIO, tmp_path)


def close_on_a_full_disk(path: Path) -> list[bool]:
    """The snapshot that `close` finishes cannot be written: (the handler was put back, the folder is not locked)."""
    dmp, pipeline = build(SCENARIO)
    former = signal.getsignal(signal.SIGTERM)
    checkpointer = checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=1, in_background=True)
    pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
    with full_disk(), pytest.raises(StateError, match="No space left"):
        checkpointer.after_batch()
        checkpointer.close()
    return [signal.getsignal(signal.SIGTERM) is former, not (path / ".writer").exists()]


def test_a_snapshot_that_fails_at_the_end_leaves_no_handler_and_no_lock(pools: RankPools, tmp_path: Path) -> None:
    assert pools[1].run(close_on_a_full_disk, tmp_path) == [[True, True]]


def leave_by_an_error(path: Path) -> list[str]:
    """An error of the loop while rows are written: what is left in the folder a moment later."""
    dmp, pipeline = build(SCENARIO)
    with pytest.MonkeyPatch.context() as patch:
        Slow(patch)
        with (
            pytest.raises(KeyError, match="of the loop"),
            checkpoint.Checkpointer(path, dmp, pipeline._optimizer, pipeline, every=1, in_background=True) as writer,
        ):
            pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
            writer.after_batch()
            raise KeyError("of the loop")
        deadline = time.monotonic() + 120
        while list(path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
    return [file.name for file in path.iterdir()]


def test_an_error_of_the_loop_gives_up_what_is_being_written(pools: RankPools, tmp_path: Path) -> None:
    assert pools[1].run(leave_by_an_error, tmp_path) == [[]]


def give_up_at_the_end(path: Path) -> list[str]:
    """The thread has written and looked whether it is wanted, but is still there: what is left in the folder."""
    dmp, pipeline = build(SCENARIO)
    pipeline.progress(iter(mine(SCENARIO, all_batches(SCENARIO))))
    has_looked, may_end, work = threading.Event(), threading.Event(), checkpoint.Saving._write_in_background

    def stay(saving: checkpoint.Saving) -> None:
        work(saving)
        has_looked.set()
        may_end.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Saving, "_write_in_background", stay)
        saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline)
        saving.start()
        has_looked.wait()
        saving.give_up()
        left = [file.name for file in path.iterdir()]
        may_end.set()
    return left


def test_what_is_given_up_when_it_is_just_written_goes_too(pools: RankPools, tmp_path: Path) -> None:
    assert pools[1].run(give_up_at_the_end, tmp_path) == [[]]


def load_while_one_rank_writes(path: Path) -> str:
    dmp, pipeline = build(SCENARIO)
    batches = iter(mine(SCENARIO, all_batches(SCENARIO)))
    pipeline.progress(batches)
    first = checkpoint.save(path, dmp, pipeline._optimizer, pipeline=pipeline)
    at_first = records_of(dmp)
    pipeline.progress(batches)
    may_write, write = threading.Event(), checkpoint.Saving._write

    def late(saving: checkpoint.Saving, *, num_threads: int) -> None:
        if dist.get_rank() == 1:
            may_write.wait()
        write(saving, num_threads=num_threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Saving, "_write", late)
        saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline)
        saving.start()
        while dist.get_rank() == 0 and not saving.is_written:
            time.sleep(0.002)
        pipeline.reset()
        before = records_of(dmp)
        with pytest.raises(StateError, match="still writes a snapshot") as raised:
            checkpoint.load(first, dmp, pipeline._optimizer, pipeline=pipeline)
        assert records_of(dmp) == before
        may_write.set()
        saving.finish()
    checkpoint.load(first, dmp, pipeline._optimizer, pipeline=pipeline)
    assert records_of(dmp) == at_first != before
    return str(raised.value)


def test_rows_that_one_rank_still_writes_are_replaced_on_none(pools: RankPools, tmp_path: Path) -> None:
    messages = pools[2].run(load_while_one_rank_writes, tmp_path)
    assert messages[0] == messages[1] and "rank 1 of 2" in messages[0]
