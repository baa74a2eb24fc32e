"""The rows of a table that is followed: versions of it that share the rows which did not change.

A row is at a position that it keeps; a row with other values gets another position. So a version is an array of ids and
one of positions, readers of an older version see what they saw, and an update copies no row that did not change.
Positions are used again when nobody has a version any more that may read them.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout

_NO_POSITIONS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
Mark = tuple[NDArray[np.int64], int]
"""What is free, and how many positions have ever been used."""


class RowStorage:
    """Scores and records by position. One thread writes; others read positions that are not free."""

    def __init__(self, record_floats: int) -> None:
        """``record_floats``: of a row."""
        self._record_floats = record_floats
        # Blocks never move, so that there is no moment at which all rows are in memory twice.
        self._blocks: tuple[tuple[NDArray[np.uint32], NDArray[np.float32]], ...] = ()
        self._begins: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._free, self._num_used = _NO_POSITIONS, 0
        self._retired: collections.deque[tuple[weakref.ref[object], NDArray[np.int64]]] = collections.deque()

    @property
    def capacity(self) -> int:
        """Positions that there is memory for."""
        return int(self._begins[-1])

    @property
    def mark(self) -> Mark:
        """For `roll_back`."""
        return self._free, self._num_used

    def roll_back(self, mark: Mark) -> None:
        """Take back every `put` since."""
        self._free, self._num_used = mark

    def reserve(self, num_rows: int) -> None:
        """Memory for so many more rows, in one block."""
        missing = num_rows - (self.capacity - self._num_used) - len(self._free)
        if missing <= 0:
            return
        n = max(missing, self.capacity // 8, 1024)
        block = np.empty(n, dtype=np.uint32), np.empty((n, self._record_floats), dtype=np.float32)
        self._blocks, self._begins = (*self._blocks, block), np.append(self._begins, self.capacity + n)

    def put(self, scores_n: NDArray[np.int64], records: NDArray[np.float32]) -> NDArray[np.int64]:
        """Positions of new rows: int64 [n]."""
        n = len(scores_n)
        self.reserve(n)
        again, self._free = self._free[:n], self._free[n:]
        first, self._num_used = self._num_used, self._num_used + n - len(again)
        at = np.concatenate([again, np.arange(first, self._num_used)])
        for block, inside, which in self._places(at):
            block[0][inside] = scores_n[which]
            block[1][inside] = records[which]
        return at

    def read(self, at_n: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(scores int64 [n], records float32 [n, floats]), copies."""
        scores = np.empty(len(at_n), dtype=np.int64)
        records = np.empty((len(at_n), self._record_floats), dtype=np.float32)
        for block, inside, which in self._places(at_n):
            scores[which] = block[0][inside]
            records[which] = block[1][inside]
        return scores, records

    def _places(
        self, at_n: NDArray[np.int64]
    ) -> Iterable[tuple[tuple[NDArray[np.uint32], NDArray[np.float32]], NDArray[np.int64], NDArray[np.int64]]]:
        """(block, where in it, which of the positions) for every block."""
        of_block = np.searchsorted(self._begins, at_n, side="right") - 1
        for b, block in enumerate(self._blocks):
            which = np.flatnonzero(of_block == b)
            if len(which):
                yield block, at_n[which] - self._begins[b], which

    def retire(self, version: object, at_n: NDArray[np.int64]) -> None:
        """Positions that a version, and those before it, may read, and none after it."""
        self._retired.append((weakref.ref(version), at_n))

    def reclaim(self) -> None:
        """Free the positions of versions that nobody has any more."""
        while self._retired and self._retired[0][0]() is None:
            self._free = np.concatenate([self._free, self._retired.popleft()[1]])


@dataclass(frozen=True, kw_only=True, eq=False)
class FollowedRows:
    """All rows of a table in one version, ascending by id."""

    storage: RowStorage
    ids: NDArray[np.int64]
    at: NDArray[np.int64]
    """Position of each id's row."""

    @classmethod
    def none(cls, storage: RowStorage) -> FollowedRows:
        """Of a table without rows."""
        return cls(storage=storage, ids=np.empty(0, dtype=np.int64), at=_NO_POSITIONS)

    def where(self, ids_n: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(index into ``ids`` where it is there, whether it is)."""
        index = np.searchsorted(self.ids, ids_n)
        found = np.zeros(len(ids_n), dtype=np.bool_)
        inside = index < len(self.ids)
        found[inside] = self.ids[index[inside]] == ids_n[inside]
        return index, found

    def chunk(self, index_n: NDArray[np.int64] | slice, layout: RowStateLayout) -> RowChunk:
        """Some rows, copied."""
        scores, records = self.storage.read(self.at[index_n])
        ids = torch.from_numpy(self.ids[index_n].copy())
        return RowChunk.of_records(ids, torch.from_numpy(scores), torch.from_numpy(records), layout)

    def after(
        self, chunks: Iterable[RowChunk], layout: RowStateLayout, removed_n: NDArray[np.int64] | None
    ) -> tuple[FollowedRows, NDArray[np.int64]]:
        """The next version, and the positions that it does not need any more.

        Args:
            chunks: Rows to put in, or in the place of others; each id once.
            layout: Of their records.
            removed_n: Ids to take out before; None: all that ``chunks`` does not have.
        """
        taken = [(chunk.ids_N.numpy(), self._put(chunk, layout)) for chunk in chunks]
        new_ids = np.concatenate([_NO_POSITIONS, *(ids for ids, _ in taken)])
        new_at = np.concatenate([_NO_POSITIONS, *(at for _, at in taken)])
        index, is_there = self.where(new_ids)
        if is_there.all() and (len(new_ids) == len(self.ids) if removed_n is None else not len(removed_n)):
            at = self.at.copy()  # no id came or went
            at[index] = new_at
            old_at = self.at[index]
            return FollowedRows(storage=self.storage, ids=self.ids, at=at), old_at[old_at != new_at]
        is_kept = np.full(len(self.ids), removed_n is not None)
        is_kept[index[is_there]] = False
        if removed_n is not None:
            gone, was_there = self.where(removed_n)
            is_kept[gone[was_there]] = False
        ids = np.concatenate([self.ids[is_kept], new_ids])
        order = np.argsort(ids, kind="stable")
        at = np.concatenate([self.at[is_kept], new_at])[order]
        is_used = np.zeros(self.storage.capacity, dtype=np.bool_)
        is_used[new_at] = True
        left = self.at[~is_kept]
        return FollowedRows(storage=self.storage, ids=ids[order], at=at), left[~is_used[left]]

    def _put(self, chunk: RowChunk, layout: RowStateLayout) -> NDArray[np.int64]:
        """Positions of rows, of those that are there already as they are: where they are."""
        index, is_there = self.where(chunk.ids_N.numpy())
        scores, records = chunk.scores_N.numpy(), chunk.records(layout).numpy()
        at = np.empty(len(scores), dtype=np.int64)
        at[is_there] = self.at[index[is_there]]
        old_scores, old_records = self.storage.read(at[is_there])
        is_same = np.zeros(len(scores), dtype=np.bool_)
        has_bits = (old_records.view(np.uint32) == records[is_there].view(np.uint32)).all(axis=1)
        is_same[is_there] = has_bits & (old_scores == scores[is_there])
        at[~is_same] = self.storage.put(scores[~is_same], records[~is_same])
        return at
