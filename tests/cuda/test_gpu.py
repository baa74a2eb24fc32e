"""Training on a CUDA GPU. The bodies run on the simulated NPU too: see test_bodies.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from device_backends.cuda import backend
from hybridrec.distributed.device_check import _all_gather, _all_to_all, _problem, _reduce_scatter
from hybridrec.kernels.factory import kernel_choice
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from tests.cuda import bodies
from tests.distributed import test_hazards as hazards
from tests.distributed.scenario import Scenario
from tests.ranks import RankPool

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def self_tests() -> list[str]:
    """Problems of copies, streams, events and NCCL's collectives on this device."""
    device = backend.indexed(torch.device(DEVICE))
    backend.self_test(device)
    group = dist.group.WORLD
    assert group is not None
    problems = [_problem(test, group, device, [4096]) for test in (_all_to_all, _all_gather, _reduce_scatter)]
    return [str(p) for p in problems if p is not None]


def test_streams_copies_and_collectives(cuda_pool: RankPool) -> None:
    assert cuda_pool.run(self_tests) == [[]]


def choices() -> dict[str, tuple[str, str]]:
    kinds: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
    found = {}
    for kind in kinds:
        for dim in (4, 64, 6):
            for is_weighted in (False, True):
                choice = kernel_choice(
                    OptimizerSpec(kind=kind), dim=dim, is_weighted=is_weighted, device=torch.device(DEVICE)
                )
                found[f"{kind} {dim} {is_weighted}"] = choice.name, choice.reason
    return found


def test_fbgemm_s_kernels_pass_their_trial(cuda_pool: RankPool) -> None:
    (found,) = cuda_pool.run(choices)
    for case, (name, reason) in found.items():
        kind, dim, _ = case.split()
        assert name == ("torch" if kind == "adam" or dim == "6" else "tbe"), (case, reason)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum_and_mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cached_and_pipelined_equals_all_rows_on_the_device(
    cuda_pool: RankPool, optimizer: str, is_weighted: bool
) -> None:
    scenario = Scenario(optimizer=optimizer, is_weighted=is_weighted, steps=60, device=DEVICE, tables=bodies.TABLES)
    (whole,) = cuda_pool.run(bodies.trained, dataclasses.replace(scenario, kernel="fused", cache="all"), 0)
    for cache, depth in (("tenth", 3), ("minimum", 1), ("below", 5)):
        (cached,) = cuda_pool.run(bodies.trained, dataclasses.replace(scenario, cache=cache), depth)
        assert cached.losses == whole.losses and cached.tables == whole.tables
        assert cached.loads > 0 and (cached.oversized > 0) == (cache == "below")


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
@pytest.mark.parametrize("name", hazards.HAZARDS)
def test_hazards(cuda_pool: RankPool, name: str, depth: int) -> None:
    scenario = dataclasses.replace(hazards.SCENARIO, device=DEVICE)
    ((whole, cached),) = cuda_pool.run(bodies.hazard, hazards.HAZARDS[name], depth, scenario)
    assert cached.losses == whole.losses and cached.tables == whole.tables
    assert cached.loads > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_no_wait_and_no_allocation_once_warm(cuda_pool: RankPool, depth: int, optimizer: str) -> None:
    (found,) = cuda_pool.run(bodies.steady_steps, DEVICE, optimizer=optimizer, depth=depth)
    assert found.loads > 0 and found.write_backs > 0
    before, after = found.memory
    assert after == before


def test_reads_do_not_wait_once_warm(cuda_pool: RankPool) -> None:
    assert cuda_pool.run(bodies.steady_reads, DEVICE) == [10]
