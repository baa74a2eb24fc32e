"""Reported defects of pipelines' life cycles: last batches, epochs, evaluation, ranks that end apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HybridTrainPipelineSparseDist
from tests.distributed.pipelines import PipelineBatch, check_pins
from tests.distributed.test_pipeline_life import Run, several_epochs, two_pipelines
from tests.distributed.test_pipeline_models import TwoCollections, same_as_the_plain_loop
from tests.distributed.test_uneven_ranks import Uneven, make_empty, one_epoch, without_bags
from tests.distributed.test_untraceable_models import against_oracle
from tests.ranks import RankPool, RankPools

DEPTHS = (1, 2, 3, 4)


def n_batches_are_n_steps(depth: int) -> None:
    run = Run(depth)
    for n in range(1, 7):
        before = run.pipeline.batches_committed
        iterator = run.loader(0, n)
        run.train(iterator, range(n))
        run.ends(iterator)
        assert run.pipeline.batches_committed - before == n
    run.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_tr1050_the_last_batches_are_trained(pool_2: RankPool, depth: int) -> None:
    pool_2.run(n_batches_are_n_steps, depth)


class Persistent:
    """One object that is its own iterator and begins anew after its end, as a loader with persistent workers."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._next = items, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._items):
            self._next = 0
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]


def three_epochs_of_one_object(depth: int) -> None:
    run = Run(depth)
    iterator = Persistent(run.mine[:5])
    for _ in range(3):
        run.train(iterator, range(5))
        run.ends(iterator)
    assert run.pipeline.batches_committed == 15
    run.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_tr2670_tr2327_the_second_epoch_of_one_iterator_object_is_trained(pool_2: RankPool, depth: int) -> None:
    pool_2.run(three_epochs_of_one_object, depth)


def evaluation_between(depth: int) -> None:
    """Ten training batches; after each third, three of evaluation, to their end."""
    run = Run(depth)
    iterator = run.loader(0, 10)
    for step in range(10):
        run.train(iterator, range(step, step + 1))
        if step % 3 == 2:
            run.dmp.eval()
            other = run.loader(10, 13)
            for k in range(10, 13):
                loss = run.pipeline.progress(other)
                run.same(loss, run.oracle.step(run.batches[k], run._dense_optimizer, train=False), k)
            run.ends(other)
            run.dmp.train()
    run.ends(iterator)
    assert run.pipeline.batches_committed == 10
    run.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_tr3750_the_end_of_evaluation_does_not_end_training(pool_2: RankPool, depth: int) -> None:
    pool_2.run(evaluation_between, depth)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("policy", ["stop", "drain"])
def test_tr747_tr810_tr189_ter9_tr3132_tr4158_ranks_with_7_and_5_batches_end_together(
    pool_2: RankPool, policy: str, is_training: bool
) -> None:
    pool_2.run(one_epoch, (7, 5), 3, policy, True, is_training)


def steps_rise(depth: int) -> list[int]:
    run, steps = Run(depth), []
    for _ in range(2):
        iterator = run.loader(0, 6)
        for step in range(6):
            run.train(iterator, range(step, step + 1))
            steps.append(run.pipeline.batches_committed)
        run.ends(iterator)
    return steps


def test_ter606_the_step_counter_goes_on_in_the_second_pass(pool_2: RankPool) -> None:
    for steps in pool_2.run(steps_rise, 3):
        assert steps == list(range(1, 13))


def odd_tail(depth: int, num_bags: int) -> None:
    """The last batch has one bag, or none, on rank 1 only; then it has on all ranks."""
    counts = [6] * dist.get_world_size()
    run = Uneven(counts, depth, "stop")
    iterator = iter(run.mine[:6])
    for step in range(6):
        run.step(iterator, run.padded(step))
    with pytest.raises(StopIteration):
        run.pipeline.progress(iterator)
    batch, everyone = run.mine[6], run.batches[6]
    tails = [without_bags(b) if num_bags == 0 else _first_bag(b) for b in everyone]
    mine = make_empty(batch) if num_bags == 0 else _first_bag_of(batch)
    run.step(iter([mine]), tails)
    run.finish()


def _first_bag(batch: Any) -> Any:
    n = min(1, batch.num_bags)
    bags = {feature: bags[:n] for feature, bags in batch.bags.items()}
    return type(batch)(bags=bags, labels=batch.labels[:n], num_bags=n)


