"""`OpenBatches`: the batches that an undo may still concern, and which call is legal for which of them.

A batch is *open* from plan until it is undone, or committed together with all earlier ones. Rows move in batch order; a
batch may be undone while a later one is open only if its own rows have moved.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridrec.errors import StateError
from hybridrec.native.reference.journal import BatchJournal


class OpenBatches:
    """Open batches, the oldest first. Every refusal is a `StateError`, and nothing changed."""

    def __init__(self) -> None:
        self._batches: dict[int, BatchJournal] = {}  # by ordinal, ascending

    def __iter__(self) -> Iterator[BatchJournal]:
        return iter(self._batches.values())

    def add(self, batch: BatchJournal) -> None:
        """The newest."""
        self._batches[batch.ordinal] = batch

    def remove(self, batch: BatchJournal) -> None:
        """It was undone."""
        del self._batches[batch.ordinal]

    def take_final(self) -> Iterator[BatchJournal]:
        """Remove the committed batches that no batch in flight precedes, one after the other."""
        while self._batches and (oldest := next(iter(self))).is_committed:
            yield oldest
            del self._batches[oldest.ordinal]

    def in_flight(self, ordinal: int, call: str) -> BatchJournal:
        """The batch, if it is planned and neither committed nor undone."""
        batch = self._batches.get(ordinal)
        if batch is None or batch.is_committed:
            raise StateError(
                f"batch {ordinal}: {call}() is legal only for a batch in flight; this one was never planned, or it is "
                "committed or undone. Nothing changed."
            )
        return batch

    def to_move(self, ordinal: int, call: str) -> BatchJournal:
        """The batch, if its rows are the next to move, or it has none to move."""
        batch = self.in_flight(ordinal, call)
        if batch.is_moved and batch.has_moves:
            raise StateError(f"batch {ordinal}: {call}() after its rows were moved. Nothing changed.")
        self._require_moved_before(ordinal, call)
        return batch

    def to_commit(self, ordinal: int) -> BatchJournal:
        """The batch, if its rows and those of all earlier batches were moved."""
        batch = self.in_flight(ordinal, "commit")
        self._require_moved_before(ordinal + 1, "commit")
        return batch

    def to_undo(self, ordinal: int) -> tuple[BatchJournal, list[BatchJournal]]:
        """The batch and the open ones after it, oldest first."""
        batch = self.in_flight(ordinal, "undo")
        later = [b for b in self if b.ordinal > ordinal]
        if batch.is_gathered and not batch.is_moved:
            raise StateError(
                f"batch {ordinal}: undo() between gather_loads() and scatter_victims(): its victims' rows are on their "
                "way to the store. Call scatter_victims() first. Nothing changed."
            )
        if later and not batch.is_moved:
            raise StateError(
                f"batch {ordinal}: undo() before its swap while batch {later[-1].ordinal} was planned on top of it. "
                "Undo the newest batch first. Nothing changed."
            )
        return batch, later

    def require_all_moved(self, call: str) -> None:
        """Refuse while any row is on its way."""
        for batch in self:
            if not batch.is_moved:
                raise StateError(
                    f"{call}() while the rows of batch {batch.ordinal} are still to be moved. Call swap() or undo() "
                    "for it first. Nothing changed."
                )

    def _require_moved_before(self, ordinal: int, call: str) -> None:
        for earlier in self:
            if earlier.ordinal < ordinal and not earlier.is_moved:
                raise StateError(f"{call}() before the swap of batch {earlier.ordinal}. Nothing changed.")
