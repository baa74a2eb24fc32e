"""The model of a `ShardGroup`: who is live is replayed from the list of batches; values live in one dict and stay put.

It keeps no journal and restores nothing: an undone batch is struck from the list, and who is live with which score
follows from replaying the rest. Only slots and row numbers, which have a history, are kept as explicit lists of free
ones in the order in which they will be given out. Everything is quadratic and meant for tiny tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybridrec.native.protocol import InitKind, Plan, PlanStatus, ShardSpec
from tests.property import plain

OK, NO_SLOTS, QUOTA = PlanStatus.OK, PlanStatus.NO_SLOTS, PlanStatus.QUOTA


@dataclass
class ModelMove:
    row: int
    slot: int
    is_new: bool
    victim: int | None = None
    was_dirty: bool = False
    last_use: tuple[int, int] = (0, 0)


@dataclass
class ModelBatch:
    """One batch in one table."""

    ordinal: int
    rows: dict[int, int]  # key -> row, in order of first occurrence
    evicted: list[tuple[int, int]]  # (key, row)
    beyond: set[int]  # keys inserted beyond planned_rows
    moves: list[ModelMove]
    accesses: int
    access_hits: int
    unique_hits: int
    is_aside: bool = False
    is_committed: bool = False


@dataclass
class TableModel:
    spec: ShardSpec
    base: dict[int, tuple[int, int]] = field(default_factory=dict)  # key -> (row, score), of final batches
    open: list[ModelBatch] = field(default_factory=list)
    free_rows: list[int] = field(default_factory=lambda: list(range(2000)))
    slots: dict[int, int] = field(default_factory=dict)  # slot -> row
    last_use: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (plans before, position)
    num_plans: int = 0  # undone ones too
    dirty: set[int] = field(default_factory=set)  # rows
    values: dict[int, np.ndarray] = field(default_factory=dict)  # row -> record
    counts: dict[str, int] = field(default_factory=dict)
    num_slots: int = 0
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_slots = self.spec.num_slots
        self.free_slots = list(range(self.num_slots))

    # ---- derived -------------------------------------------------------------------------------------------------

    def replay(self) -> tuple[dict[int, tuple[int, int]], dict[int, list[int]]]:
        """(key -> (row, score), ordinal -> keys that it inserts)."""
        live, inserted = dict(self.base), {}
        for batch in self.open:
            for key, _ in batch.evicted:
                del live[key]
            inserted[batch.ordinal] = [key for key in batch.rows if key not in live]
            live |= {key: (row, batch.ordinal) for key, row in batch.rows.items()}
        return live, inserted

    def slot_of(self, row: int) -> int:
        return next((s for s, r in self.slots.items() if r == row), -1)

    def pins(self, row: int) -> int:
        return sum(row in b.rows.values() for b in self.open if not b.is_committed and not b.is_aside)

    def initial(self, key: int) -> np.ndarray:
        spec = self.spec
        if spec.init_kind == InitKind.BANK:
            assert spec.bank is not None
            weights = spec.bank[plain.bank_row(spec.table_seed, key, len(spec.bank))]
        else:
            weights = plain.uniform_row(spec.table_seed, key, spec.dim, spec.init_a, spec.init_b)
        states = [v for v in spec.state_initial_values[: spec.num_row_states] for _ in range(spec.dim)]
        return np.array([*weights, *states, *spec.state_initial_values[spec.num_row_states :]], dtype=np.float32)

    def entries(self) -> list[tuple[int, int, int, int, int]]:
        live, _ = self.replay()
        found = [(key, row, score, self.slot_of(row), self.pins(row)) for key, (row, score) in live.items()]
        return sorted(((k, r, sc, sl, p if sl >= 0 else 0) for k, r, sc, sl, p in found), key=lambda e: e[1])

    def counters(self) -> dict[str, int]:
        live, inserted = self.replay()
        committed = [b for b in self.open if b.is_committed]
        record_bytes = 4 * (self.spec.dim * (1 + self.spec.num_row_states) + self.spec.num_row_wise_states)
        names = ("accesses", "access_hits", "uniques", "unique_hits", "loads", "victims", "write_backs", "rejected")
        counts = {name: self.counts.get(name, 0) for name in names}
        return counts | {
            "inserted": self.counts.get("inserted", 0) + sum(len(inserted[b.ordinal]) for b in committed),
            "grown": self.counts.get("grown", 0)
            + sum(len(b.beyond.intersection(inserted[b.ordinal])) for b in committed),
            "evicted": self.counts.get("evicted", 0) + sum(len(b.evicted) for b in committed),
            "load_bytes": counts["loads"] * record_bytes,
            "write_back_bytes": counts["write_backs"] * record_bytes,
            "rows": len(live),
            "resident": len(self.slots),
            "pins": sum(self.pins(row) for row in self.slots.values()),
        }

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    # ---- plan ----------------------------------------------------------------------------------------------------

    def decide(
        self, keys: list[int], ordinal: int, *, is_aside: bool = False
    ) -> ModelBatch | tuple[PlanStatus, int, int, int]:
        live, _ = self.replay()
        uniques = list(dict.fromkeys(keys))
        new = [key for key in uniques if key not in live]
        evicted = self._evictions(live, uniques, len(new), ordinal)
        if evicted is None:
            return QUOTA, len(live) + len(new), self.spec.max_rows, 0
        rows = dict(zip(new, self.free_rows, strict=False)) | {k: live[k][0] for k in uniques if k in live}
        rows = {key: rows[key] for key in uniques}
        resident = {key for key in uniques if key in live and self.slot_of(rows[key]) >= 0}
        missing = [] if is_aside else [key for key in uniques if key not in resident]
        pinned = {slot for slot, row in self.slots.items() if self.pins(row)}
        in_use = {self.slot_of(rows[key]) for key in resident}
        victims = sorted(set(self.slots) - pinned - in_use, key=lambda s: self.last_use[s])
        places = [*self.free_slots, *victims]
        if len(places) < len(missing):
            return NO_SLOTS, len(uniques), self.num_slots, len(pinned)
        moves = []
        for key, slot in zip(missing, places, strict=False):
            victim = self.slots.get(slot)
            moves.append(
                ModelMove(rows[key], slot, key in new, victim, victim in self.dirty, self.last_use.get(slot, (0, 0)))
            )
        total = len(live) - len(evicted)
        beyond = {key for n, key in enumerate(new, start=total + 1) if n > self.spec.planned_rows}
        if is_aside:
            return ModelBatch(ordinal, rows, evicted, beyond, [], len(keys), 0, 0, is_aside=True)
        hits = sum(key in resident for key in keys)
        return ModelBatch(ordinal, rows, evicted, beyond, moves, len(keys), hits, len(resident))

    def _evictions(
        self, live: dict[int, tuple[int, int]], uniques: list[int], num_new: int, ordinal: int
    ) -> list[tuple[int, int]] | None:
        excess = len(live) + num_new - self.spec.max_rows
        if self.spec.full_policy == "grow" or excess <= 0 or not num_new:
            return []
        in_flight = {row for b in self.open if not b.is_committed for row in b.rows.values()}
        old = sorted(
            (score, key & plain.MASK, key, row)
            for key, (row, score) in live.items()
            if score < ordinal - 12 and key not in uniques and row not in in_flight
        )
        if self.spec.full_policy == "error" or len(old) < excess:
            return None
        return [(key, row) for _, _, key, row in old[:excess]]

    def apply(self, batch: ModelBatch) -> None:
        live, _ = self.replay()
        for key, row in batch.rows.items():
            if key not in live:
                self.free_rows.remove(row)
                self.values[row] = self.initial(key)
        self.open.append(batch)
        for move in batch.moves:
            if move.victim is None:
                self.free_slots.remove(move.slot)
            else:
                self.dirty.discard(move.victim)
            self.slots[move.slot] = move.row
        for position, row in enumerate([] if batch.is_aside else batch.rows.values()):
            self.last_use[self.slot_of(row)] = (self.num_plans, position)
        self.num_plans += 1

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def batch(self, ordinal: int) -> ModelBatch:
        return next(b for b in self.open if b.ordinal == ordinal)

    def gathered(self, ordinal: int) -> None:
        for move in self.batch(ordinal).moves:
            if move.is_new:
                self.dirty.add(move.row)
            else:
                self.count("loads")

    def scattered(self, ordinal: int) -> None:
        for move in self.batch(ordinal).moves:
            self.count("victims", move.victim is not None)
            self.count("write_backs", move.was_dirty)

    def commit(self, ordinal: int) -> None:
        batch = self.batch(ordinal)
        batch.is_committed = True
        self.dirty.update([] if batch.is_aside else batch.rows.values())
        for name in ("accesses", "access_hits", "unique_hits"):
            self.count(name, getattr(batch, name))
        self.count("uniques", len(batch.rows))
        self.finalize()

    def undo(self, ordinal: int, *, is_moved: bool, is_scattered: bool) -> None:
        batch = self.batch(ordinal)
        inserted = self.replay()[1][ordinal]
        self.open.remove(batch)
        later = [b for b in self.open if b.ordinal > ordinal]
        if later:
            later[0].evicted[:0] = batch.evicted
            live, _ = self.replay()
            room = self.spec.max_rows - len(live)
            for dropped in [d for d in reversed(batch.evicted) if d[0] not in live][: max(0, room)]:
                later[0].evicted.remove(dropped)
        for move in [] if is_moved else reversed(batch.moves):
            del self.slots[move.slot]
            if move.victim is None or is_scattered or move.victim in self.free_rows:
                self.free_slots.insert(0, move.slot)
            else:
                self.slots[move.slot] = move.victim
                self.last_use[move.slot] = move.last_use
                if move.was_dirty:
                    self.dirty.add(move.victim)
        for key in reversed(list(batch.rows)):
            if key not in inserted:
                continue
            heir = next((b for b in later if key in b.rows), None)
            if heir is None:
                self._forget(batch.rows[key])
            elif key in batch.beyond:
                heir.beyond.add(key)
        self.finalize()

    def finalize(self) -> None:
        while self.open and self.open[0].is_committed:
            batch = self.open[0]
            inserted = self.replay()[1][batch.ordinal]
            self.count("inserted", len(inserted))
            self.count("grown", len(batch.beyond.intersection(inserted)))
            self.count("evicted", len(batch.evicted))
            for key, row in batch.evicted:
                del self.base[key]
                self._forget(row)
            self.base |= {key: (row, batch.ordinal) for key, row in batch.rows.items()}
            del self.open[0]

    def _forget(self, row: int) -> None:
        slot = self.slot_of(row)
        if slot >= 0:
            del self.slots[slot]
            self.free_slots.insert(0, slot)
        self.dirty.discard(row)
        self.free_rows.insert(0, row)


class GroupModel:
    """All tables, and what is legal when."""

    def __init__(self, specs: list[ShardSpec]) -> None:
        self.tables = [TableModel(spec) for spec in specs]
        self.ordinal = 0
        self.is_moved: dict[int, bool] = {}  # of open batches
        self.is_scattered: set[int] = set()
        self.is_gathered: set[int] = set()

    def plan(self, keys: list[list[int]], *, is_aside: bool = False) -> tuple[Plan, list[list[int]]]:
        """The plan, and per table the slot of every key; of a batch aside its number in order of first occurrence."""
        decided: list[ModelBatch] = []
        for t, (table, table_keys) in enumerate(zip(self.tables, keys, strict=True)):
            decision = table.decide(table_keys, self.ordinal + 1, is_aside=is_aside)
            if not isinstance(decision, ModelBatch):
                table.count("rejected")
                status, needed, available, pinned = decision
                return Plan(status, t, needed, available, pinned, 0, 0, 0, 0, 0, 0), []
            decided.append(decision)
        self.ordinal += 1
        for table, batch in zip(self.tables, decided, strict=True):
            table.apply(batch)
        moves = [move for batch in decided for move in batch.moves]
        self.is_moved[self.ordinal] = not moves
        inits = sum(move.is_new for move in moves)
        victims = sum(move.victim is not None for move in moves)
        plan = Plan(
            OK, -1, 0, 0, 0, self.ordinal, sum(len(b.rows) for b in decided), len(moves) - inits, inits, victims,
            sum(move.was_dirty for move in moves),
        )  # fmt: skip
        pairs = zip(self.tables, decided, keys, strict=True)
        if is_aside:
            return plan, [[list(b.rows).index(key) for key in table_keys] for _, b, table_keys in pairs]
        return plan, [[t.slot_of(b.rows[key]) for key in table_keys] for t, b, table_keys in pairs]

    def open_ordinals(self) -> list[int]:
        return [b.ordinal for b in self.tables[0].open]

    def in_flight(self) -> list[int]:
        return [b.ordinal for b in self.tables[0].open if not b.is_committed]

    def can_move(self, ordinal: int) -> bool:
        earlier = [o for o in self.open_ordinals() if o < ordinal]
        return ordinal in self.in_flight() and not self.is_moved[ordinal] and all(self.is_moved[o] for o in earlier)

    def can_scatter(self, ordinal: int) -> bool:
        return self.can_move(ordinal) and ordinal not in self.is_scattered

    def can_gather(self, ordinal: int) -> bool:
        return self.can_move(ordinal) and ordinal not in self.is_gathered

    def can_swap(self, ordinal: int) -> bool:
        return self.can_scatter(ordinal) and self.can_gather(ordinal)

    def can_commit(self, ordinal: int) -> bool:
        return ordinal in self.in_flight() and all(self.is_moved[o] for o in self.open_ordinals() if o <= ordinal)

    def can_undo(self, ordinal: int) -> bool:
        is_newest = ordinal == max(self.open_ordinals(), default=0)
        can_come_back = is_newest and ordinal not in self.is_gathered
        return ordinal in self.in_flight() and (self.is_moved[ordinal] or can_come_back)

    def has_no_moves(self, ordinal: int) -> bool:
        return ordinal in self.open_ordinals() and not any(table.batch(ordinal).moves for table in self.tables)

    def can_read(self) -> bool:
        return all(self.is_moved[o] for o in self.open_ordinals())

    def scattered(self, ordinal: int) -> None:
        self.is_scattered.add(ordinal)
        for table in self.tables:
            table.scattered(ordinal)
        self.is_moved[ordinal] = ordinal in self.is_gathered

    def gathered(self, ordinal: int) -> None:
        self.is_gathered.add(ordinal)
        for table in self.tables:
            table.gathered(ordinal)
        if ordinal not in self.is_scattered and not self.num_write_backs(ordinal):
            self.scattered(ordinal)
        self.is_moved[ordinal] = ordinal in self.is_scattered

    def swapped(self, ordinal: int) -> None:
        self.scattered(ordinal)
        self.gathered(ordinal)

    def num_write_backs(self, ordinal: int) -> int:
        return sum(move.was_dirty for table in self.tables for move in table.batch(ordinal).moves)

    def commit(self, ordinal: int) -> None:
        for table in self.tables:
            table.commit(ordinal)

    def undo(self, ordinal: int) -> None:
        for table in self.tables:
            table.undo(ordinal, is_moved=self.is_moved[ordinal], is_scattered=ordinal in self.is_scattered)
        del self.is_moved[ordinal]
        self.is_scattered.discard(ordinal)
        self.is_gathered.discard(ordinal)
        if ordinal == self.ordinal:
            self.ordinal -= 1
