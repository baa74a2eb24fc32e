"""The pipeline's tests must be able to fail: each named mutation of the code breaks one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from hybridrec.cache.swap import HostMemorySwapper
from hybridrec.cache.transaction import TransactionLog
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.distributed.model_calls import ModelCalls
from hybridrec.distributed.pipelined_call import PipelinedCall
from hybridrec.distributed.stages import HostStages
from hybridrec.native.protocol import Plan
from tests.distributed import test_pipeline_eviction, test_pipeline_life, test_pipeline_models
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario
from tests.ranks import RankFailure, RankPool


@contextlib.contextmanager
def release_pins_early() -> Iterator[None]:
    """Slots are unpinned as soon as rows are in them, not when the backward is over."""
    swap = HostMemorySwapper.swap

    def early(self: HostMemorySwapper, plan: Plan, fence: Any, lock: Any) -> None:
        swap(self, plan, fence, lock)
        self._group.commit(plan.ordinal)

    with (
        mock.patch.object(HostMemorySwapper, "swap", early),
        mock.patch.object(TransactionLog, "_apply_posted", lambda self: self._posted.clear()),
    ):
        yield


@contextlib.contextmanager
def lose_posted_commits() -> Iterator[None]:
    """A commit that comes while the host thread is busy with the group is forgotten."""
    real = TransactionLog.post_commit

    def post(self: TransactionLog, transaction: Any) -> None:
        if self.committed % 3 == 2:
            self.committed += 1
            self.released()
        else:
            real(self, transaction)

    with mock.patch.object(TransactionLog, "post_commit", post):
        yield


@contextlib.contextmanager
def lose_victims() -> Iterator[None]:
    """Victims are not written back before their slots are filled: their last values are lost."""
    swap = HostMemorySwapper.swap

    def lossy(self: HostMemorySwapper, plan: Plan, fence: Any, lock: Any) -> None:
        if plan.ordinal == 20:
            with lock:
                counts = torch.empty((len(self._group._specs), 2), dtype=torch.int64)
                self._group.swap_counts(plan.ordinal, counts)
                loads = torch.empty(plan.num_loads + plan.num_inits, dtype=torch.int64)
                victims = torch.empty(plan.num_write_backs, dtype=torch.int64)
                self._group.swap_slots(plan.ordinal, loads, victims)
                start = 0
                for table, count in enumerate(counts[:, 1].tolist()):
                    slots = victims[start : start + count]
                    self._group._bound[table][0][slots] = 0.0
                    start += count
        swap(self, plan, fence, lock)

    with mock.patch.object(HostMemorySwapper, "swap", lossy):
        yield


@contextlib.contextmanager
def keep_what_was_mapped() -> Iterator[None]:
    """A direct call, a reset or another iterator does not take back what was mapped ahead."""

    def withdraw(self: HostStages, batches: Iterable[InFlightBatch]) -> None:
        self._thread.settle()

    with mock.patch.object(HostStages, "withdraw", withdraw):
        yield


@contextlib.contextmanager
def answer_direct_calls_from_the_queue() -> Iterator[None]:
    """As TorchRec's pipelines do: whoever calls the model gets the next batch's embeddings."""
    real = PipelinedCall.__call__

    def call(self: PipelinedCall, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner()
        if owner is not None and owner.computing is None and owner._sources and owner._sources[-1].queue:
            batch = owner._sources[-1].queue[0]
            owner._stages.wait_mapped(batch)
            return owner.prepared(self, batch)()
        return real(self, *args, **kwargs)

    with mock.patch.object(PipelinedCall, "__call__", call):
        yield


@contextlib.contextmanager
def trust_the_trace() -> Iterator[None]:
    """What the model passes to a collection is not compared with what tracing found."""
    with mock.patch.object(PipelinedCall, "_is_as_expected", lambda self, batch, args, kwargs: True):
        yield


@contextlib.contextmanager
def keep_unused_pins() -> Iterator[None]:
    """Rows of a batch that no backward reached stay pinned."""
    with mock.patch.object(HostStages, "release", lambda self, batch: None):
        yield


@contextlib.contextmanager
def ask_once_too_often() -> Iterator[None]:
    """The loader is one batch further than the depth says."""
    real = HybridTrainPipelineSparseDist._fill

    def fill(self: HybridTrainPipelineSparseDist, source: Any) -> None:
        self._depth += 1
        real(self, source)
        self._depth -= 1

    with mock.patch.object(HybridTrainPipelineSparseDist, "_fill", fill):
        yield


@contextlib.contextmanager
def mix_up_the_collections() -> Iterator[None]:
    """A collection gets what was prepared for the one beside it."""
    real = ModelCalls.prepared

    def prepared(self: ModelCalls, call: PipelinedCall, batch: InFlightBatch) -> Callable[[], Any]:
        if call in self.hashed:
            context = batch.contexts[self.hashed.index(call) - 1]
            return lambda: call.module.compute_and_output_dist(context, None)
        return real(self, call, batch)

    with mock.patch.object(ModelCalls, "prepared", prepared):
        yield


def oracle_run() -> None:
    run_pipeline_against_oracle(Scenario(cache="minimum", optimizer="adagrad", steps=40), 3)


def eviction() -> None:
    expected = test_pipeline_eviction.train(0, 120, True)
    got = test_pipeline_eviction.train(5, 120, True)
    assert expected == got


class _Life:
    """A life of the life-cycle tests; by name, since ranks get it pickled."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> None:
        getattr(test_pipeline_life, self._name)(3)


class _SameModel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> None:
        test_pipeline_models.same_as_the_plain_loop(getattr(test_pipeline_models, self._name), 3)


MUTANTS = [
    (release_pins_early, oracle_run),
    (lose_posted_commits, oracle_run),
    (lose_victims, oracle_run),
    (ask_once_too_often, oracle_run),
    (keep_what_was_mapped, eviction),
    (answer_direct_calls_from_the_queue, _Life("direct_calls")),
    (trust_the_trace, _SameModel("Switched")),
    (keep_unused_pins, _SameModel("Unused")),
    (mix_up_the_collections, _SameModel("TwoCollections")),
]


def mutated(mutant: Callable[[], Any], check: Callable[[], None]) -> None:
    with mutant():
        check()


@pytest.mark.parametrize("check", {id(c): c for _, c in MUTANTS}.values(), ids=lambda c: getattr(c, "_name", "run"))
def test_without_a_mutant_the_check_passes(pool_1: RankPool, check: Callable[[], None]) -> None:
    pool_1.run(mutated, contextlib.nullcontext, check)


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_mutant_is_caught(pool_1: RankPool, mutant: Callable[[], Any], check: Callable[[], None]) -> None:
    with pytest.raises(RankFailure):
        pool_1.run(mutated, mutant, check)
