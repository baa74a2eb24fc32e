"""A device that fails in the middle of a swap: right rows or an error, never other rows; nothing stays lent."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from hybridrec import StateError
from hybridrec.cache.swap import StagedSwapper
from tests.distributed.pipelines import settle
from tests.distributed.test_pipeline_life import SCENARIO, Run
from tests.ranks import RankPools


class Planted(Exception):
    """Raised by a test."""


NPU = dataclasses.replace(SCENARIO, device="npu", cache="minimum")


def failed_before_it_moved() -> None:
    """Victims cannot be read: the batch is left out, those behind it train."""
    run = Run(3, NPU)
    real, calls = StagedSwapper._read_slots, itertools.count()

    def planted(*args: Any) -> None:
        if next(calls) == 3:
            raise Planted("out of device memory")
        real(*args)

    iterator = run.loader(0, 14)
    failed = []
    with mock.patch.object(StagedSwapper, "_read_slots", planted):
        for step in range(14):
            try:
                run.train(iterator, range(step, step + 1))
            except Planted:
                failed.append(step)
    assert len(failed) == 1
    run.ends(iterator)
    run.check()


def test_a_swap_that_fails_early_is_undone(npu_pools: RankPools) -> None:
    npu_pools[1].run(failed_before_it_moved)


def failed_half_way(is_flushed: bool) -> None:
    """Rows are claimed to be in slots that were not written: nothing can be looked up any more."""
    run = Run(1, dataclasses.replace(NPU, ids_per_table=100))
    iterator = run.loader(0, 30)
    run.train(iterator, range(20))
    if is_flushed:
        run.pipeline.flush()  # then no victim needs a write-back, and the core counts the batch as moved
    with (
        mock.patch.object(StagedSwapper, "_write_slots", side_effect=Planted("out of device memory")),
        pytest.raises(Planted, match="out of device memory"),
    ):
        for _ in range(5):
            run.pipeline.progress(iterator)
    for call in (lambda: run.pipeline.progress(iterator), lambda: run.dmp(run.mine[20].to(run.device))):
        with pytest.raises(StateError, match="SWAP of batch .* failed half-way: Planted: out of device memory"):
            call()
    run.dmp.eval()
    with torch.no_grad(), pytest.raises(StateError, match="failed half-way"):
        run.dmp(run.mine[20].to(run.device))
    run.pipeline.reset()


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_swap_that_fails_half_way_breaks_the_collection_by_name(npu_pools: RankPools, is_flushed: bool) -> None:
    npu_pools[1].run(failed_half_way, is_flushed)


def gone_with_batches_in_flight() -> None:
    run = Run(3, NPU)
    run.train(run.loader(0, 20), range(6))
    settle(run.pipeline)
    run.pipeline = run.dmp = run.oracle = None
    gc.collect()


def test_slots_are_not_freed_under_the_swap_stream(npu_pools: RankPools) -> None:
    npu_pools[1].run(gone_with_batches_in_flight)  # the pool looks for hazards after every job
