"""Models whose forward cannot be traced: what is declared is prefetched, the rest is trained all the same and named."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import ConfigError, HybridTrainPipelineSparseDist, IdError
from hybridrec.distributed import model_calls
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from tests.distributed.pipelines import PipelineBatch, PipelinedModel, run_pipeline_against_oracle
from tests.distributed.scenario import Scenario
from tests.distributed.test_pipeline_models import (
    Derived,
    Head,
    PropertyBatch,
    Repeated,
    Switched,
    TwoCollections,
    Unused,
    Writing,
    batches,
    build,
    hashed,
    plain,
    same_as_the_plain_loop,
)
from tests.ranks import RankPool

CPU = torch.device("cpu")


def turns(batch: PipelineBatch) -> int:
    """What no tracer follows: a loop as long as the data says, a branch, and an exception that is caught."""
    count = 0
    for label in batch.labels.tolist():
        try:
            count += 1 // int(label > 0.5)
        except ZeroDivisionError:
            continue
    return count if count > 2 else 0


class Untraceable(PipelinedModel):
    """The oracle's model behind control flow that depends on data."""

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        if turns(batch):
            return super().forward(batch)
        loss, output = super().forward(batch)
        return loss, output


@contextlib.contextmanager
def recorded_maps(threads: list[str]) -> Iterator[None]:
    """On which thread each batch was mapped."""
    real = ShardedHashEmbeddingBagCollection.map_batch

    def map_batch(self: ShardedHashEmbeddingBagCollection, ctx: Any, *args: Any) -> bool:
        if ctx.mapped is None:
            threads.append(threading.current_thread().name)
        return real(self, ctx, *args)

    with mock.patch.object(ShardedHashEmbeddingBagCollection, "map_batch", map_batch):
        yield


def against_oracle(depth: int, inputs: dict[str, str] | None) -> tuple[set[str], str]:
    threads: list[str] = []
    with recorded_maps(threads):
        result = run_pipeline_against_oracle(
            Scenario(steps=30), depth, model_class=Untraceable, inputs=inputs, strict=inputs is not None
        )
    return set(threads), str(result["report"])


@pytest.mark.parametrize("depth", [1, 3, 12])
@pytest.mark.parametrize("world_size", [1, 2])
def test_re_15_declared_inputs_are_prefetched_without_a_trace(
    pools: dict[int, RankPool], world_size: int, depth: int
) -> None:
    for threads, report in pools[world_size].run(against_oracle, depth, {"ebc": "features"}):
        assert threads == {"hybridrec-host"}
        assert report == "ebc  hashed  prefetched: declared in inputs"


@pytest.mark.parametrize(("world_size", "depth"), [(1, 12), (2, 3)])
def test_re_15_without_a_declaration_it_is_trained_and_not_prefetched(
    pools: dict[int, RankPool], world_size: int, depth: int
) -> None:
    for threads, report in pools[world_size].run(against_oracle, depth, None):
        assert threads == {"MainThread"}
        assert "NOT prefetched: the model's forward cannot be traced symbolically (" in report


class Hidden(TwoCollections):
    """Two hashed collections and a plain one, behind what no tracer follows."""

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        turns(batch)
        return super().forward(batch)


class Skipping(Head):
    """A collection with a capacity is called when the data says so: not at all, once, or twice."""

    def __init__(self) -> None:
        super().__init__(8)
        self.first = hashed("t1", "a", max_rows=50, full_policy="evict")
        self.second = hashed("t2", "c")

    def forward(self, batch: PropertyBatch) -> tuple[Tensor, Tensor]:
        pool = self.second(batch.features).values()
        calls = [0, 1, 1, 2][int(batch.labels[0] * 4)]
        first = torch.zeros_like(pool)
        for _ in range(calls):
            first = first + self.first(features=batch.features).values()
        return self.score([first, pool], batch.labels)


def everything_declared(model_class: Callable[[], Head], depth: int, inputs: dict[str, Any]) -> None:
    """As the plain loop, and nothing was traced."""
    with mock.patch.object(model_calls, "rewrite_model", side_effect=AssertionError("traced")):
        same_as_the_plain_loop(model_class, depth, inputs=inputs)


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_plain_collections_are_declared_too(pool_2: RankPool, depth: int) -> None:
    fields = {"first": "features", "second": features_of, "plain": features_of}
    pool_2.run(everything_declared, Hidden, depth, fields)


