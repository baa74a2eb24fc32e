"""The tables of a point as other formats want them: whole rows, weights alone, chunk by chunk. Needs no model."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridrec.checkpoint.arguments import check_names
from hybridrec.checkpoint.files import sync_folder
from hybridrec.checkpoint.manifest import CollectionEntry, TableEntry
from hybridrec.checkpoint.points import Point, read_point
from hybridrec.checkpoint.sorted_rows import sorted_rows
from hybridrec.errors import ConfigError, StateError
from hybridrec.row_type import RowType
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

EXPORT_CHUNK_BYTES = 8 * 2**20
"""Embeddings that are read and written at a time."""
_COLUMNS = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)

Chunks = Iterator[tuple[Tensor, Tensor]]
"""(ids int64 [n], weights [n, D] of the table's type)."""


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """One table at a point, whatever its columns were on."""

    name: str
    collection: str
    point: Point
    parts: tuple[TableEntry, ...]
    """Itself, or its columns from left to right."""

    @property
    def most_rows(self) -> int:
        """What R is at most: rows of all layers, in which an id may be more than once. R, if there is one layer."""
        return sum(layer.table(self.collection, self.parts[0].name).rows for layer in self.point.layers)

    @property
    def dim(self) -> int:
        """D."""
        return sum(part.dim for part in self.parts)

    @property
    def row_type(self) -> RowType:
        """Of the weights."""
        return RowType[self.parts[0].row_type]

    def verify(self) -> None:
        """Compare its files with their entries; `StateError` names one that is not what was written."""
        for layer, part in itertools.product(self.point.layers, self.parts):
            files = layer.table(self.collection, part.name).files
            for file in (*files, *layer.removed_files(self.collection, part.name)):
                layer.verify(file)

    def ids(self) -> Iterator[Tensor]:
        """All ids, ascending: int64 [n]. Its files were verified."""
        first = self.parts[0]
        for rows in sorted_rows(self.point, self.collection, first.name, layout_of(first), "ids"):
            yield rows.ids_N

    def chunks(self) -> Chunks:
        """All rows, ascending by id. Its files were verified.

        Raises:
            StateError: The columns do not have the rows of the same ids.
        """
        n = max(1, EXPORT_CHUNK_BYTES // (self.dim * self.row_type.dtype.itemsize))
        for together in itertools.zip_longest(*(self._chunks_of(part, n) for part in self.parts)):
            ids_N = None if together[0] is None else together[0][0]
            if ids_N is None or not all(part is not None and torch.equal(ids_N, part[0]) for part in together):
                where = self.point.last.folder
                raise StateError(f"table {self.name!r} of {where} has columns whose ids differ. Use an older snapshot.")
            yield ids_N, torch.cat([weights for _, weights in together], 1)

    def _chunks_of(self, part: TableEntry, n: int) -> Chunks:
        """Ids and weights, n rows at a time."""
        ids: list[Tensor] = []
        weights: list[Tensor] = []
        waiting = 0
        for rows in sorted_rows(self.point, self.collection, part.name, layout_of(part), "weights"):
            ids.append(rows.ids_N)
            weights.append(rows.weights_ND)
            waiting += len(rows.ids_N)
            if waiting >= n:
                all_ids, all_weights = torch.cat(ids), torch.cat(weights)
                last = waiting - waiting % n
                yield from zip(all_ids[:last].split(n), all_weights[:last].split(n), strict=True)
                ids, weights, waiting = [all_ids[last:].clone()], [all_weights[last:].clone()], waiting - last
        if waiting:
            yield torch.cat(ids), torch.cat(weights)


def layout_of(table: TableEntry) -> RowStateLayout:
    """What a record of the table holds."""
    states = tuple(RowState(name=name, is_row_wise=is_row_wise) for name, is_row_wise in table.states)
    return RowStateLayout(dim=table.dim, states=states, row_type=RowType[table.row_type])


def columns_of(entry: TableEntry) -> tuple[str, int] | None:
    """(table, first column), if the entry is of columns of a table."""
    match = _COLUMNS.fullmatch(entry.name)
    if match is None or entry.is_row_wise or int(match[3]) - int(match[2]) != entry.dim:
        return None
    return match[1], int(match[2])


def saved_tables(point: Point, names: Collection[str] | None = None) -> list[SavedTable]:
    """The tables of all collections, or those of some names.

    Raises:
        ConfigError: ``names`` is one string, two collections have a table of one name, or there is none of a name that
            was asked for.
    """
    check_names(names, "export")
    found = [table for c in point.collections for table in _joined(point, c)]
    have = [table.name for table in found]
    if missing := sorted(set(names or ()) - set(have)):
        raise ConfigError(f"there is no table {missing[0]!r} in the snapshot. Tables: {sorted(have)}.")
    wanted = [table for table in found if names is None or table.name in names]
    if twice := sorted({table.name for table in wanted if have.count(table.name) > 1}):
        raise ConfigError(f"two collections of the snapshot have a table {twice[0]!r}: one file cannot hold both.")
    return wanted


def export_tables(
    path: str | Path,
    out: str | Path,
    suffix: str,
    write: Callable[[Path, SavedTable], Iterator[int]],
    *,
    tables: Collection[str] | None,
    progress: Callable[[int], None] | None,
) -> list[Path]:
    """Write tables of a point to ``OUT/TABLE.suffix``: verified before, beside and renamed, so whole or not there.

    Args:
        path: See `read_point`.
        out: Folder, made if it is missing.
        suffix: Of the files, without the dot.
        write: Gets a file to make and the table; yields numbers of rows written.
        tables: Names; None: all.
        progress: Is told the rows of each chunk.
    """
    out = Path(out)
    found = saved_tables(read_point(path), tables)
    targets = [out / f"{table.name.replace(os.sep, '_')}.{suffix}" for table in found]
    taken = [target for target in targets if target.exists() or targets.count(target) > 1]
    if taken:
        why = "exists" if taken[0].exists() else "would be the file of two tables"
        raise ConfigError(f"export: {taken[0]} {why}. Remove or rename it, or export tables to different folders.")
    for table in found:
        table.verify()
    out.mkdir(parents=True, exist_ok=True)
    for table, target in zip(found, targets, strict=True):
        beside = target.with_name(f".{target.name}.unfinished")
        try:
            for rows in write(beside, table):
                if progress is not None:
                    progress(rows)
            with open(beside, "rb") as written:
                os.fsync(written.fileno())
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    sync_folder(out)
    return targets


def _joined(point: Point, collection: CollectionEntry) -> Iterator[SavedTable]:
    """Tables; the columns of one, which are tables of their own in a snapshot, as one."""
    columns: dict[str, dict[int, TableEntry]] = {}
    for entry in collection.tables:
        table, first = columns_of(entry) or (entry.name, 0)
        columns.setdefault(table, {})[first] = entry
    for name, parts in columns.items():
        in_order = tuple(parts[first] for first in sorted(parts))
        yield SavedTable(name=name, collection=collection.name, point=point, parts=in_order)
