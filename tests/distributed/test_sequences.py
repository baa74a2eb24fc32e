"""Sharded sequences: outputs as unsharded, reads without a trace, refusals on all ranks, mixed models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HybridHashEmbeddingCollectionSharder,
    HybridRecError,
    HybridTrainPipelineSparseDist,
    describe_plan,
    get_default_hybrid_sharders,
)
from hybridrec.debug import verified, where
from tests.distributed.pipelines import PipelineBatch
from tests.distributed.scenario import by_place, sum_of_samples
from tests.ranks import RankPool
from tests.unit.modules.batches import random_batch

torch.fx.wrap("by_place")  # tracing knows them by the module that calls them
torch.fx.wrap("sum_of_samples")
KEYS = ("w", "unused", "i", "v", "u")
NAMES = ["u", "v", "i@item", "i@word", "w"]


def tables(**changes: Any) -> list[HashEmbeddingConfig]:
    """A feature that two tables share, a table that two features share."""
    return [
        HashEmbeddingConfig(10**12, 4, "user", feature_names=["u", "v"], planned_rows=100, **changes),
        HashEmbeddingConfig(50, 4, "item", feature_names=["i"], **changes),
        HashEmbeddingConfig(70, 4, "word", feature_names=["i", "w"], **changes),
    ]


def make(**changes: Any) -> HashEmbeddingCollection:
    module = HashEmbeddingCollection(tables(**changes), need_indices=True)
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    return module


def shard(module: nn.Module, *, dedups: bool = False) -> DistributedModelParallel:
    """The script, with tables that take their cached form."""
    world_size = dist.get_world_size()
    host_env = ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(host_env)
    if dedups:
        sharders = [HybridHashEmbeddingCollectionSharder(host_env, use_index_dedup=True)]
    names = ["user", "item", "word", "bag"]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={n: ParameterConstraints(compute_kernels=["fused_uvm_caching"]) for n in names},
    )
    plan = planner.collective_plan(module, sharders, dist.GroupMember.WORLD)
    assert "'word'" in describe_plan(plan, module, sharders)
    return DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)


def rows_of(outputs: Any) -> Tensor:
    return torch.cat([outputs[name].values() for name in NAMES])


def compare_with_unsharded(dedups: bool) -> None:
    dmp, reference = shard(make(), dedups=dedups), make()
    for step, dtype in enumerate((torch.int64, torch.int32)):
        full = random_batch(KEYS, 5 - dist.get_rank(), seed=step, longest=0 if step and dist.get_rank() else 4)
        features = KeyedJaggedTensor(
            full.keys(), (full.values() % 2**31).to(dtype), lengths=full.lengths().to(dtype), weights=None
        )
        for train in (True, False):
            dmp.train(train)
            actual, expected = dmp(features), reference(features)
            assert list(actual.keys()) == list(expected) == NAMES
            for name, theirs in expected.items():
                ours = actual[name]
                assert torch.equal(ours.values(), theirs.values())
                assert torch.equal(ours.offsets(), theirs.offsets())
                for get in ("lengths", "weights"):
                    assert torch.equal(getattr(ours, get)(), getattr(theirs, get)())
                    assert getattr(ours, get)().dtype == getattr(theirs, get)().dtype
    assert all(s.rows == 0 for s in dmp.module.stats())  # no backward, no trace


@pytest.mark.parametrize(("world_size", "dedups"), [(1, False), (2, False), (3, True)])
def test_outputs_are_those_of_the_unsharded_collection(
    pools: dict[int, RankPool], world_size: int, dedups: bool
) -> None:
    pools[world_size].run(compare_with_unsharded, dedups)


def train_like_unsharded() -> None:
    dmp, reference = shard(make()), make()
    for step in range(8):
        features = random_batch(KEYS, 6, seed=step)
        for model in (dmp, reference):
            rows = rows_of(model(features))
            (by_place(rows) ** 2).sum().backward()
    features = random_batch(KEYS, 6, seed=3)
    dmp.eval()
    before = dmp.module.stats()
    torch.testing.assert_close(rows_of(dmp(features)), rows_of(reference.eval()(features)), rtol=1e-6, atol=1e-7)
    unknown = KeyedJaggedTensor(list(KEYS), torch.arange(5) + 10**15, lengths=torch.ones(5, dtype=torch.int64))
    assert torch.equal(rows_of(dmp(unknown)), rows_of(make()(unknown)))
    assert dmp.module.stats() == before  # reading counts nothing
    assert {s.table: s.rows for s in before} == reference.num_rows()


def test_training_is_that_of_the_unsharded_collection(pool_1: RankPool) -> None:
    pool_1.run(train_like_unsharded)


def refuse(kind: str) -> str:
    """The error on this rank; afterwards nothing is changed, and training goes on."""
    dmp = shard(make(max_rows=400, full_policy="error"))
    features = random_batch(KEYS, 6, seed=dist.get_rank())
    bad = features
    if dist.get_rank() == 1 and kind == "variable":
        lengths = features.lengths()
        bad = KeyedJaggedTensor(
            features.keys(),
            features.values(),
            lengths=lengths,
            stride_per_key_per_rank=[[6]] * 5,
            inverse_indices=(features.keys(), torch.arange(6).expand(5, 6)),
        )
    elif dist.get_rank() == 1 and kind == "key":
        bad = random_batch(("w", "u"), 6, seed=1)
    elif dist.get_rank() == 1:
        ids = torch.arange(2000)
        bad = KeyedJaggedTensor(["w", "i", "v", "u"], ids, lengths=torch.full((4,), 500))
    before = dmp.module.stats()
    try:
        dmp(bad)
    except HybridRecError as e:
        message = f"{type(e).__name__}: {e}"
    else:
        return "not refused"
    after = dmp.module.stats()
    if [(s.rows, s.pins) for s in before] != [(s.rows, s.pins) for s in after]:
        return f"changed: {after}"
    rows_of(dmp(features)).sum().backward()
    return message if sum(s.rows for s in dmp.module.stats()) else "does not go on"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("variable", "IdError: ShardedHashEmbeddingCollection: the batch is variable"),
        ("key", "IdError: ShardedHashEmbeddingCollection: the batch lacks 'v' (table 'user')"),
        ("capacity", "CapacityError: "),
    ],
)
def test_all_ranks_refuse_what_one_refuses(pool_2: RankPool, kind: str, expected: str) -> None:
    first, second = pool_2.run(refuse, kind)
    assert first == second and first.startswith(expected)


class Mixed(nn.Module):
    """Pooled and sequence tables in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = make(device_rows=60)
        self.bags = HashEmbeddingBagCollection(
            [HashEmbeddingBagConfig(10**9, 4, "bag", feature_names=["u"], planned_rows=100, device_rows=60)]
        )
        apply_optimizer_in_backward(torch.optim.Adagrad, self.bags.parameters(), {"lr": 0.1})
        self.over = nn.Linear(4, 1)

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        rows, pooled = self.rows(batch.features), self.bags(batch.features)
        sums = [sum_of_samples(self.over(by_place(rows[n].values())), rows[n].lengths()) for n in NAMES]
        loss = ((torch.stack(sums).sum(0) + self.over(pooled["u"])).squeeze(1) - batch.labels).square().sum() / 8
        return loss, loss.detach()


