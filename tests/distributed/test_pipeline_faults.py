"""What goes wrong in a step, on one rank or on all: it surfaces, nobody waits in vain, nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.streamable import Pipelineable

from hybridrec import ConfigError, StateError
from hybridrec.cache.transaction import TransactionLog
from hybridrec.distributed.mapped_batch import MappedBatch
from hybridrec.kernels import tbe_kernel
from hybridrec.kernels.tbe_kernel import TbeKernel
from tests.distributed.test_pipeline_life import SCENARIO, Run
from tests.ranks import RankFailure, RankPool


class Planted(Exception):
    """Raised by a test."""


def plant(run: Run, error: BaseException, at: int) -> None:
    """The dense part raises in its ``at``-th forward from now."""
    calls = iter(range(10**6))

    def hook(*args: Any) -> None:
        if next(calls) == at:
            raise error

    run.dmp.module.dense.register_forward_pre_hook(hook)


def fails_on_rank_0(cache: str, path: str) -> None:
    run = Run(3, dataclasses.replace(SCENARIO, cache=cache))
    iterator = run.loader(0, 20)
    for _ in range(4):
        run.pipeline.progress(iterator)
    if dist.get_rank() == 0:
        plant(run, Planted(), 0)
    try:
        run.pipeline.progress(iterator)
    except Planted:
        Path(path).touch()
        with pytest.raises(StateError, match="failed before, in a way that other ranks may not know of .Planted"):
            run.pipeline.progress(iterator)
        raise


@pytest.mark.parametrize("cache", ["minimum", "all"])
def test_an_exception_of_one_rank_leaves_progress(pool_2: RankPool, cache: str, tmp_path: Path) -> None:
    """With the smallest cache the other rank's MAP waits for pins meanwhile."""
    with pytest.raises(RankFailure):
        pool_2.run(fails_on_rank_0, cache, str(tmp_path / "raised"))
    assert (tmp_path / "raised").exists()


def fails_on_all(depth: int) -> None:
    run = Run(depth)
    iterator = run.loader(0, 20)
    run.train(iterator, range(4))
    plant(run, Planted(), 0)
    with pytest.raises(Planted):
        run.pipeline.progress(iterator)
    with pytest.raises(StateError, match=r"Call reset\(\) on all ranks, then go on from batch 4"):
        run.pipeline.progress(iterator)
    run.pipeline.reset()
    resumed = run.loader(run.pipeline.batches_committed, 20)
    run.train(resumed, range(4, 20))
    run.ends(resumed)
    run.check()


@pytest.mark.parametrize("depth", [1, 3])
def test_after_an_exception_of_all_ranks_a_reset_goes_on(pool_2: RankPool, depth: int) -> None:
    pool_2.run(fails_on_all, depth)


class Strange(Pipelineable):
    """A batch without the field that the model reads."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Strange:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing to record."""

    def pin_memory(self) -> Strange:
        return self


def strange_batch(depth: int) -> None:
    run = Run(depth)
    batches: list[Any] = list(run.mine[:20])
    strange_rank = dist.get_world_size() - 1
    if dist.get_rank() == strange_rank:
        batches[6] = Strange()
    iterator = iter(batches)
    run.train(iterator, range(6))
    with pytest.raises(Exception, match="features") as raised:
        run.pipeline.progress(iterator)
    if dist.get_rank() != strange_rank:
        assert f"refused by rank {strange_rank}" in str(raised.value)
    run.train(iterator, range(7, 20))
    run.ends(iterator)
    run.check()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_batch_that_one_rank_cannot_read_is_refused_on_all(pool_1: RankPool, pool_2: RankPool, depth: int) -> None:
    pool_1.run(strange_batch, depth)
    pool_2.run(strange_batch, depth)


def interrupted() -> None:
    run = Run(3)
    iterator = run.loader(0, 20)
    run.train(iterator, range(4))
    plant(run, KeyboardInterrupt(), 0)
    with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps its last exception
        run.pipeline.progress(iterator)
    run.train(iterator, range(5, 8))
    plant(run, KeyboardInterrupt(), 0)
    with pytest.raises(KeyboardInterrupt):
        run.pipeline.progress(iterator)
    run.pipeline.reset()
    run.check()
    assert kept.value is not None and run.pipeline.stats().batches_in_flight == 0