def _first_bag_of(batch: PipelineBatch) -> PipelineBatch:
    features = batch.features
    stride = features.stride()
    n = min(1, stride)
    lengths = features.lengths().view(-1, stride) if stride else features.lengths().view(len(features.keys()), 0)
    ends = features.offsets()
    starts = [int(ends[f * stride]) for f in range(len(features.keys()))] if stride else []
    parts = [features.values()[s : s + int(lengths[f, 0])] for f, s in enumerate(starts)]
    return PipelineBatch(
        KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(parts) if parts else features.values(),
            lengths=lengths[:, :n].reshape(-1),
            stride=n,
        ),
        batch.labels[:n],
    )


@pytest.mark.parametrize("num_bags", [1, 0])
@pytest.mark.parametrize("depth", [1, 3])
def test_ter677_a_tail_batch_of_one_row_and_of_none_is_trained(pool_2: RankPool, depth: int, num_bags: int) -> None:
    pool_2.run(odd_tail, depth, num_bags)


def test_re15_a_model_that_cannot_be_traced_is_pipelined(pool_2: RankPool) -> None:
    for threads, _ in pool_2.run(against_oracle, 3, {"ebc": "features"}):
        assert threads == {"hybridrec-host"}


@pytest.mark.parametrize("depth", [1, 3])
def test_tr3927_two_collections_share_one_kjt(pool_2: RankPool, depth: int) -> None:
    pool_2.run(same_as_the_plain_loop, TwoCollections, depth)


def constructed(name: str) -> str:
    """By keyword and by position, as TorchRec's own pipeline is."""
    run = Run(1)
    classes: dict[str, Callable[..., Any]] = {
        "hybrid": HybridTrainPipelineSparseDist,
        "torchrec": TrainPipelineSparseDist,
    }
    model, optimizer, device = run.dmp, run.pipeline._optimizer, torch.device("cpu")
    first = classes[name](model, optimizer, device)
    second = classes[name](model=model, optimizer=optimizer, device=device, execute_all_batches=False)
    assert first._model is second._model is model
    return type(first).__name__


@pytest.mark.parametrize("name", ["hybrid", "torchrec"])
def test_tr3903_every_pipeline_class_takes_the_same_arguments(pool_1: RankPool, name: str) -> None:
    pool_1.run(constructed, name)


@pytest.mark.parametrize("depth", [2, 3])
def test_tr876_two_pipelines_take_turns_on_one_model(pool_2: RankPool, depth: int) -> None:
    pool_2.run(two_pipelines, depth)
    pool_2.run(several_epochs, depth)


DTYPES = [
    (torch.int64, torch.int64),
    (torch.int64, torch.int32),
    (torch.int32, torch.int64),
    (torch.int32, torch.int32),
]


def empty_on_one_rank(dtypes: tuple[torch.dtype, torch.dtype], depth: int) -> None:
    """Rank 1 gives no bag at every second step, its lengths in another dtype than rank 0's."""
    run = Run(depth)
    everyone, batches = [], []
    for step in range(6):
        pair = list(run.batches[step])
        batch = run.mine[step]
        if step % 2:
            pair[1] = without_bags(pair[1])
            batch = make_empty(batch) if dist.get_rank() == 1 else batch
        features = batch.features
        values_dtype = torch.int64  # ids of the whole range do not fit 32 bits
        everyone.append(pair)
        batches.append(
            PipelineBatch(
                KeyedJaggedTensor(
                    keys=features.keys(),
                    values=features.values().to(values_dtype),
                    lengths=features.lengths().to(dtypes[dist.get_rank()]),
                    stride=features.stride(),
                ),
                batch.labels,
            )
        )
    iterator = iter(batches)
    for step in range(6):
        expected = run.oracle.step(everyone[step], run._dense_optimizer)
        run.same(run.pipeline.progress(iterator), expected, step)
    run.ends(iterator)
    run.check()
    check_pins(run.dmp)


@pytest.mark.parametrize("dtypes", DTYPES, ids=[f"{str(a)[6:]}_{str(b)[6:]}" for a, b in DTYPES])
def test_re349_re341_an_empty_batch_on_one_rank_in_every_dtype(
    pools: RankPools, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    pools[2].run(empty_on_one_rank, dtypes, 3)
