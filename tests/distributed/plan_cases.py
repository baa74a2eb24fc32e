"""Planning runs that the plan tests share: one model, one planner, what came out in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders

MIB = 1 << 20
DIM = 16
ROW_BYTES = 2 * 4 * DIM  # weights and Adagrad's state
BATCH_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hashed tables name -> config fields; plain tables name -> rows; everything else is the planner's."""

    tables: dict[str, dict[str, Any]]
    plain: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    load_factors: dict[str, float] = field(default_factory=dict)
    sharding_types: dict[str, str] = field(default_factory=dict)
    device_type: str = "cuda"
    world_size: int = 2
    caps: dict[str, int] = field(default_factory=lambda: {"hbm_cap": 64 * MIB, "ddr_cap": 4096 * MIB})
    host_memory_bytes: int | None = None


class Model(nn.Module):
    """One hashed collection and, if there are any, one plain one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ebc = HashEmbeddingBagCollection(
            [
                HashEmbeddingBagConfig(name=name, embedding_dim=DIM, feature_names=[f"f_{name}"], **fields)
                for name, fields in case.tables.items()
            ]
        )
        if case.plain:
            tables = [
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{name}"])
                for name, rows in case.plain.items()
            ]
            self.plain = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        for module in self.children():
            apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})


def sharders_of(case: Case) -> list[ModuleSharder[nn.Module]]:
    pg = dist.new_group(backend="gloo")
    env = ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=pg)
    return get_default_hybrid_sharders(env, host_memory_bytes=case.host_memory_bytes)


def planner_of(case: Case) -> EmbeddingShardingPlanner:
    names = {*case.kernels, *case.load_factors, *case.sharding_types}
    constraints = {
        name: ParameterConstraints(
            sharding_types=[case.sharding_types[name]] if name in case.sharding_types else None,
            compute_kernels=[case.kernels[name]] if name in case.kernels else None,
            cache_params=CacheParams(load_factor=case.load_factors[name]) if name in case.load_factors else None,
        )
        for name in names
    }
    topology = Topology(world_size=case.world_size, compute_device=case.device_type, **case.caps)
    return EmbeddingShardingPlanner(topology=topology, batch_size=BATCH_SIZE, constraints=constraints)


def run_plan(case: Case) -> dict[str, Any]:
    """Plan, and the memory that the planner says is used and left on each rank."""
    planner, model, sharders = planner_of(case), Model(case), sharders_of(case)
    plan = planner.plan(model, sharders)
    available = planner._storage_reservation.last_reserved_topology.devices
    used = [[0, 0] for _ in available]
    for option in planner._best_plan:
        for shard in option.shards:
            used[shard.rank][0] += shard.storage.hbm
            used[shard.rank][1] += shard.storage.ddr
    return {
        **entries(plan),
        "hbm": [(u[0], d.storage.hbm) for u, d in zip(used, available, strict=True)],
        "ddr": [(u[1], d.storage.ddr) for u, d in zip(used, available, strict=True)],
    }


def entries(plan: ShardingPlan) -> dict[str, Any]:
    """Kernel and load factor of every table."""
    planned = {name: entry for tables in plan.plan.values() for name, entry in tables.items()}
    return {
        "kernel": {name: entry.compute_kernel for name, entry in planned.items()},
        "factor": {name: entry.cache_params and entry.cache_params.load_factor for name, entry in planned.items()},
    }
