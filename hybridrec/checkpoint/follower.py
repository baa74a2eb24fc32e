"""`follow`: a training's tables in another process, by a snapshot and its deltas. Needs no model and no device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.checkpoint.delta_chain import DeltaManifest, delta_folder, newest_delta, read_delta
from hybridrec.checkpoint.files import read_rows, verify
from hybridrec.checkpoint.manifest import CollectionEntry, Manifest, TableEntry, read_manifest
from hybridrec.checkpoint.saved_tables import layout_of
from hybridrec.checkpoint.sharded import MODEL, ShardedReader
from hybridrec.checkpoint.snapshot import resolve
from hybridrec.errors import ConfigError, HybridRecError, StateError
from hybridrec.store.row_export import RowChunk

Key = tuple[str, str]
"""Collection, table."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """All rows of a table, ascending by id."""

    ids: NDArray[np.int64]
    scores: NDArray[np.int64]
    records: NDArray[np.float32]

    def where(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(positions, which ids are there)."""
        at = np.searchsorted(self.ids, ids)
        found = np.zeros(len(ids), dtype=np.bool_)
        inside = at < len(self.ids)
        found[inside] = self.ids[at[inside]] == ids[inside]
        return at, found

    def changed(self, removed: NDArray[np.int64], new: _Rows) -> _Rows:
        """Without some ids, and with rows of others, new ones or replaced; itself stays as it is."""
        at, is_there = self.where(np.concatenate([removed, new.ids]))
        is_kept = np.ones(len(self.ids), dtype=np.bool_)
        is_kept[at[is_there]] = False
        ids = np.concatenate([self.ids[is_kept], new.ids])
        order = np.argsort(ids, kind="stable")
        return _Rows(
            ids=ids[order],
            scores=np.concatenate([self.scores[is_kept], new.scores])[order],
            records=np.concatenate([self.records[is_kept], new.records])[order],
        )


