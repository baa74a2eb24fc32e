"""Checkpoints, resume, other numbers of ranks: defects of other systems, each with a test of the right behaviour here.

Resume: test_i_resume.py. Deltas and export: test_j_delta_export.py.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec import checkpoint
from hybridrec.checkpoint import files
from hybridrec.native import ShardGroup, mix64
from hybridrec.native.protocol import PlanStatus, ShardSpec
from hybridrec.store.row_export import RowChunk
from tests.cases.checkpoints import (
    EVICTING,
    MAX_ROWS,
    by_step,
    load_rows,
    on_machines,
    snapshots_at_random_moments,
)
from tests.checkpoint import mixed
from tests.checkpoint.runs import build, records_of, save_and_go_on
from tests.checkpoint.test_save_load import everything
from tests.distributed.pipelines import all_batches, mine
from tests.distributed.scenario import Scenario
from tests.property.driver import Slots
from tests.ranks import RankPool, RankPools

ADAM = Scenario(optimizer="adam", steps=9, ids_per_table=40)


# ---- one moment ------------------------------------------------------------------------------------------------------


class Inserted:
    """A native table of weights, a row-sized and a row-wise state, few slots, and what its rows should be."""

    SPEC = ShardSpec(
        name="t",
        dim=3,
        num_row_states=1,
        num_row_wise_states=1,
        state_initial_values=(0.0, 0.0),
        num_slots=24,
        planned_rows=100,
    )
    WIDTH = 7

    def __init__(self) -> None:
        self.group, self.slots = ShardGroup([self.SPEC]), Slots(self.SPEC, self.SPEC.num_slots)
        self.group.bind_slots(0, *self.slots.bind())
        self.lock = threading.Lock()
        self.rows: dict[int, tuple[int, list[float]]] = {}
        self.is_over = False

    def plan(self, ids_N: Tensor) -> tuple[int, Tensor]:
        """(ordinal, slots); the rows are in them."""
        slots_N = torch.empty_like(ids_N)
        plan = self.group.plan(mix64(ids_N), torch.tensor([0, len(ids_N)]), torch.tensor([0]), slots_N)
        assert plan.status == PlanStatus.OK
        if plan.num_loads or plan.num_inits:
            self.group.swap(plan.ordinal)
        return plan.ordinal, slots_N

    def insert(self, seed: int) -> None:
        """What a thread does until it is told to stop: batches of old and new ids; each row tells who wrote it when."""
        rng = random.Random(seed)
        while not self.is_over:
            ids = rng.sample(range(4000), rng.randint(1, 12))
            with self.lock:  # as the log of a collection has it
                ordinal, slots_N = self.plan(torch.tensor(ids))
                records = torch.tensor(ids)[:, None] * 2**-4 + ordinal * 256 + torch.arange(self.WIDTH) * 2**-7
                self.slots.write(slots_N, records)
                self.group.commit(ordinal)
                self.rows |= {i: (ordinal, r) for i, r in zip(ids, records.tolist(), strict=True)}

    def snapshot(self) -> tuple[dict[int, tuple[int, list[float]]], tuple[Tensor, Tensor, Tensor]]:
        """(the rows of the moment in which it began, what was read of them while they changed)."""
        with self.lock:
            self.group.flush()
            handle, num_rows = self.group.export_begin(0)
            expected = dict(self.rows)
        parts = []
        while num_rows:
            n = min(num_rows, 5)
            ids, scores = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
            records = torch.full((n, self.WIDTH), torch.nan)
            self.group.export_next(handle, ids, scores, records)
            parts.append((ids, scores, records))
            num_rows -= n
        self.group.export_end(handle)
        ids, scores, records = (torch.cat(part) for part in zip(*parts, strict=True))
        return expected, (ids, scores, records)


def test_dr1023_fb3206_fb5986_rows_and_states_are_of_one_moment_while_four_threads_insert() -> None:
    """In no state is there a key that the others lack; what is restored into memory full of NaN is finite."""
    table = Inserted()
    threads = [threading.Thread(target=table.insert, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    found = []
    try:
        while len(found) < 12 or table.group.counters(0).write_backs < 5000:
            if table.rows:
                found.append(table.snapshot())
    finally:
        table.is_over = True
        for thread in threads:
            thread.join()
    moved = 0
    for expected, (ids, scores, records) in found:
        got = dict(zip(ids.tolist(), zip(scores.tolist(), records.tolist(), strict=True), strict=True))
        assert got == expected
        moved += got != {i: table.rows[i] for i in got}
    assert moved >= 10  # rows had changed by the end
    again, (ids, scores, records) = Inserted(), found[-1][1]
    again.group.set_ordinal(int(scores.max()))
    again.group.import_rows(0, ids, scores, records)
    for part_ids, part in zip(ids.split(20), records.split(20), strict=True):
        ordinal, slots_N = again.plan(part_ids)
        assert torch.equal(again.slots.read(slots_N), part) and bool(part.isfinite().all())
        again.group.commit(ordinal)


def load_what_is_not_finite(path: Path) -> tuple[dict[str, int], list[str], bool]:
    """Rows with NaN and infinity: (how many this rank loaded, its warnings, whether they are as they were)."""
    dmp, pipeline = build(ADAM)
    pipeline.progress(iter(mine(ADAM, all_batches(ADAM))))
    pipeline.reset()
    lookup = dmp.module.ebc.lookup
    (chunk,) = lookup.export_rows("user", chunk_rows=10_000)
    layout = lookup.tables[lookup.table_names.index("user")].layout
    records = chunk.records(layout).clone()
    records[0, 1], records[2, -1] = torch.nan, torch.inf  # a weight, and a value of the last state
    lookup.import_rows("user", RowChunk.of_records(chunk.ids_N, chunk.scores_N, records, layout))
    before = records_of(dmp)
    checkpoint.save(path, dmp)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridrec").addHandler(handler)
    try:
        loaded = checkpoint.load(path, build(ADAM)[0])
        again, _ = build(ADAM)
        checkpoint.load(path, again)
    finally:
        logging.getLogger("hybridrec").removeHandler(handler)
    assert any(str(int(chunk.ids_N[k])) in said[0] for k in (0, 2))
    return dict(loaded.non_finite), said, records_of(again) == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_dr1023_rows_that_are_not_finite_are_told_at_load(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    for counts, said, is_same in pools[world_size].run(load_what_is_not_finite, tmp_path):
        assert counts == {"user": 2} and len(said) == 2 and is_same
        assert "2 rows of table 'user' that this rank loaded hold NaN or infinity" in said[0]


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(2, [1]), *(pytest.param(w, range(12), marks=pytest.mark.slow) for w in (1, 2, 3))]
)
def test_tr4322_fb4304_re108_re125_snapshots_beside_training_and_eviction_are_of_a_step_boundary(
    pools: RankPools, tmp_path: Path, world_size: int, seeds: Any
) -> None:
    """At random moments, written while rows move, change and leave; the slow ones are more than a hundred."""
    expected = pools[world_size].run(by_step, EVICTING, MAX_ROWS, watchdog=600)
    num_snapshots = num_evicted = 0
    for seed in seeds:
        arguments = EVICTING, tmp_path / str(seed), MAX_ROWS, seed
        found = pools[world_size].run(snapshots_at_random_moments, *arguments, watchdog=600)
        for rank, (snapshots, losses, evicted) in enumerate(found):
            assert losses == expected[rank]["losses"]
            for step, records in snapshots.items():
                assert records == expected[rank]["records"][step], f"seed {seed}: not the rows of step {step}"
            num_evicted += evicted
        num_snapshots += len(found[0][0])
    assert num_evicted > 0  # while one of them was being written
    assert num_snapshots > (4 if len(seeds) == 1 else 100)


def train_beside_a_dump(path: Path) -> tuple[int, bool]:
    """Nothing of a dump gets to the disk until the last batch was trained: (batches that were, whether it is whole)."""
    may_write, original = threading.Event(), files.HashedFile.write
    dmp, pipeline = build(ADAM)
    batches, trained = iter(mine(ADAM, all_batches(ADAM))), 0

    def write(file: files.HashedFile, data: memoryview, *, rows: int = 0) -> None:
        may_write.wait(600)
        original(file, data, rows=rows)

    pipeline.progress(batches)
    group = dist.new_group(backend="gloo")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StopIteration):
        saving = checkpoint.Saving(path, dmp, pipeline._optimizer, pipeline=pipeline, group=group)
        expected = records_of(dmp)
        patch.setattr(files.HashedFile, "write", write)
        saving.start()
        while True:
            pipeline.progress(batches)
            trained += not saving.is_written
    may_write.set()
    checkpoint.load(saving.finish(), dmp, pipeline._optimizer, pipeline=pipeline)
    return trained, records_of(dmp) == expected


def test_re108_re125_a_dump_does_not_block_training(pool_2: RankPool, tmp_path: Path) -> None:
    assert pool_2.run(train_beside_a_dump, tmp_path) == [(ADAM.steps - 1, True)] * 2


# ---- other shapes ----------------------------------------------------------------------------------------------------


def test_tfra451_tfra374_tfra363_tfra364_tfra290_rows_are_the_same_on_any_number_of_ranks(
    pools: RankPools, tmp_path: Path
) -> None:
    """Id, row, states and score of what is left after evictions, each once; Adam's step and the counters of batches."""
    scenario = replace(EVICTING, optimizer="adam", steps=40)
    saved = pools[2].run(save_and_go_on, scenario, tmp_path, 40, max_rows=160)
    rows = everything(saved)
    assert sum(one["evicted"] for one in saved) > 0
    for of_table in rows.values():
        assert len(of_table) > 100 and len({record for record, _ in of_table.values()}) == len(of_table)
    for world_size in (1, 2, 3, 4):
        found = pools[world_size].run(load_rows, scenario, tmp_path, 160)
        assert everything(found) == rows
        assert sum(len(r) for one in found for r in one["records"].values()) == sum(map(len, rows.values()))
        assert {one["progress"] for one in found} == {(40, 40, 40, 40)}