def test_an_interrupt_leaves_nothing_behind(pool_1: RankPool) -> None:
    pool_1.run(interrupted)


def optimizer_fails() -> None:
    run = Run(3)
    iterator = run.loader(0, 20)
    run.train(iterator, range(4))
    log = run.dmp.module.ebc.lookup.log
    with (
        mock.patch.object(run.pipeline._optimizer, "step", side_effect=Planted),
        pytest.raises(Planted) as raised,
    ):
        run.pipeline.progress(iterator)
    assert "Batch 4 counts as committed" in raised.value.__notes__[0]
    stats = run.pipeline.stats()
    assert log.committed == stats.batches_committed == 5 and stats.batches_dropped == 0


def test_a_step_whose_rows_were_updated_counts_as_committed(pool_1: RankPool) -> None:
    pool_1.run(optimizer_fails)


def stop_in_model() -> None:
    run = Run(3)
    plant(run, StopIteration(), 2)
    iterator = run.loader(0, 20)
    for _ in range(2):
        run.pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match="the model raised StopIteration"):
        run.pipeline.progress(iterator)


def test_a_model_cannot_end_an_epoch(pool_1: RankPool) -> None:
    pool_1.run(stop_in_model)


def kept_losses() -> int:
    run = Run(3, return_loss=True)
    iterator = run.loader(0, 30)
    kept = [run.pipeline.progress(iterator)[1] for _ in range(25)]
    gc.collect()
    num_batches = sum(isinstance(o, MappedBatch) for o in gc.get_objects())
    assert len(kept) == 25
    return num_batches


def test_losses_that_are_kept_keep_no_batches(pool_1: RankPool) -> None:
    (num_batches,) = pool_1.run(kept_losses)
    assert num_batches <= 3


def iterators_left_early() -> None:
    run = Run(2)
    for k in range(7):
        run.train(run.loader(2 * k, 30), range(2 * k, 2 * k + 1))
    run.pipeline.reset()
    assert run.pipeline.stats().batches_in_flight == 0
    run.check()


def test_iterators_left_early_are_let_go_by_reset(pool_1: RankPool) -> None:
    pool_1.run(iterators_left_early)


def overwritten() -> None:
    run = Run(3)

    def reusing() -> Any:
        """Gives one batch's tensors again and again, filled anew."""
        batch = run.mine[0]
        for k in range(10):
            batch.features.values().add_(k)
            yield batch

    iterator = reusing()
    with pytest.raises(StateError, match="the ids of batch 0 were written over after the iterator gave them"):
        run.pipeline.progress(iterator)
    run.pipeline.reset()
    assert not any(s.pins for s in run.dmp.module.ebc.stats())


def test_a_loader_that_writes_over_its_batches_is_found_out(pool_1: RankPool) -> None:
    pool_1.run(overwritten)


def called_twice_at_a_time() -> None:
    run = Run(3)

    class Calling:
        def __next__(self) -> Any:
            return run.pipeline.progress(self)

    with pytest.raises(StateError, match="was called while it runs"):
        run.pipeline.progress(Calling())
    run.train(run.loader(0, 5), range(5))


def test_progress_is_not_called_inside_itself(pool_1: RankPool) -> None:
    pool_1.run(called_twice_at_a_time)


def depths_differ() -> None:
    run = Run(2 + dist.get_rank())
    with pytest.raises(ConfigError, match=r"pipe_n_batch differs between ranks .rank 0: 2, rank 1: 3."):
        run.pipeline.progress(run.loader(0, 5))


def test_ranks_of_different_depth_are_refused(pool_2: RankPool) -> None:
    pool_2.run(depths_differ)


