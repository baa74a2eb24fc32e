"""Rows that leave a shard group for a snapshot, and rows that come into it, against the model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hybridrec.errors import ConfigError, StateError
from hybridrec.native import ShardGroup
from hybridrec.native.reference import row_snapshot, shard_group
from hybridrec.native.reference.shard_group import ShardGroup as ReferenceGroup
from hybridrec.native.reference.table_shard import TableShard
from tests.property.driver import DisagreementError, all_cores, make_specs
from tests.property.snapshots import SnapshotDriver, random_walk

POLICIES = ("grow", "evict", "error")


def start(policy: str = "grow", *, slots: tuple[int, int] = (3, 4), max_rows: int = 9) -> SnapshotDriver:
    return SnapshotDriver(all_cores(), make_specs(policy, slots=slots, max_rows=max_rows))


def train(driver: SnapshotDriver, ids: list[list[int]]) -> None:
    ordinal = driver.plan(ids).ordinal
    if not driver.model.is_moved[ordinal]:
        driver.swap(ordinal)
    driver.commit(ordinal)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_walk_with_snapshots(policy: str) -> None:
    driver = start(policy, slots=(7, 5))
    random_walk(driver, random.Random(policy), 900)
    assert driver.num_read > 20 and driver.num_imported > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_walks_with_snapshots(policy: str, seed: int) -> None:
    rng = random.Random(f"snapshots {policy} {seed}")
    driver = start(policy, slots=(rng.randint(3, 10), rng.randint(2, 8)), max_rows=rng.randint(5, 14))
    random_walk(driver, rng, 1700, num_ids=rng.randint(8, 20))


def test_a_snapshot_is_the_state_without_the_batches_in_flight() -> None:
    driver = start(slots=(6, 4))
    train(driver, [[1, 2, 3], [5], []])
    driver.plan([[2, 4], [], []])
    driver.swap(2)
    driver.plan([[4, 3], [6], []])
    driver.swap(3)
    driver.flush()
    driver.begin_export(0)
    assert [(id_, score) for id_, score, _ in driver.exports[0].rows] == [(1, 1), (2, 1), (3, 1)]
    driver.commit(2)
    driver.commit(3)
    driver.read_export(driver.exports[0], 10)


def test_rows_that_are_written_back_before_they_were_read_are_kept() -> None:
    driver = start(slots=(2, 4))
    train(driver, [[1, 2], [], []])
    driver.flush()
    driver.begin_export(0)
    for ids in ([1, 2], [3, 4], [1, 3], [2, 4]):  # trained, evicted from their slots, trained again
        train(driver, [ids, [], []])
    driver.begin_export(1)
    driver.flush()
    driver.begin_export(0)
    while driver.exports:
        driver.read_export(driver.exports[-1], 1)


def test_an_evicted_row_whose_number_is_given_again_is_still_in_the_snapshot() -> None:
    driver = start("evict", slots=(2, 4), max_rows=2)
    train(driver, [[1, 2], [], []])
    for _ in range(12):
        train(driver, [[], [], []])
    driver.flush()
    driver.begin_export(0)
    train(driver, [[3, 4], [], []])
    train(driver, [[3, 4], [], []])
    driver.flush()
    driver.read_export(driver.exports[0], 2)
    assert sorted(i for i, _, _ in driver.committed(0)) == [3, 4]


def test_rows_that_a_batch_in_flight_evicted_are_in_the_snapshot() -> None:
    driver = start("evict", slots=(2, 4), max_rows=2)
    train(driver, [[1, 2], [], []])
    for _ in range(12):
        train(driver, [[], [], []])
    driver.plan([[3, 4], [], []])
    driver.swap(14)
    driver.flush()
    driver.begin_export(0)
    assert [id_ for id_, _, _ in driver.exports[0].rows] == [1, 2]
    driver.commit(14)
    driver.read_export(driver.exports[0], 2)


def test_only_rows_trained_since() -> None:
    driver = start()
    for ids in ([1, 2], [2], [3]):
        train(driver, [ids, [], []])
    driver.flush()
    driver.begin_export(0, above_score=1)
    assert [(id_, score) for id_, score, _ in driver.exports[0].rows] == [(2, 2), (3, 3)]
    driver.read_export(driver.exports[0], 2)


def test_imported_rows_go_on_like_those_that_were_trained_here() -> None:
    driver = start("evict", slots=(3, 4), max_rows=3)
    driver.set_ordinal(4)
    rng = random.Random(1)
    driver.import_rows(0, [1, -1, 2**63 - 1, -(2**63), 1], rng)
    driver.set_ordinal(20)
    train(driver, [[1, 5], [], []])
    driver.import_rows(0, [5, 7], rng)  # 5 is in a slot, whose value is not its own any more
    driver.read([[1, 5, 7], [], []])
    train(driver, [[5, 7, 7], [], []])
    driver.flush()
    assert driver.model.tables[0].counters()["evicted"] > 0


@pytest.mark.parametrize("core", ["reference", "compiled"])
def test_what_cannot_be_imported_or_exported_is_refused_and_changes_nothing(core: Any) -> None:
    group = ShardGroup(make_specs(), core=core, host_budget_bytes=3 * 2**20)
    ids, records = torch.arange(3), torch.zeros(3, 8)
    with pytest.raises(ConfigError, match="id 0 has score 1. Accepted: 1 to 0, the newest ordinal"):
        group.import_rows(0, ids, torch.ones(3, dtype=torch.int64), records)
    group.set_ordinal(5)
    for score in (0, 6, -1):
        with pytest.raises(ConfigError, match=f"has score {score}"):
            group.import_rows(0, ids, torch.full((3,), score), records)
    with pytest.raises(ConfigError, match="records has shape"):
        group.import_rows(0, ids, torch.full((3,), 5), records[:, :7].contiguous())
    many = torch.arange(400_000)
    with pytest.raises(StateError, match="needs .* bytes of host memory in all, the budget is"):
        group.import_rows(0, many, torch.full_like(many, 5), torch.zeros(len(many), 8))
    assert group.counters(0).rows == 0
    group.import_rows(0, ids, torch.full((3,), 5), records)
    with pytest.raises(StateError, match="set_ordinal: 4 is below the newest ordinal, 5"):
        group.set_ordinal(4)
    handle, num_rows = group.export_begin(0)
    assert num_rows == 3
    with pytest.raises(StateError, match="clear_rows: table 'uniform' is being exported"):
        group.clear_rows(0)
    with pytest.raises(ConfigError, match="export_next"):
        group.export_next(handle, torch.empty(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64), torch.ones(4, 8))
    group.export_end(handle)
    group.export_end(handle)
    with pytest.raises(StateError, match="has ended or never was"):
        group.export_next(handle, ids, ids.clone(), records)
    group.clear_rows(0)
    assert group.counters(0).rows == 0


def _forget_batches_in_flight(patch: pytest.MonkeyPatch) -> None:
    original = row_snapshot.committed_scores
    patch.setattr(shard_group, "committed_scores", lambda ids, _open, table, rows: original(ids, [], table, rows))


def _share_the_records(patch: pytest.MonkeyPatch) -> None:
    """As if nothing were copied before it is overwritten."""
    original = ReferenceGroup.export_begin

    def export_begin(self: ReferenceGroup, table: int, above_score: int) -> tuple[int, int]:
        handle, n = original(self, table, above_score)
        snapshot, shard = self._exports[handle], self._tables[table]
        rows = {i: row for row, i in zip(shard.ids.live_rows(), _ids(shard), strict=True)}
        snapshot._rows = [
            row._replace(record=shard.store.read(rows[row.id])) if row.id in rows else row for row in snapshot._rows
        ]
        return handle, n

    patch.setattr(ReferenceGroup, "export_begin", export_begin)


def _keep_the_slot(patch: pytest.MonkeyPatch) -> None:
    """An imported row that is in a slot is read from there."""
    original = TableShard.import_rows

    def import_rows(self: TableShard, keys: list[int], scores: list[int], records: Any) -> None:
        free = self.slots.free
        self.slots.free = lambda slot: None  # type: ignore[method-assign]
        original(self, keys, scores, records)
        self.slots.free = free  # type: ignore[method-assign]

    patch.setattr(TableShard, "import_rows", import_rows)


def _ids(shard: TableShard) -> list[int]:
    return row_snapshot.ids_of(shard.ids, list(shard.ids.live_rows()))


@pytest.mark.parametrize("mutate", [_forget_batches_in_flight, _share_the_records, _keep_the_slot])
def test_mutants_are_caught(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    specs = make_specs("evict", slots=(7, 5))
    driver = SnapshotDriver({"reference": lambda s: ShardGroup(s, core="reference")}, specs)
    with pytest.raises(DisagreementError):
        random_walk(driver, random.Random("mutant"), 3000)
