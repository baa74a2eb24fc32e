"""`RowSnapshot`: the rows of one table at one moment, and which they are while batches are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridrec.native.reference.id_map import IdMap
from hybridrec.native.reference.journal import BatchJournal
from hybridrec.native.reference.mix64 import unmix64


class SnapshotRow(NamedTuple):
    """One row as it was."""

    id: int
    score: int
    record: NDArray[np.float32]


class RowSnapshot:
    """Rows that are read one part after the other. Here all are copied at once."""

    def __init__(self, table: int, rows: Sequence[SnapshotRow]) -> None:
        self.table = table
        self._rows = list(rows)

    def __len__(self) -> int:
        """Rows that were not taken yet."""
        return len(self._rows)

    def take(self, n: int) -> list[SnapshotRow]:
        """The next n rows."""
        taken, self._rows = self._rows[:n], self._rows[n:]
        return taken


def committed_scores(ids: IdMap, open_batches: Sequence[BatchJournal], table: int, max_rows: int) -> dict[int, int]:
    """Row -> score as they would be if all batches in flight were undone, newest first. Changes nothing.

    Args:
        ids: Of the table.
        open_batches: Oldest first.
        table: Its index.
        max_rows: 0: no limit.
    """
    scores = {row: ids.score_of_row[row] for row in ids.live_rows()}
    is_before_committed = False
    for batch in reversed(open_batches):
        if batch.is_committed:
            is_before_committed = True
            continue
        journal = batch.tables[table]
        for row, old_score in journal.old_scores.items():
            if scores.get(row) != batch.ordinal:
                continue
            if row in journal.inserted:
                del scores[row]
            else:
                scores[row] = old_score
        for row in reversed(journal.evicted):
            keys = {ids.key_of_row[live] for live in scores}
            has_room = not is_before_committed or len(scores) < max_rows
            if has_room and ids.key_of_row[row] not in keys:
                scores[row] = ids.score_of_row[row]
    return scores


def ids_of(ids: IdMap, rows: Sequence[int]) -> list[int]:
    """The ids of rows."""
    keys = np.array([ids.key_of_row[row] for row in rows], dtype=np.int64)
    found = np.empty_like(keys)
    unmix64(keys, found)
    return [int(i) for i in found]
