"""`max_rows` with its policies, and the host budget, on sharded tables."""

from __future__ import annotations

import logging
import random
import resource
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    CapacityError,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    Uniform,
    get_default_hybrid_sharders,
)
from hybridrec._compat.fbgemm import HAS_PREALLOCATED_HOST_BUFFERS
from hybridrec.distributed import shard_watch
from tests.distributed.oracle import Table, initial_row, mix64, parts_of
from tests.distributed.scenario import give_to_owners, state_of
from tests.ranks import RankPool

DIM = 8


class Model(nn.Module):
    def __init__(self, ebc: HashEmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values().square().sum()


def shard(
    *,
    device_rows: int = 64,
    dim: int = DIM,
    kernel: str = "fused_uvm_caching",
    num_embeddings: int = 1000,
    host_memory_bytes: int | None = None,
    owners: tuple[tuple[int, int], ...] = (),
    **table: object,
) -> DistributedModelParallel:
    """``owners``: as of the oracle's `Table`."""
    config = HashEmbeddingBagConfig(
        name="t",
        num_embeddings=num_embeddings,
        embedding_dim=dim,
        feature_names=["f"],
        device_rows=None if kernel == "fused" else device_rows,
        initializer=Uniform(-0.1, 0.1),
        **table,
    )
    model = Model(HashEmbeddingBagCollection([config]))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    world_size = dist.get_world_size()
    env = ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env, host_memory_bytes=host_memory_bytes)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={"t": ParameterConstraints(compute_kernels=[kernel])},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    if owners:
        owned = Table(name="t", dim=dim, features=("f",), owners=owners)
        plan.plan["ebc"]["t"] = give_to_owners(plan.plan["ebc"]["t"], owned, world_size)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def bag_of(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids)]))


def ids_of(step: int, rank: int) -> list[int]:
    rng = random.Random(f"{step} {rank}")
    return [rng.randrange(-60, 60) for _ in range(4)]


class EvictingModel:
    """The rule of docs/design/transaction.md for one rank's shard, on a dict id -> ordinal of last use."""

    def __init__(self, quota: int) -> None:
        self.quota, self.last_use, self.ordinal, self.evicted = quota, {}, 0, []

    def step(self, ids: set[int]) -> None:
        self.ordinal += 1
        new = ids - set(self.last_use)
        missing = len(self.last_use) + len(new) - self.quota
        self.last_use |= dict.fromkeys(ids, self.ordinal)
        if missing > 0:
            old = sorted((score, mix64(i), i) for i, score in self.last_use.items() if score < self.ordinal - 12)
            assert len(old) >= missing, "the test's own quota is too small"
            for _, _, i in old[:missing]:
                del self.last_use[i]
                self.evicted.append(i)