def features_of(batch: PipelineBatch) -> KeyedJaggedTensor:
    return batch.features


@pytest.mark.parametrize("model_class", [Switched, Writing, Unused, Derived, Repeated])
def test_a_declaration_that_the_model_does_not_keep_changes_nothing(
    pool_2: RankPool, model_class: Callable[[], Head]
) -> None:
    paths = ["first"] if model_class is Writing else ["first", "second"]
    pool_2.run(everything_declared, model_class, 3, dict.fromkeys(paths, "features"))


def now_and_then(depth: int, around: Callable[[nn.Module], Any] = contextlib.nullcontext) -> tuple[list[float], int]:
    """Losses of `Skipping` over 60 small batches, and how many rows were evicted; the plain loop at depth 0."""
    dmp, optimizer = build(Skipping())
    with around(dmp):
        return train_skipping(dmp, optimizer, depth)


def train_skipping(dmp: Any, optimizer: Any, depth: int) -> tuple[list[float], int]:
    inputs = {"first": "features", "second": "features"}
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU, pipe_n_batch=depth, inputs=inputs) if depth else None
    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(60):
        lengths = torch.randint(0, 3, (6,), generator=generator)
        ids = torch.randint(0, 90, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(keys=["a", "c"], values=ids, lengths=lengths)
        data.append(PropertyBatch(features, torch.rand(3, generator=generator)))
    result, iterator = [], iter(data)
    for batch in data:
        if pipeline is None:
            optimizer.zero_grad()
            loss, output = dmp(batch)
            loss.backward()
            optimizer.step()
        else:
            output = pipeline.progress(iterator)
        result.append(output.item())
    loss = output = None
    assert not any(s.pins for module in (dmp.module.first, dmp.module.second) for s in module.stats())
    return result, dmp.module.first.stats()[0].evicted


def test_collections_that_are_called_now_and_then(pool_1: RankPool) -> None:
    (expected,) = pool_1.run(now_and_then, 0)
    assert expected[1] > 10
    for depth in (3, 12):
        assert pool_1.run(now_and_then, depth) == [expected]


def one_of_two() -> tuple[list[str], str]:
    """Some batches of `Hidden` with one collection declared; what was said, and the report."""
    dmp, optimizer = build(Hidden())
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU, inputs={"second": "features"})
    before = str(pipeline.report())
    with mock.patch.object(model_calls.logger, "warning") as warning:
        iterator = iter(batches())
        for _ in range(5):
            pipeline.progress(iterator)
    pipeline.reset()
    assert "second  hashed  prefetched: declared" in before.replace("NOT ", "") and "not known before the" in before
    return [str(call.args[1]) for call in warning.call_args_list], str(pipeline.report())


def test_one_of_two_is_declared(pool_2: RankPool) -> None:
    pool_2.run(same_as_the_plain_loop_with_one_declared)
    for messages, report in pool_2.run(one_of_two):
        lines = report.splitlines()
        assert [line.split()[:2] for line in lines] == [["first", "hashed"], ["second", "hashed"], ["plain", "plain"]]
        assert ["NOT prefetched" in line for line in lines] == [True, False, True]
        assert [message.partition(":")[0] for message in messages] == ["first", "plain"]
        assert all("cannot be traced" in m and "inputs={'" in m for m in messages)


def same_as_the_plain_loop_with_one_declared() -> None:
    same_as_the_plain_loop(Hidden, 3, inputs={"second": "features"})


class HiddenRepeated(Repeated):
    """Calls a collection twice, which no trace shows."""

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        turns(batch)
        return super().forward(batch)


def strict() -> None:
    for model, named, inputs in (
        (Hidden(), ("first: .*traced.*\n.*second: .*traced.*\n.*plain: .*traced"), None),
        (Hidden(), ("first: .*traced.*\n.*plain: .*traced"), {"second": "features"}),
        (Derived(), "second: .*tracing found no call of it", None),
        (Repeated(), "first: .*more than once", None),
        (HiddenRepeated(), "first: the model calls it more than once.*strict", {"first": "features"} | SECOND),
        (Switched(), "first: the model passes something else than inputs says.*strict", {"first": "shifted"} | SECOND),
    ):
        dmp, optimizer = build(model)
        pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU, strict=True, inputs=inputs)
        with pytest.raises(ConfigError, match=named):
            pipeline.progress(iter(batches()))
        pipeline.reset()
        loss, _ = dmp(batches()[0])  # without the pipeline it works as before
        loss.backward()
        assert not any(s.pins for s in dmp.module.second.stats())


