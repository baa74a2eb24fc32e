"""Whether the columns of a table, which are tables of their own in a snapshot, have rows of the same ids."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from hybridrec.checkpoint.manifest import FileEntry, TableEntry
from hybridrec.checkpoint.points import Layer, Point
from hybridrec.distributed.column_parts import columns_of
from hybridrec.errors import StateError

Key = tuple[int, str, str]
"""Number of a layer, collection, table."""
Digests = Mapping[tuple[Key, str, str], str]
"""(table of a layer, columns, file) -> digest of its ids and scores, in their order."""


def digests_of_columns(
    point: Point, tables: Mapping[str, Collection[str]], files: Iterable[tuple[Layer, FileEntry]]
) -> dict[tuple[Key, str, str], str]:
    """Of those files that are columns of a table: they were verified; of each row 12 bytes are read.

    Args:
        point: Whose files they are.
        tables: Collection -> names of its tables, without columns.
        files: Some of them.
    """
    wanted = {(layer.folder, file.name) for layer, file in files}
    return {
        (key, entry.name, file.name): _digest(point.layers[key[0]].folder, entry, file)
        for key, entry in _columns(point, tables)
        for file in entry.files
        if (point.layers[key[0]].folder, file.name) in wanted
    }


def require_same_rows(point: Point, everyone: Iterable[Digests]) -> None:
    """Refuse columns that were not saved together.

    Args:
        point: Whose they are.
        everyone: `digests_of_columns` of all ranks, which are those of all files.

    Raises:
        StateError: Two columns of a table do not have the same ids with the same scores; names them.
    """
    found: dict[Key, dict[str, list[str]]] = {}
    for digests in everyone:
        for (key, columns, _), digest in sorted(digests.items()):
            found.setdefault(key, {}).setdefault(columns, []).append(digest)
    for (number, collection, table), of_columns in found.items():
        (first, expected), *others = sorted(of_columns.items())
        for other, its_digests in others:
            if its_digests != expected:
                raise StateError(
                    f"{point.layers[number].folder}: of table {table!r} in collection {collection!r} {first!r} and "
                    f"{other!r} do not have the same ids with the same last use. They must have been saved together; "
                    "load another snapshot."
                )


def _columns(point: Point, tables: Mapping[str, Collection[str]]) -> Iterator[tuple[Key, TableEntry]]:
    """All that is a part of a table."""
    for number, layer in enumerate(point.layers):
        for collection in layer.manifest.collections:
            for entry in collection.tables:
                table, _, dim = columns_of(entry.name, tables[collection.name])
                if dim is not None:
                    yield (number, collection.name, table), entry


def _digest(folder: Path, table: TableEntry, file: FileEntry) -> str:
    ids, scores, left = hashlib.sha256(), hashlib.sha256(), file.rows
    with open(folder / file.name, "rb") as stream:
        while left:  # chunks of columns that are wider have fewer rows
            n = min(left, table.chunk_rows)
            ids.update(stream.read(8 * n))
            scores.update(stream.read(4 * n))
            stream.seek(4 * n * table.record_floats, os.SEEK_CUR)
            left -= n
    return ids.hexdigest() + scores.hexdigest()