def test_tr4173_tr3188_tr2911_tr4000_ranks_of_a_machine_may_be_others(pools: RankPools, tmp_path: Path) -> None:
    """`local_world_size` 1, 2 and 3 when saving and when loading; W as well."""
    for before, local in ((1, 1), (2, 1), (2, 2), (3, 3)):
        path = tmp_path / f"{before}_{local}"
        rows = everything(pools[before].run(on_machines, local, save_and_go_on, ADAM, path, 4))
        for after, other in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3)):
            assert everything(pools[after].run(on_machines, other, load_rows, ADAM, path)) == rows


# ---- beside tables of TorchRec itself --------------------------------------------------------------------------------


def train_save_load(path: Path) -> tuple[list[float], list[float], dict[str, tuple[int, ...]], bool]:
    """(losses behind the snapshot, those of a model that loaded it, its sizes of states, whether all tables are equal)
    of hashed and plain row-wise tables together."""
    plan, hashed = dict.fromkeys(mixed.PLAN, "row_wise"), dict.fromkeys(mixed.HASHED, "row_wise")
    dmp, optimizer = mixed.build(plan, hashed=hashed)
    mixed.train(dmp, optimizer, range(3))
    checkpoint.save(path, dmp, optimizer)
    other, other_optimizer = mixed.build(plan, hashed=hashed)
    checkpoint.load(path, other, other_optimizer)
    losses = mixed.train(dmp, optimizer, range(3, 7)), mixed.train(other, other_optimizer, range(3, 7))
    tensors = mixed.tensors_of(other, other_optimizer)
    states = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ":" in name}
    return *losses, states, mixed.same(mixed.tensors_of(dmp, optimizer), tensors)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tr3037_tr3239_tr3444_hashed_and_plain_tables_together(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    """Trained, saved and loaded: plain tables keep their shape and the size of their states beside hashed ones."""
    for losses, again, states, is_same in pools[world_size].run(train_save_load, tmp_path):
        assert again == losses and len(set(losses)) == 4 and is_same
        assert len(states) == 5 and set(states.values()) == {(mixed.ROWS, mixed.DIM)}
