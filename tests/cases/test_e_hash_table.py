"""Hash tables, keys and overflow: defects of other systems, each with a test of the right behaviour here."""

from __future__ import annotations

import dataclasses
import logging
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import CapacityError
from hybridrec.native import ShardGroup, initial_rows, mix64, unmix64
from hybridrec.native.protocol import PlanStatus, ShardSpec
from tests.distributed.oracle import Table, initial_row, owner
from tests.distributed.pipelines import run_pipeline_against_oracle
from tests.distributed.scenario import TABLES, Scenario, run_against_oracle, state_of, universe
from tests.distributed.test_capacity import bag_of, shard
from tests.property.driver import Driver, Slots, all_cores, make_specs, run_random
from tests.ranks import RankPool

ONE_TABLE = Table(name="t", dim=8, features=("f",))


# ---- the whole table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["grow", "evict", "error"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 3), (127, 128)], ids=str)
def test_hkv110_hkv112_hkv91_hkv203_hkv242_hkv78_random_calls_against_a_dictionary(
    policy: str, slots: tuple[int, int]
) -> None:
    """Every core at once; a million calls of the C++ core under sanitizers are in tests/native."""
    driver = Driver(all_cores(), make_specs(policy, slots=slots, max_rows=14))
    run_random(driver, random.Random(f"{policy} {slots}"), 250, num_ids=20)


def test_re328_re329_slots_of_every_number_grow() -> None:
    """16 to 300 slots, grown four times with rows in them; tests/native does it under sanitizers."""
    for num_slots in range(16, 301):
        spec = ShardSpec(
            name="t",
            dim=1,
            num_row_states=0,
            num_row_wise_states=0,
            state_initial_values=(),
            num_slots=num_slots,
            planned_rows=num_slots,
        )
        group = ShardGroup([spec])
        weights = torch.full((num_slots, 1), torch.nan)
        group.bind_slots(0, weights, [], [])
        for k in range(5):
            keys = mix64(torch.arange(len(weights)))
            slots = torch.empty_like(keys)
            plan = group.plan(keys, torch.tensor([0, len(keys)]), torch.tensor([0]), slots)
            assert plan.status == PlanStatus.OK and sorted(slots.tolist()) == list(range(len(weights)))
            group.swap(plan.ordinal)
            weights[slots, 0] = torch.arange(len(weights), dtype=torch.float32)  # as a kernel would train them
            group.commit(plan.ordinal)
            if k < 4:
                grown = torch.full((len(weights) + 1 + 37 * k, 1), torch.nan)
                grown[: len(weights)] = weights
                weights = grown
                group.resize_slots(0, len(weights))
                group.bind_slots(0, weights, [], [])
        assert group.counters(0).loads == group.counters(0).victims == 0


