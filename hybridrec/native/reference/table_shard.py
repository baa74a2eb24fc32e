"""`TableShard`: the shard of one table. Decisions are made without changing anything, then applied as a whole.

That is why a refusal has nothing to take back here; the C++ core changes as it goes and takes back. Both end equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrec.errors import ConfigError
from hybridrec.native.protocol import PlanStatus, ShardSpec
from hybridrec.native.reference import id_map
from hybridrec.native.reference.id_map import IdMap
from hybridrec.native.reference.initial_rows import initial_rows
from hybridrec.native.reference.journal import Move, TableJournal
from hybridrec.native.reference.mix64 import MASK
from hybridrec.native.reference.removal_log import RemovalLog
from hybridrec.native.reference.row_store import RowStore
from hybridrec.native.reference.slot_index import SlotIndex

Records = NDArray[np.float32]

EVICTION_DISTANCE = 12
"""A row used by one of so many last batches is not evicted: the greatest depth, whatever depth is in use."""
ROW_INDEX_BYTES = 24
"""Accounted for a row number: its line of the id map and what is kept beside it. Dicts and lists take more."""
SLOT_INDEX_BYTES = 24
"""Accounted for a slot."""


@dataclass(frozen=True)
class Refusal:
    """Why a batch does not fit."""

    status: PlanStatus
    needed: int
    available: int
    pinned: int = 0


@dataclass(frozen=True)
class Decision:
    """What a plan will do to one table."""

    keys: list[int]
    """Unique keys in order of first occurrence."""
    rows: list[int]
    """Their row numbers, those of new keys included."""
    new_rows: set[int]
    evicted: list[int]
    """Rows to drop, lowest (score, key) first."""
    moves: list[Move]
    slot_of_key: dict[int, int]
    """Of a batch that is aside: the key's number in order of first occurrence."""
    accesses: int
    access_hits: int
    is_aside: bool


@dataclass
class TableCounters:
    """What `Counters` counts as it happens; the rest is looked up."""

    accesses: int = 0
    access_hits: int = 0
    uniques: int = 0
    unique_hits: int = 0
    inserted: int = 0
    loads: int = 0
    victims: int = 0
    write_backs: int = 0
    grown: int = 0
    evicted: int = 0
    rejected: int = 0


class SlotMemory:
    """Records in the slots of one table: host memory that the caller gave to ``bind_slots``."""

    def __init__(
        self, weights: Records, row_states: Sequence[Records], row_wise_states: Sequence[NDArray[np.float32]]
    ) -> None:
        self.weights = weights
        self._wide = [weights, *row_states]
        self._narrow = list(row_wise_states)

    def read(self, slot: int) -> NDArray[np.float32]:
        """A copy of a slot's record."""
        return np.concatenate([*(a[slot] for a in self._wide), *(a[slot : slot + 1] for a in self._narrow)])

    def write(self, slot: int, record: NDArray[np.float32]) -> None:
        """Fill a slot."""
        start = 0
        for array in self._wide:
            array[slot] = record[start : start + array.shape[1]]
            start += array.shape[1]
        for i, array in enumerate(self._narrow):
            array[slot] = record[start + i]


