"""The pipeline's life: ends, switches, direct calls, resets, failures. Everything against the oracle, bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrec import CapacityError, ConfigError, HybridTrainPipelineSparseDist
from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from hybridrec.native import unmix64
from tests.distributed.pipelines import (
    Counted,
    PipelineBatch,
    all_batches,
    build_oracle,
    build_pipelined,
    check_pins,
    mine,
    settle,
)
from tests.distributed.scenario import Scenario, compare_state, raise_together, state_of
from tests.ranks import RankPool

SCENARIO = Scenario(optimizer="adam", cache="tenth", steps=30)


class Run:
    """A pipeline and an oracle that are fed the same batches, and must never differ."""

    def __init__(self, depth: int, scenario: Scenario | None = None, **kwargs: Any) -> None:
        scenario = scenario or SCENARIO
        self.scenario, self.device = scenario, torch.device(scenario.device)
        self.batches = all_batches(scenario)
        self.mine = mine(scenario, self.batches)
        self.dmp, self.pipeline = build_pipelined(scenario, self.batches, depth, **kwargs)
        self.oracle, self._dense_optimizer = build_oracle(scenario)

    def loader(self, start: int, end: int) -> Counted:
        return Counted(self.mine[start:end])

    def train(self, iterator: Any, steps: range) -> None:
        """The iterator's next batches are those numbers."""
        for step in steps:
            self.same(
                self.pipeline.progress(iterator), self.oracle.step(self.batches[step], self._dense_optimizer), step
            )

    def plain_step(self, step: int) -> None:
        """One step without ``progress``."""
        self.pipeline._optimizer.zero_grad()
        loss, output = self.dmp(self.mine[step].to(self.device))
        loss.backward()
        self.pipeline._optimizer.step()
        self.same(output, self.oracle.step(self.batches[step], self._dense_optimizer), step)

    def read(self, step: int) -> None:
        """A direct forward in eval mode."""
        self.dmp.eval()
        with torch.no_grad():
            _, output = self.dmp(self.mine[step].to(self.device))
        self.dmp.train()
        self.same(output, self.oracle.step(self.batches[step], self._dense_optimizer, train=False), step)

    def ends(self, iterator: Any) -> None:
        with pytest.raises(StopIteration):
            self.pipeline.progress(iterator)

    def same(self, loss: torch.Tensor, expected: torch.Tensor, step: int) -> None:
        difference = "" if loss.item() == expected.item() else f"loss {loss.item()!r}, not {expected.item()!r}"
        raise_together(difference, step)

    def check(self) -> None:
        """Rows, states and pins."""
        settle(self.pipeline)
        raise_together(compare_state(self.scenario, self.oracle, state_of(self.dmp)), -1)
        if not self.pipeline.stats().batches_in_flight:
            check_pins(self.dmp)


def several_epochs(depth: int) -> None:
    run = Run(depth)
    for _ in range(3):
        iterator = run.loader(0, 7)
        run.train(iterator, range(7))
        run.ends(iterator)
        assert iterator.calls == 8
        run.check()
        run.ends(iterator)  # asks again, as a loop would
        assert iterator.calls == 9
    assert run.pipeline.batches_committed == 21


def fewer_batches_than_depth(depth: int) -> None:
    run = Run(depth)
    for n in range(4):
        iterator = run.loader(0, n)
        run.train(iterator, range(n))
        run.ends(iterator)
        assert iterator.calls == n + 1
    run.check()


def restarted_iterator(depth: int) -> None:
    """An iterator that goes on after it said that it ended."""
    run = Run(depth)

    class Restarting:
        def __init__(self) -> None:
            self._epoch = iter(run.mine[:5])

        def __next__(self) -> PipelineBatch:
            try:
                return next(self._epoch)
            except StopIteration:
                self._epoch = iter(run.mine[:5])
                raise

    iterator = Restarting()
    for _ in range(3):
        run.train(iterator, range(5))
        run.ends(iterator)
    run.check()


def switched_iterators(depth: int) -> None:
    run = Run(depth)
    first, second = run.loader(0, 12), run.loader(12, 24)
    run.train(first, range(4))
    run.train(second, range(12, 17))
    run.train(first, range(4, 9))
    run.check()
    run.train(second, range(17, 24))
    run.ends(second)
    run.train(first, range(9, 12))
    run.ends(first)
    run.check()
    assert run.pipeline.stats().batches_dropped == 0


def modes_of_one_iterator(depth: int) -> None:
    """A batch has the mode in which it was taken; the other mode's batches wait."""
    run = Run(depth)
    iterator = run.loader(0, 30)
    run.train(iterator, range(5))  # the pipeline took up to 5 + depth - 1
    taken = 5 + depth - 1
    run.dmp.eval()
    with torch.no_grad():
        for step in range(taken, taken + 3):
            run.same(
                run.pipeline.progress(iterator),
                run.oracle.step(run.batches[step], run._dense_optimizer, train=False),
                step,
            )
    run.dmp.train()
    run.train(iterator, range(5, taken))
    run.check()