@pytest.mark.parametrize("num_ids", [0, 1, 31, 32, 33, 4095, 4096, 4097])
def test_re27_fb2075_initial_rows_and_unique_ids_of_every_size(num_ids: int) -> None:
    spec = dataclasses.replace(make_specs()[0], dim=5)
    keys = mix64(torch.arange(num_ids))
    rows = initial_rows(spec, keys)
    assert rows.shape == (num_ids, 5) and torch.isfinite(rows).all()
    for i in {0, num_ids // 2, num_ids - 1} & set(range(num_ids)):
        assert torch.equal(initial_rows(spec, keys[i : i + 1])[0], rows[i])
    group = ShardGroup(make_specs(slots=(5000, 5000)))
    twice, index = torch.cat([keys, keys]), torch.empty(2 * num_ids, dtype=torch.int64)
    counts = torch.empty(2, dtype=torch.int64)
    group.end_read(group.read_plan(twice, torch.tensor([0, 2 * num_ids]), torch.tensor([1]), index, counts))
    assert counts.tolist() == [0, num_ids] and index.tolist() == [*range(num_ids)] * 2


# ---- negative keys ---------------------------------------------------------------------------------------------------


def owners_of_negative_ids() -> list[int]:
    """Rows of negative ids live where plain integers say; reads of all ranks find them trained."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ids = [-(2**63), -(2**63) + 1, -1, -2, -(2**32), -(2**32) - 1, *range(-1000, -900)]
    dmp = shard(device_rows=200)
    dmp(bag_of(ids)).backward()
    (rows,) = state_of(dmp)
    assert set(rows) == {i for i in ids if owner(i, world_size) == rank}
    dmp.eval()
    with torch.no_grad():
        read = dmp(bag_of(ids)).item()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, {i: row[: ONE_TABLE.dim] for i, row in rows.items()})
    total = sum((np.sum([r[i] for r in everyone for i in [k] if i in r], 0) for k in ids), np.zeros(8))
    assert read == pytest.approx(float(np.square(total).sum()), rel=1e-4)
    assert not any(np.array_equal(row[:8], initial_row(ONE_TABLE, i)) for i, row in rows.items())
    return [owner(i, world_size) for i in ids]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_hc_23_12_owners_of_negative_ids(pools: dict[int, RankPool], world_size: int) -> None:
    owners = pools[world_size].run(owners_of_negative_ids)[0]
    assert set(owners) == set(range(world_size))


NEGATIVE = Scenario(optimizer="adagrad", cache="tenth", steps=14, ids_per_table=1001, seed=5)


def train_both_ways() -> dict[str, Any]:
    """Plain loop and pipeline, whose oracle routes by plain integers; how many ids are negative."""
    run_against_oracle(NEGATIVE)
    run_pipeline_against_oracle(NEGATIVE, 3)
    return {"negative": sum(i < 0 for i in universe(NEGATIVE, TABLES[0]))}


@pytest.mark.parametrize("world_size", [2, 3])
def test_tr2682_one_routing_in_training_eval_and_pipeline(pools: dict[int, RankPool], world_size: int) -> None:
    for result in pools[world_size].run(train_both_ways):
        assert result["negative"] > 300


# ---- sizes -----------------------------------------------------------------------------------------------------------


def odd_sizes(num_embeddings: int, kernel: str) -> int:
    """As many ids as the table's nominal size, and a few more, which any size takes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dmp = shard(num_embeddings=num_embeddings, kernel=kernel, device_rows=700)
    ids = list(range(num_embeddings + 50))
    for first in range(0, len(ids), 500):
        dmp(bag_of(ids[first : first + 500][rank::world_size])).backward()
    (rows,) = state_of(dmp)
    assert set(rows) == {i for i in ids if owner(i, world_size) == rank}
    return len(rows)


@pytest.mark.parametrize("num_embeddings", [4091, 1021])
@pytest.mark.parametrize(("world_size", "kernel"), [(2, "fused"), (3, "fused_uvm_caching"), (4, "fused_uvm")])
def test_fb5649_tr1591_sizes_that_no_world_size_divides(
    pools: dict[int, RankPool], world_size: int, kernel: str, num_embeddings: int
) -> None:
    assert sum(pools[world_size].run(odd_sizes, num_embeddings, kernel)) == num_embeddings + 50


def widths_of_integers() -> list[bytes]:
    """The same batches with ids and lengths of 32 and of 64 bits."""
    results = []
    for ids_dtype in (torch.int32, torch.int64):
        for lengths_dtype in (torch.int32, torch.int64):
            dmp = shard(device_rows=40)
            for step in range(6):
                ids = torch.arange(-7 - step, 8 + step).repeat(2) * 100_003
                lengths = torch.tensor([3, 0, len(ids) - 3])
                kjt = KeyedJaggedTensor(keys=["f"], values=ids.to(ids_dtype), lengths=lengths.to(lengths_dtype))
                dmp(kjt).backward()
            (rows,) = state_of(dmp)
            results.append(b"".join(rows[i].tobytes() for i in sorted(rows)))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_fb3589_int32_and_int64(pools: dict[int, RankPool], world_size: int) -> None:
    for results in pools[world_size].run(widths_of_integers):
        assert len(results[0]) > 0 and results == [results[0]] * 4


# ---- full tables and crafted keys ------------------------------------------------------------------------------------


def one_hundred_rows(policy: str) -> dict[str, Any]:
    """150 ids for 100 rows; those that were refused read their initial row, never zeros."""
    bounds = {"grow": {"planned_rows": 100}}.get(policy, {"max_rows": 100, "full_policy": policy})
    dmp = shard(device_rows=64, **bounds)
    errors = 0
    for first in range(0, 150, 10):
        try:
            dmp(bag_of(list(range(first, first + 10)))).backward()
        except CapacityError:
            errors += 1
    (stats,) = dmp.module.ebc.stats()
    dmp.eval()
    with torch.no_grad():
        pooled = dmp.module.ebc(bag_of([149])).values().numpy()
    (rows,) = state_of(dmp)
    expected = rows[149][:8] if 149 in rows else initial_row(ONE_TABLE, 149)
    return {"errors": errors, "stats": stats, "reads": bool(np.array_equal(pooled[0], expected)) and bool(pooled.any())}


@pytest.mark.parametrize("policy", ["grow", "evict", "error"])
def test_re12_keys_beyond_capacity_meet_the_policy(pool_1: RankPool, policy: str) -> None:
    (result,) = pool_1.run(one_hundred_rows, policy)
    stats = result["stats"]
    assert result["reads"]
    assert stats.rejected == result["errors"]  # whatever was not stored is counted, and was an error
    if policy == "grow":
        assert (stats.rows, stats.grown, result["errors"]) == (150, 50, 0)
    else:
        # "evict" too: with 10 new ids a batch nothing of 100 rows has been unused for 12 batches.
        assert (stats.rows, stats.evicted, result["errors"]) == (100, 0, 5)


def crafted_ids() -> list[int]:
    """1,000 ids whose keys agree in 54 bits: all have the same home line in the id map, at any of its sizes."""
    keys = torch.arange(1000) + (5 << 60)
    return unmix64(keys).tolist()


def train_crafted_ids() -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dmp = shard(device_rows=300)
    ids = crafted_ids()
    for _ in range(2):
        for first in range(0, 1000, 100):
            dmp(bag_of(ids[first : first + 100][rank::world_size])).backward()
    (rows,) = state_of(dmp)
    assert set(rows) == {i for i in ids if owner(i, world_size) == rank}
    assert len({row.tobytes() for row in rows.values()}) == len(rows)
    return len(rows)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tfra449_keys_of_one_bucket(pools: dict[int, RankPool], world_size: int) -> None:
    assert sum(pools[world_size].run(train_crafted_ids)) == 1000


# ---- rows, slots and states ------------------------------------------------------------------------------------------


class Shard:
    """One native table with Adagrad-like state 0.5, whose rows hold what they were trained to."""

    def __init__(self, num_slots: int, max_rows: int = 0) -> None:
        self.spec = ShardSpec(
            name="t",
            dim=4,
            num_row_states=1,
            num_row_wise_states=1,
            state_initial_values=(0.5, 0.25),
            num_slots=num_slots,
            planned_rows=1,
            max_rows=max_rows,
            full_policy="evict" if max_rows else "grow",
        )
        self.group = ShardGroup([self.spec])
        self.slots = Slots(self.spec, num_slots)
        self.group.bind_slots(0, *self.slots.bind())
        self.trained: dict[int, torch.Tensor] = {}

    def plan(self, ids: list[int]) -> tuple[Any, torch.Tensor]:
        keys = mix64(torch.tensor(ids, dtype=torch.int64))
        slots = torch.empty(len(ids), dtype=torch.int64)
        return self.group.plan(keys, torch.tensor([0, len(ids)]), torch.tensor([0]), slots), slots

    def train(self, ids: list[int], value: float) -> torch.Tensor:
        """The records as they were before."""
        plan, slots = self.plan(ids)
        assert plan.status == PlanStatus.OK, plan
        if plan.num_loads or plan.num_inits:
            self.group.swap(plan.ordinal)
        before = self.slots.read(slots)
        after = torch.full_like(before, value) + torch.tensor(ids).unsqueeze(1)
        self.slots.write(slots, after)
        self.group.commit(plan.ordinal)
        self.trained |= dict(zip(ids, after, strict=True))
        return before

    def entries(self) -> dict[int, tuple[int, int, int]]:
        """id -> row, score, slot."""
        keys, rows, scores, slots, _ = self.group.entries(0)
        ids = unmix64(torch.from_numpy(keys.copy())).tolist()
        return {i: (int(r), int(s), int(t)) for i, r, s, t in zip(ids, rows, scores, slots, strict=True)}


def test_re467_a_new_key_inherits_nothing_from_its_slot() -> None:
    table = Shard(num_slots=1, max_rows=1)
    for _ in range(100):
        table.train([7], 1.0)
    for _ in range(13):  # 7 becomes evictable
        table.train([], 0.0)
    before = table.train([8], 1.0)
    assert set(table.entries()) == {8}
    assert table.entries()[8][2] == 0  # in the slot that 7 had
    assert table.entries()[8][1] == 114  # its score is its own batch
    assert before[0, 4:].tolist() == [0.5] * 4 + [0.25]
    assert abs(before[0, :4]).max() <= 0.01


def test_re468_rows_and_keys_stay_one_to_one_after_deletions() -> None:
    table = Shard(num_slots=8, max_rows=70)
    for step in range(120):
        table.train([(5 * step + k) % 211 for k in range(5)], float(step))
        entries = table.entries()
        rows, slots = [e[0] for e in entries.values()], [e[2] for e in entries.values() if e[2] >= 0]
        assert len(set(rows)) == len(rows) <= 70 and len(set(slots)) == len(slots) <= 8
    table.group.flush()
    ids = list(entries)
    records = table.group.read_records(0, np.array([entries[i][0] for i in ids], dtype=np.uint32))
    np.testing.assert_array_equal(records, torch.stack([table.trained[i] for i in ids]).numpy())
    assert table.group.counters(0).evicted > 400


def test_re284_what_leaves_a_slot_is_its_last_value() -> None:
    """Also after batches that were refused because all slots were needed by others."""
    table = Shard(num_slots=4)
    table.train([1, 2, 3, 4], 1.0)
    table.train([3, 4], 9.0)
    pinning, slots = table.plan([1, 2])
    assert table.plan([5, 6, 7])[0].status == PlanStatus.NO_SLOTS
    assert table.slots.read(slots).equal(torch.stack([table.trained[i] for i in (1, 2)]))
    table.group.undo(pinning.ordinal)
    table.train([5, 6, 7, 8], 2.0)  # all four leave
    entries = table.entries()
    assert [entries[i][2] for i in (1, 2, 3, 4)] == [-1] * 4
    records = table.group.read_records(0, np.array([entries[i][0] for i in (1, 2, 3, 4)], dtype=np.uint32))
    np.testing.assert_array_equal(records, torch.stack([table.trained[i] for i in (1, 2, 3, 4)]).numpy())


# ---- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import gc, sys, torch
from hybridrec.native import ShardGroup, mix64
from hybridrec.native.protocol import ShardSpec
from tests.property.driver import Driver, Slots, all_cores, make_specs, run_random

dim, rows, batch = map(int, sys.argv[1:])
spec = ShardSpec(name="t", dim=dim, num_row_states=0, num_row_wise_states=1, state_initial_values=(0.0,),
                 num_slots=batch, planned_rows=rows)


def fill(group, slots, first, n):
    group.bind_slots(0, *slots.bind())
    out = torch.empty(batch, dtype=torch.int64)
    for at in range(first, first + n, batch):
        plan = group.plan(mix64(torch.arange(at, at + batch)), torch.tensor([0, batch]), torch.tensor([0]), out)
        group.swap(plan.ordinal)
        group.commit(plan.ordinal)
    group.flush()


def resident():
    gc.collect()
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Rss:"))


small = ShardGroup([spec])
fill(small, Slots(spec, batch), 0, 2 * batch)  # what any first use of the code takes
slots, group = Slots(spec, batch), ShardGroup([spec])
slots.weights.fill_(0)
before = resident()
fill(group, slots, 0, rows)
print(resident() - before, group.counters(0).host_bytes, group.counters(0).rows)
"""


@pytest.mark.parametrize(
    "dim", [8, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)]
)
def test_hc348_hc412_memory_is_what_is_reported(dim: int) -> None:
    """Within 10 % of what the process grew by. The index takes 39 to 66 bytes a row, most after segments split."""
    rows = 1_600_000 if dim == 8 else 400_000
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(dim), str(rows), "20000"], capture_output=True, text=True, check=True
    )
    grown, reported, stored = map(int, done.stdout.split())
    record_bytes = -(-4 * dim // 64) * 64 + 4
    print(f"dim {dim}: {grown / rows:.1f} bytes a row, {reported / rows:.1f} reported, {4 * dim + 4} of them values")
    assert stored == rows
    assert grown == pytest.approx(reported, rel=0.1)
    assert record_bytes < reported / rows < record_bytes + 72


# ---- warnings --------------------------------------------------------------------------------------------------------


def warnings_of_a_table_that_outgrows_its_plan() -> list[str]:
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler = Collect()
    logger = logging.getLogger("hybridrec")
    logger.addHandler(handler)
    dmp = shard(kernel="fused", planned_rows=40)
    for step in range(200):
        dmp(bag_of(list(range(5 * step, 5 * step + 30)))).backward()
    logger.removeHandler(handler)
    return lines


def test_fb5818_a_warning_comes_once(pool_2: RankPool) -> None:
    for lines in pool_2.run(warnings_of_a_table_that_outgrows_its_plan):
        assert len(lines) == 1 and "more rows live than planned_rows says" in lines[0]
