"""The tables of a snapshot as other formats want them: whole rows, weights alone, chunk by chunk. Needs no model."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridrec.checkpoint.arguments import check_names
from hybridrec.checkpoint.delta_chain import newest_delta
from hybridrec.checkpoint.files import read_rows, sync_folder, verify
from hybridrec.checkpoint.manifest import CollectionEntry, Manifest, TableEntry, read_manifest
from hybridrec.checkpoint.snapshot import resolve
from hybridrec.errors import ConfigError, StateError
from hybridrec.row_type import RowType
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

logger = logging.getLogger("hybridrec")

EXPORT_CHUNK_BYTES = 8 * 2**20
"""Embeddings that are read and written at a time."""
_COLUMNS = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)

Chunks = Iterator[tuple[Tensor, Tensor]]
"""(ids int64 [n], weights [n, D] of the table's type)."""


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """One table of a snapshot, whatever its columns were on."""

    name: str
    collection: str
    parts: tuple[TableEntry, ...]
    """Itself, or its columns from left to right."""

    @property
    def rows(self) -> int:
        """R, over all ranks."""
        return self.parts[0].rows

    @property
    def dim(self) -> int:
        """D."""
        return sum(part.dim for part in self.parts)

    @property
    def row_type(self) -> RowType:
        """Of the weights."""
        return RowType[self.parts[0].row_type]

    def chunks(self, folder: Path) -> Chunks:
        """All rows, in the order of the snapshot's files, which were verified.

        Raises:
            StateError: The columns do not have the rows of the same ids.
        """
        n = max(1, EXPORT_CHUNK_BYTES // (self.dim * self.row_type.dtype.itemsize))
        is_one = len({part.rows for part in self.parts}) == 1
        for together in zip(*(_chunks_of(folder, part, n) for part in self.parts), strict=is_one):
            ids_N = together[0][0]
            if not is_one or not all(torch.equal(ids_N, other) for other, _ in together):
                raise StateError(
                    f"table {self.name!r} of {folder} has columns whose ids differ. Use an older snapshot."
                )
            yield ids_N, torch.cat([weights for _, weights in together], 1)


def layout_of(table: TableEntry) -> RowStateLayout:
    """What a record of the table holds."""
    states = tuple(RowState(name=name, is_row_wise=is_row_wise) for name, is_row_wise in table.states)
    return RowStateLayout(dim=table.dim, states=states, row_type=RowType[table.row_type])


def saved_tables(manifest: Manifest, names: Collection[str] | None = None) -> list[SavedTable]:
    """The tables of all collections, or those of some names.

    Raises:
        ConfigError: ``names`` is one string, two collections have a table of one name, or there is none of a name that
            was asked for.
    """
    check_names(names, "export")
    found = [table for c in manifest.collections for table in _joined(c)]
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
    write: Callable[[Path, SavedTable, Callable[[], Chunks]], Iterator[int]],
    *,
    tables: Collection[str] | None,
    progress: Callable[[int], None] | None,
) -> list[Path]:
    """Write tables of a snapshot to ``OUT/TABLE.suffix``: verified before, beside and renamed, so whole or not there.

    Args:
        path: A snapshot, or a folder of them: the newest.
        out: Folder, made if it is missing.
        suffix: Of the files, without the dot.
        write: Gets a file to make, the table, and what begins to read its rows; yields numbers of rows written.
        tables: Names; None: all.
        progress: Is told the rows of each chunk.
    """
    folder, out = resolve(path), Path(out)
    manifest = read_manifest(folder)
    found = saved_tables(manifest, tables)
    targets = [out / f"{table.name.replace(os.sep, '_')}.{suffix}" for table in found]
    taken = [target for target in targets if target.exists() or targets.count(target) > 1]
    if taken:
        why = "exists" if taken[0].exists() else "would be the file of two tables"
        raise ConfigError(f"export: {taken[0]} {why}. Remove or rename it, or export tables to different folders.")
    for table in found:
        for file in (file for part in table.parts for file in part.files):
            verify(folder, file)
    _tell_deltas(folder, manifest)
    out.mkdir(parents=True, exist_ok=True)
    for table, target in zip(found, targets, strict=True):
        beside = target.with_name(f".{target.name}.unfinished")
        try:
            for rows in write(beside, table, functools.partial(table.chunks, folder)):
                if progress is not None:
                    progress(rows)
            with open(beside, "rb") as written:
                os.fsync(written.fileno())
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    sync_folder(out)
    return targets


def _tell_deltas(folder: Path, manifest: Manifest) -> None:
    """Warn that an export is behind the run."""
    num_deltas = 0
    with contextlib.suppress(StateError):  # damaged ones are not read here
        num_deltas, _ = newest_delta(folder)
    if num_deltas:
        logger.warning(
            "export: %s is as of step %d; its deltas, %d, are newer and left out. Save a snapshot, or use follow().",
            folder,
            manifest.step,
            num_deltas,
        )


def _joined(collection: CollectionEntry) -> Iterator[SavedTable]:
    """Tables; the columns of one, which are tables of their own in a snapshot, as one."""
    columns: dict[str, dict[int, TableEntry]] = {}
    for entry in collection.tables:
        match = _COLUMNS.fullmatch(entry.name)
        if match is None or entry.is_row_wise or int(match[3]) - int(match[2]) != entry.dim:
            columns[entry.name] = {0: entry}
        else:
            columns.setdefault(match[1], {})[int(match[2])] = entry
    for name, parts in columns.items():
        in_order = tuple(parts[first] for first in sorted(parts))
        yield SavedTable(name=name, collection=collection.name, parts=in_order)


def _chunks_of(folder: Path, entry: TableEntry, n: int) -> Chunks:
    """Ids and weights, n rows at a time."""
    layout = layout_of(entry)
    ids: list[Tensor] = []
    weights: list[Tensor] = []
    waiting = 0
    for file in entry.files:
        for chunk in read_rows(folder, entry, file, layout):
            ids.append(chunk.ids_N)
            weights.append(chunk.weights_ND)
            waiting += len(chunk.ids_N)
            if waiting >= n:
                all_ids, all_weights = torch.cat(ids), torch.cat(weights)
                last = waiting - waiting % n
                yield from zip(all_ids[:last].split(n), all_weights[:last].split(n), strict=True)
                ids, weights, waiting = [all_ids[last:].clone()], [all_weights[last:].clone()], waiting - last
    if waiting:
        yield torch.cat(ids), torch.cat(weights)
