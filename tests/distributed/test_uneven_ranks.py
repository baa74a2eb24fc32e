"""Ranks with different numbers of batches: all stop together, or the short ones go on with empty batches.

Losses, rows and states equal those of the oracle, which gets the batches that all ranks had, or the padded ones.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import ConfigError
from tests.distributed import oracle as oracle_module
from tests.distributed import scenario as scenario_module
from tests.distributed.oracle import Batch
from tests.distributed.pipelines import Counted, PipelineBatch, check_pins, mine, settle
from tests.distributed.scenario import Scenario, compare_state, make_batch, raise_together, state_of
from tests.distributed.test_pipeline_life import SCENARIO, Run
from tests.ranks import RankPool, RankPools


def make_empty(batch: PipelineBatch) -> PipelineBatch:
    """What a user writes."""
    features = batch.features
    return PipelineBatch(
        KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values()[:0],
            lengths=features.lengths()[:0],
            stride=0,
        ),
        batch.labels[:0],
    )


def without_bags(batch: Batch) -> Batch:
    return Batch(bags={feature: [] for feature in batch.bags}, labels=batch.labels[:0], num_bags=0)


def shortened(batch: Batch, num_bags: int) -> Batch:
    bags = {feature: bags[:num_bags] for feature, bags in batch.bags.items()}
    return Batch(bags=bags, labels=batch.labels[:num_bags], num_bags=min(num_bags, batch.num_bags))


class Uneven(Run):
    """A run whose ranks have their own numbers of batches."""

    def __init__(
        self, counts: Sequence[int], depth: int, uneven_ranks: str, scenario: Scenario = SCENARIO, **kwargs: Any
    ) -> None:
        if uneven_ranks == "drain":
            kwargs["make_empty_batch"] = make_empty
        super().__init__(depth, dataclasses.replace(scenario, steps=12), uneven_ranks=uneven_ranks, **kwargs)
        self.counts = counts
        last = counts[-1] - 1  # the last batch of the last rank is of another size
        if last >= 0:
            self.batches[last][-1] = shortened(self.batches[last][-1], 3)
        self.mine = mine(self.scenario, self.batches)
        self.count = counts[dist.get_rank()]

    def padded(self, step: int) -> list[Batch]:
        """What the ranks compute in a step."""
        pairs = zip(self.counts, self.batches[step], strict=True)
        return [batch if step < count else without_bags(batch) for count, batch in pairs]

    def step(self, iterator: Any, everyone: list[Batch], *, train: bool = True) -> None:
        loss = self.pipeline.progress(iterator)
        self.same(loss, self.oracle.step(everyone, self._dense_optimizer, train=train), -1)

    def finish(self) -> None:
        settle(self.pipeline)
        raise_together(compare_state(self.scenario, self.oracle, state_of(self.dmp)), -1)
        check_pins(self.dmp)


class Kept(logging.Handler):
    """The warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Kept:
        logging.getLogger("hybridrec").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hybridrec").removeHandler(self)


def one_epoch(
    counts: Sequence[int],
    depth: int,
    uneven_ranks: str,
    execute_all: bool,
    train: bool,
    scenario: Scenario = SCENARIO,
) -> list[str]:
    run = Uneven(counts, depth, uneven_ranks, scenario, execute_all_batches=execute_all)
    run.dmp.train(train)
    common = min(counts) if uneven_ranks == "stop" else max(counts)
    steps = common if execute_all else max(0, common - (depth - 1))
    iterator = Counted(run.mine[: run.count])
    with Kept() as kept, torch.set_grad_enabled(train):
        for step in range(steps):
            run.step(iterator, run.padded(step), train=train)
        run.ends(iterator)
    run.finish()
    # Whether the end is seen when it is the oldest batch or when it is the newest.
    taken = min(run.count, common + (depth if execute_all else 1))
    stats = run.pipeline.stats()
    assert (stats.batches_taken, stats.batches_in_flight) == (taken, 0), stats
    assert stats.batches_dropped == max(0, taken - steps), stats
    assert stats.batches_committed == (steps if train else 0), stats
    assert iterator.calls <= run.count + 1
    return [text for text in kept.texts if "had more" in text or "ended after" in text]


