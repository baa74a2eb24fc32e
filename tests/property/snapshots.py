"""The driver of `driver`, and snapshots that are read while everything else goes on, imports, and tables made empty."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import numpy as np
import torch

from tests.property import plain
from tests.property.driver import EXTREME_IDS, Driver, random_operation
from tests.property.oracle import TableModel


@dataclass
class OpenExport:
    """One export of all systems, and what is left of the rows that it must give."""

    table: int
    handles: list[int]
    rows: list[tuple[int, int, list[float]]]


class SnapshotDriver(Driver):
    """Exports, imports and clears beside everything that a `Driver` does."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.exports: list[OpenExport] = []
        self.num_read = self.num_imported = 0

    def committed(self, table: int) -> list[tuple[int, int, list[float]]]:
        """(id, score, record) of every row, ascending by id, as if all batches in flight were undone, newest first."""
        model = copy.deepcopy(self.model)
        for ordinal in reversed(model.in_flight()):
            model.undo(ordinal)
        live, _ = model.tables[table].replay()
        values = self.model.tables[table].values
        found = [(plain.signed(unmix64(key)), score, values[row].tolist()) for key, (row, score) in live.items()]
        return sorted(found)

    def begin_export(self, table: int, *, above_score: int = 0) -> None:
        is_legal = self.model.can_read() and not self._has_dirty(table)
        handles = []
        for system in self.systems:
            if not is_legal:
                self._call(system, "export_begin", table, is_legal=False)
                continue
            handle, num_rows = self._guard(system, lambda s: s.group.export_begin(table, above_score=above_score))
            handles.append(handle)
            expected = [row for row in self.committed(table) if row[1] > above_score]
            self._same(system, "rows of an export", num_rows, len(expected))
        if is_legal:
            rows = [row for row in self.committed(table) if row[1] > above_score]
            self.exports.append(OpenExport(table, handles, rows))
        self.check()

    def read_export(self, export: OpenExport, n: int) -> None:
        """The next n rows; the last ones end it."""
        n = min(n, len(export.rows))
        expected, export.rows = export.rows[:n], export.rows[n:]
        for system, handle in zip(self.systems, export.handles, strict=True):
            ids, scores = torch.full((n,), -7), torch.full((n,), -7)
            records = torch.full((n, self._width(export.table)), torch.nan)
            self._call(system, "export_next", handle, ids, scores, records)
            found = list(zip(ids.tolist(), scores.tolist(), records.tolist(), strict=True))
            self._same(system, f"rows of export {handle}", found, expected)
            if not export.rows:
                self._call(system, "export_end", handle)
                self._call(system, "export_next", handle, ids[:0], scores[:0], records[:0], is_legal=False)
        self.num_read += n
        if not export.rows:
            self.exports.remove(export)
        self.check()

    def import_rows(self, table: int, ids: list[int], rng: random.Random) -> None:
        """New values and scores for ids, those that live and others."""
        is_legal = not self.model.open_ordinals()
        if is_legal and not self.model.ordinal:
            self.set_ordinal(3)
        scores = [rng.randint(1, max(1, self.model.ordinal)) for _ in ids]
        seed = rng.randrange(1000)
        records = np.random.default_rng(seed).standard_normal((len(ids), self._width(table))).astype(np.float32)
        for system in self.systems:
            arguments = (
                table,
                torch.tensor(ids, dtype=torch.int64),
                torch.tensor(scores, dtype=torch.int64),
                torch.from_numpy(records.copy()),
            )
            self._call(system, "import_rows", *arguments, is_legal=is_legal)
        if is_legal:
            for id_, score, record in zip(ids, scores, records, strict=True):
                _import(self.model.tables[table], plain.signed(plain.mix64(id_)), score, record)
            self.num_imported += len(ids)
        self.check()

    def set_ordinal(self, ordinal: int) -> None:
        is_empty = not any(table.base for table in self.model.tables)
        is_legal = not self.model.open_ordinals() and (ordinal >= self.model.ordinal or is_empty)
        for system in self.systems:
            self._call(system, "set_ordinal", ordinal, is_legal=is_legal)
        if is_legal:
            self.model.ordinal = ordinal
            for table in self.model.tables:
                table.num_plans = max(table.num_plans, ordinal)
        for system in self.systems:
            self._same(system, "ordinal", system.group.ordinal, self.model.ordinal)

    def clear(self, table: int) -> None:
        is_read = any(export.table == table for export in self.exports)
        is_legal = not self.model.open_ordinals() and not is_read
        for system in self.systems:
            self._call(system, "clear_rows", table, is_legal=is_legal)
        if is_legal:
            old = self.model.tables[table]
            fresh = TableModel(old.spec, num_plans=old.num_plans, counts=old.counts)
            fresh.num_slots, fresh.free_slots = old.num_slots, list(range(old.num_slots))
            self.model.tables[table] = fresh
        self.check()

    def _has_dirty(self, table: int) -> bool:
        model = self.model.tables[table]
        return any(row in model.dirty for row in model.slots.values())


def unmix64(key: int) -> int:
    """The id of a key."""
    x = key & plain.MASK
    x ^= x >> 33
    x = x * pow(0xC4CEB9FE1A85EC53, -1, 2**64) & plain.MASK
    x ^= x >> 33
    x = x * pow(0xFF51AFD7ED558CCD, -1, 2**64) & plain.MASK
    return x ^ (x >> 33)


def _import(model: TableModel, key: int, score: int, record: np.ndarray) -> None:
    if key in model.base:
        row = model.base[key][0]
        slot = model.slot_of(row)
        if slot >= 0:
            del model.slots[slot]
            model.free_slots.insert(0, slot)
        model.dirty.discard(row)
    else:
        row = model.free_rows.pop(0)
    model.base[key] = (row, score)
    model.values[row] = record


def random_walk(driver: SnapshotDriver, rng: random.Random, num_operations: int, *, num_ids: int = 12) -> None:
    """Calls of all kinds, legal and not; whatever is left of exports is read at the end."""
    ids = [*range(num_ids), *EXTREME_IDS]
    while driver.num_operations < num_operations:
        draw, table = rng.random(), rng.randrange(2)
        if draw < 0.1:
            if rng.random() < 0.8:
                driver.flush()
            if len(driver.exports) < 3:
                above = rng.randint(0, driver.model.ordinal) if rng.random() < 0.4 else 0
                driver.begin_export(table, above_score=above)
        elif draw < 0.2 and driver.exports:
            driver.read_export(rng.choice(driver.exports), rng.randint(1, 3))
        elif draw < 0.23:
            driver.import_rows(table, [rng.choice(ids) for _ in range(rng.randint(0, 4))], rng)
        elif draw < 0.235:
            driver.clear(table)
        elif draw < 0.24:
            driver.set_ordinal(max(0, driver.model.ordinal + rng.randint(-2, 3)))
        else:
            random_operation(driver, rng, num_ids)
    while driver.exports:
        driver.read_export(driver.exports[0], 1000)
