"""`DistributedModelParallel(model)` without sharders: an error that names the remedy, and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel, sharding_plan
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.types import ShardingEnv

from hybridrec import (
    ConfigError,
    HashEmbeddingBagCollection,
    HashEmbeddingCollection,
    register_default_sharders,
    unregister_default_sharders,
)
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from tests.conformance.twins import batch, dense, hashed, numbered
from tests.ranks import RankPool, RankPools

CPU = torch.device("cpu")


@contextmanager
def registered(env: ShardingEnv | None = None) -> Iterator[None]:
    register_default_sharders(env)
    try:
        yield
    finally:
        unregister_default_sharders()


def host_env() -> ShardingEnv:
    return ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))


def collection() -> nn.Module:
    return hashed(torch.optim.SGD, lr=0.1)


def alone() -> None:
    """The tutorial's shortest line, also with a plan and no sharders."""
    features = batch(dist.get_rank())
    expected = dense()(numbered(features)).values()
    with registered(host_env()):
        whole = DistributedModelParallel(collection())
        assert type(whole.module) is ShardedHashEmbeddingBagCollection
        torch.testing.assert_close(whole(features).wait().values(), expected)
        size = dist.get_world_size()
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=size, local_world_size=size, compute_device="cpu")
        )
        unsharded = nn.Sequential(collection())
        plan = planner.collective_plan(unsharded)  # without sharders as well
        planned = DistributedModelParallel(unsharded, plan=plan, device=CPU)
        torch.testing.assert_close(planned(features).wait().values(), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_once_registered_no_sharders_are_needed(pools: RankPools, world_size: int) -> None:
    pools[world_size].run(alone)


def composed() -> None:
    features = batch(dist.get_rank())
    expected = dense()(numbered(features)).values()
    size = dist.get_world_size()
    with registered():
        plan = sharding_plan.construct_module_sharding_plan(
            module := collection(),
            {name: sharding_plan.row_wise() for name in ("user", "item", "word")},
            local_size=size,
            world_size=size,
            device_type="cpu",
        )
        for sharded in (
            shard(module, plan, device=CPU),
            shard(collection(), sharding_plan.row_wise(), device=CPU),
            shard_modules(nn.Sequential(collection()), device=CPU)[0],
        ):
            assert type(sharded) is ShardedHashEmbeddingBagCollection
            torch.testing.assert_close(sharded(features).wait().values(), expected)


def test_the_composable_calls_know_registered_sharders(pool_2: RankPool) -> None:
    pool_2.run(composed)


def not_registered(how: str) -> str:
    model = nn.Sequential(collection())
    if how == "registered and taken back":
        with registered():
            DistributedModelParallel(collection())
    with pytest.raises(ConfigError) as error:
        if how == "shard_modules":
            shard_modules(model, device=CPU)
        elif how == "planner":
            EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu")).plan(model, [])
        elif how == "without initial parameters":
            DistributedModelParallel(model, device=CPU, init_parameters=False)
        else:
            DistributedModelParallel(model, device=CPU)
    return str(error.value)


@pytest.mark.parametrize(
    "how", ["never", "registered and taken back", "shard_modules", "planner", "without initial parameters"]
)
def test_otherwise_the_error_names_what_to_call(pool_1: RankPool, how: str) -> None:
    (text,) = pool_1.run(not_registered, how)
    assert "'HashEmbeddingBagCollection'" in text
    assert "sharders=get_default_hybrid_sharders(host_env)" in text
    assert "hybridrec.register_default_sharders(host_env)" in text


def answers() -> None:
    """What is registered is TorchRec's list with ours; TorchRec's own comes back, everywhere."""
    before = sharding_plan.get_default_sharders
    own = [type(s) for s in before()]
    with registered():
        inside = [s.module_type for s in sharding_plan.get_default_sharders()]
        assert sharding_plan.get_module_to_default_sharders().keys() == set(inside)
    assert {type(s) for s in sharding_plan.get_default_sharders()} == set(own)
    assert set(inside) == {s.module_type for s in before()} | {HashEmbeddingBagCollection, HashEmbeddingCollection}
    dmp = DistributedModelParallel(EmbeddingBagCollection([], device=CPU), device=CPU)
    assert [type(s) for s in dmp.sharders] == own


def test_torchrecs_sharders_stay_and_come_back(pool_1: RankPool) -> None:
    pool_1.run(answers)


def test_importing_and_building_replaces_no_default_sharders() -> None:
    """Opt-in: without the call TorchRec's function is TorchRec's."""
    script = """
from torchrec.distributed import model_parallel, sharding_plan
before = sharding_plan.get_default_sharders
import hybridrec
hybridrec.HashEmbeddingBagCollection([hybridrec.HashEmbeddingBagConfig(9, 4, "t")])
hybridrec.get_default_hybrid_sharders
assert sharding_plan.get_default_sharders is model_parallel.get_default_sharders is before
print(before.__code__.co_filename)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("torchrec/distributed/sharding_plan.py")
