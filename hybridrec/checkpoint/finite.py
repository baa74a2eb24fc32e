"""Rows that hold NaN or infinity, met on their way into a model: loaded as they were saved, and told."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from hybridrec.store.row_export import RowChunk

logger = logging.getLogger("hybridrec")


class NonFiniteRows:
    """How many rows of each table are not finite, with an id of each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Table -> rows; those that have some."""
        return dict(self._counts)

    def look(self, table: str, rows: RowChunk) -> None:
        """Weights and optimizer states of some rows."""
        arrays = (rows.weights_ND, *rows.states.values())
        # A sum is not finite if one of its terms is not: one pass where all is well.
        if all(math.isfinite(array.sum(dtype=torch.float32).item()) for array in arrays):
            return
        is_bad_N = torch.zeros(len(rows.ids_N), dtype=torch.bool)
        for array in arrays:
            is_bad_N |= ~array.isfinite().reshape(len(rows.ids_N), -1).all(1)
        if bool(is_bad_N.any()):
            self._counts[table] = self._counts.get(table, 0) + int(is_bad_N.sum())
            self._examples.setdefault(table, int(rows.ids_N[is_bad_N][0]))

    def report(self, folder: Path) -> None:
        """One warning a table."""
        for table, count in self._counts.items():
            logger.warning(
                "%s: %d rows of table %r that this rank loaded hold NaN or infinity, id %d among them. They are as "
                "they were saved; load an older snapshot if training went wrong.",
                folder,
                count,
                table,
                self._examples[table],
            )
