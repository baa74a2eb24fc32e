"""Plans against what training then takes: bytes that were accounted, slots that were planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)
from hybridrec.distributed.planner_demand import BATCHES_IN_FLIGHT
from hybridrec.distributed.planner_report import planned_tables
from tests.distributed.plan_cases import MIB, Case, Model, entries, planner_of, sharders_of
from tests.ranks import RankPool

HOST = torch.device("cpu")
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
IDS_A_STEP = 4000


def train(dmp: DistributedModelParallel, ids: torch.Tensor) -> None:
    """One step; every feature of one table asks for the same ids, one a bag."""
    ebc = dmp.module
    keys = [name for table in ebc.table_configs for name in table.feature_names]
    values = ids.repeat(len(keys))
    kjt = KeyedJaggedTensor(keys, values, lengths=torch.ones_like(values, dtype=torch.int32))
    output = dmp(kjt).wait()
    rows = output.values() if isinstance(output, KeyedTensor) else output[keys[0]].values()
    rows.sum().backward()


def accounted_and_taken(
    kernel: str, optimizer: str, dim: int, planned_rows: int, *, is_sequence: bool = False
) -> tuple[int, int]:
    """Bytes of this rank in both tiers: as planned for batches of so many ids, and once all planned rows live."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config_class, collection_class = (
        (HashEmbeddingConfig, HashEmbeddingCollection)
        if is_sequence
        else (HashEmbeddingBagConfig, HashEmbeddingBagCollection)
    )
    config = config_class(
        name="t", num_embeddings=10**12, planned_rows=planned_rows, embedding_dim=dim, feature_names=["f"]
    )
    model = collection_class([config])
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], model.parameters(), {"lr": 0.1})
    factor = {"t": 0.3} if kernel == "fused_uvm_caching" else {}
    case = Case(tables={}, kernels={"t": kernel}, load_factors=factor, device_type="cpu", world_size=world_size)
    sharders = sharders_of(case)
    plan = planner_of(case).collective_plan(model, sharders, dist.GroupMember.WORLD)
    (table,) = planned_tables(plan, model, sharders)
    # A plain loop has one batch in flight, of which a rank owns what it sends.
    batch_rows = IDS_A_STEP // world_size // BATCHES_IN_FLIGHT
    accounted = table.demand.accounted(kernel, world_size, factor.get("t"), batch_rows=batch_rows, is_host_memory=True)
    dmp = DistributedModelParallel(model, device=HOST, plan=plan, sharders=sharders)
    ids = torch.arange(planned_rows).split(IDS_A_STEP)
    for batch in [*ids, *ids[: len(ids) // 2]]:  # again, so that the last rows leave their slots too
        train(dmp, batch[rank::world_size])
    (stats,) = dmp.module.stats()
    live = torch.tensor(stats.rows)
    dist.all_reduce(live)
    if live.item() != planned_rows:
        raise AssertionError(f"{live.item()} rows live, {planned_rows} were planned")
    return accounted.device + accounted.host, stats.slots * table.demand.layout.slot_bytes + stats.host_bytes


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching", "fused_uvm"])
@pytest.mark.parametrize(("optimizer", "dim"), [("sgd", 32), ("adagrad", 16), ("rowwise_adagrad", 10), ("adam", 24)])
def test_bytes_are_those_that_were_accounted(pool_2: RankPool, kernel: str, optimizer: str, dim: int) -> None:
    for accounted, taken in pool_2.run(accounted_and_taken, kernel, optimizer, dim, 240_000):
        assert accounted == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching", "fused_uvm"])
def test_bytes_of_sequences_are_those_that_were_accounted(pool_2: RankPool, kernel: str) -> None:
    for accounted, taken in pool_2.run(accounted_and_taken, kernel, "adagrad", 16, 240_000, is_sequence=True):
        assert accounted == pytest.approx(taken, rel=0.05)


def train_planned(case: Case, device: torch.device = HOST) -> dict[str, Any]:
    """Collective plan, then steps with ever new ids; what the plan says and what the tables have."""
    model, sharders = Model(case).ebc, sharders_of(case)
    plan = planner_of(case).collective_plan(model, sharders, dist.GroupMember.WORLD)
    planned = {t.demand.name: t.placed.num_slots for t in planned_tables(plan, model, sharders)}
    dmp = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        train(dmp, torch.randint(-(2**63), 2**63 - 1, (30,), generator=generator))
    stats = dmp.module.stats()
    return {
        **entries(plan),
        "planned": planned,
        "slots": {s.table: s.slots for s in stats},
        "victims": {s.table: s.victims for s in stats},
        "rows": {s.table: s.rows for s in stats},
    }


def on_npu(case: Case) -> dict[str, Any]:
    """`train_planned` there."""
    return train_planned(case, torch.device("npu", 0))


def half_and_twenty(device_type: str, world_size: int) -> Case:
    """A device of 120,000 bytes for a rank, some of it reserved, so that a few batches fill the cache."""
    rows = 40_000 // 128 * world_size
    return Case(
        tables={"small": {"num_embeddings": rows // 2}, "large": {"num_embeddings": 10**12, "planned_rows": 20 * rows}},
        caps={"hbm_cap": 120_000, "ddr_cap": 4096 * MIB},
        device_type=device_type,
        world_size=world_size,
    )


def check_trained(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["kernel"] == {"small": "fused", "large": "fused_uvm_caching"}
        assert result["slots"] == result["planned"]
        assert result["rows"]["large"] > result["slots"]["large"]
        assert result["victims"]["large"] > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_less_and_more_than_the_device_train(pools: dict[int, RankPool], world_size: int) -> None:
    check_trained(pools[world_size].run(train_planned, half_and_twenty("cuda", world_size)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_less_and_more_than_the_npu_train(npu_pools: dict[int, RankPool], world_size: int) -> None:
    check_trained(npu_pools[world_size].run(on_npu, half_and_twenty("npu", world_size)))


def split_of_the_budget() -> tuple[list[int], int]:
    """Budgets of a large, a small and an unplanned collection, and the whole."""
    large = {"t": {"num_embeddings": 300_000}}
    case = Case(tables=large, device_type="cpu", world_size=dist.get_world_size(), host_memory_bytes=1 << 30)
    model = torch.nn.ModuleDict(
        {
            "large": Model(case).ebc,
            "small": Model(dataclasses.replace(case, tables={"u": {"num_embeddings": 100_000}})).ebc,
        }
    )
    sharders = sharders_of(case)
    planner_of(case).collective_plan(model, sharders, dist.GroupMember.WORLD)
    budget = sharders[0]._host_budget
    return [budget.part_of(module) for module in (*model.values(), Model(case).ebc)], budget.total_bytes


def test_collections_share_one_budget(pool_2: RankPool) -> None:
    for (large, small, unplanned), total in pool_2.run(split_of_the_budget):
        assert total == unplanned == 1 << 30
        assert total - 2 <= large + small <= total
        assert 2.5 < large / small < 3.5
