"""Journals: what a batch changed in each table, kept until no undo can need it any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Move(NamedTuple):
    """One row that goes into a slot, and the row that leaves it."""

    row: int
    slot: int
    is_new: bool
    """The initial row is computed; else the row is loaded from the store."""
    victim: int = -1
    """Row that leaves the slot; -1: the slot was free."""
    is_victim_dirty: bool = False
    """The victim must be written back first."""
    victim_last_use: tuple[int, int] = (0, 0)


@dataclass
class TableJournal:
    """One batch in one table."""

    old_scores: dict[int, int]
    """Row -> its score before the batch, in order of first occurrence. Of inserted rows it means nothing."""
    inserted: dict[int, bool]
    """New rows -> whether they are beyond ``planned_rows``."""
    evicted: list[int]
    """Rows that ``full_policy="evict"`` dropped; their numbers stay reserved."""
    moves: list[Move]
    accesses: int
    access_hits: int
    unique_hits: int
    is_aside: bool = False
    """The batch has no slots: its rows are read from and written to the store."""

    @property
    def write_backs(self) -> list[Move]:
        """The moves whose victim is dirty."""
        return [move for move in self.moves if move.is_victim_dirty]


@dataclass
class BatchJournal:
    """One batch. Open until it is undone, or committed together with all earlier batches."""

    ordinal: int
    tables: list[TableJournal]
    is_scattered: bool = False
    """Dirty victims are in the store."""
    is_gathered: bool = False
    """Loads and new rows are in their slots."""
    is_committed: bool = False
    is_aside: bool = False

    @property
    def has_moves(self) -> bool:
        """Whether any row comes into a slot."""
        return any(journal.moves for journal in self.tables)

    @property
    def is_moved(self) -> bool:
        """Every row is where the plan says."""
        return not self.has_moves or (self.is_scattered and self.is_gathered)
