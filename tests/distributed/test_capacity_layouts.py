"""What a full table drops depends on the batches alone: not on depth, cache, placement or threads of the core."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import (
    CapacityError,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    Uniform,
    get_default_hybrid_sharders,
)
from hybridrec.cache import TransactionLog
from hybridrec.distributed import lookup
from hybridrec.native import unmix64
from tests.distributed.oracle import Table, initial_row, owner
from tests.distributed.pipelines import PipelineBatch, settle
from tests.distributed.scenario import OPTIMIZERS, state_of
from tests.ranks import RankPool

TABLES = {"narrow": 4, "wide": 12}
STEPS = 50
REPEATS = 2000
QUOTA = {1: 80, 2: 44}  # world size -> rows of each rank


class Model(torch.nn.Module):
    def __init__(self, ebc: HashEmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, batch: PipelineBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.ebc(batch.features).values().square().sum()
        return loss, loss.detach()


class NoDense(torch.optim.Optimizer):
    """All parameters are updated in the backward."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Any = None) -> None:
        """There is nothing to do."""


def build(
    *,
    kernel: str = "fused_uvm_caching",
    device_rows: int | None = 40,
    optimizer: str = "adagrad",
    threads: int = 1,
    host_memory_bytes: int | None = None,
    **table: Any,
) -> DistributedModelParallel:
    """Two tables with one policy."""
    configs = [
        HashEmbeddingBagConfig(
            name=name,
            num_embeddings=400,
            embedding_dim=dim,
            feature_names=[name],
            device_rows=device_rows,
            initializer=Uniform(-0.1, 0.1),
            **table,
        )
        for name, dim in TABLES.items()
    ]
    model = Model(HashEmbeddingBagCollection(configs))
    optimizer_class, arguments = OPTIMIZERS[optimizer]
    if optimizer.endswith("adagrad"):
        arguments = {**arguments, "initial_accumulator_value": 0.25}
    apply_optimizer_in_backward(optimizer_class, model.parameters(), dict(arguments))
    world_size = dist.get_world_size()
    env = ShardingEnv(world_size=world_size, rank=dist.get_rank(), pg=dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(env, host_memory_bytes=host_memory_bytes)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={name: ParameterConstraints(compute_kernels=[kernel]) for name in TABLES},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    group = lookup.ShardGroup
    with mock.patch.object(lookup, "ShardGroup", lambda specs, **kw: group(specs, **{**kw, "num_threads": threads})):
        return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def batch_of(ids: dict[str, list[int]]) -> PipelineBatch:
    """One bag a table."""
    values = torch.tensor([i for name in TABLES for i in ids[name]], dtype=torch.int64)
    kjt = KeyedJaggedTensor(keys=list(TABLES), values=values, lengths=torch.tensor([len(ids[name]) for name in TABLES]))
    return PipelineBatch(kjt, torch.zeros(1))


def ids_of(step: int, rank: int) -> dict[str, list[int]]:
    """Ids drift and come back; the two tables see different ones."""
    rng = random.Random(f"{step} {rank}")
    return {
        name: [rng.randrange(step * 5 % 130, step * 5 % 130 + 24) - 70 * k for _ in range(5)]
        for k, name in enumerate(TABLES)
    }


class Evictions:
    """Which ids every plan dropped, by its ordinal; a plan that was taken back is forgotten."""

    def __init__(self) -> None:
        self.by_ordinal: dict[int, list[list[int]]] = {}
        self._plan = TransactionLog.plan

    def plan(self, log: TransactionLog, *args: Any) -> Any:
        with log.lock:
            log.settle()
            before = [set(log.group.entries(t)[0].tolist()) for t in range(len(TABLES))]
            result = self._plan(log, *args)
            after = [set(log.group.entries(t)[0].tolist()) for t in range(len(TABLES))]
        if hasattr(result, "ordinal") and result.ordinal:
            gone = [
                unmix64(torch.tensor(sorted(b - a), dtype=torch.int64)).tolist()
                for b, a in zip(before, after, strict=True)
            ]
            self.by_ordinal[result.ordinal] = gone
        return result


def train(depth: int, **layout: Any) -> dict[str, Any]:
    """``depth`` 0: the plain loop."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    evictions = Evictions()
    dmp = build(max_rows=QUOTA[world_size] * world_size, full_policy="evict", **layout)
    # Each id so often that the core's threads take part.
    batches = [batch_of({n: REPEATS * ids for n, ids in ids_of(step, rank).items()}) for step in range(STEPS)]
    with mock.patch.object(TransactionLog, "plan", lambda log, *args: evictions.plan(log, *args)):
        if depth == 0:
            for batch in batches:
                dmp(batch)[0].backward()
        else:
            pipeline = HybridTrainPipelineSparseDist(dmp, NoDense(), torch.device("cpu"), pipe_n_batch=depth)
            iterator = iter(batches)
            for _ in range(STEPS):
                pipeline.progress(iterator)
            settle(pipeline)
    stats = dmp.module.ebc.stats()
    for t, s in enumerate(stats):
        assert s.evicted == sum(len(gone[t]) for gone in evictions.by_ordinal.values()), s
        assert s.rows <= QUOTA[world_size] and s.pins == 0 and s.rejected == 0
    group = dmp.module.ebc.lookup.log.group
    scores = [dict(zip(keys.tolist(), s.tolist(), strict=True)) for keys, _, s, _, _ in map(group.entries, range(2))]
    return {
        "evictions": evictions.by_ordinal,
        "scores": scores,
        "rows": [{i: row.tobytes() for i, row in rows.items()} for rows in state_of(dmp)],
        "counts": [(s.evicted, s.inserted, s.accesses, s.uniques, s.grown) for s in stats],
    }


LAYOUTS: list[dict[str, Any]] = [
    {"depth": 1, "kernel": "fused", "device_rows": None},
    {"depth": 12, "kernel": "fused_uvm_caching", "device_rows": 70, "threads": 4},
    {"depth": 3, "kernel": "fused_uvm_caching", "device_rows": 24},
    {"depth": 12, "kernel": "fused_uvm", "device_rows": None, "threads": 3},
    {"depth": 0, "kernel": "fused_uvm", "device_rows": None, "threads": 2},
]


def all_layouts(optimizer: str) -> int:
    plain = train(0, optimizer=optimizer)
    for layout in LAYOUTS:
        other = train(optimizer=optimizer, **layout)
        for name, value in plain.items():
            assert other[name] == value, (layout, name)
    return sum(len(gone) for step in plain["evictions"].values() for gone in step)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_ids_are_evicted_in_every_layout(pools: dict[int, RankPool], world_size: int, optimizer: str) -> None:
    for evicted in pools[world_size].run(all_layouts, optimizer):
        assert evicted > 40


def come_back(optimizer: str) -> int:
    """An id that comes back after its eviction has its initial row and initial states in its slot, before it trains."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dmp = build(optimizer=optimizer, max_rows=QUOTA[world_size] * world_size, full_policy="evict")
    state = 0.25 if optimizer.endswith("adagrad") else 0.0
    live: list[set[int]] = [set(), set()]
    seen: list[set[int]] = [set(), set()]
    num_back = 0
    for step in range(STEPS):
        everyone = [ids_of(step, r) for r in range(world_size)]
        loss, _ = dmp(batch_of(everyone[rank]))
        for t, (name, rows) in enumerate(zip(TABLES, state_of(dmp), strict=True)):
            table = Table(name=name, dim=TABLES[name], features=(name,))
            born = {i for ids in everyone for i in ids[name] if owner(i, world_size) == rank} - live[t]
            for i in born:
                states = np.full(len(rows[i]) - table.dim, state, np.float32)
                np.testing.assert_array_equal(rows[i], np.concatenate([initial_row(table, i), states]))
            num_back += len(born & seen[t])
            seen[t] |= born
        loss.backward()
        live = [set(rows) for rows in state_of(dmp)]
    return num_back


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evicted_id_comes_back_as_new(pools: dict[int, RankPool], world_size: int, optimizer: str) -> None:
    for num_back in pools[world_size].run(come_back, optimizer):
        assert num_back > 10


def beyond_the_budget(kernel: str) -> dict[str, Any]:
    """A batch for which the memory is lacking is refused on all ranks, leaves nothing, and smaller ones go on."""
    rank = dist.get_rank()
    budget = (16 if kernel == "fused_uvm_caching" else 20) * 2**20
    refused, plain = (
        build(kernel=kernel, device_rows=110_000 if kernel == "fused_uvm_caching" else None, host_memory_bytes=b)
        for b in (budget, 400 * 2**20)
    )
    large = {name: list(range(10**6, 10**6 + (100_000 * dist.get_world_size() if rank == 0 else 5))) for name in TABLES}
    errors = []
    for step in range(30):
        if step % 10 == 5:
            before = _everything(refused)
            try:
                refused(batch_of(large))
            except CapacityError as e:
                errors.append(str(e))
            assert _everything(refused) == before
        ids = {name: list(range(100 * step + 7 * rank, 100 * step + 90)) for name in TABLES}
        for dmp in (refused, plain):
            dmp(batch_of(ids))[0].backward()
        host_bytes = sum(s.host_bytes for s in refused.module.ebc.stats())
        assert host_bytes <= budget, host_bytes
    rows = [[{i: r.tobytes() for i, r in t.items()} for t in state_of(dmp)] for dmp in (refused, plain)]
    return {
        "errors": errors,
        "same": rows[0] == rows[1],
        "rejected": sum(s.rejected for s in refused.module.ebc.stats()),
    }


def _everything(dmp: DistributedModelParallel) -> list[Any]:
    group = dmp.module.ebc.lookup.log.group
    entries = [[a.tobytes() for a in group.entries(t)] for t in range(len(TABLES))]
    counters = [{**group.counters(t)._asdict(), "rejected": 0, "host_bytes": 0} for t in range(len(TABLES))]
    return [entries, counters, [{i: r.tobytes() for i, r in rows.items()} for rows in state_of(dmp)]]


@pytest.mark.parametrize("kernel", ["fused_uvm_caching", "fused_uvm"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_beyond_the_host_budget_leaves_nothing(
    pools: dict[int, RankPool], world_size: int, kernel: str
) -> None:
    results = pools[world_size].run(beyond_the_budget, kernel)
    assert sum(r["rejected"] for r in results) >= 3
    for result in results:
        assert len(result["errors"]) == 3 and result["errors"] == results[0]["errors"]
        assert result["same"]
