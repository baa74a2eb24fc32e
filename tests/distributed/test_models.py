"""Models with more than one collection, and what the script of a user can get wrong around them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    Uniform,
    get_default_hybrid_sharders,
)
from tests.ranks import RankPool

STEPS = 12


class Heads(nn.Module):
    """Several collections on the same features; each pools into its own part of the loss."""

    def __init__(self, collections: dict[str, nn.Module]) -> None:
        super().__init__()
        self.collections = nn.ModuleDict(collections)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor, target: Tensor) -> dict[str, Tensor]:
        return {
            name: ((collection(features).values().sum(1) * self.scale - target) ** 2).sum()
            for name, collection in self.collections.items()
        }


def hashed(name: str, dim: int, features: list[str]) -> HashEmbeddingBagCollection:
    config = HashEmbeddingBagConfig(
        name=name,
        num_embeddings=200,
        embedding_dim=dim,
        feature_names=features,
        device_rows=60,
        initializer=Uniform(-0.1, 0.1),
    )
    return HashEmbeddingBagCollection([config])


def plain(dim: int) -> EmbeddingBagCollection:
    torch.manual_seed(5)
    config = EmbeddingBagConfig(name="plain", num_embeddings=40, embedding_dim=dim, feature_names=["b"])
    collection = EmbeddingBagCollection([config], device=torch.device("cpu"))
    nn.init.uniform_(collection.embedding_bags["plain"].weight, -0.1, 0.1)
    return collection


def batch_of(step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_bags = 6
    lengths = torch.randint(0, 4, (2 * num_bags,), generator=generator)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths), torch.ones(num_bags)


def shard(model: nn.Module, optimizer_class: type = torch.optim.SGD) -> DistributedModelParallel:
    for collection in model.collections.values():
        apply_optimizer_in_backward(optimizer_class, collection.parameters(), {"lr": 0.05})
    world_size = dist.get_world_size()
    env = ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={
            "first": ParameterConstraints(compute_kernels=["fused_uvm_caching"]),
            "second": ParameterConstraints(compute_kernels=["fused_uvm_caching"]),
            "plain": ParameterConstraints(sharding_types=["row_wise"]),
        },
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def losses_of(names: list[str]) -> dict[str, list[float]]:
    """Train a model with the named collections; the loss of each, step by step. ``scale`` is left alone."""
    collections = {"first": hashed("first", 8, ["a", "b"]), "second": hashed("second", 5, ["b"]), "plain": plain(4)}
    dmp = shard(Heads({name: collections[name] for name in names}))
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(STEPS):
        parts = dmp(*batch_of(step, dist.get_rank()))
        sum(parts.values()).backward()
        for name, loss in parts.items():
            losses[name].append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_collections_side_by_side(pools: dict[int, RankPool], world_size: int) -> None:
    """Two hashed collections and a plain one train as each would alone, bit for bit."""
    together = pools[world_size].run(losses_of, ["first", "second", "plain"])
    for name in ("first", "second", "plain"):
        alone = pools[world_size].run(losses_of, [name])
        for rank in range(world_size):
            assert together[rank][name] == alone[rank][name]
            assert together[rank][name][0] != together[rank][name][-1]


def without_sharder(kind: str) -> str:
    model = Heads({"first": hashed("first", 8, ["a"])})
    apply_optimizer_in_backward(torch.optim.SGD, model.collections["first"].parameters(), {"lr": 0.05})
    arguments: dict[str, object] = {"plan": ShardingPlan(plan={})}
    if kind == "no sharder":
        from torchrec.distributed.sharding_plan import get_default_sharders

        arguments["sharders"] = get_default_sharders()
    else:
        env = ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))
        arguments["sharders"] = get_default_hybrid_sharders(env)
    try:
        DistributedModelParallel(model, device=torch.device("cpu"), **arguments)
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return "trained unsharded"


@pytest.mark.parametrize("kind", ["no sharder", "empty plan"])
def test_unsharded_collection_in_a_sharded_model_is_an_error(pool_1: RankPool, kind: str) -> None:
    (text,) = pool_1.run(without_sharder, kind)
    assert text.startswith("ConfigError")
    assert "sharders=get_default_hybrid_sharders(host_env)" in text


def wrong_host_env(kind: str) -> str:
    env: object = dist.group.WORLD
    if kind == "no group":
        env = ShardingEnv.from_local(world_size=1, rank=0)
    try:
        get_default_hybrid_sharders(env)
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@pytest.mark.parametrize(("kind", "match"), [("no group", "no process group"), ("a group alone", "ProcessGroup")])
def test_host_env_must_have_a_gloo_group(pool_1: RankPool, kind: str, match: str) -> None:
    (text,) = pool_1.run(wrong_host_env, kind)
    assert text.startswith("ConfigError") and match in text and 'backend="gloo"' in text


def config_error(kind: str) -> str:
    """Build and shard a model with one thing wrong."""
    collection = hashed("first", 8, ["a"])
    model = Heads({"first": collection})
    parameters = list(collection.parameters())
    optimizer: tuple[type, dict[str, object]] | None = (torch.optim.SGD, {"lr": 0.05})
    if kind == "momentum":
        optimizer = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    elif kind == "no optimizer":
        optimizer = None
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer[0], parameters, optimizer[1])
    if kind == "twice":
        apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.05})
    env = ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))
    try:
        sharders = get_default_hybrid_sharders(env, host_memory_bytes=0 if kind == "budget" else None)
        plan = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu")).plan(model, sharders)
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("momentum", "momentum"),
        ("no optimizer", "has no optimizer"),
        ("twice", "2 times"),
        ("budget", "host_memory_bytes=0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(pool_1: RankPool, kind: str, match: str) -> None:
    (text,) = pool_1.run(config_error, kind)
    assert text.startswith("ConfigError") and match in text, text


def keys_of_state_dict() -> list[str]:
    return list(shard(Heads({"first": hashed("first", 8, ["a"])})).state_dict())


def test_a_state_dict_has_rows_and_says_whose(pool_1: RankPool) -> None:
    (keys,) = pool_1.run(keys_of_state_dict)
    assert [key for key in keys if key.endswith("rows.first.rank_0_of_1.records")]
