"""`ShardGroup`: the shards of one collection, and what each batch does to them. See ``protocol`` for each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridrec.errors import CapacityError, ConfigError, StateError
from hybridrec.native.protocol import Counters, Plan, PlanStatus, ShardSpec
from hybridrec.native.reference.journal import BatchJournal
from hybridrec.native.reference.mix64 import mix64, unmix64
from hybridrec.native.reference.open_batches import OpenBatches
from hybridrec.native.reference.removal_log import RemovalLog
from hybridrec.native.reference.row_snapshot import RowSnapshot, SnapshotRow, committed_scores, ids_of
from hybridrec.native.reference.table_shard import Decision, Records, Refusal, SlotMemory, TableShard

Int64s = NDArray[np.int64]

MAX_PLANS = 2**32 - 2
"""Scores and last uses of slots are uint32."""


class ShardGroup:
    """The reference implementation of `hybridrec.native.protocol.ShardGroup`; arrays are numpy arrays."""

    def __init__(self, specs: Sequence[ShardSpec], *, host_budget_bytes: int = 0, num_threads: int = 1) -> None:
        """
        Args:
            specs: One a table.
            host_budget_bytes: Most host memory; 0 = no limit.
            num_threads: No effect: this implementation has one thread.
        """
        self._tables = [TableShard(spec) for spec in specs]
        self._budget = host_budget_bytes
        self._open = OpenBatches()
        self._last_ordinal = 0
        self._num_plans = 0  # that succeeded, undone ones included
        # Rises with whatever changes which slots are dirty, or their rows. A move needs no count: its plan had one.
        self._dirty_version = 1
        self._flushing_version = 0  # at the last flush_slots
        self._reads: dict[int, list[list[int]]] = {}  # handle -> unique keys of every table
        self._last_handle = 0
        self._exports: dict[int, RowSnapshot] = {}
        self._last_export = 0
        self._lock = threading.RLock()

    # ---- slots ---------------------------------------------------------------------------------------------------

    def bind_slots(
        self, table: int, weights: Records, row_states: Sequence[Records], row_wise_states: Sequence[Records]
    ) -> None:
        with self._lock:
            self._tables[table].memory = SlotMemory(weights, row_states, row_wise_states)

    def resize_slots(self, table: int, num_slots: int) -> None:
        with self._lock:
            shard = self._tables[table]
            if num_slots < shard.slots.num_slots:
                raise ConfigError(
                    f"table {shard.spec.name!r}: resize_slots({num_slots:,}) would shrink its "
                    f"{shard.slots.num_slots:,} slots; they only grow. Nothing changed."
                )
            if pins := shard.slots.pins:
                raise StateError(
                    f"table {shard.spec.name!r}: resize_slots() while batches in flight hold {pins:,} pins. Commit or "
                    "undo them first. Nothing changed."
                )
            shard.slots.num_slots = num_slots
            shard.memory = None

    # ---- MAP -----------------------------------------------------------------------------------------------------

    def plan(self, keys: Int64s, feature_offsets: Int64s, feature_table: Int64s, slots: Int64s) -> Plan:
        return self._plan(keys, feature_offsets, feature_table, slots, is_aside=False)

    def plan_aside(
        self, keys: Int64s, feature_offsets: Int64s, feature_table: Int64s, index: Int64s, unique_counts: Int64s
    ) -> Plan:
        with self._lock:
            plan = self._plan(keys, feature_offsets, feature_table, index, is_aside=True)
            if plan.status == PlanStatus.OK:
                journals = self._open.in_flight(plan.ordinal, "plan_aside").tables
                unique_counts[...] = [len(journal.old_scores) for journal in journals]
            return plan

    def _plan(
        self, keys: Int64s, feature_offsets: Int64s, feature_table: Int64s, slots: Int64s, *, is_aside: bool
    ) -> Plan:
        with self._lock:
            ordinal = self._last_ordinal + 1
            if self._num_plans >= MAX_PLANS:
                raise StateError(f"batch {ordinal:,}: {MAX_PLANS:,} batches were planned, the most there can be.")
            occurrences = self._by_table(keys, feature_offsets, feature_table)
            aside = [batch for batch in self._open if batch.is_aside and not batch.is_committed]
            for t, shard in enumerate(self._tables):
                shard.kept = {row for batch in aside for row in batch.tables[t].old_scores}
            decisions = self._decide(occurrences, ordinal, is_aside=is_aside)
            if isinstance(decisions, Plan):
                return decisions
            journals = [
                shard.apply(d, ordinal, self._num_plans + 1) for shard, d in zip(self._tables, decisions, strict=True)
            ]
            self._last_ordinal = ordinal
            self._num_plans += 1
            self._open.add(BatchJournal(ordinal, journals, is_aside=is_aside))
            for (positions, table_keys), decision in zip(occurrences, decisions, strict=True):
                slots[positions] = [decision.slot_of_key[key] for key in table_keys]
            moves = [move for decision in decisions for move in decision.moves]
            self._dirty_version += bool(moves)
            num_inits = sum(move.is_new for move in moves)
            return Plan(
                status=PlanStatus.OK,
                table=-1,
                needed=0,
                available=0,
                pinned=0,
                ordinal=ordinal,
                num_unique=sum(len(d.keys) for d in decisions),
                num_loads=len(moves) - num_inits,
                num_inits=num_inits,
                num_victims=sum(move.victim >= 0 for move in moves),
                num_write_backs=sum(move.is_victim_dirty for move in moves),
            )

    def _by_table(self, keys: Int64s, feature_offsets: Int64s, feature_table: Int64s) -> list[tuple[Int64s, list[int]]]:
        """(positions in ``keys``, the keys there) of every table: features in order, keys in order."""
        parts: list[list[Int64s]] = [[np.empty(0, dtype=np.int64)] for _ in self._tables]
        for feature, table in enumerate(feature_table.tolist()):
            parts[table].append(np.arange(feature_offsets[feature], feature_offsets[feature + 1]))
        positions = [np.concatenate(part) for part in parts]
        return [(p, keys[p].tolist()) for p in positions]

    def _decide(
        self, occurrences: list[tuple[Int64s, list[int]]], ordinal: int, *, is_aside: bool
    ) -> list[Decision] | Plan:
        decisions: list[Decision] = []
        num_bytes = self._host_bytes()
        for t, (shard, (_, keys)) in enumerate(zip(self._tables, occurrences, strict=True)):
            decision = shard.decide(keys, ordinal, is_aside=is_aside)
            if isinstance(decision, Decision):
                num_bytes += shard.extra_host_bytes(decision)
                if self._budget and num_bytes > self._budget:
                    decision = Refusal(PlanStatus.HOST_BUDGET, num_bytes, self._budget)
            if isinstance(decision, Refusal):
                shard.counters.rejected += 1
                return Plan(decision.status, t, decision.needed, decision.available, decision.pinned, 0, 0, 0, 0, 0, 0)
            decisions.append(decision)
        return decisions

    # ---- SWAP ----------------------------------------------------------------------------------------------------

    def swap(self, ordinal: int) -> None:
        with self._lock:
            batch = self._open.to_move(ordinal, "swap")
            if batch.is_scattered or batch.is_gathered:
                due = "gather_loads" if batch.is_scattered else "scatter_victims"
                raise StateError(
                    f"batch {ordinal}: swap() of rows half of which moved; {due}() is due. Nothing changed."
                )
            work = [
                (shard, journal, self._bound(shard, "swap"))
                for shard, journal in zip(self._tables, batch.tables, strict=True)
                if journal.moves
            ]
            for shard, journal, memory in work:
                shard.write_back(journal, memory)
                shard.load(journal, memory)
            self._victims_left(batch)
            self._loads_arrived(batch)

    def swap_counts(self, ordinal: int, counts: Int64s) -> None:
        with self._lock:
            batch = self._open.in_flight(ordinal, "swap_counts")
            moves = [(len(journal.moves), len(journal.write_backs)) for journal in batch.tables]
        counts[...] = np.array(moves, dtype=np.int64).reshape(-1, 2)

    def swap_slots(self, ordinal: int, load_slots: Int64s, victim_slots: Int64s) -> None:
        with self._lock:
            batch = self._open.in_flight(ordinal, "swap_slots")
            load_slots[...] = [move.slot for journal in batch.tables for move in journal.moves]
            victim_slots[...] = [move.slot for journal in batch.tables for move in journal.write_backs]

    def scatter_victims(self, ordinal: int, staging: NDArray[np.float32]) -> None:
        with self._lock:
            batch = self._open.to_move(ordinal, "scatter_victims")
            if batch.is_scattered:
                raise StateError(f"batch {ordinal}: a second scatter_victims(). Nothing changed.")
            parts = self._records(staging, [len(journal.write_backs) for journal in batch.tables])
            for shard, journal, records in zip(self._tables, batch.tables, parts, strict=True):
                for move, record in zip(journal.write_backs, records, strict=True):
                    shard.store.write(move.victim, record)
            self._victims_left(batch)

    def gather_loads(self, ordinal: int, staging: NDArray[np.float32]) -> None:
        with self._lock:
            batch = self._open.to_move(ordinal, "gather_loads")
            if batch.is_gathered:
                raise StateError(f"batch {ordinal}: a second gather_loads(). Nothing changed.")
            parts = self._records(staging, [len(journal.moves) for journal in batch.tables])
            for shard, journal, records in zip(self._tables, batch.tables, parts, strict=True):
                records[...] = shard.incoming(journal)
            self._loads_arrived(batch)
            if not batch.is_scattered and not any(journal.write_backs for journal in batch.tables):
                self._victims_left(batch)

    def _records(self, staging: NDArray[np.float32], counts: Sequence[int]) -> Iterator[Records]:
        """The part of a staging buffer that each table has, as records."""
        position = 0
        for shard, n in zip(self._tables, counts, strict=True):
            end = position + n * shard.record_floats
            yield staging[position:end].reshape(n, shard.record_floats)
            position = end

    def _victims_left(self, batch: BatchJournal) -> None:
        if not batch.has_moves:
            return
        for shard, journal in zip(self._tables, batch.tables, strict=True):
            shard.victims_left(journal)
        batch.is_scattered = True

    def _loads_arrived(self, batch: BatchJournal) -> None:
        for shard, journal in zip(self._tables, batch.tables, strict=True):
            shard.loads_arrived(journal)
        batch.is_gathered = batch.has_moves

    # ---- COMMIT and undo -----------------------------------------------------------------------------------------

    def commit(self, ordinal: int) -> None:
        with self._lock:
            batch = self._open.to_commit(ordinal)
            for shard, journal in zip(self._tables, batch.tables, strict=True):
                shard.commit(journal)
            batch.is_committed = True
            self._dirty_version += 1
            self._finalize()

    def undo(self, ordinal: int) -> None:
        with self._lock:
            batch, later = self._open.to_undo(ordinal)
            for t, (shard, journal) in enumerate(zip(self._tables, batch.tables, strict=True)):
                shard.unpin(journal)
                if not batch.is_moved:
                    shard.undo_moves(journal, is_scattered=batch.is_scattered)
                shard.undo(journal, [(b.tables[t], b.is_committed) for b in later])
            self._open.remove(batch)
            self._dirty_version += 1
            if ordinal == self._last_ordinal:
                self._last_ordinal -= 1
            self._finalize()

    def _finalize(self) -> None:
        for batch in self._open.take_final():
            for shard, journal in zip(self._tables, batch.tables, strict=True):
                shard.finalize(journal)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_plan(
        self, keys: Int64s, feature_offsets: Int64s, feature_table: Int64s, index: Int64s, unique_counts: Int64s
    ) -> int:
        with self._lock:
            uniques: list[list[int]] = []
            for positions, table_keys in self._by_table(keys, feature_offsets, feature_table):
                number_of_key: dict[int, int] = {}
                index[positions] = [number_of_key.setdefault(key, len(number_of_key)) for key in table_keys]
                uniques.append(list(number_of_key))
            unique_counts[...] = [len(u) for u in uniques]
            self._last_handle += 1
            self._reads[self._last_handle] = uniques
            return self._last_handle

    def read_rows(self, handle: int, buffers: Sequence[Records], host_only: bool) -> None:
        with self._lock:
            uniques = self._read(handle, "read_rows")
            used = [shard for shard, keys in zip(self._tables, uniques, strict=True) if keys]
            memories = {} if host_only else {shard: self._bound(shard, "read_rows") for shard in used}
            for shard, keys, buffer in zip(self._tables, uniques, buffers, strict=True):
                slots = [self._slot_of_key(shard, key) for key in keys]
                resident = [i for i, slot in enumerate(slots) if slot >= 0]
                on_host = [i for i, slot in enumerate(slots) if slot < 0]
                if on_host:
                    buffer[on_host] = shard.weights_on_host([keys[i] for i in on_host])
                if resident and not host_only:
                    buffer[resident] = memories[shard].weights[[slots[i] for i in resident]]
            if not host_only:
                del self._reads[handle]

    def read_resident(self, handle: int, table: int) -> tuple[Int64s, Int64s]:
        with self._lock:
            keys = self._read(handle, "read_resident")[table]
            slots = [self._slot_of_key(self._tables[table], key) for key in keys]
            pairs = [(i, slot) for i, slot in enumerate(slots) if slot >= 0]
            found = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
            return found[:, 0].copy(), found[:, 1].copy()

    def end_read(self, handle: int) -> None:
        with self._lock:
            self._reads.pop(handle, None)

    # ---- flush ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        with self._lock:
            self._open.require_all_moved("flush")
            self._require_room_for_flush("flush")
            memories = [self._bound(shard, "flush") for shard in self._tables]
            for shard, memory in zip(self._tables, memories, strict=True):
                shard.flush([memory.read(s) for s in shard.slots.dirty_slots()])
            self._dirty_version += 1

    def flush_counts(self, counts: Int64s) -> None:
        with self._lock:
            self._open.require_all_moved("flush_counts")
            counts[...] = [len(shard.slots.dirty_slots()) for shard in self._tables]

    def flush_slots(self, slots: Int64s) -> None:
        with self._lock:
            self._open.require_all_moved("flush_slots")
            slots[...] = [s for shard in self._tables for s in shard.slots.dirty_slots()]
            self._flushing_version = self._dirty_version

    def flush_records(self, staging: NDArray[np.float32]) -> None:
        with self._lock:
            self._open.require_all_moved("flush_records")
            if self._flushing_version != self._dirty_version:
                raise StateError(
                    "flush_records(): rows were trained or moved since flush_slots(), or it was not called. Begin "
                    "again with it. Nothing changed."
                )
            self._require_room_for_flush("flush_records")
            parts = self._records(staging, [len(shard.slots.dirty_slots()) for shard in self._tables])
            for shard, records in zip(self._tables, parts, strict=True):
                shard.flush(records)
            self._dirty_version += 1

    def _require_room_for_flush(self, call: str) -> None:
        extra = sum(shard.host_bytes_of_flush() for shard in self._tables)
        if self._budget and self._host_bytes() + extra > self._budget:
            raise CapacityError(
                f"{call} needs {extra:,} bytes of host memory and {self._budget - self._host_bytes():,} are left of "
                "the budget. Raise host_memory_bytes. Nothing changed."
            )

    # ---- snapshots -----------------------------------------------------------------------------------------------

    def export_begin(self, table: int, above_score: int) -> tuple[int, int]:
        with self._lock:
            shard = self._tables[table]
            self._open.require_all_moved("export_begin")
            if shard.slots.dirty_slots():
                raise StateError(
                    f"export_begin: rows of table {shard.spec.name!r} are newer in their slots than in the store. Call "
                    "flush(). Nothing changed."
                )
            scores = committed_scores(shard.ids, list(self._open), table, shard.spec.max_rows)
            rows = [row for row, score in scores.items() if score > above_score]
            found = zip(ids_of(shard.ids, rows), rows, strict=True)
            snapshot = [SnapshotRow(i, scores[row], shard.store.read(row).copy()) for i, row in sorted(found)]
            self._last_export += 1
            self._exports[self._last_export] = RowSnapshot(table, snapshot)
            return self._last_export, len(snapshot)

    def export_next(self, handle: int, ids: Int64s, scores: Int64s, records: Records) -> None:
        with self._lock:
            snapshot = self._exports.get(handle)
            if snapshot is None or len(ids) > len(snapshot):
                left = "it has ended or never was" if snapshot is None else f"{len(snapshot)} rows are left"
                raise ConfigError(f"export_next of {len(ids)} rows of export {handle}: {left}. Nothing changed.")
            rows = snapshot.take(len(ids))
            ids[...] = [row.id for row in rows]
            scores[...] = [row.score for row in rows]
            records[...] = np.array([row.record for row in rows], dtype=np.float32).reshape(records.shape)

    def export_end(self, handle: int) -> None:
        with self._lock:
            self._exports.pop(handle, None)

    def import_rows(self, table: int, ids: Int64s, scores: Int64s, records: Records) -> None:
        with self._lock:
            self._require_no_batches("import_rows")
            shard = self._tables[table]
            for id_, score in zip(ids.tolist(), scores.tolist(), strict=True):
                if not 1 <= score <= self._last_ordinal:
                    raise ConfigError(
                        f"import_rows: table {shard.spec.name!r}: id {id_} has score {score}. Accepted: 1 to "
                        f"{self._last_ordinal}, the newest ordinal; see set_ordinal(). Nothing changed."
                    )
            keys = np.empty_like(ids)
            mix64(ids, keys)
            extra = shard.host_bytes_of_import(keys.tolist())
            if self._budget and self._host_bytes() + extra > self._budget:
                raise StateError(
                    f"import_rows: table {shard.spec.name!r} needs {self._host_bytes() + extra:,} bytes of host memory "
                    f"in all, the budget is {self._budget:,}. Nothing changed."
                )
            shard.import_rows(keys.tolist(), scores.tolist(), records)
            self._dirty_version += 1

    def clear_rows(self, table: int) -> None:
        with self._lock:
            self._require_no_batches("clear_rows")
            if any(snapshot.table == table for snapshot in self._exports.values()):
                raise StateError(
                    f"clear_rows: table {self._tables[table].spec.name!r} is being exported. Nothing changed."
                )
            self._tables[table] = self._tables[table].without_rows()
            self._dirty_version += 1

    def track_removals(self, table: int, max_ids: int) -> None:
        with self._lock:
            shard = self._tables[table]
            log = None if max_ids < 0 else RemovalLog(max_ids)
            old = 0 if shard.removals is None else shard.removals.host_bytes
            needed = self._host_bytes() - old + (0 if log is None else log.host_bytes)
            if log is not None and log.host_bytes > old and self._budget and needed > self._budget:
                raise StateError(
                    f"track_removals: table {shard.spec.name!r} needs {needed:,} bytes of host memory in all, the "
                    f"budget is {self._budget:,}. Nothing changed."
                )
            shard.removals = log

    def removed_ids(self, table: int) -> Int64s:
        with self._lock:
            shard = self._tables[table]
            self._open.require_all_moved("removed_ids")
            if shard.removals is None or not shard.removals.is_whole:
                raise StateError(
                    f"removed_ids: table {shard.spec.name!r} does not know which ids it lost: track_removals() was not "
                    "called, more ids left than it was given room for, or rows were imported or dropped since. Nothing "
                    "changed."
                )
            not_final = [shard.ids.key_of_row[row] for batch in self._open for row in batch.tables[table].evicted]
            keys = {*shard.removals.keys, *not_final}
            there = committed_scores(shard.ids, list(self._open), table, shard.spec.max_rows)
            keys -= {shard.ids.key_of_row[row] for row in there}
            shard.removals.keys.clear()
            ids = np.empty(len(keys), dtype=np.int64)
            unmix64(np.array(list(keys), dtype=np.int64), ids)
            return np.sort(ids)

    def final_ordinal(self) -> int:
        with self._lock:
            return next((batch.ordinal - 1 for batch in self._open), self._last_ordinal)

    def ordinal(self) -> int:
        with self._lock:
            return self._last_ordinal

    def set_ordinal(self, ordinal: int) -> None:
        with self._lock:
            self._require_no_batches("set_ordinal")
            if ordinal >= MAX_PLANS - 1:
                raise ConfigError(f"set_ordinal: ordinals end at {MAX_PLANS - 2:,}. Nothing changed.")
            if ordinal < self._last_ordinal and any(len(shard.ids) for shard in self._tables):
                raise StateError(
                    f"set_ordinal: {ordinal} is below the newest ordinal, {self._last_ordinal}, that rows may bear. "
                    "Call clear_rows() for all tables. Nothing changed."
                )
            if ordinal < self._last_ordinal:
                for shard in self._tables:
                    shard.removals = None  # scores to come may be those of before
            self._last_ordinal = ordinal
            self._num_plans = max(self._num_plans, ordinal)

    def _require_no_batches(self, call: str) -> None:
        for batch in self._open:
            raise StateError(f"{call}: batch {batch.ordinal} is in flight. Commit or undo it first. Nothing changed.")

    # ---- what is there -------------------------------------------------------------------------------------------

    def entries(self, table: int) -> tuple[Int64s, NDArray[np.uint32], NDArray[np.uint32], Int64s, NDArray[np.uint32]]:
        with self._lock:
            shard = self._tables[table]
            rows = sorted(shard.ids.live_rows())
            slots = [shard.slots.slot_of(row) for row in rows]
            return (
                np.array([shard.ids.key_of_row[row] for row in rows], dtype=np.int64),
                np.array(rows, dtype=np.uint32),
                np.array([shard.ids.score_of_row[row] for row in rows], dtype=np.uint32),
                np.array(slots, dtype=np.int64),
                np.array([shard.slots[slot].pins if slot >= 0 else 0 for slot in slots], dtype=np.uint32),
            )

    def read_records(self, table: int, rows: NDArray[np.uint32]) -> Records:
        with self._lock:
            self._open.require_all_moved("read_records")
            shard = self._tables[table]
            shard.require_stored(rows.tolist(), "read_records")
            records = np.empty((len(rows), shard.record_floats), dtype=np.float32)
            for i, row in enumerate(rows.tolist()):
                records[i] = shard.store.read(row)
            return records

    def write_records(self, table: int, rows: NDArray[np.uint32], records: Records) -> None:
        with self._lock:
            self._open.require_all_moved("write_records")
            shard = self._tables[table]
            shard.require_stored(rows.tolist(), "write_records")
            for row, record in zip(rows.tolist(), records, strict=True):
                shard.store.write(row, record)

    def batch_rows(self, ordinal: int, table: int) -> tuple[NDArray[np.uint32], Int64s]:
        with self._lock:
            self._open.require_all_moved("batch_rows")
            rows = list(self._open.in_flight(ordinal, "batch_rows").tables[table].old_scores)
            slots = [self._tables[table].slots.slot_of(row) for row in rows]
            return np.array(rows, dtype=np.uint32), np.array(slots, dtype=np.int64)

    def counters(self, table: int) -> Counters:
        with self._lock:
            shard = self._tables[table]
            counted, record_bytes = shard.counters, shard.record_floats * 4
            return Counters(
                accesses=counted.accesses,
                access_hits=counted.access_hits,
                uniques=counted.uniques,
                unique_hits=counted.unique_hits,
                inserted=counted.inserted,
                loads=counted.loads,
                victims=counted.victims,
                write_backs=counted.write_backs,
                load_bytes=counted.loads * record_bytes,
                write_back_bytes=counted.write_backs * record_bytes,
                rows=len(shard.ids),
                resident=len(shard.slots),
                grown=counted.grown,
                evicted=counted.evicted,
                rejected=counted.rejected,
                pins=shard.slots.pins,
                host_bytes=shard.host_bytes,
            )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _read(self, handle: int, call: str) -> list[list[int]]:
        self._open.require_all_moved(call)
        uniques = self._reads.get(handle)
        if uniques is None:
            raise StateError(f"{call}(): the read plan {handle} has ended or never was. Make one with read_plan().")
        return uniques

    def _bound(self, shard: TableShard, call: str) -> SlotMemory:
        if shard.memory is None:
            raise StateError(
                f"table {shard.spec.name!r}: {call}() needs bind_slots() first, and again after resize_slots()."
            )
        return shard.memory

    def _slot_of_key(self, shard: TableShard, key: int) -> int:
        row = shard.ids.find(key)
        return -1 if row is None else shard.slots.slot_of(row)

    def _host_bytes(self) -> int:
        return sum(shard.host_bytes for shard in self._tables)