def direct_calls(depth: int) -> None:
    run = Run(depth)
    iterator = run.loader(0, 20)
    run.train(iterator, range(3))
    run.read(25)
    run.train(iterator, range(3, 6))
    run.plain_step(26)
    run.read(3)
    run.train(iterator, range(6, 9))
    run.check()
    run.dmp.eval()
    eval_iterator = run.loader(20, 24)
    with torch.no_grad():
        for step in range(20, 24):
            expected = run.oracle.step(run.batches[step], run._dense_optimizer, train=False)
            run.same(run.pipeline.progress(eval_iterator), expected, step)
        run.ends(eval_iterator)
    run.dmp.train()
    run.train(iterator, range(9, 20))
    run.ends(iterator)
    run.check()


def forward_without_backward(depth: int) -> None:
    """A graph that the caller keeps pins its rows, and is undone when it goes; prefetch goes on around it."""
    run = Run(depth, dataclasses.replace(SCENARIO, cache="all"))
    iterator = run.loader(0, 20)
    run.train(iterator, range(3))
    loss, _ = run.dmp(run.mine[25].to(run.device))
    run.train(iterator, range(3, 6))
    del loss
    gc.collect()
    run.train(iterator, range(6, 20))
    run.ends(iterator)
    run.check()


def reset_in_flight(depth: int) -> None:
    run = Run(depth)
    iterator = run.loader(0, 20)
    run.train(iterator, range(6))
    run.pipeline.reset()
    run.check()
    check_pins(run.dmp)
    stats = run.pipeline.stats()
    assert (stats.batches_committed, stats.batches_in_flight, stats.batches_dropped) == (6, 0, depth - 1)
    resumed = run.loader(run.pipeline.batches_committed, 20)
    run.train(resumed, range(6, 20))
    run.ends(resumed)
    run.check()


def detached(depth: int) -> None:
    run = Run(depth)
    iterator = run.loader(0, 20)
    run.train(iterator, range(4))
    model = run.pipeline.detach()
    assert model is run.dmp and "forward" not in run.dmp.module.ebc.__dict__
    run.plain_step(22)
    run.read(23)
    run.pipeline.attach()
    run.train(iterator, range(4, 8))
    run.pipeline.detach()
    run.train(iterator, range(8, 20))  # attaches by itself
    run.ends(iterator)
    run.check()


def flushed(depth: int) -> None:
    run = Run(depth)
    iterator = run.loader(0, 12)
    run.train(iterator, range(6))
    run.pipeline.flush()
    ebc = run.dmp.module.ebc
    group = ebc.lookup.log.group
    for t, name in enumerate(ebc.lookup.table_names):
        keys, rows, _, _, _ = group.entries(t)
        stored = group.read_records(t, rows)
        table = next(i for i, config in enumerate(run.scenario.tables) if config.name == name)
        expected = run.oracle.state_of(table)
        ids = ids_of_keys(keys)
        assert len(ids) and all(stored[i].tobytes() == expected[id_].tobytes() for i, id_ in enumerate(ids))
    run.train(iterator, range(6, 12))
    run.ends(iterator)
    run.check()


def ids_of_keys(keys: Any) -> list[int]:
    return unmix64(torch.from_numpy(keys.copy())).tolist()


def not_all_batches(depth: int) -> None:
    run = Run(depth, execute_all_batches=False)
    iterator = run.loader(0, 10)
    computed = 10 - (depth - 1)
    run.train(iterator, range(computed))
    run.ends(iterator)
    run.check()
    assert run.pipeline.stats().batches_dropped == depth - 1
    check_pins(run.dmp)


def two_pipelines(depth: int) -> None:
    """Two pipelines take turns on one model; each keeps its batches."""
    run = Run(depth)
    other = HybridTrainPipelineSparseDist(run.dmp, run.pipeline._optimizer, run.device, pipe_n_batch=max(1, depth - 1))
    first, second = run.loader(0, 10), run.loader(10, 20)
    mine_ = run.pipeline
    for k in range(5):
        run.pipeline = mine_
        run.train(first, range(2 * k, 2 * k + 2))
        run.pipeline = other
        run.train(second, range(10 + 2 * k, 12 + 2 * k))
    run.ends(second)
    run.pipeline = mine_
    run.ends(first)
    run.check()


def dropped_pipeline(depth: int) -> None:
    """A pipeline that is gone leaves nothing behind."""
    run = Run(depth)
    iterator = run.loader(0, 10)
    run.train(iterator, range(4))
    optimizer = run.pipeline._optimizer
    settle(run.pipeline)
    run.pipeline = None
    gc.collect()
    run.pipeline = HybridTrainPipelineSparseDist(run.dmp, optimizer, run.device, pipe_n_batch=depth)
    check_pins(run.dmp)
    run.train(run.loader(4, 10), range(4, 10))
    run.check()


