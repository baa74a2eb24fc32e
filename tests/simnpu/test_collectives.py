"""Process groups of "hccl": results of gloo, on a stream of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RankPools
from tests.simnpu.memory import take_hazards
from tests.simnpu.ordering import SyncHazard

NPU = "npu"


def of_rank(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=NPU) + 10 * dist.get_rank()


def every_collective() -> dict[str, list[float]]:
    """Each on two ranks; the values that it leaves on this one."""
    results: dict[str, Tensor] = {}
    results["all_reduce"] = of_rank(1, 2)
    dist.all_reduce(results["all_reduce"])
    results["broadcast"] = of_rank(1, 2)
    dist.broadcast(results["broadcast"], 1)
    results["all_gather_into_tensor"] = torch.empty(4, device=NPU)
    dist.all_gather_into_tensor(results["all_gather_into_tensor"], of_rank(1, 2))
    parts = [torch.empty(2, device=NPU) for _ in range(2)]
    dist.all_gather(parts, of_rank(1, 2))
    results["all_gather"] = torch.cat(parts)
    results["reduce_scatter_tensor"] = torch.empty(1, device=NPU)
    dist.reduce_scatter_tensor(results["reduce_scatter_tensor"], of_rank(1, 2))
    splits = [1, 2] if dist.get_rank() == 0 else [2, 1]  # what goes to each rank, and as much comes back
    results["all_to_all_single"] = torch.empty(3, device=NPU)
    dist.all_to_all_single(results["all_to_all_single"], of_rank(1, 2, 3), splits, splits)
    received = [torch.empty(1, device=NPU) for _ in range(2)]
    dist.all_to_all(received, list(of_rank(1, 2).split(1)))
    results["all_to_all"] = torch.cat(received)
    results["functional"] = functional.all_reduce(of_rank(1), "sum", dist.group.WORLD)
    group = dist.new_group(backend="hccl")
    results["new_group"] = of_rank(1)
    dist.all_reduce(results["new_group"], group=group)
    if dist.get_rank() == 0:
        dist.send(of_rank(5), 1)
        results["recv"] = of_rank(5)
    else:
        results["recv"] = torch.empty(1, device=NPU)
        dist.recv(results["recv"], 0)
    on_host = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(on_host)
    results["host tensor"] = on_host
    return {name: result.tolist() for name, result in results.items()}


def test_collectives_give_gloo_s_results(npu_pools: RankPools) -> None:
    both = {
        "all_reduce": [12, 14],
        "broadcast": [11, 12],
        "all_gather_into_tensor": [1, 2, 11, 12],
        "all_gather": [1, 2, 11, 12],
        "functional": [12],
        "new_group": [12],
        "recv": [5],
        "host tensor": [3],
    }
    first = {"reduce_scatter_tensor": [12], "all_to_all_single": [1, 11, 12], "all_to_all": [1, 11]}
    second = {"reduce_scatter_tensor": [14], "all_to_all_single": [2, 3, 13], "all_to_all": [2, 12]}
    assert npu_pools[2].run(every_collective) == [both | first, both | second]


def use_before_wait() -> list[str]:
    tensor, sent = of_rank(1), of_rank(1)
    received = torch.empty(2, device=NPU)
    work = dist.all_reduce(tensor, async_op=True)
    gather = dist.all_gather_into_tensor(received, sent, async_op=True)
    with pytest.raises(SyncHazard, match="wrote last"):
        tensor + 1  # the output
    with pytest.raises(SyncHazard, match="still be reading"):
        sent.zero_()  # the input
    work.wait()
    gather.wait()
    tensor + 1
    sent.zero_()
    return take_hazards()


def test_outputs_and_inputs_belong_to_the_collective_until_it_is_waited_for(npu_pools: RankPools) -> None:
    assert all(len(hazards) == 2 for hazards in npu_pools[2].run(use_before_wait))


def mix_devices() -> None:
    with pytest.raises(RuntimeError, match="npu and host tensors in one collective"):
        dist.distributed_c10d._get_default_group()._run("allgather", [[torch.ones(1)]], [of_rank(1)])


def test_a_collective_takes_tensors_of_one_device(npu_pools: RankPools) -> None:
    npu_pools[1].run(mix_devices)


def gradient_of_ddp() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1).to(NPU))
    model(torch.full((3, 2), 1.0 + dist.get_rank(), device=NPU)).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def test_ddp_averages_gradients(npu_pools: RankPools) -> None:
    assert npu_pools[2].run(gradient_of_ddp) == [[4.5, 4.5]] * 2