class TableShard:
    """Id map, slot index and row store of one table."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.record_floats = spec.record_floats
        self.ids = IdMap()
        self.slots = SlotIndex(spec.num_slots)
        self.store = RowStore(self.record_floats)
        self.memory: SlotMemory | None = None
        self.counters = TableCounters()
        self.removals: RemovalLog | None = None
        """None: not kept, or lost."""
        self.kept: set[int] = set()
        """Rows that the next plan does not evict: batches aside have no pins that would keep them."""

    # ---- plan: decide, then apply --------------------------------------------------------------------------------

    def decide(self, keys: list[int], ordinal: int, *, is_aside: bool) -> Decision | Refusal:
        """What a batch with these keys (occurrences, in order) needs. Changes nothing."""
        occurrences: dict[int, int] = {}
        for key in keys:
            occurrences[key] = occurrences.get(key, 0) + 1
        uniques = list(occurrences)
        known = {key: row for key in uniques if (row := self.ids.find(key)) is not None}
        num_new = len(uniques) - len(known)

        evicted = self._decide_evictions(num_new, set(known.values()), ordinal)
        if isinstance(evicted, Refusal):
            return evicted
        numbers = iter(self.ids.next_numbers(num_new))
        rows = [known[key] if key in known else next(numbers) for key in uniques]
        new_rows = {row for key, row in zip(uniques, rows, strict=True) if key not in known}
        if new_rows and max(new_rows) >= id_map.MAX_ROWS:
            return Refusal(PlanStatus.TOO_MANY_ROWS, max(new_rows) + 1, id_map.MAX_ROWS)

        if is_aside:
            return Decision(
                keys=uniques,
                rows=rows,
                new_rows=new_rows,
                evicted=evicted,
                moves=[],
                slot_of_key={key: i for i, key in enumerate(uniques)},
                accesses=len(keys),
                access_hits=0,
                is_aside=True,
            )
        slot_of_row = {row: slot for row in known.values() if (slot := self.slots.slot_of(row)) >= 0}
        hits = sum(n for key, n in occurrences.items() if known.get(key) in slot_of_row)
        moves = self._decide_moves([row for row in rows if row not in slot_of_row], new_rows, set(slot_of_row.values()))
        if moves is None:
            return Refusal(PlanStatus.NO_SLOTS, len(uniques), self.slots.num_slots, self.slots.num_pinned)
        slot_of_row |= {move.row: move.slot for move in moves}
        return Decision(
            keys=uniques,
            rows=rows,
            new_rows=new_rows,
            evicted=evicted,
            moves=moves,
            slot_of_key={key: slot_of_row[row] for key, row in zip(uniques, rows, strict=True)},
            accesses=len(keys),
            access_hits=hits,
            is_aside=False,
        )

    def _decide_evictions(self, num_new: int, in_use: set[int], ordinal: int) -> list[int] | Refusal:
        quota, needed = self.spec.max_rows, len(self.ids) + num_new
        if not quota or not num_new or needed <= quota or self.spec.full_policy == "grow":
            return []
        scores, keys = self.ids.score_of_row, self.ids.key_of_row
        evictable: list[int] = []
        if self.spec.full_policy == "evict":
            evictable = [
                row
                for row in self.ids.live_rows()
                if scores[row] < ordinal - EVICTION_DISTANCE
                and row not in in_use
                and row not in self.kept
                and not self._is_pinned(row)
            ]
        if len(evictable) < needed - quota:
            return Refusal(PlanStatus.QUOTA, needed, quota)
        return heapq.nsmallest(needed - quota, evictable, key=lambda row: (scores[row], keys[row] & MASK))

    def _decide_moves(self, rows: list[int], new_rows: set[int], in_use: set[int]) -> list[Move] | None:
        free = self.slots.next_free(len(rows))
        victims = self.slots.next_victims(len(rows) - len(free), in_use)
        if len(free) + len(victims) < len(rows):
            return None
        moves = [Move(row, slot, row in new_rows) for row, slot in zip(rows, free, strict=False)]
        for row, s in zip(rows[len(free) :], victims, strict=True):
            slot = self.slots[s]
            moves.append(Move(row, s, row in new_rows, slot.row, slot.is_dirty, slot.last_use))
        return moves

    def _is_pinned(self, row: int) -> bool:
        slot = self.slots.slot_of(row)
        return slot >= 0 and self.slots[slot].pins > 0

    def extra_host_bytes(self, decision: Decision) -> int:
        """Host memory that applying a decision will allocate."""
        numbers = max([self.ids.num_numbers, *(row + 1 for row in decision.new_rows)])
        written = decision.new_rows if decision.is_aside else [m.victim for m in decision.moves if m.is_victim_dirty]
        chunks = self.store.missing_chunks(written)
        return (numbers - self.ids.num_numbers) * ROW_INDEX_BYTES + self.store.chunk_bytes(len(chunks))

    def apply(self, decision: Decision, ordinal: int, plan_number: int) -> TableJournal:
        """Do what was decided; nothing moves yet.

        Args:
            decision: Of `decide`.
            ordinal: Becomes the rows' score.
            plan_number: Becomes the slots' last use. Unlike an ordinal, which an undo gives back, never used twice.
        """
        for row in decision.evicted:
            self.ids.drop(row)
        first_beyond = self.spec.planned_rows - len(self.ids)  # of the new rows, counted from 0
        old_scores: dict[int, int] = {}
        inserted: dict[int, bool] = {}
        for key, row in zip(decision.keys, decision.rows, strict=True):
            if row in decision.new_rows:
                self.ids.insert(key, ordinal)
                inserted[row] = len(inserted) >= first_beyond
                old_scores[row] = ordinal
            else:
                old_scores[row] = self.ids.score_of_row[row]
                self.ids.score_of_row[row] = ordinal
        for move in decision.moves:
            if move.victim >= 0:
                self.slots.leave(move.slot)
            self.slots.take(move.slot, move.row)
        for position, row in enumerate([] if decision.is_aside else decision.rows):
            slot = self.slots[self.slots.slot_of(row)]
            slot.pins += 1
            slot.last_use = (plan_number, position)
        journal = TableJournal(
            old_scores=old_scores,
            inserted=inserted,
            evicted=decision.evicted,
            moves=decision.moves,
            accesses=decision.accesses,
            access_hits=decision.access_hits,
            unique_hits=0 if decision.is_aside else len(decision.rows) - len(decision.moves),
            is_aside=decision.is_aside,
        )
        self.store.allocate(move.victim for move in journal.write_backs)
        if decision.is_aside:
            self._store_new_rows(sorted(decision.new_rows))
        return journal

    def _store_new_rows(self, rows: list[int]) -> None:
        self.store.allocate(rows)
        keys = np.array([self.ids.key_of_row[row] for row in rows], dtype=np.int64)
        for row, record in zip(rows, self.initial_records(keys), strict=True):
            self.store.write(row, record)

    # ---- moving values -------------------------------------------------------------------------------------------

    def write_back(self, journal: TableJournal, memory: SlotMemory) -> None:
        """Dirty victims: slots -> store."""
        for move in journal.write_backs:
            self.store.write(move.victim, memory.read(move.slot))

    def load(self, journal: TableJournal, memory: SlotMemory) -> None:
        """Loads and new rows -> slots."""
        for move, record in zip(journal.moves, self.incoming(journal), strict=True):
            memory.write(move.slot, record)

    def incoming(self, journal: TableJournal) -> Records:
        """float32 [L, record]: loads and new rows in the order of their moves."""
        moves = journal.moves
        records = np.empty((len(moves), self.record_floats), dtype=np.float32)
        keys = np.array([self.ids.key_of_row[move.row] for move in moves if move.is_new], dtype=np.int64)
        new = iter(self.initial_records(keys))
        for i, move in enumerate(moves):
            records[i] = next(new) if move.is_new else self.store.read(move.row)
        return records

    def initial_records(self, keys: NDArray[np.int64]) -> Records:
        """float32 [n, record]: initial weights, then every state's initial value."""
        spec = self.spec
        records = np.empty((len(keys), self.record_floats), dtype=np.float32)
        initial_rows(spec, keys, records[:, : spec.weight_words])
        wide = np.array(spec.state_initial_values[: spec.num_row_states], dtype=np.float32).repeat(spec.dim)
        narrow = np.array(spec.state_initial_values[spec.num_row_states :], dtype=np.float32)
        records[:, spec.weight_words :] = np.concatenate([wide, narrow])
        return records

    def flush(self, records: Iterable[NDArray[np.float32]]) -> None:
        """Records of all dirty slots, in order -> store; the slots are clean then."""
        slots = self.slots.dirty_slots()
        self.store.allocate(self.slots[s].row for s in slots)
        for s, record in zip(slots, records, strict=True):
            self.store.write(self.slots[s].row, record)
            self.slots[s].is_dirty = False

    def host_bytes_of_flush(self) -> int:
        """Host memory that `flush` will allocate."""
        rows = [self.slots[s].row for s in self.slots.dirty_slots()]
        return self.store.chunk_bytes(len(self.store.missing_chunks(rows)))

    def victims_left(self, journal: TableJournal) -> None:
        """Victims are in the store now."""
        self.counters.victims += sum(move.victim >= 0 for move in journal.moves)
        self.counters.write_backs += len(journal.write_backs)

    def loads_arrived(self, journal: TableJournal) -> None:
        """Every value is where the plan says."""
        for move in journal.moves:
            self.slots[move.slot].is_dirty = move.is_new
            self.counters.loads += not move.is_new

    # ---- the end of a batch --------------------------------------------------------------------------------------

    def commit(self, journal: TableJournal) -> None:
        """The rows were updated in their slots."""
        for row in [] if journal.is_aside else journal.old_scores:
            slot = self.slots[self.slots.slot_of(row)]
            slot.is_dirty = True
        self.unpin(journal)
        counters = self.counters
        counters.accesses += journal.accesses
        counters.access_hits += journal.access_hits
        counters.uniques += len(journal.old_scores)
        counters.unique_hits += journal.unique_hits
        counters.inserted += len(journal.inserted)
        counters.grown += sum(journal.inserted.values())
        counters.evicted += len(journal.evicted)

    def finalize(self, journal: TableJournal) -> None:
        """No undo can bring the evicted rows back any more."""
        for row in journal.evicted:
            if self.removals is not None:
                self.removals.add(self.ids.key_of_row[row])
            slot = self.slots.slot_of(row)
            if slot >= 0:
                self.slots.free(slot)
            self.ids.free(row)

    def undo(self, journal: TableJournal, later: list[tuple[TableJournal, bool]]) -> None:
        """Take back what a batch did to this table, but for its moves.

        Args:
            journal: Its journal.
            later: Journals of the open batches after it, oldest first, each with whether that batch is committed.
        """
        for row, old_score in reversed(journal.old_scores.items()):
            heir = next(((j, committed) for j, committed in later if row in j.old_scores), None)
            if row not in journal.inserted:
                if heir is None:
                    self.ids.score_of_row[row] = old_score
                else:
                    heir[0].old_scores[row] = old_score
            elif heir is None:
                self._remove(row)
            else:
                self._hand_over(row, journal.inserted[row], *heir)
        if not later:
            for row in journal.evicted:
                self.ids.restore(row)
        else:
            # As if the batch had never been: the rows that it dropped come back, the last one first, as far as later
            # batches left them room and did not make a new row of the same key.
            passed = []
            for row in reversed(journal.evicted):
                if len(self.ids) < self.spec.max_rows and self.ids.find(self.ids.key_of_row[row]) is None:
                    self.ids.restore(row)
                else:
                    passed.append(row)
            heir_journal, is_committed = later[0]
            heir_journal.evicted[:0] = reversed(passed)
            self.counters.evicted += len(passed) * is_committed

    def undo_moves(self, journal: TableJournal, *, is_scattered: bool) -> None:
        """Take rows that never came out of their slots again; victims that did not leave get theirs back.

        Args:
            journal: Of the newest open batch.
            is_scattered: Its victims have left: their values are in the store.
        """
        for move in reversed(journal.moves):
            self.slots.free(move.slot)
            # A victim that "evict" had dropped may be gone for good by now.
            if move.victim >= 0 and not is_scattered and not self.ids.is_free(move.victim):
                self.slots.take(move.slot, move.victim)
                self.slots[move.slot].is_dirty = move.is_victim_dirty
                self.slots[move.slot].last_use = move.victim_last_use

    def unpin(self, journal: TableJournal) -> None:
        """Let go of the slots of a batch."""
        for row in [] if journal.is_aside else journal.old_scores:
            self.slots[self.slots.slot_of(row)].pins -= 1

    def _hand_over(self, row: int, is_beyond: bool, heir: TableJournal, is_committed: bool) -> None:
        heir.inserted[row] = is_beyond
        if is_committed:
            self.counters.inserted += 1
            self.counters.grown += is_beyond

    def _remove(self, row: int) -> None:
        slot = self.slots.slot_of(row)
        if slot >= 0:
            self.slots.free(slot)
        self.ids.drop(row)
        self.ids.free(row)

    # ---- rows that come from outside --------------------------------------------------------------------------------

    def host_bytes_of_import(self, keys: list[int]) -> int:
        """Host memory that `import_rows` will allocate."""
        new = list(dict.fromkeys(key for key in keys if self.ids.find(key) is None))
        numbers = self.ids.next_numbers(len(new))
        known = [row for key in keys if (row := self.ids.find(key)) is not None]
        chunks = self.store.missing_chunks([*numbers, *known])
        beyond = sum(number >= self.ids.num_numbers for number in numbers)
        return self.store.chunk_bytes(len(chunks)) + beyond * ROW_INDEX_BYTES

    def import_rows(self, keys: list[int], scores: list[int], records: Records) -> None:
        """Insert or replace rows; their values go to the store, what a slot holds of them is forgotten."""
        self.removals = None  # these rows change without a batch that trains them
        for key, score, record in zip(keys, scores, records, strict=True):
            row = self.ids.find(key)
            if row is None:
                row = self.ids.insert(key, score)
            elif self.slots.slot_of(row) >= 0:
                self.slots.free(self.slots.slot_of(row))
            self.ids.score_of_row[row] = score
            self.store.allocate([row])
            self.store.write(row, record)

    def without_rows(self) -> TableShard:
        """A shard in this one's place, with its slots' memory and counters."""
        fresh = TableShard(self.spec)
        fresh.slots = SlotIndex(self.slots.num_slots)
        fresh.memory, fresh.counters = self.memory, self.counters
        return fresh

    # ---- records of the store --------------------------------------------------------------------------------------

    def require_stored(self, rows: list[int], call: str) -> None:
        """Refuse rows that are not live, or newer in a slot than in the store."""
        live = set(self.ids.live_rows())
        for row in rows:
            slot = self.slots.slot_of(row)
            if row not in live or (slot >= 0 and self.slots[slot].is_dirty):
                why = "is not live" if row not in live else f"is newer in slot {slot}; call flush() first"
                raise ConfigError(f"table {self.spec.name!r}: {call} of row {row}, which {why}.")

    # ---- what is where -------------------------------------------------------------------------------------------

    def weights_on_host(self, keys: list[int]) -> Records:
        """float32 [n, words]: rows that are in no slot, from the store; initial rows of unknown keys."""
        weights = np.empty((len(keys), self.spec.weight_words), dtype=np.float32)
        rows = [self.ids.find(key) for key in keys]
        unknown = [i for i, row in enumerate(rows) if row is None]
        weights[unknown] = self.initial_records(np.array(keys, dtype=np.int64)[unknown])[:, : self.spec.weight_words]
        for i, row in enumerate(rows):
            if row is not None:
                weights[i] = self.store.read(row)[: self.spec.weight_words]
        return weights

    @property
    def host_bytes(self) -> int:
        """Host memory that this shard accounts for."""
        index = self.ids.num_numbers * ROW_INDEX_BYTES + self.slots.num_slots * SLOT_INDEX_BYTES
        return index + self.store.host_bytes + (0 if self.removals is None else self.removals.host_bytes)
