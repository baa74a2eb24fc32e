"""The pipeline's life on the simulated NPU: ends, switches, direct calls, resets; no access that is not ordered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest

from tests.distributed import test_pipeline_life
from tests.distributed.test_pipeline_life import (
    SCENARIO,
    detached,
    direct_calls,
    dropped_pipeline,
    flushed,
    forward_without_backward,
    modes_of_one_iterator,
    refused_batch,
    reset_in_flight,
    switched_iterators,
    two_pipelines,
)
from tests.ranks import RankPools

LIVES = [
    detached,
    direct_calls,
    dropped_pipeline,
    flushed,
    forward_without_backward,
    modes_of_one_iterator,
    refused_batch,
    reset_in_flight,
    switched_iterators,
    two_pipelines,
]


def live(life: Callable[[int], None], depth: int) -> None:
    with mock.patch.object(test_pipeline_life, "SCENARIO", dataclasses.replace(SCENARIO, device="npu")):
        life(depth)


@pytest.mark.parametrize("life", LIVES, ids=lambda f: f.__name__)
def test_life(npu_pools: RankPools, life: Callable[[int], None]) -> None:
    npu_pools[2].run(live, life, 3)