def forked() -> None:
    run = Run(3)
    iterator = run.loader(0, 20)
    run.pipeline.progress(iterator)
    child = os.fork()
    if child == 0:
        try:
            run.pipeline.progress(iterator)
        except StateError as e:
            os._exit(7 if "in a forked process" in str(e) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    run.pipeline.progress(iterator)


def test_a_forked_process_is_told(pool_1: RankPool) -> None:
    pool_1.run(forked)


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from hybridrec.distributed.lookup import PooledLookup
from tests.distributed.test_pipeline_life import Run
run = Run(6)
iterator = run.loader(0, 8)
run.pipeline.progress(iterator)
real, matrix = PooledLookup.map, torch.rand(64, 64)

def slow(*args, **kwargs):
    end = time.monotonic() + 0.4
    while time.monotonic() < end:  # in and out of C++
        torch.mm(matrix, matrix)
    return real(*args, **kwargs)

PooledLookup.map = slow
run.pipeline.reset()
iterator = run.loader(1, 8)
run.pipeline.progress(iterator)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_ends_with_its_own_status_while_batches_are_in_flight(status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(status)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == status, done.stderr[-2000:]


def stages_of_the_base() -> None:
    run = Run(3)
    iterator = run.loader(0, 20)
    for name in ("fill_pipeline", "enqueue_batch", "start_sparse_data_dist", "dequeue_batch"):
        with pytest.raises(StateError, match="TorchRec's stages are not this pipeline's"):
            getattr(run.pipeline, name)(iterator)
    assert iterator.calls == 0


def test_inherited_stages_are_refused(pool_1: RankPool) -> None:
    pool_1.run(stages_of_the_base)


def rate_while_growing() -> tuple[float, float]:
    run = Run(1, dataclasses.replace(SCENARIO, optimizer="adagrad"))
    kernel = next(k for k in run.dmp.module.ebc.lookup.kernels if isinstance(k, TbeKernel))
    build = tbe_kernel._build_tbe

    def build_then_set(*args: Any) -> Any:
        made = build(*args)
        kernel.learning_rate = 0.5  # the training thread, meanwhile
        return made

    with mock.patch.object(tbe_kernel, "_build_tbe", build_then_set):
        kernel.resize([t.num_slots + 10 for t in kernel.spec.tables])
    return kernel.learning_rate, float(kernel._tbe.get_learning_rate())


def test_a_learning_rate_set_while_slots_grow_is_kept(pool_1: RankPool) -> None:
    ((said, used),) = pool_1.run(rate_while_growing)
    assert said == used == 0.5


class _Batch:
    """As much of a transaction as `TransactionLog.abandoned` needs here."""


def test_a_batch_abandoned_while_one_waits_ends_the_wait() -> None:
    """The garbage collector abandons without a lock, in the middle of the wait's own code."""
    log = TransactionLog(None, None)  # type: ignore[arg-type]
    asked = []

    def may_wait() -> bool:
        asked.append(True)
        if len(asked) == 2:
            log.abandoned.append(_Batch())  # type: ignore[arg-type]
        return len(asked) < 100

    assert log.wait_for_release(log.num_releases, may_wait)
    assert len(asked) < 100


def test_batches_abandoned_while_others_are_undone_lose_nothing() -> None:
    """A thread that frees a graph appends in the middle of `settle`."""
    log = TransactionLog(None, None)  # type: ignore[arg-type]
    freed_meanwhile, undone = [9], list[int]()

    class Batch:
        is_final = False

        def __init__(self, ordinal: int) -> None:
            self._ordinal = ordinal

        @property
        def ordinal(self) -> int:
            if freed_meanwhile:
                log.abandoned.append(Batch(freed_meanwhile.pop()))  # type: ignore[arg-type]
            return self._ordinal

        def undo(self) -> None:
            undone.append(self._ordinal)

    log.abandoned.extend([Batch(1), Batch(2), Batch(3)])  # type: ignore[list-item]
    log.settle()
    assert undone == [3, 9, 2, 1] and not log.abandoned


def update_failed_while_one_waits() -> None:
    run = Run(1)
    lookup, waited = run.dmp.module.ebc.lookup, []

    def wait_for_release(seen: int, may_wait: object) -> bool:
        lookup.log.broken = "the update of batch 1 failed half-way"
        waited.append(seen)
        return len(waited) < 100

    keys = run.dmp.module.ebc._feature_order.apply(run.mine[0].features)
    with (
        mock.patch.object(TransactionLog, "is_any_aside", True),
        mock.patch.object(lookup.log, "wait_for_release", wait_for_release),
        pytest.raises(StateError, match="the update of batch 1 failed half-way"),
    ):
        lookup.map(keys, is_training=True, may_wait=lambda: True)
    assert len(waited) == 1


def test_a_batch_that_waits_behind_a_failed_update_is_refused(pool_1: RankPool) -> None:
    """Abandoned batches cannot be undone any more, so that every look for released pins would say: try again."""
    pool_1.run(update_failed_while_one_waits)
