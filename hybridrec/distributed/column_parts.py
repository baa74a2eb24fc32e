"""Columns of a table as something saved them, into the columns that a rank has now.

All column shards of a table see the same batches: they have the same ids with the same scores, so that rows are put
together, and cut, by their place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hybridrec.distributed.routing import TablePart
from hybridrec.errors import ConfigError, StateError
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout


@dataclass(frozen=True, kw_only=True)
class SavedColumns:
    """Columns of a table that were saved together."""

    name: str
    """As that of a `TablePart`: ``"t"``, ``"t[0:8]"``."""
    first_column: int
    dim: int
    """Columns."""

    def layout(self, now: RowStateLayout) -> RowStateLayout:
        """Of the rows that were saved, if the table has this one now."""
        return replace(now, dim=self.dim)


def columns_of(name: str, tables: Collection[str]) -> tuple[str, int, int | None]:
    """(table, first column, number of columns or None if all) of the name of a table or of columns of one.

    Args:
        name: ``"t"`` or ``"t[0:8]"``.
        tables: Names of tables that there are; one of them is not cut.
    """
    found = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name, re.DOTALL)
    if name in tables or found is None or found[1] not in tables:
        return name, 0, None
    return found[1], int(found[2]), int(found[3]) - int(found[2])


def covering(part: TablePart, saved: Iterable[str], where: str) -> list[SavedColumns]:
    """What was saved of a part's columns, in their order.

    Args:
        part: Of a table now.
        saved: Names of tables, or of columns of them, that were saved.
        where: They were, for the message.

    Raises:
        ConfigError: Not every column of the part was saved once; names what was.
    """
    table, end = part.table.name, part.first_column + part.dim
    parsed = ((name, *columns_of(name, [table])) for name in saved)
    of_table = sorted(
        (first, part.table.embedding_dim if dim is None else dim, name)
        for name, base, first, dim in parsed
        if base == table
    )
    found = [
        SavedColumns(name=name, first_column=first, dim=dim)
        for first, dim, name in of_table
        if first < end and first + dim > part.first_column
    ]
    ends = [part.first_column, *(c.first_column + c.dim for c in found)]
    starts = [max(c.first_column, part.first_column) for c in found]
    if not found or starts != ends[:-1] or ends[-1] < end:
        raise ConfigError(
            f"table {table!r}: its columns {part.first_column} to {end} are needed, {where} has "
            f"{[name for _, _, name in of_table] or 'none of it'}. Load all that was saved of the table."
        )
    return found


def recut(pieces: Sequence[tuple[SavedColumns, RowChunk]], part: TablePart, layout: RowStateLayout) -> RowChunk:
    """The same rows with the columns of a part.

    Args:
        pieces: What `covering` gave, each with the rows that were saved.
        part: Of the table now.
        layout: Of its rows.

    Raises:
        StateError: The pieces have different ids or scores: they were not saved together.
    """
    columns, rows = pieces[0]
    if len(pieces) == 1 and (columns.first_column, columns.dim) == (part.first_column, part.dim):
        return rows
    for other, chunk in pieces[1:]:
        if not torch.equal(chunk.ids_N, rows.ids_N) or not torch.equal(chunk.scores_N, rows.scores_N):
            raise StateError(
                f"table {part.table.name!r}: {columns.name!r} and {other.name!r} do not have the same ids with the "
                "same last use. They must have been saved together."
            )
    end = part.first_column + part.dim
    cuts = [slice(max(part.first_column - c.first_column, 0), end - c.first_column) for c, _ in pieces]
    states = {
        state.name: torch.cat(
            [chunk.states[state.name][:, cut] for cut, (_, chunk) in zip(cuts, pieces, strict=True)], 1
        )
        for state in layout.row_states
    }
    # Optimizers that have these do not cut a table (`check_columns`): there is one piece, of all columns.
    states |= {state.name: rows.states[state.name] for state in layout.row_wise_states}
    weights = [chunk.weights_ND[:, cut] for cut, (_, chunk) in zip(cuts, pieces, strict=True)]
    return RowChunk(ids_N=rows.ids_N, scores_N=rows.scores_N, weights_ND=torch.cat(weights, 1), states=states)
