"""Sharding one collection by itself, without `DistributedModelParallel`."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingEnv,
    ShardingPlan,
)

from hybridrec.backend import parse_device
from hybridrec.errors import ConfigError


def shard_from_plan(
    module: nn.Module,
    sharder: ModuleSharder[Any],
    device: str | torch.device,
    plan: ShardingPlan | EmbeddingModuleShardingPlan | None,
    env: ShardingEnv | None,
) -> nn.Module:
    """Shard a collection as a plan says, or as TorchRec's planner does. Collective.

    Args:
        module: The collection, unsharded.
        sharder: Of its class.
        device: Where it computes.
        plan: Of ``module`` itself: a `ShardingPlan` whose entry is "", or that entry. None: the planner decides.
        env: Whose group pools travel over; None: the default process group's.

    Raises:
        ConfigError: The sharder is for another class, or the plan has no entry for the module.
    """
    if sharder.module_type is not type(module):
        raise ConfigError(
            f"{type(sharder).__name__} shards {sharder.module_type.__name__}, module is a {type(module).__name__}. "
            "Pass the sharder of its class."
        )
    target = parse_device(device)
    if target is None:
        raise ConfigError(f'device={device!r}. Pass the device that the collection computes on, like "cpu".')
    env = env or ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    if plan is None:
        topology = Topology(
            world_size=env.world_size, local_world_size=get_local_size(env.world_size), compute_device=target.type
        )
        plan = EmbeddingShardingPlanner(topology=topology).collective_plan(module, [sharder], env.process_group)
    params = plan.get_plan_for_module("") if isinstance(plan, ShardingPlan) else plan
    if params is None:
        raise ConfigError(
            f"plan: has entries for {sorted(plan.plan)} and none for '', the module itself. Make it for the collection "
            "alone, or pass the entry of the collection: plan.plan['path.of.the.collection']."
        )
    return cast(nn.Module, sharder.shard(module, params, env, target))