def evicting_run(
    max_rows: int, device_rows: int, steps: int, owners: tuple[tuple[int, int], ...] = ()
) -> dict[str, object]:
    """Live ids after every step, as the model says; rows that came back were initial again."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dmp = shard(device_rows=device_rows, max_rows=max_rows, full_policy="evict", owners=owners)
    model = EvictingModel(max_rows if owners else -(-max_rows // world_size))
    table = Table(name="t", dim=DIM, features=("f",), owners=owners)
    parts = [part for part in parts_of(table, world_size) if part.owner in (None, rank)]
    wrong = ""
    for step in range(steps):
        everyone = [ids_of(step, r) for r in range(world_size)]
        mine = {i for ids in everyone for i in ids if any(part.has(i, rank, world_size) for part in parts)}
        born = mine - set(model.last_use)
        loss = dmp(bag_of(everyone[rank]))
        for part, rows in zip(parts, state_of(dmp), strict=True):
            for i in born:
                if not np.array_equal(rows[i], initial_row(table, i)[part.first : part.first + part.dim]):
                    wrong = wrong or f"step {step}: id {i} came back as {rows[i]}"
        loss.backward()
        model.step(mine)
        for rows in state_of(dmp):
            if set(rows) != set(model.last_use):
                wrong = wrong or f"step {step}: {sorted(set(rows) ^ set(model.last_use))[:4]} should not differ"
    (stats,) = dmp.module.ebc.stats()
    if stats.evicted != len(parts) * len(model.evicted):
        wrong = wrong or f"{stats.evicted} counted as evicted, not {len(parts)} x {len(model.evicted)}"
    bits = [{i: row.tobytes() for i, row in rows.items()} for rows in state_of(dmp)]
    return {"wrong": wrong, "evicted": model.evicted, "bits": bits}


@pytest.mark.parametrize("world_size", [1, 2])
def test_evict_drops_the_rows_that_the_rule_names(pools: dict[int, RankPool], world_size: int) -> None:
    max_rows = 80 if world_size == 1 else 96
    runs = [pools[world_size].run(evicting_run, max_rows, device_rows, 60) for device_rows in (12, 64)]
    for rank in range(world_size):
        small, large = runs[0][rank], runs[1][rank]
        assert small["wrong"] == large["wrong"] == ""
        assert small["evicted"] and small["evicted"] == large["evicted"]  # whatever the cache's size
        assert small["bits"] == large["bits"]


OWNERS = {"table_wise": ((DIM, 1),), "column_wise": ((3, 1), (4, 0), (1, 1))}


@pytest.mark.parametrize("sharding_type", list(OWNERS))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_of_one_table_evict_the_same_ids(
    pools: dict[int, RankPool], world_size: int, sharding_type: str
) -> None:
    """Each has the whole quota and sees all ids."""
    quota, owners = (104 if world_size == 3 else 90), OWNERS[sharding_type]
    runs = [pools[world_size].run(evicting_run, quota, device_rows, 60, owners) for device_rows in (12, 64)]
    for small, large in zip(*runs, strict=True):
        assert small["wrong"] == large["wrong"] == ""
        assert small["bits"] == large["bits"] and small["evicted"] == large["evicted"]
    having = [rank["evicted"] for rank in runs[0] if rank["bits"]]
    assert len(having) == len({owner % world_size for _, owner in owners})
    assert having[0] and having == having[:1] * len(having)


def refused(kind: str, owners: tuple[tuple[int, int], ...] = ()) -> dict[str, object]:
    """Train until the table is full; then the next new row is refused, and known ones still train."""
    arguments: dict[str, object] = {"max_rows": 40, "full_policy": "error"}
    if kind == "evict":  # nothing is old enough to be evicted
        arguments = {"max_rows": 40, "full_policy": "evict"}
    elif kind == "budget":
        arguments = {"host_memory_bytes": 300_000, "device_rows": 200}
    dmp = shard(owners=owners, **arguments)
    error, first = "", list(range(10))
    for step in range(400):
        ids = list(range(10 * step, 10 * step + 10))
        try:
            dmp(bag_of(ids)).backward()
        except CapacityError as e:
            error = str(e)
            break
    before = state_of(dmp)
    dmp(bag_of(first)).backward()
    after = state_of(dmp)
    (stats,) = dmp.module.ebc.stats()
    return {
        "error": error,
        "known rows train": [
            set(old) == set(new) and any(not np.array_equal(old[i], new[i]) for i in old)
            for old, new in zip(before, after, strict=True)
        ],
        "rejected": stats.rejected,
        "rows": stats.rows,
    }


@pytest.mark.parametrize(
    ("kind", "match"),
    [("error", "full_policy='error'"), ("evict", "unused for 12 batches"), ("budget", "host_memory_bytes")],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_full_table_is_refused(pools: dict[int, RankPool], world_size: int, kind: str, match: str) -> None:
    results = pools[world_size].run(refused, kind)
    for result in results:
        assert "table 't'" in result["error"] and match in result["error"], result
        assert result["rows"] > 0
    assert any(all(r["known rows train"]) for r in results)
    assert sum(r["rejected"] for r in results) >= 1
    assert len({r["error"] for r in results}) == 1


@pytest.mark.parametrize("sharding_type", list(OWNERS))
@pytest.mark.parametrize("kind", ["error", "evict"])
def test_a_full_table_of_one_rank_is_refused(pool_2: RankPool, kind: str, sharding_type: str) -> None:
    """All of its shards are full at once; the ranks that have none refuse with them."""
    owners = OWNERS[sharding_type]
    results = pool_2.run(refused, kind, owners)
    assert len({r["error"] for r in results}) == 1
    assert "the quota is 40 (max_rows" in results[0]["error"] and "2 ranks, full" not in results[0]["error"]
    for rank, result in enumerate(results):
        num_shards = sum(owner == rank for _, owner in owners)
        assert result["rows"] == 40 * num_shards and result["known rows train"] == [True] * num_shards
        assert (result["rejected"] > 0) == (num_shards > 0)


def warnings_near_budget(device_rows: int) -> list[str]:
    dmp = shard(host_memory_bytes=20_000_000, device_rows=device_rows, dim=512)
    with mock.patch.object(shard_watch.logger, "warning") as warning:
        for step in range(3000):
            try:
                dmp(bag_of(list(range(10 * step, 10 * step + 10)))).backward()
            except CapacityError:
                break
    lines = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return [line for line in lines if "in passes" not in line]


@pytest.mark.parametrize("device_rows", [50, 5], ids=["batches_fit_the_slots", "batches_go_in_passes"])
def test_budget_warns_once_before_it_refuses(pool_1: RankPool, device_rows: int) -> None:
    (lines,) = pool_1.run(warnings_near_budget, device_rows)
    assert len(lines) == 1 and "of the budget of 20,000,000" in lines[0]
    assert logging.getLogger("hybridrec") is shard_watch.logger


def abandoned_eviction() -> dict[str, object]:
    """A forward evicts a trained row, a later one does not need its room, and the first is dropped."""
    dmp = shard(max_rows=20, full_policy="evict")
    for step in range(14):
        dmp(bag_of(list(range(20)) if step == 0 else list(range(1, 20)))).backward()
    (before,) = state_of(dmp)
    first = dmp(bag_of([500]))  # 0, unused for 13 batches, makes room
    (during,) = state_of(dmp)
    second = dmp(bag_of([5]))
    del first
    second.backward()
    (stats,) = dmp.module.ebc.stats()
    (after,) = state_of(dmp)
    return {
        "evicted": 0 in before and 0 not in during,
        "came back": 0 in after and np.array_equal(before[0], after[0]) and 500 not in after,
        "rows": stats.rows,
        "counted": stats.evicted,
    }


def test_row_evicted_by_an_abandoned_batch_comes_back(pool_1: RankPool) -> None:
    (result,) = pool_1.run(abandoned_eviction)
    assert result == {"evicted": True, "came back": True, "rows": 20, "counted": 0}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def planned_table_costs() -> dict[str, int]:
    """Bytes of memory that a table of 5 million planned rows takes before and after its first batch."""
    shard()  # whatever the first model of a process loads
    before = resident_bytes()
    dmp = shard(kernel="fused", num_embeddings=10**12, planned_rows=5_000_000, dim=64)
    built = resident_bytes()
    dmp(bag_of(list(range(1000)))).backward()
    return {"built": built - before, "trained": resident_bytes() - before, "slots": dmp.module.ebc.stats()[0].slots}


@pytest.mark.skipif(not HAS_PREALLOCATED_HOST_BUFFERS, reason="this FBGEMM writes all slots when it makes them")
def test_planned_rows_cost_nothing_up_front(pool_1: RankPool) -> None:
    (result,) = pool_1.run(planned_table_costs)
    assert result["slots"] == 5_000_000  # 1.28 GB, were they taken at once
    assert result["built"] < 128 * 2**20, result
    assert result["trained"] < 192 * 2**20, result