EPOCHS = [
    ((7, 5), 1, True, True),
    ((5, 7), 2, True, True),
    ((7, 5), 3, True, True),
    ((5, 7), 12, True, False),
    ((7, 5), 3, True, False),
    ((7, 5), 1, False, True),
    ((5, 7), 3, False, True),
    ((4, 6, 3), 3, True, True),
    ((4, 6, 3), 5, False, True),
    ((3, 4, 6), 4, True, False),
]


@pytest.mark.parametrize("uneven_ranks", ["stop", "drain"])
@pytest.mark.parametrize(("counts", "depth", "execute_all", "train"), EPOCHS)
def test_uneven_ranks_end_together(
    pools: RankPools, counts: tuple[int, ...], depth: int, execute_all: bool, train: bool, uneven_ranks: str
) -> None:
    warnings = pools[len(counts)].run(one_epoch, counts, depth, uneven_ranks, execute_all, train)
    if uneven_ranks == "drain":
        assert warnings == [[]] * len(counts)
        return
    common = min(counts)
    seen = depth if execute_all else 1
    lost = {rank: min(count, common + seen) - common for rank, count in enumerate(counts)}
    for texts in warnings:
        (text,) = texts
        assert f"the data of ranks {counts.index(common)} ended after {common} batches" in text
        named = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items() if count)
        assert f"Taken and dropped: {named}." in text


@pytest.mark.slow
@pytest.mark.parametrize("uneven_ranks", ["stop", "drain"])
@pytest.mark.parametrize("depth", range(1, 13))
def test_uneven_ranks_end_together_at_every_depth(pools: RankPools, depth: int, uneven_ranks: str) -> None:
    for counts in ((7, 5), (5, 7), (4, 6, 3), (1, 9)):
        for execute_all in (True, False):
            for train in (True, False):
                pools[len(counts)].run(one_epoch, counts, depth, uneven_ranks, execute_all, train)


class Restarting:
    """An iterator that goes on after it said that it ended."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items, self._epoch = items, iter(items)

    def __next__(self) -> Any:
        try:
            return next(self._epoch)
        except StopIteration:
            self._epoch = iter(self._items)
            raise


def epochs_of_restarting(counts: Sequence[int], depth: int) -> Iterator[list[list[int]]]:
    """For each epoch the steps: for each rank the number of its batch. A rank that stops early keeps what it has."""
    left = [list(range(count)) for count in counts]
    while True:
        steps = min(map(len, left))
        yield [[numbers[step] for numbers in left] for step in range(steps)]
        for rank, count in enumerate(counts):
            has_ended = len(left[rank]) < steps + depth
            left[rank] = list(range(count)) if has_ended else left[rank][steps + depth :]


def same_iterators(counts: Sequence[int], depth: int) -> None:
    run = Uneven(counts, depth, "stop")
    iterator = Restarting(run.mine[: run.count])
    epochs = epochs_of_restarting(counts, depth)
    for _ in range(4):
        for numbers in next(epochs):
            run.step(iterator, [run.batches[number][rank] for rank, number in enumerate(numbers)])
        run.ends(iterator)
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_epochs_of_the_same_iterators_stop_together(pool_2: RankPool, depth: int) -> None:
    pool_2.run(same_iterators, (7, 5), depth)


def drained_epochs(depth: int) -> None:
    """Also a whole epoch of nothing, an eval in between, and a pipeline that goes on."""
    run = Uneven((4, 2), depth, "drain")
    iterator = Restarting(run.mine[: run.count])
    for epoch in range(3):
        for step in range(4):
            run.step(iterator, run.padded(step))
            if (epoch, step) == (1, 2):
                run.read(9)
        run.ends(iterator)
    run.counts = (3, 0)
    iterator = Restarting(run.mine[: run.counts[dist.get_rank()]])
    for step in range(3):
        run.step(iterator, run.padded(step))
    run.ends(iterator)
    run.finish()


@pytest.mark.parametrize("depth", [1, 4])
def test_epochs_of_the_same_iterators_drain(pool_2: RankPool, depth: int) -> None:
    pool_2.run(drained_epochs, depth)


def nothing_on_one_rank(depth: int, uneven_ranks: str) -> None:
    run = Uneven((3, 0), depth, uneven_ranks)
    iterator = Counted(run.mine[: run.count])
    if uneven_ranks == "drain":
        for _ in range(3):
            with pytest.raises(ConfigError, match=r"ranks 1 of 2 ended before their first batch.*Give every rank a"):
                run.pipeline.progress(iterator)
    run.ends(iterator)
    assert run.pipeline.stats().batches_in_flight == 0
    run.counts = (3, 3)
    iterator = Counted(run.mine[:3])
    for step in range(3):
        run.step(iterator, run.batches[step])
    run.ends(iterator)
    run.counts = (2, 0)
    empty = Counted(run.mine[: run.counts[dist.get_rank()]])
    if uneven_ranks == "drain":
        for step in range(2):
            run.step(empty, run.padded(step))
    run.ends(empty)
    run.finish()


@pytest.mark.parametrize("uneven_ranks", ["stop", "drain"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_rank_without_any_batch(pool_2: RankPool, depth: int, uneven_ranks: str) -> None:
    pool_2.run(nothing_on_one_rank, depth, uneven_ranks)


def mean_loss(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of a batch without samples it is NaN."""
    return torch.nn.functional.binary_cross_entropy_with_logits(prediction.squeeze(1), labels)


