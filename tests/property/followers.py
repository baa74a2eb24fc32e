"""The driver of `snapshots`, and readers that follow a table: the rows of a moment, and from then on deltas alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from hybridrec.errors import StateError
from tests.property.driver import DisagreementError, System
from tests.property.snapshots import SnapshotDriver

Rows = dict[int, tuple[int, list[float]]]
"""Id -> (score, record)."""


@dataclass
class Followed:
    """What a reader has of one table."""

    mark: int
    rows: Rows = field(default_factory=dict)


class FollowDriver(SnapshotDriver):
    """Readers of both tables beside everything that a `SnapshotDriver` does."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.followed: dict[int, Followed] = {}
        self.num_deltas = self.num_changed = self.num_removed = 0

    def follow(self, table: int, *, max_ids: int = 10_000) -> None:
        """Begin with all rows of a table; where that is not legal now, nothing."""
        if not self.model.can_read() or self._has_dirty(table):
            return
        for system in self.systems:
            self._call(system, "track_removals", table, max_ids)
            self._same(system, "the final ordinal", system.group.final_ordinal, self._final_ordinal())
        self.followed[table] = Followed(self._final_ordinal(), self._now(table))
        self.check()

    def apply_delta(self, table: int) -> None:
        """What changed since, to the rows that a reader has: then they are those of now."""
        if not self.model.can_read() or self._has_dirty(table):
            return
        followed = self.followed.get(table)
        if followed is None:
            for system in self.systems:
                self._call(system, "removed_ids", table, is_legal=False)
            return
        mark, now = self._final_ordinal(), self._now(table)
        for system in self.systems:
            removed = self._call(system, "removed_ids", table).tolist()
            changed = self._changed(system, table, followed.mark)
            self._same(system, "removed ids that are there", [i for i in removed if i in now], [])
            self._same(system, "removed ids in order", removed, sorted(set(removed)))
            rows = {i: row for i, row in followed.rows.items() if i not in set(removed)} | changed
            self._same(system, f"table {table} by deltas", rows, now)
            self.num_changed += len(changed)
            self.num_removed += len(removed)
        self.followed[table] = Followed(mark, now)
        self.num_deltas += 1
        self.check()

    def import_rows(self, table: int, ids: list[int], rng: random.Random) -> None:
        if not self.model.open_ordinals():
            self.followed.pop(table, None)
        super().import_rows(table, ids, rng)

    def clear(self, table: int) -> None:
        is_read = any(export.table == table for export in self.exports)
        if not self.model.open_ordinals() and not is_read:
            self.followed.pop(table, None)
        super().clear(table)

    def set_ordinal(self, ordinal: int) -> None:
        before = self.model.ordinal
        super().set_ordinal(ordinal)
        if self.model.ordinal < before:
            self.followed.clear()

    def _final_ordinal(self) -> int:
        return min(self.model.open_ordinals(), default=self.model.ordinal + 1) - 1

    def _now(self, table: int) -> Rows:
        return {i: (score, record) for i, score, record in self.committed(table)}

    def _changed(self, system: System, table: int, mark: int) -> Rows:
        handle, n = self._guard(system, lambda s: s.group.export_begin(table, above_score=mark))
        ids, scores = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
        records = torch.empty(n, self._width(table))
        self._call(system, "export_next", handle, ids, scores, records)
        self._call(system, "export_end", handle)
        return dict(zip(ids.tolist(), zip(scores.tolist(), records.tolist(), strict=True), strict=True))


def lost(system: System, table: int) -> bool:
    """Whether a core says that its log had no room."""
    try:
        system.group.removed_ids(table)
    except StateError as e:
        if "more ids left than" not in str(e):
            raise DisagreementError(f"{system.name}: {e}") from e
        return True
    return False
