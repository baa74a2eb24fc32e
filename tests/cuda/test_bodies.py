"""The bodies of the GPU's tests on the simulated NPU: they run, and they see what they look for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from hybridrec.cache.staging import StreamCopies, Uploader
from hybridrec.distributed.lookup import PooledLookup
from tests.cuda import bodies
from tests.distributed import test_hazards as hazards
from tests.distributed.scenario import Scenario
from tests.ranks import RankFailure, RankPools

DEVICE = "npu"


@pytest.mark.parametrize(("cache", "depth"), [("tenth", 3), ("below", 5)])
def test_cached_and_pipelined_equals_all_rows_on_the_device(npu_pools: RankPools, cache: str, depth: int) -> None:
    scenario = Scenario(optimizer="rowwise_adagrad", steps=12, device=DEVICE, tables=bodies.TABLES)
    (whole,) = npu_pools[1].run(bodies.trained, dataclasses.replace(scenario, kernel="fused", cache="all"), 0)
    (cached,) = npu_pools[1].run(bodies.trained, dataclasses.replace(scenario, cache=cache), depth)
    assert cached.losses == whole.losses and cached.tables == whole.tables
    assert cached.loads > 0 and (cached.oversized > 0) == (cache == "below")
    assert whole.loads == 0


def test_hazards(npu_pools: RankPools) -> None:
    scenario = dataclasses.replace(hazards.SCENARIO, device=DEVICE)
    for name, depth in (("dirty_load", 3), ("evicted_at_i_needed_at_i_plus_1", 0)):
        ((whole, cached),) = npu_pools[1].run(bodies.hazard, hazards.HAZARDS[name], depth, scenario)
        assert cached.losses == whole.losses and cached.tables == whole.tables
        assert cached.loads > 0


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_no_wait_once_warm(npu_pools: RankPools, optimizer: str) -> None:
    (found,) = npu_pools[1].run(bodies.steady_steps, DEVICE, optimizer=optimizer, counts_memory=False)
    assert found.loads > 0 and found.write_backs > 0


def test_reads_do_not_wait_once_warm(npu_pools: RankPools) -> None:
    assert npu_pools[1].run(bodies.steady_reads, DEVICE) == [10]


# ---- what they look for ----------------------------------------------------------------------------------------------


def look_at_the_pool() -> AbstractContextManager[Any]:
    """COMPUTE reads one number of what it computed."""
    compute = PooledLookup.compute

    def look(self: PooledLookup, batch: Any) -> Any:
        result = compute(self, batch)
        result[0].sum().item()
        return result

    return mock.patch.object(PooledLookup, "compute", look)


def upload_and_wait() -> AbstractContextManager[Any]:
    """What a batch needs goes to the device in blocking copies."""

    def upload(self: Uploader, tensors: list[torch.Tensor], stream: Any = None) -> list[torch.Tensor]:
        with self._backend.use_stream(self._stream):
            return [tensor.to(self._device) for tensor in tensors]

    return mock.patch.object(Uploader, "upload", upload)


def read_and_wait() -> AbstractContextManager[Any]:
    """What a read needs goes to the device in blocking copies."""
    return mock.patch.object(StreamCopies, "upload", lambda self, tensors: [t.to(self._device) for t in tensors])


def mutated(mutate: Callable[[], AbstractContextManager[Any]], body: Callable[..., Any], **kwargs: Any) -> None:
    with mutate():
        body(DEVICE, **kwargs)


@pytest.mark.parametrize(
    ("mutate", "body", "kwargs", "wait"),
    [
        (look_at_the_pool, bodies.steady_steps, {"counts_memory": False}, "_local_scalar_dense: the host needs"),
        (upload_and_wait, bodies.steady_steps, {"counts_memory": False}, "a blocking copy of .* to the device"),
        (read_and_wait, bodies.steady_reads, {}, "a blocking copy of .* to the device"),
    ],
)
def test_a_wait_is_seen(npu_pools: RankPools, mutate: Any, body: Any, kwargs: dict[str, Any], wait: str) -> None:
    with pytest.raises(RankFailure, match=f"Synchronised: (.|\n)*{wait}"):
        npu_pools[1].run(mutated, mutate, body, **kwargs)