class Planted(Exception):
    """Raised in a stage by a test."""


def exception_in(depth: int, where: str) -> None:
    """An exception surfaces in ``progress``; the batch is left out, everything else is as if it had not been."""
    run = Run(depth)
    owner, name = {
        "dist": (ShardedHashEmbeddingBagCollection, "input_dist"),
        "map": (PooledLookup, "map"),
        "compute": (PooledLookup, "compute"),
        "swap": (HostMemorySwapper, "swap"),
    }[where]
    real = getattr(owner, name)
    calls = itertools.count()

    def planted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 6:
            raise Planted
        return real(*args, **kwargs)

    iterator = run.loader(0, 14)
    failed = []
    with mock.patch.object(owner, name, planted):
        for step in range(14):
            try:
                run.train(iterator, range(step, step + 1))
            except Exception as e:
                assert isinstance(e, Planted) or "Planted" in str(e), e
                failed.append(step)
    run.ends(iterator)
    assert len(failed) == 1
    run.check()
    assert run.pipeline.stats().batches_dropped == 1


def exception_in_loader(depth: int) -> None:
    run = Run(depth)
    items = iter(run.mine)

    class Failing:
        calls = 0

        def __next__(self) -> PipelineBatch:
            self.calls += 1
            if self.calls == 5:
                raise Planted
            return next(items)

    iterator = Failing()
    done = 0
    while done < 10:
        try:
            batch = run.pipeline.progress(iterator)
        except Planted:
            continue
        run.same(batch, run.oracle.step(run.batches[done], run._dense_optimizer), done)
        done += 1
    run.check()


def refused_batch(depth: int) -> None:
    """A batch that one rank cannot take is left out on all; those before and behind it are trained."""
    run = Run(depth, dataclasses.replace(SCENARIO, cache="minimum"))
    real = PooledLookup.map
    calls = itertools.count()

    def map_(self: PooledLookup, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5 and dist.get_rank() == dist.get_world_size() - 1:
            return CapacityError("no room for this one")
        return real(self, *args, **kwargs)

    iterator = run.loader(0, 12)
    refused = []
    with mock.patch.object(PooledLookup, "map", map_):
        for step in range(12):
            try:
                run.train(iterator, range(step, step + 1))
            except CapacityError as e:
                assert "no room for this one" in str(e)
                refused.append(step)
    assert len(refused) == 1
    run.ends(iterator)
    run.check()


LIVES: list[Callable[[int], None]] = [
    several_epochs,
    fewer_batches_than_depth,
    restarted_iterator,
    switched_iterators,
    modes_of_one_iterator,
    direct_calls,
    forward_without_backward,
    reset_in_flight,
    detached,
    flushed,
    not_all_batches,
    two_pipelines,
    dropped_pipeline,
    exception_in_loader,
    refused_batch,
]


@pytest.mark.parametrize("life", LIVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_life_at_one_rank(pool_1: RankPool, life: Callable[[int], None], depth: int) -> None:
    pool_1.run(life, depth)


@pytest.mark.parametrize("life", LIVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("depth", [2, 4])
def test_life_at_two_ranks(pool_2: RankPool, life: Callable[[int], None], depth: int) -> None:
    pool_2.run(life, depth)


@pytest.mark.parametrize("where", ["dist", "map", "compute", "swap"])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_exception_in_a_stage_surfaces_and_leaves_the_batch_out(pool_1: RankPool, where: str, depth: int) -> None:
    pool_1.run(exception_in, depth, where)


def wrong_arguments() -> None:
    run = Run(3)
    model, optimizer, device = run.dmp, run.pipeline._optimizer, torch.device("cpu")
    for kwargs, text in (
        ({"pipe_n_batch": 0}, "pipe_n_batch=0"),
        ({"pipe_n_batch": 13}, "pipe_n_batch=13"),
        ({"pipe_n_batch": True}, "pipe_n_batch=True"),
        ({"pipe_n_batch": 2.0}, "pipe_n_batch=2.0"),
        ({"apply_jit": True}, "apply_jit=True"),
    ):
        with pytest.raises(ConfigError, match=text):
            HybridTrainPipelineSparseDist(model, optimizer, device, **kwargs)
    with pytest.raises(ConfigError, match="model has type dict"):
        HybridTrainPipelineSparseDist({}, optimizer, device)
    with pytest.raises(ConfigError, match="without zero_grad"):
        HybridTrainPipelineSparseDist(model, object(), device)
    with pytest.raises(ConfigError, match="device=None"):
        HybridTrainPipelineSparseDist(model, optimizer, None)
    with pytest.raises(ConfigError, match="got a list, which is no iterator"):
        run.pipeline.progress(run.mine)
    with pytest.raises(ConfigError, match="the iterator gave a int"):
        run.pipeline.progress(iter([3]))
    assert run.pipeline.stats().batches_dropped == 1


def test_wrong_arguments_are_refused_by_name(pool_1: RankPool) -> None:
    pool_1.run(wrong_arguments)
