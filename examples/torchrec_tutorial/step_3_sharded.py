"""Step 3: planner, plan, sharder and `DistributedModelParallel`: the tables on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import LazyAwaitable, ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from examples.torchrec_tutorial import twins
from examples.torchrec_tutorial.tell import close, holds, same, say, title
from hybridrec import (
    HashEmbeddingBagCollection,
    HybridHashEmbeddingBagCollectionSharder,
    register_default_sharders,
    unregister_default_sharders,
)

CPU = torch.device("cpu")


def run() -> None:
    """Every way to place a table, then the shortest way to all of it."""
    title(3, "Sharded over ranks")
    say(f"{dist.get_world_size()} ranks, each with a batch of its own, keep the tables together.")
    for sharding_type in ("row_wise", "table_wise", "column_wise"):
        by_hand(sharding_type)
    by_default()


def planner_of(sharding_type: str | None = None, compute_kernel: str | None = None) -> EmbeddingShardingPlanner:
    """TorchRec's planner, with the same constraint for both tables."""
    size = dist.get_world_size()
    constraint = ParameterConstraints(
        sharding_types=None if sharding_type is None else [sharding_type],
        compute_kernels=None if compute_kernel is None else [compute_kernel],
        min_partition=twins.DIM // 2,  # columns of a column-wise shard
    )
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        constraints={twins.table_of(feature): constraint for feature in twins.FEATURES},
    )


def trained_collection() -> HashEmbeddingBagCollection:
    """A hashed collection with an optimizer in its backward."""
    collection = twins.hashed_bags()
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return collection


def by_hand(sharding_type: str) -> None:
    """Plan, look at the plan, shard, look up."""
    collection = trained_collection()
    sharder = HybridHashEmbeddingBagCollectionSharder()
    plan = planner_of(sharding_type).collective_plan(collection, [sharder], dist.GroupMember.WORLD)
    say(f"\nThe plan for {sharding_type}, as TorchRec prints it:")
    say(str(plan.plan[""]).strip("\n"))
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharded = sharder.shard(collection, plan.plan[""], env, CPU)
    features = twins.batch(dist.get_rank())
    awaitable = sharded(features)
    holds(f"{sharding_type}: a LazyAwaitable comes back while ranks exchange", isinstance(awaitable, LazyAwaitable))
    output = awaitable.wait()
    expected = twins.plain_bags()(twins.numbered(features))
    same(f"{sharding_type}: order of the keys", output.keys(), expected.keys())
    close(f"{sharding_type}: pools, beside TorchRec's unsharded collection", output.values(), expected.values())
    parts = [getattr(sharded, part) for part in ("_input_dists", "_lookups", "_output_dists")]
    holds(f"{sharding_type}: TorchRec's parts: _input_dists, _lookups, _output_dists", all(map(len, parts)))


def by_default() -> None:
    """TorchRec's shortest line, after one of ours."""
    say("\nDistributedModelParallel(model) finds no sharder for hashed tables by itself; register_default_sharders()")
    say("tells TorchRec about them, once in a process. It plans and shards by itself then.")
    register_default_sharders()
    try:
        model = DistributedModelParallel(trained_collection(), device=CPU)
    finally:
        unregister_default_sharders()
    features = twins.batch(dist.get_rank())
    expected = twins.plain_bags()(twins.numbered(features))
    close("DistributedModelParallel(model): pools", model(features).wait().values(), expected.values())
