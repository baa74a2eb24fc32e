"""Faults in the ordering of a swap that a real device might hide for a thousand runs: each is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from device_backends.base import AcceleratorBackend
from hybridrec import HybridTrainPipelineSparseDist
from hybridrec.cache.staging import StagingRing
from hybridrec.cache.swap import StagedSwapper
from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.distributed.lookup import PooledLookup
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import Scenario
from tests.ranks import RankFailure, RankPools


def forget_record_stream() -> AbstractContextManager[Any]:
    return mock.patch.object(AcceleratorBackend, "record_stream", lambda self, tensor, stream: None)


def forget_ready() -> AbstractContextManager[Any]:
    """COMPUTE does not wait for the rows that SWAP brings."""

    def use(self: PooledLookup, tensors: Sequence[Tensor], ready: Any) -> None:
        for tensor in tensors:
            self._backend.record_stream(tensor, self._backend.current_stream(self._device))

    return mock.patch.object(PooledLookup, "use", use)


def forget_fence() -> AbstractContextManager[Any]:
    """SWAP does not wait for the last use of the slots that it empties."""
    swap = StagedSwapper.swap
    return mock.patch.object(StagedSwapper, "swap", lambda self, plan, fence, lock: swap(self, plan, None, lock))


def reuse_staging_early() -> AbstractContextManager[Any]:
    """A staging buffer counts as free while a copy from it is under way."""
    give_back = StagingRing.give_back
    return mock.patch.object(StagingRing, "give_back", lambda self, event: give_back(self, None))


def forget_arrival() -> AbstractContextManager[Any]:
    """Victims go to the store before their copy to the host is over."""
    record = AcceleratorBackend.record_event

    class Hasty:
        def __init__(self, event: Any) -> None:
            self.event = event

        def synchronize(self) -> None:
            """Does not wait."""

        def wait(self, stream: Any) -> None:
            self.event.wait(stream)

    return mock.patch.object(AcceleratorBackend, "record_event", lambda self, stream: Hasty(record(self, stream)))


def forget_the_batch() -> AbstractContextManager[Any]:
    """The compute stream does not wait for the batch that the copy stream brings."""
    copy = HybridTrainPipelineSparseDist._copy

    def late(self: HybridTrainPipelineSparseDist, batch: InFlightBatch) -> None:
        copy(self, batch)
        batch.copied = self._backend.record_event(self._backend.current_stream(self._device))

    return mock.patch.object(HybridTrainPipelineSparseDist, "_copy", late)


def run_mutant(mutate: Callable[[], AbstractContextManager[Any]], scenario: Scenario) -> None:
    # The self-test at the first rows would find some of these before training can.
    with mock.patch.object(AcceleratorBackend, "self_test", lambda self, device: None), mutate():
        run_pipeline_against_oracle(scenario, 3, delay_seed=3)


@pytest.mark.parametrize(
    ("mutate", "hazard"),
    [
        (forget_record_stream, "was freed while stream"),
        (forget_ready, "without waiting for it"),
        (forget_fence, "without waiting for it"),
        (reuse_staging_early, "pinned memory of shape .* was changed"),
        (forget_the_batch, "without waiting for it"),
    ],
)
def test_a_fault_in_the_order_is_caught(npu_pools: RankPools, mutate: Any, hazard: str) -> None:
    with pytest.raises(RankFailure, match=f"SyncHazard: (.|\n)*{hazard}"):
        npu_pools[1].run(run_mutant, mutate, Scenario(cache="tenth", steps=30, device="npu"))


def test_victims_that_did_not_arrive_are_other_rows(npu_pools: RankPools) -> None:
    with pytest.raises(RankFailure, match="step .*: (loss|table)|is not"):
        npu_pools[1].run(run_mutant, forget_arrival, Scenario(cache="tenth", steps=30, device="npu"))
