"""Sizes that plans account, against arithmetic on paper; budgets; wraps that fail loudly."""

from __future__ import annotations

import importlib
import math
import random

import pytest
import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hybridrec import HashEmbeddingBagConfig
from hybridrec._compat import planner, planner_device
from hybridrec.config import resolve_table
from hybridrec.distributed.host_memory import HostBudget
from hybridrec.distributed.placement import MAX_SLOTS, size_shard
from hybridrec.distributed.planner_demand import TableDemand, load_factor_of, slot_index_bytes
from hybridrec.distributed.planner_refusal import human
from hybridrec.distributed.planner_report import HybridPlanPolicy
from hybridrec.errors import BackendError
from hybridrec.native import planned_host_bytes
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

ADAGRAD = (RowState(name="sum", is_row_wise=False),)


def demand(num_embeddings: int = 10_000, dim: int = 16, **fields: object) -> TableDemand:
    config = HashEmbeddingBagConfig(
        name="t", num_embeddings=num_embeddings, embedding_dim=dim, feature_names=["f"], **fields
    )
    table = resolve_table(config)
    return TableDemand(table=table, layout=RowStateLayout(dim, ADAGRAD, table.row_type))


def test_rows_of_16_bits_are_accounted_as_such() -> None:
    full, half = demand(10**6, dim=256), demand(10**6, dim=256, data_type=DataType.BF16)
    for kernel in ("fused", "fused_uvm_caching"):
        wide, narrow = (one.bytes_of(one.placed(kernel, 1, 0.25)) for one in (full, half))
        slots = full.placed(kernel, 1, 0.25).num_slots
        assert wide.device - narrow.device == slots * 512
        store_rows = 0 if kernel == "fused" else 10**6
        assert wide.host - narrow.host == pytest.approx(store_rows * 512, rel=0.05)
    staging = [one.staging_bytes(one.placed("fused", 1, None), 100) for one in (full, half)]
    assert staging[0].device - staging[1].device == 2 * 100 * 512


def test_load_factor_gives_exactly_the_slots_that_fit() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        rows = rng.randrange(1, 2 ** rng.randrange(1, 33))
        slots = rng.randrange(1, min(rows, MAX_SLOTS) + 1)
        sized = demand(rows)
        factor = load_factor_of(slots, rows)
        assert size_shard(sized.table, "fused_uvm_caching", factor, world_size=1).num_slots == slots
        assert math.ceil(factor * rows) == slots


@pytest.mark.parametrize(
    ("kernel", "factor", "slots", "store_rows"),
    [("fused", None, 10_000, 0), ("fused_uvm_caching", 0.25, 2500, 10_000), ("fused_uvm_caching", 1.0, 10_000, 0)],
)
def test_both_tiers(kernel: str, factor: float | None, slots: int, store_rows: int) -> None:
    host = planned_host_bytes(
        dim=16, num_row_states=1, num_row_wise_states=0, num_rows=10_000, num_slots=slots, store_rows=store_rows
    )
    on_host = demand().accounted(kernel, 1, factor, batch_rows=100, is_host_memory=True)
    assert (on_host.device, on_host.host) == (slots * 2 * 16 * 4, host)
    on_device = demand().accounted(kernel, 1, factor, batch_rows=100, is_host_memory=False)
    assert on_device.device - on_host.device == 2 * 100 * 128  # a buffer in, a buffer out
    assert on_device.host - on_host.host == 4 * 100 * 128  # two of each, pinned


def test_batches_in_flight_of_a_host_table() -> None:
    assert demand().placed("fused_uvm", 1, None, batch_rows=500).num_slots == 1500
    assert demand().placed("fused_uvm", 1, None, batch_rows=5).num_slots == 256
    assert demand(100).placed("fused_uvm", 1, None, batch_rows=500).num_slots == 100
    assert demand(device_rows=7).placed("fused_uvm", 1, None, batch_rows=0).num_slots == 7


def test_quota_bounds_what_is_planned() -> None:
    limited = demand(10**12, max_rows=1000, full_policy="evict")
    assert limited.placed("fused", 4, None).planned_rows == 250


def test_more_than_can_be_numbered_is_still_compared() -> None:
    huge, half = (demand(n).accounted("fused", 1, None, batch_rows=1, is_host_memory=True) for n in (2**42, 2**41))
    assert huge.device == 2 * half.device == 2**42 * 128
    assert huge.host == pytest.approx(2 * half.host, rel=1e-6)


def test_slot_index_bytes_are_what_the_core_takes() -> None:
    def of(slots: int) -> int:
        return planned_host_bytes(
            dim=64, num_row_states=2, num_row_wise_states=1, num_rows=10**6, num_slots=slots, store_rows=10**6
        )

    assert of(123_456) - of(23_456) == pytest.approx(100_000 * slot_index_bytes(), rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 << 20, "3.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (1 << 52, "4,096.00 TiB"),
    ],
)
def test_human(num_bytes: int, text: str) -> None:
    assert human(num_bytes) == text


def test_budget_is_split_by_plan_and_whole_without_one() -> None:
    budget = HostBudget(1000)
    first, second, other = (torch.nn.Linear(1, 1) for _ in range(3))
    assert budget.part_of(first) == 1000
    budget.plan({first: 300, second: 100})
    assert [budget.part_of(m) for m in (first, second, other)] == [750, 250, 1000]
    del second  # a model that is gone counts no longer
    assert budget.part_of(first) == 1000


def test_symbols_that_moved_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reservations = importlib.import_module("torchrec.distributed.planner.storage_reservations")
    monkeypatch.delattr(reservations, "_reserve_dense_storage")
    with pytest.raises(BackendError, match=r"storage_reservations\._reserve_dense_storage does not exist"):
        planner_device._show_alias(reservations, "_reserve_dense_storage")
    monkeypatch.setattr(reservations, "_reserve_dense_storage", lambda where: None, raising=False)
    with pytest.raises(BackendError, match=r"has no parameter 'topology'"):
        planner_device._show_alias(reservations, "_reserve_dense_storage")
    estimators = importlib.import_module("torchrec.distributed.planner.shard_estimators")
    monkeypatch.setattr(estimators, "calculate_shard_storages", lambda tensor: None)
    with pytest.raises(BackendError, match=r"calculate_shard_storages has no parameter 'sharding_type', 'shard_sizes'"):
        planner._wrap_storages()


def test_planners_without_our_sharders_are_torchrec_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours runs: neither choice nor refusal."""

    def session(*args: object) -> None:
        raise AssertionError("our policy was asked")

    monkeypatch.setattr(HybridPlanPolicy, "session", session)
    reservations = importlib.import_module("torchrec.distributed.planner.storage_reservations")
    planners = importlib.import_module("torchrec.distributed.planner.planners")
    types = importlib.import_module("torchrec.distributed.planner.types")
    sharders = importlib.import_module("torchrec.distributed.embeddingbag")
    configs = importlib.import_module("torchrec.modules.embedding_configs")
    table = configs.EmbeddingBagConfig(name="p", num_embeddings=100, embedding_dim=4, feature_names=["f"])
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=[table], device=torch.device("meta")))
    topology = types.Topology(world_size=2, compute_device="cpu")
    reservation = reservations.FixedPercentageStorageReservation(0.1)
    made = planners.EmbeddingShardingPlanner(topology=topology, storage_reservation=reservation)
    plan = made.plan(model, [sharders.EmbeddingBagCollectionSharder()])
    assert list(plan.plan) == ["0"]
