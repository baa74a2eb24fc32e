"""Mutations of the reference that the comparison with the model must find: proof that it can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridrec.errors import StateError
from hybridrec.native import ShardGroup
from hybridrec.native.reference.id_map import IdMap
from hybridrec.native.reference.journal import BatchJournal
from hybridrec.native.reference.open_batches import OpenBatches
from hybridrec.native.reference.shard_group import ShardGroup as ReferenceGroup
from hybridrec.native.reference.slot_index import SlotIndex
from hybridrec.native.reference.table_shard import TableShard
from tests.property.driver import DisagreementError, Driver, make_specs, run_random

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def skip_one_write_back(patch: pytest.MonkeyPatch) -> None:
    def write_back(self: TableShard, journal: Any, memory: Any) -> None:
        for move in journal.write_backs[1:]:
            self.store.write(move.victim, memory.read(move.slot))

    patch.setattr(TableShard, "write_back", write_back)


@mutant
def load_before_write_back(patch: pytest.MonkeyPatch) -> None:
    load, write_back = TableShard.load, TableShard.write_back

    def do_nothing(self: TableShard, journal: Any, memory: Any) -> None:
        pass

    def load_first(self: TableShard, journal: Any, memory: Any) -> None:
        load(self, journal, memory)
        write_back(self, journal, memory)

    patch.setattr(TableShard, "write_back", do_nothing)
    patch.setattr(TableShard, "load", load_first)


@mutant
def release_a_pin_early(patch: pytest.MonkeyPatch) -> None:
    """The pins that nobody sees: the choice of victims overlooks one."""
    original = SlotIndex.next_victims

    def next_victims(self: SlotIndex, n: int, in_use: set[int]) -> list[int]:
        pinned = [slot for slot in self._slots if slot.pins]
        for slot in pinned[:1]:
            slot.pins -= 1
        victims = original(self, n, in_use)
        for slot in pinned[:1]:
            slot.pins += 1
        return victims

    patch.setattr(SlotIndex, "next_victims", next_victims)


@mutant
def forget_the_old_score(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.undo

    def undo(self: TableShard, journal: Any, later: Any) -> None:
        for row in journal.old_scores:
            journal.old_scores[row] = self.ids.score_of_row[row]
        original(self, journal, later)

    patch.setattr(TableShard, "undo", undo)


@mutant
def keep_a_dead_row_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IdMap, "free", lambda self, row: None)


@mutant
def forget_that_a_trained_slot_is_dirty(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.commit

    def commit(self: TableShard, journal: Any) -> None:
        dirty = self.slots.dirty_slots()
        original(self, journal)
        for slot in set(self.slots.dirty_slots()) - set(dirty):
            self.slots[slot].is_dirty = False

    patch.setattr(TableShard, "commit", commit)


@mutant
def do_not_hand_a_new_row_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableShard, "_hand_over", lambda self, row, is_beyond, heir, is_committed: None)


@mutant
def do_not_bring_evicted_rows_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IdMap, "restore", lambda self, row: self.free(row))


@mutant
def evict_the_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hybridrec.native.reference.table_shard.heapq.nsmallest", lambda n, rows, key: sorted(rows)[-n:])


@mutant
def evict_rows_that_may_be_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hybridrec.native.reference.table_shard.EVICTION_DISTANCE", 11)


@mutant
def leave_states_as_they_were_in_the_slot(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.initial_records

    def initial_records(self: TableShard, keys: Any) -> Any:
        records = original(self, keys)
        records[:, self.spec.dim :] = 0
        return records

    patch.setattr(TableShard, "initial_records", initial_records)


@mutant
def first_in_first_out_victims(patch: pytest.MonkeyPatch) -> None:
    def next_victims(self: SlotIndex, n: int, in_use: set[int]) -> list[int]:
        found = [s for s, slot in enumerate(self._slots) if slot.row >= 0 and not slot.pins and s not in in_use]
        return found[:n]

    patch.setattr(SlotIndex, "next_victims", next_victims)


@mutant
def allow_a_commit_before_the_swap(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceGroup.commit

    def commit(self: ReferenceGroup, ordinal: int) -> None:
        for batch in self._open:
            batch.is_scattered = batch.is_gathered = True
        original(self, ordinal)

    patch.setattr(ReferenceGroup, "commit", commit)


@mutant
def change_a_score_when_a_plan_is_refused(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.decide

    def decide(self: TableShard, keys: list[int], ordinal: int, *, is_aside: bool) -> Any:
        decision = original(self, keys, ordinal, is_aside=is_aside)
        row = self.ids.find(keys[0]) if keys else None
        if row is not None and not hasattr(decision, "moves"):
            self.ids.score_of_row[row] = ordinal
        return decision

    patch.setattr(TableShard, "decide", decide)


@mutant
def keep_the_ordinal_of_an_undone_batch(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceGroup.undo

    def undo(self: ReferenceGroup, ordinal: int) -> None:
        newest = self._last_ordinal
        original(self, ordinal)
        self._last_ordinal = newest

    patch.setattr(ReferenceGroup, "undo", undo)


@mutant
def order_slots_by_an_ordinal_that_is_given_again(patch: pytest.MonkeyPatch) -> None:
    original = TableShard.apply

    def apply(self: TableShard, decision: Any, ordinal: int, plan_number: int) -> Any:
        return original(self, decision, ordinal, ordinal)

    patch.setattr(TableShard, "apply", apply)


@mutant
def count_a_gathered_batch_as_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchJournal, "is_moved", property(lambda self: not self.has_moves or self.is_gathered))


@mutant
def undo_while_victims_are_on_their_way(patch: pytest.MonkeyPatch) -> None:
    def to_undo(self: OpenBatches, ordinal: int) -> Any:
        batch = self.in_flight(ordinal, "undo")
        later = [b for b in self if b.ordinal > ordinal]
        if later and not batch.is_moved:
            raise StateError("undo the newest first")
        return batch, later

    patch.setattr(OpenBatches, "to_undo", to_undo)


@mutant
def lose_victims_that_are_scattered_last(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceGroup.scatter_victims

    def scatter_victims(self: ReferenceGroup, ordinal: int, staging: Any) -> None:
        is_last = any(batch.is_gathered and batch.ordinal == ordinal for batch in self._open)
        original(self, ordinal, np.zeros_like(staging) if is_last else staging)

    patch.setattr(ReferenceGroup, "scatter_victims", scatter_victims)


@mutant
def forget_that_a_flushed_slot_is_clean(patch: pytest.MonkeyPatch) -> None:
    def flush(self: TableShard, records: Any) -> None:
        slots = self.slots.dirty_slots()
        self.store.allocate(self.slots[s].row for s in slots)
        for s, record in zip(slots, records, strict=True):
            self.store.write(self.slots[s].row, record)

    patch.setattr(TableShard, "flush", flush)


@mutant
def flush_records_of_other_tables_slots(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceGroup.flush_records
    patch.setattr(ReferenceGroup, "flush_records", lambda self, staging: original(self, staging[::-1].copy()))


def _walk() -> None:
    for policy in ("evict", "grow"):
        for seed in range(4):
            driver = Driver({"mutant": lambda specs: ShardGroup(specs, core="reference")}, make_specs(policy))
            run_random(driver, random.Random(seed), 400)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(DisagreementError):
        _walk()


def test_the_model_finds_nothing_in_what_is_right() -> None:
    _walk()
    assert len(MUTANTS) >= 21
