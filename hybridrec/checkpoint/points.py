"""A point of a run that can be gone back to: a snapshot, or a snapshot and the first of its deltas.

A point is named by its folder, that of the snapshot or that of the last delta.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.checkpoint.delta_chain import DeltaManifest, delta_folder, newest_delta, read_delta
from hybridrec.checkpoint.files import read_rows, verify
from hybridrec.checkpoint.manifest import (
    MANIFEST,
    CollectionEntry,
    FileEntry,
    Manifest,
    TableEntry,
    read_manifest,
)
from hybridrec.checkpoint.snapshot import DELTAS, resolve
from hybridrec.errors import StateError
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A snapshot, or one of its deltas."""

    folder: Path
    manifest: Manifest | DeltaManifest

    def table(self, collection: str, name: str) -> TableEntry:
        """Rows to put in. The table is there: all layers of a chain have the same ones."""
        return self.tables[collection, name]

    @functools.cached_property
    def tables(self) -> dict[tuple[str, str], TableEntry]:
        """(collection, table) -> rows to put in."""
        return {(c.name, t.name): t for c in self.manifest.collections for t in c.tables}

    def removed(self, collection: str, name: str) -> NDArray[np.int64]:
        """Ids to take out before: int64, in no order."""
        files = self.removed_files(collection, name)
        return np.concatenate([np.empty(0, np.int64), *(np.fromfile(self.folder / f.name, "<i8") for f in files)])

    def removed_files(self, collection: str, name: str) -> list[FileEntry]:
        """The files of `removed`, in each of which ids ascend; none of a snapshot."""
        if isinstance(self.manifest, Manifest):
            return []
        return [e.file for e in self.manifest.removed if (e.collection, e.table) == (collection, name)]

    def verify(self, file: FileEntry) -> None:
        """Compare one of its files with its entry.

        Raises:
            StateError: It is missing, cut or altered; names it, and the number of the delta.
        """
        try:
            verify(self.folder, file)
        except StateError as e:
            if isinstance(self.manifest, Manifest):
                raise
            raise StateError(
                f"delta {self.manifest.number} of {self.folder.parent.parent} cannot be applied: {e}"
            ) from e


@dataclass(frozen=True, kw_only=True)
class Point:
    """The state after the last one of some layers, each the change of what is before it."""

    layers: tuple[Layer, ...]
    """The snapshot, and deltas 1, 2 and so on."""

    @property
    def snapshot(self) -> Path:
        """Where the chain begins."""
        return self.layers[0].folder

    @property
    def last(self) -> Layer:
        """What has all that is not rows: dense part, steps, what each rank has for itself."""
        return self.layers[-1]

    @property
    def number(self) -> int:
        """Deltas; 0: the snapshot alone."""
        return len(self.layers) - 1

    @property
    def digest(self) -> str:
        """Of the last manifest, and so of all."""
        return self.last.manifest.digest

    @property
    def collections(self) -> tuple[CollectionEntry, ...]:
        """As of the last layer, whose files are not all rows."""
        return self.last.manifest.collections

    def files(self) -> list[tuple[Layer, FileEntry]]:
        """All files but manifests."""
        return [(layer, file) for layer in self.layers for file in layer.manifest.files()]


def read_point(path: str | Path) -> Point:
    """A point by its folder; its manifests are read and checked, its other files are not.

    Args:
        path: A snapshot: that alone. A delta: with all that is before it. The folder of a snapshot's deltas: the
            snapshot with all of them. A folder of snapshots: the newest snapshot with all its deltas.

    Raises:
        StateError: There is none; or a manifest is missing, damaged, or not the one that follows: names the number.
        ConfigError: Another version wrote it.
    """
    path = Path(path)
    number = _number_of(path)
    if number is not None:
        return _read_chain(path.parent.parent, number)
    is_of_deltas = path.name == DELTAS and (path.parent / MANIFEST).is_file()
    snapshot = path.parent if is_of_deltas else resolve(path)
    if snapshot == path:
        return _read_chain(snapshot, 0)
    number, digest = newest_delta(snapshot)
    point = _read_chain(snapshot, number)
    if number and point.digest != digest:
        raise StateError(f"delta {number} of {snapshot} is not the one that was written last. {_older(snapshot, 0)}")
    return point


