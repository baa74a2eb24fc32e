"""TorchRec's planner for the three device types: the NPU, which it does not know, as CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders
from hybridrec.errors import BackendError
from tests.ranks import RankPool

GIB = 1 << 30


@pytest.fixture(scope="module")
def npu_process() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process of its own in which torch knows the name "npu": that cannot be undone.

    No `RankPool`: its barrier asks torch for the accelerator, of which there is only the name here.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), teach_name) as executor:
        yield lambda fn, *args, **kwargs: executor.submit(fn, *args, **kwargs).result(timeout=300)


def teach_name() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(torch.nn.Module):
    """A hashed and a plain table, and a dense layer."""

    def __init__(self, plain_rows: int = 1_000_000) -> None:
        super().__init__()
        self.hashed = HashEmbeddingBagCollection(
            [HashEmbeddingBagConfig(name="h", num_embeddings=10**6, embedding_dim=16, feature_names=["a"])]
        )
        self.plain = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[EmbeddingBagConfig(name="p", num_embeddings=plain_rows, embedding_dim=16, feature_names=["b"])],
        )
        self.dense = torch.nn.Linear(1000, 1000, device="meta")
        apply_optimizer_in_backward(torch.optim.Adagrad, self.hashed.parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(torch.optim.Adagrad, self.plain.parameters(), {"lr": 0.1})


def plan_on(device_type: str, kernel: str, world_size: int = 8, **caps: int) -> dict[str, object]:
    """What the planner accounts and decides, in plain values."""
    topology = Topology(world_size=world_size, local_world_size=4, compute_device=device_type, **caps)
    constraints = {
        "h": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[kernel]),
        "p": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]),
    }
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=1, rank=0, pg=dist.group.WORLD))
    plan = planner.plan(Model(), sharders)
    options = {option.name: option for option in planner._best_plan}
    reserved = planner._storage_reservation.last_reserved_topology.devices[0].storage
    return {
        "device": topology.compute_device,
        "caps": [(d.storage.hbm, d.storage.ddr) for d in topology.devices],
        "reserved": (reserved.hbm, reserved.ddr),
        "storages": {n: [(s.storage.hbm, s.storage.ddr) for s in o.shards] for n, o in options.items()},
        "perfs": {n: [s.perf.total for s in o.shards] for n, o in options.items()},
        "kernels": {n: o.compute_kernel for n, o in options.items()},
        "placements": [str(s.placement) for s in plan.plan["hashed"]["h"].sharding_spec.shards],
    }


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching", "fused_uvm"])
def test_npu_is_accounted_as_cuda(npu_process: Callable[..., Any], kernel: str) -> None:
    caps = {"hbm_cap": 32 * GIB, "ddr_cap": 256 * GIB}
    npu = npu_process(plan_on, "npu", kernel, **caps)
    cuda = npu_process(plan_on, "cuda", kernel, **caps)
    assert npu.pop("device") == "npu"
    assert cuda.pop("device") == "cuda"
    assert npu.pop("placements")[5] == "rank:5/npu:1"
    assert cuda.pop("placements")[5] == "rank:5/cuda:1"
    faster = npu.pop("perfs"), cuda.pop("perfs")
    assert faster[0] != faster[1]  # by rates of its own
    assert npu == cuda
    assert npu["caps"] == [(32 * GIB, 256 * GIB)] * 8
    reserved_hbm, reserved_ddr = npu["reserved"]
    assert reserved_hbm < 0.85 * 32 * GIB - 6 * 4 * 1000 * 1000  # the dense layer, six times
    assert reserved_ddr == 256 * GIB
    # Adagrad on 10^6 rows of 16 floats, on whichever rank the plain table landed
    assert sum(hbm for hbm, _ in npu["storages"]["p"]) >= 2 * 16 * 4 * 10**6


def rates_on(device_type: str, **given: float) -> tuple[float, ...]:
    topology = Topology(world_size=1, compute_device=device_type, **given)
    return topology.devices[0].storage.hbm, topology.hbm_mem_bw, topology.hbm_to_ddr_mem_bw


def test_npu_has_rates_of_its_own_unless_given(npu_process: Callable[..., Any]) -> None:
    assert npu_process(rates_on, "npu") == (64 * 10**9, 1.6e9, 32e6)
    assert npu_process(rates_on, "npu", hbm_cap=GIB, hbm_mem_bw=5.0) == (GIB, 5.0, 32e6)
    assert npu_process(rates_on, "cuda")[0] == 32 * GIB  # TorchRec's own


def test_cpu_counts_both_tiers_as_one(pool_1: RankPool) -> None:
    (cpu,) = pool_1.run(plan_on, "cpu", "fused", ddr_cap=GIB)
    assert cpu["caps"] == [(0, GIB)] * 8
    assert all(hbm == 0 and ddr > 125_000 * 2 * 16 * 4 for hbm, ddr in cpu["storages"]["h"])
    assert cpu["placements"][5] == "rank:5/cpu"


def plan_too_large(device_type: str) -> str:
    topology = Topology(world_size=2, compute_device=device_type, hbm_cap=GIB, ddr_cap=GIB)
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=1, rank=0, pg=dist.group.WORLD))
    constraints = {"p": ParameterConstraints(compute_kernels=["fused"])}
    try:
        EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(Model(10**8), sharders)
    except PlannerError as e:
        return e.error_type.value
    return "planned"


def test_plain_table_beyond_the_npu_is_refused(npu_process: Callable[..., Any]) -> None:
    assert npu_process(plan_too_large, "npu") == "insufficient_storage"


def default_topology() -> tuple[str, str]:
    """Of a planner that is given none, and where its plan puts the shards of two tables."""
    planner = EmbeddingShardingPlanner()
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo")))
    plan = planner.collective_plan(Model(), sharders, dist.GroupMember.WORLD)
    return planner._topology.compute_device, str(plan.plan["hashed"]["h"].sharding_spec.shards[0].placement)


def test_a_planner_without_topology_plans_for_the_npu_that_is_there(
    npu_pools: dict[int, RankPool], pool_1: RankPool
) -> None:
    assert npu_pools[1].run(default_topology) == [("npu", "rank:0/npu:0")]
    assert pool_1.run(default_topology) == [("cpu", "rank:0/cpu")]


def factory_topology(device_type: str) -> str:
    from torchrec.distributed.planner import types

    if not hasattr(types, "KernelConfig"):
        return device_type  # TorchRec 1.5: no such way
    types.KernelConfig(compute_device=device_type).validate()
    return str(Topology(world_size=1, compute_device=device_type).compute_device)


def test_kernel_config_accepts_the_npu(npu_process: Callable[..., Any]) -> None:
    assert npu_process(factory_topology, "npu") == "npu"


def test_unknown_devices_stay_refused() -> None:
    with pytest.raises(AssertionError, match="unsupported compute device toaster"):
        Topology(world_size=1, compute_device="toaster")


def test_absent_device_says_why() -> None:
    """torch cannot express the placements of a device whose extension is missing."""
    reason = "torch_npu is not installed" if torch.version.cuda is None else r"torch \S+ is a CUDA build"
    with pytest.raises(BackendError, match=f"device 'npu': {reason}"):
        Topology(world_size=1, compute_device="npu")


def train_on_host_by_plan_for(device_type: str) -> list[object]:
    """One step of a hashed and of a plain row-wise table, with a plan whose placements are on another device type."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = [EmbeddingBagConfig(name="p", num_embeddings=10, embedding_dim=4, feature_names=["b"])]
    hashed = [HashEmbeddingBagConfig(name="h", num_embeddings=100, embedding_dim=4, feature_names=["a"])]
    model = torch.nn.ModuleDict(
        {
            "hashed": HashEmbeddingBagCollection(hashed),
            "plain": EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        }
    )
    for module in model.values():
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    sharders = get_default_hybrid_sharders(ShardingEnv(world_size=world_size, rank=rank, pg=dist.new_group()))
    topology = Topology(world_size=world_size, compute_device=device_type)
    row_wise = {n: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]) for n in "hp"}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=row_wise)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    placements = [str(s.placement) for s in plan.plan["plain"]["p"].sharding_spec.shards]
    host = torch.device("cpu")
    dmp = DistributedModelParallel(model, device=host, plan=plan, sharders=sharders)
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([-5, 7]), lengths=torch.tensor([1, 1]))
    pooled = [dmp.module[n](kjt).values() for n in ("hashed", "plain")]
    torch.stack(pooled).sum().backward()
    shards = dmp.module["plain"].state_dict()["embedding_bags.p.weight"].local_shards()
    return [placements, [str(p.device) for p in pooled], [str(s.metadata.placement) for s in shards]]


def test_plan_for_another_device_type_serves(pool_2: RankPool) -> None:
    results = pool_2.run(train_on_host_by_plan_for, "cuda")
    for rank, (planned, devices, placed) in enumerate(results):
        assert planned == ["rank:0/cuda:0", "rank:1/cuda:1"]
        assert devices == ["cpu", "cpu"]
        assert placed == [f"rank:{rank}/cpu"]
