"""Collectives that return success and wrong values: refused on all ranks, by name, before a row is trained."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from hybridrec.distributed import device_check
from hybridrec.errors import BackendError
from tests.distributed.scenario import Scenario, build
from tests.ranks import RankPools
from tests.simnpu.collectives import SimulatedHccl

NPU = Scenario(device="npu")
METHODS = {
    "all_to_all": "alltoall_base all_to_all_single",
    "all_gather": "_allgather_base all_gather_single",
    "reduce_scatter": "_reduce_scatter_base reduce_scatter_single",
}


def zeros(real: Any) -> Any:
    """The collective runs; then this rank's output is zeros."""

    def run(self: Any, output: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = real(self, output, *args, **kwargs)
        if dist.get_rank() == 1:
            work.wait()
            output.zero_()
        return work

    return run


def shard(name: str) -> str:
    device_check._tested.clear()
    broken = {method: zeros(getattr(SimulatedHccl, method)) for method in METHODS[name].split()}
    with mock.patch.multiple(SimulatedHccl, **broken), pytest.raises(BackendError) as caught:
        build(NPU, {t.name: 10 for t in NPU.tables})
    device_check._tested.clear()
    return str(caught.value)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_collective_that_gives_zeros_is_refused(npu_pools: RankPools, name: str) -> None:
    first, second = npu_pools[2].run(shard, name)
    assert first == second
    assert f"rank 1 of 2: self-test of 'cpu:gloo,npu:hccl' on 'npu': {name} returned without an error, but" in first
    assert "values arrived wrong: value 0 is 0, not" in first
    assert "python -m hybridrec.doctor" in first


def shard_over_one_that_raises() -> str:
    device_check._tested.clear()
    error = mock.Mock(side_effect=RuntimeError("EI0006: no answer"))
    with mock.patch.multiple(SimulatedHccl, alltoall_base=error, all_to_all_single=error):
        with pytest.raises(BackendError) as caught:
            build(NPU, {t.name: 10 for t in NPU.tables})
    device_check._tested.clear()
    return str(caught.value)


def test_a_collective_that_raises_is_named(npu_pools: RankPools) -> None:
    texts = npu_pools[2].run(shard_over_one_that_raises)
    assert all("all_to_all raised RuntimeError: EI0006: no answer. Check driver" in text for text in texts)


def count_tests() -> list[int]:
    """Sharding twice over one group tests once; sizes are those of the collection."""
    device_check._tested.clear()
    sizes: list[int] = []
    real = device_check._all_to_all

    def counted(group: Any, device: Any, of_rank: Any) -> Any:
        sizes.extend(of_rank)
        return real(group, device, of_rank)

    counted.__name__ = real.__name__
    with mock.patch.object(device_check, "_all_to_all", counted):
        for _ in range(2):
            build(NPU, {t.name: 10 for t in NPU.tables})
    return sizes


def test_a_group_is_tested_once(npu_pools: RankPools) -> None:
    width = sum(t.dim * len(t.features) for t in NPU.tables)
    assert npu_pools[2].run(count_tests) == [[1024 * width, 2048 * width]] * 2