SECOND = {"second": "features"}


def test_strict_lists_what_is_not_prefetched(pool_1: RankPool) -> None:
    pool_1.run(strict)


def misdeclared() -> None:
    dmp, optimizer = build(TwoCollections())
    for inputs, message in (
        ({"third": "features"}, "inputs names 'third', .*It has 'first', 'second', 'plain'"),
        ({"dense": "features"}, "inputs names 'dense'"),
        ({"first": 3}, r"inputs\['first'\] is 3"),
        ({"first": ""}, r"inputs\['first'\] is ''"),
        (["first"], "inputs has type list"),
    ):
        with pytest.raises(ConfigError, match=message):
            HybridTrainPipelineSparseDist(dmp, optimizer, CPU, inputs=inputs)  # type: ignore[arg-type]


def test_paths_and_fields_that_are_none_are_refused(pool_1: RankPool) -> None:
    pool_1.run(misdeclared)


def bad_on_one_rank(how: str) -> list[str]:
    """The third batch's field is wrong on rank 1 alone: every rank refuses it, the others train as without it."""

    def field(batch: PropertyBatch) -> Any:
        if dist.get_rank() == 1 and (batch.labels == third).all():
            if how == "writes":
                batch.features.values().add_(0)
            else:
                return batch.labels if how == "no KJT" else 1 // 0
        return batch.features

    data = batches()
    third = data[2].labels
    dmp, optimizer = build(TwoCollections())
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU, inputs={"second": field})
    iterator = iter(data)
    result, errors = [], []
    for _ in data:
        try:
            result.append(pipeline.progress(iterator).item())
        except IdError as e:
            errors.append(str(e))
    expected_dmp, expected_optimizer = build(TwoCollections())
    for batch, got in zip(data[:2] + data[3:], result, strict=True):
        expected_optimizer.zero_grad()
        loss, output = expected_dmp(batch)
        loss.backward()
        expected_optimizer.step()
        assert output.item() == got
    return errors


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no KJT", "which is a Tensor"),
        ("raises", "which raised ZeroDivisionError"),
        ("writes", "which wrote into the batch's tensors in place"),
    ],
)
def test_a_field_that_is_wrong_on_one_rank_is_refused_on_all(pool_2: RankPool, how: str, said: str) -> None:
    first, second = pool_2.run(bad_on_one_rank, how)
    assert first == second and len(first) == 1
    assert first[0].startswith("second: inputs says that it is called with field") and said in first[0]
    assert "refused by rank 1" in first[0]


def of_another_mind(depth: int, how: str) -> None:
    """A function that gives something else when it is first asked for a batch, which is when ids are sent."""
    asked: set[int] = set()

    def field(batch: PropertyBatch) -> KeyedJaggedTensor:
        is_first = batch.labels.data_ptr() not in asked
        asked.add(batch.labels.data_ptr())
        if how == "rebinds" and is_first:
            batch.features = batch.shifted
        return batch.shifted if is_first and how == "differs" else batch.features

    same_as_the_plain_loop(TwoCollections, depth, inputs={"first": field, "plain": field})


@pytest.mark.parametrize(("depth", "how"), [(1, "rebinds"), (3, "differs")])
def test_what_was_sent_decides_and_not_what_a_function_says_later(pool_2: RankPool, depth: int, how: str) -> None:
    pool_2.run(of_another_mind, depth, how)


class HalfTrained(Head):
    """The one collection that is not prefetched is stepped, then the backward fails."""

    def __init__(self) -> None:
        super().__init__(8)
        self.first, self.second = hashed("t1", "a"), plain("t3", "p")

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        turns(batch)
        return self.score([self.first(batch.features).values(), self.second(batch.features).values()], batch.labels)


def failing_optimizer() -> None:
    dmp, optimizer = build(HalfTrained())
    pipeline = HybridTrainPipelineSparseDist(dmp, optimizer, CPU)
    with mock.patch.object(optimizer, "step", side_effect=OSError("disk")), pytest.raises(OSError) as error:
        pipeline.progress(iter(batches()))
    assert pipeline.batches_committed == 1 and "counts as committed" in error.value.__notes__[0]
    pipeline.reset()


def test_a_batch_counts_as_committed_once_rows_were_stepped(pool_1: RankPool) -> None:
    pool_1.run(failing_optimizer)