class Follower:
    """The tables of a run as its newest snapshot and deltas have them. Made by `follow`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read_snapshot(resolve(self._path))
        self.update()

    @property
    def snapshot(self) -> Path:
        """The snapshot that it began with."""
        return self._snapshot

    @property
    def number(self) -> int:
        """How many deltas it has applied to it."""
        return self._number

    @property
    def step(self) -> int:
        """Training batches whose updates it has."""
        return self._step

    @property
    def dense(self) -> dict[str, Tensor]:
        """Parameters and buffers that are not hashed tables, by name; tables that TorchRec shards whole."""
        return self._dense

    @property
    def table_names(self) -> list[str]:
        """Of all collections."""
        return [table for _, table in self._tables]

    def update(self) -> bool:
        """Apply what was written since; whether there was something.

        If a newer snapshot is there, it is read, and its deltas are followed from then on. Each delta is verified
        before it changes anything; it is applied whole.

        Raises:
            StateError: A delta is missing, in the place of another, cut or altered: names its number. The tables are
                as before it.
        """
        newest = resolve(self._path)
        is_new = newest != self._snapshot
        if is_new:
            self._read_snapshot(newest)
        last, digest = newest_delta(self._snapshot)
        if last < self._number:
            raise StateError(f"{self._snapshot} ends at delta {last}, {self._number} were applied. Follow it anew.")
        first = self._number + 1
        for number in range(first, last + 1):
            self._apply(read_delta(self._snapshot, number, self._digest))
        if last and digest != self._digest:
            raise StateError(f"delta {last} of {self._snapshot} is not the one that was written last. Follow it anew.")
        return is_new or last >= first

    def rows(self, table: str, *, collection: str | None = None) -> RowChunk:
        """All rows of a table, ascending by id; do not write into them.

        Args:
            table: Its name, or that of columns: ``"t[0:8]"``.
            collection: Needed where two have a table of this name.

        Raises:
            ConfigError: There is no such table, or there are two.
        """
        key = self._key(table, collection)
        rows = self._rows[key]
        records = torch.from_numpy(rows.records)
        ids, scores = torch.from_numpy(rows.ids), torch.from_numpy(rows.scores)
        return RowChunk.of_records(ids, scores, records, layout_of(self._tables[key]))

    def embeddings(self, table: str, ids_N: Tensor, *, collection: str | None = None) -> tuple[Tensor, Tensor]:
        """([N, D] of the table's type, bool [N]): the embeddings of ids, and which of them have one; zero where not.

        Args:
            table: See `rows`.
            ids_N: int64 [N].
            collection: See `rows`.
        """
        key = self._key(table, collection)
        rows, layout = self._rows[key], layout_of(self._tables[key])
        at, found = rows.where(ids_N.numpy())
        is_found = torch.from_numpy(found)
        records = torch.from_numpy(rows.records[at[found]])
        weights = RowChunk.of_records(ids_N[is_found], ids_N[is_found], records, layout).weights_ND
        out = torch.zeros((len(ids_N), layout.dim), dtype=weights.dtype)
        out[is_found] = weights
        return out, is_found

    def _key(self, table: str, collection: str | None) -> Key:
        found = [key for key in self._tables if key[1] == table and collection in (None, key[0])]
        if len(found) != 1:
            raise ConfigError(
                f"{'no' if not found else 'more than one'} table {table!r} is in {self._snapshot}. (collection, "
                f"table): {list(self._tables)}."
            )
        return found[0]

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _read_snapshot(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        for file in manifest.files():
            verify(folder, file)
        tables = _tables_of(manifest.collections)
        rows = {key: _read(folder, table) for key, table in tables.items()}
        self._dense = _dense(folder, manifest)
        self._tables, self._rows = tables, rows
        self._snapshot, self._number = folder, 0
        self._digest, self._step = manifest.digest, manifest.step

    def _apply(self, delta: DeltaManifest) -> None:
        folder = delta_folder(self._snapshot, delta.number)
        try:
            for file in delta.files():
                verify(folder, file)
            removed: dict[Key, list[NDArray[np.int64]]] = {key: [] for key in self._tables}
            for entry in delta.removed:
                removed[entry.collection, entry.table].append(np.fromfile(folder / entry.file.name, dtype="<i8"))
            rows = {
                key: self._rows[key].changed(np.concatenate([_NO_IDS, *removed[key]]), _read(folder, table))
                for key, table in _tables_of(delta.collections).items()
            }
            dense = _dense(folder, delta)
        except HybridRecError as e:
            raise StateError(f"delta {delta.number} of {self._snapshot} cannot be applied: {e}") from e
        self._rows |= rows
        self._dense = dense
        self._number, self._digest, self._step = delta.number, delta.digest, delta.step


_NO_IDS = np.empty(0, dtype=np.int64)


def _tables_of(collections: tuple[CollectionEntry, ...]) -> dict[Key, TableEntry]:
    return {(c.name, table.name): table for c in collections for table in c.tables}


def _read(folder: Path, table: TableEntry) -> _Rows:
    """The rows of all files of a table, each id once."""
    layout = layout_of(table)
    ids, scores = np.empty(table.rows, dtype=np.int64), np.empty(table.rows, dtype=np.int64)
    records = np.empty((table.rows, layout.record_floats), dtype=np.float32)
    begin = 0
    for file in table.files:
        for chunk in read_rows(folder, table, file, layout):
            end = begin + len(chunk.ids_N)
            ids[begin:end], scores[begin:end] = chunk.ids_N.numpy(), chunk.scores_N.numpy()
            records[begin:end] = chunk.records(layout).numpy()
            begin = end
    order = np.argsort(ids, kind="stable")
    return _Rows(ids=ids[order], scores=scores[order], records=records[order])


def _dense(folder: Path, manifest: Manifest | DeltaManifest) -> dict[str, Tensor]:
    model: dict[str, Tensor] = torch.load(folder / manifest.dense.name, map_location=HOST, weights_only=True)["model"]
    return model | ShardedReader(folder, manifest.sharded).read_whole(MODEL)


def follow(path: str | Path) -> Follower:
    """Read the newest snapshot of a run and its deltas; `Follower.update` takes in what comes later.

    The tables are in host memory, embeddings and optimizer states: 4 bytes a float, 16 a row; while a delta is applied,
    the largest table twice.

    Args:
        path: Folder of snapshots, as given to `DeltaWriter`; or one snapshot, whose deltas alone are followed then.

    Raises:
        StateError: There is no complete snapshot; or it, or a delta, is damaged or missing: names it.
    """
    return Follower(path)