def batches_of(count: int) -> list[PipelineBatch]:
    size = 6 - dist.get_rank()
    seeds = [100 * dist.get_rank() + step for step in range(count)]
    return [PipelineBatch(random_batch(KEYS, size, seed=s), torch.arange(float(size)) / 8) for s in seeds]


def no_samples(batch: PipelineBatch) -> PipelineBatch:
    lengths = torch.empty(0, dtype=torch.int64)
    features = KeyedJaggedTensor(list(KEYS), torch.empty(0, dtype=torch.int64), lengths=lengths, stride=0)
    return PipelineBatch(features, torch.empty(0))


def mixed_losses(depth: int | None) -> list[float]:
    """Of a plain loop (None) or a pipeline; the ranks have different numbers of batches."""
    dmp = shard(Mixed())
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
    batches = batches_of(14 - 3 * dist.get_rank())
    losses = []
    if depth is None:
        for batch in batches + [no_samples(batches[0])] * (14 - len(batches)):
            optimizer.zero_grad()
            loss, output = dmp(batch)
            loss.backward()
            optimizer.step()
            losses.append(output.item())
    else:
        pipeline = HybridTrainPipelineSparseDist(
            dmp,
            optimizer,
            torch.device("cpu"),
            pipe_n_batch=depth,
            uneven_ranks="drain",
            make_empty_batch=no_samples,
            strict=True,
        )
        iterator = iter(batches)
        while True:
            try:
                losses.append(pipeline.progress(iterator).item())
            except StopIteration:
                break
        assert [c.is_prefetched for c in pipeline.report().collections] == [True, True]
    dmp.eval()
    with torch.no_grad():
        losses += [dmp(batch)[1].item() for batch in batches_of(3)]
    return losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_pooled_and_sequence_tables_in_one_pipeline(pools: dict[int, RankPool], world_size: int) -> None:
    """With prefetch, until the last rank's batches have ended; then reads."""
    expected = pools[world_size].run(mixed_losses, None)
    assert len(expected[0]) == 17 and len(set(expected[0])) > 10
    for depth in (1, 3):
        assert pools[world_size].run(mixed_losses, depth) == expected


def look_inside() -> None:
    dmp = shard(make(device_rows=8))  # some batches do not fit
    with verified(dmp) as result:
        for step in range(6):
            rows_of(dmp(random_batch(KEYS, 6, seed=step))).square().sum().backward()
    assert result.difference is None and result.steps == 6 and result.rows > 100
    assert sum(s.oversized for s in dmp.module.stats()) > 0
    places = [where(dmp, "word", id_) for id_ in (*range(100, 112), 5)]
    assert {p.tier for p in places} >= {"unknown"} | ({"other rank"} if dist.get_world_size() > 1 else set())
    for place in places:
        if place.tier in ("slot", "store"):
            keys = KeyedJaggedTensor(list(KEYS), torch.full((5,), place.id), lengths=torch.ones(5, dtype=torch.int64))
    dmp.eval()
    outputs = dmp(keys)
    assert any(torch.equal(outputs["w"].values()[0], p.weights) for p in places if p.weights is not None)


@pytest.mark.parametrize("world_size", [1])
def test_where_and_verified(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(look_inside)