def nan_of_nothing() -> None:
    with (
        mock.patch.object(scenario_module, "scenario_loss", mean_loss),
        mock.patch.object(oracle_module, "scenario_loss", mean_loss),
    ):
        run = Uneven((5, 2), 3, "drain", return_loss=True)
        run.batches = [[make_batch(run.scenario, 7 * s, r, 2) for r in range(2)] for s in range(5)]  # none is empty
        run.mine = mine(run.scenario, run.batches)
        iterator = Counted(run.mine[: run.count])
        for step in range(5):
            _, loss = run.pipeline.progress(iterator)
            expected = run.oracle.step(run.padded(step), run._dense_optimizer).item()
            is_same = loss.item() == expected or (math.isnan(loss.item()) and math.isnan(expected))
            raise_together("" if is_same else f"{loss.item()}, not {expected}", step)
            assert math.isnan(loss.item()) == (step >= run.count)
        run.ends(iterator)
        run.finish()
        dense = zip(run.dmp.module.dense.parameters(), run.oracle.dense.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) and ours.isfinite().all() for ours, theirs in dense)


def test_a_mean_of_nothing_does_not_spread(pool_2: RankPool) -> None:
    pool_2.run(nan_of_nothing)


def wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"uneven_ranks='wait' is unknown. Accepted: 'stop', 'drain'"):
        Run(3, uneven_ranks="wait")
    with pytest.raises(ConfigError, match=r"uneven_ranks='drain' with make_empty_batch=None.*Pass make_empty_batch"):
        Run(3, uneven_ranks="drain")
    with pytest.raises(ConfigError, match="make_empty_batch has no effect with uneven_ranks='stop'"):
        Run(3, make_empty_batch=make_empty)
    run = Run(3, uneven_ranks="drain", make_empty_batch=lambda batch: None)
    with pytest.raises(ConfigError, match=r"make_empty_batch returned a NoneType.*class that it was given, PipelineB"):
        run.pipeline.progress(run.loader(0, 3))


def test_settings_that_cannot_be_honoured(pool_1: RankPool) -> None:
    pool_1.run(wrong_settings)


class Stuck(PipelineBatch):
    """Cannot be copied."""

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelineBatch:
        raise OSError("stuck")