def delta_layer(snapshot: Path, manifest: DeltaManifest, before: Mapping[tuple[str, str], TableEntry]) -> Layer:
    """A delta of a snapshot, behind something that has tables.

    Raises:
        StateError: It has other tables, or other rows of one: no writer makes such a chain. Names the number.
    """
    layer = Layer(folder=delta_folder(snapshot, manifest.number), manifest=manifest)
    for key in before.keys() | layer.tables.keys():
        if _rows_of(before.get(key)) != _rows_of(layer.tables.get(key)):
            raise StateError(
                f"delta {manifest.number} of {snapshot} is damaged or forged: its rows of table {key[1]!r} in "
                f"collection {key[0]!r} are not like those before it."
            )
    return layer


def _rows_of(table: TableEntry | None) -> Any:
    return table and (table.dim, table.states, table.row_type)


def newest_point(snapshot: Path) -> Point:
    """A snapshot with all its deltas. Errors as of `read_point`."""
    return _read_chain(snapshot, newest_delta(snapshot)[0])


def _number_of(path: Path) -> int | None:
    """Of a delta's folder."""
    is_delta = path.parent.name == DELTAS and path.name.isdigit() and (path.parent.parent / MANIFEST).is_file()
    return int(path.name) if is_delta else None


def _read_chain(snapshot: Path, number: int) -> Point:
    layers: list[Layer] = [Layer(folder=snapshot, manifest=read_manifest(snapshot))]
    for n in range(1, number + 1):
        try:
            delta = read_delta(snapshot, n, layers[-1].manifest.digest)
            layers.append(delta_layer(snapshot, delta, layers[-1].tables))
        except StateError as e:
            raise StateError(f"{e} {_older(snapshot, n - 1)}") from e
    return Point(layers=tuple(layers))


def _older(snapshot: Path, number: int) -> str:
    return f"What is before it is whole: {delta_folder(snapshot, number) if number else snapshot}."


def rows_at(
    point: Point,
    collection: str,
    table: str,
    layout: RowStateLayout,
    *,
    is_wanted: Callable[[Layer, FileEntry], bool] = lambda layer, file: True,
) -> Iterator[RowChunk]:
    """The rows of a table at a point, each id once, chunk by chunk; its files were verified.

    Layers are read from the last to the first, so that a row is read where it was written last. In memory are a chunk,
    and 8 bytes for each id that a delta changed.

    Args:
        point: Where.
        collection: Of the table.
        table: Its name, or that of columns.
        layout: Of its records.
        is_wanted: Whether to read a file of a layer.
    """
    newer = torch.empty(0, dtype=torch.int64)
    for layer in reversed(point.layers):
        entry = layer.table(collection, table)
        changed = [newer, torch.from_numpy(layer.removed(collection, table).astype(np.int64, copy=False))]
        for file in entry.files:
            if not is_wanted(layer, file):
                continue
            for chunk in read_rows(layer.folder, entry, file, layout):
                if layer is not point.layers[0]:
                    changed.append(chunk.ids_N)
                yield without(chunk, newer, layout)
        newer = torch.unique(torch.cat(changed))


def without(rows: RowChunk, ids_n: Tensor, layout: RowStateLayout) -> RowChunk:
    """Rows but those of some ids, int64 [n], ascending."""
    if not len(ids_n):
        return rows
    at = torch.searchsorted(ids_n, rows.ids_N).clamp_(max=len(ids_n) - 1)
    is_kept = ids_n[at] != rows.ids_N
    return RowChunk.of_records(rows.ids_N[is_kept], rows.scores_N[is_kept], rows.records(layout)[is_kept], layout)