def without_ids(batch: PipelineBatch) -> PipelineBatch:
    empty = make_empty(batch)
    lengths = torch.zeros(len(batch.features.keys()), dtype=torch.int64)
    features = KeyedJaggedTensor(keys=batch.features.keys(), values=empty.features.values(), lengths=lengths)
    return PipelineBatch(features, empty.labels)


def empty_batches_that_are_none() -> None:
    """Rank 0's is none, for one reason after another: both ranks refuse; then all goes on."""
    makers = [
        (lambda batch: batch, r"make_empty_batch returned a batch with \d+ ids in \d+ bags"),
        (without_ids, r"make_empty_batch returned a batch with 0 ids in \d+ bags"),
        (
            lambda batch: Stuck(make_empty(batch).features, batch.labels[:0]),
            r"Stuck whose to\('cpu'\) raised OSError: st",
        ),
        (lambda batch: 1 // 0, "make_empty_batch raised ZeroDivisionError"),
    ]
    run = Run(3, dataclasses.replace(SCENARIO, steps=9), uneven_ranks="drain", make_empty_batch=make_empty)
    iterator = run.loader(0, 9)
    for maker, message in makers:
        run.pipeline._end_of_data._make_empty_batch = maker if dist.get_rank() == 0 else make_empty
        with pytest.raises(ConfigError, match=message + ".*refused by rank 0"):
            run.pipeline.progress(iterator)
    run.pipeline._end_of_data._make_empty_batch = make_empty
    run.train(iterator, range(len(makers), 9))
    run.ends(iterator)
    run.check()


def test_an_empty_batch_that_is_none_is_refused_on_all_ranks(pool_2: RankPool) -> None:
    pool_2.run(empty_batches_that_are_none)


def filled_later(depth: int) -> None:
    run = Uneven((6, 4), depth, "drain")
    full = run.mine[5]
    iterator = Counted(run.mine[: run.count])
    run.step(iterator, run.padded(0))
    run.pipeline._end_of_data._make_empty_batch = lambda batch: full
    for step in range(1, 4):
        run.step(iterator, run.padded(step))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"make_empty_batch returned a batch with .* ids .*refused by rank 1"):
            run.pipeline.progress(iterator)
    run.ends(iterator)
    run.finish()


@pytest.mark.parametrize("depth", [1, 3])
def test_samples_in_a_later_empty_batch_are_not_trained(pool_2: RankPool, depth: int) -> None:
    pool_2.run(filled_later, depth)


def policies_differ() -> None:
    rank = dist.get_rank()
    kwargs = {"uneven_ranks": "drain", "make_empty_batch": make_empty} if rank else {}
    run = Run(3, **kwargs)
    with pytest.raises(ConfigError, match=r"uneven_ranks differs between ranks .rank 0: 'stop', rank 1: 'drain'."):
        run.pipeline.progress(run.loader(0, 3))


def test_ranks_of_different_policies_are_refused(pool_2: RankPool) -> None:
    pool_2.run(policies_differ)


class Stubborn(PipelineBatch):
    """Fails once to be copied."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        raise ValueError("no copy of this one")


def copy_fails(execute_all: bool, depth: int) -> int:
    """Rank 0's third batch cannot be copied: it is left out there, and the ranks go on together."""
    run = Uneven((7, 7), depth, "stop", execute_all_batches=execute_all)
    batches = list(run.mine[:7])
    if dist.get_rank() == 0:
        batches.insert(2, Stubborn(batches[2].features, batches[2].labels))
    iterator = iter(batches)
    trained = 0
    while True:
        try:
            run.pipeline.progress(iterator)
        except ValueError:
            continue
        except StopIteration:
            break
        trained += 1
    return trained


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("execute_all", [True, False])
def test_a_batch_that_cannot_be_copied_is_left_out_on_its_rank(pool_2: RankPool, execute_all: bool, depth: int) -> None:
    expected = 7 if execute_all else 7 - (depth - 1)
    assert pool_2.run(copy_fails, execute_all, depth) == [expected, expected]
