"""`follow`: a training's tables in another process, by a snapshot and its deltas. Needs no model and no device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.checkpoint.arguments import Ids
from hybridrec.checkpoint.delta_chain import newest_delta, read_delta
from hybridrec.checkpoint.files import read_rows
from hybridrec.checkpoint.followed_rows import FollowedRows, RowStorage
from hybridrec.checkpoint.followed_tables import FollowedTables, Key, Unknown
from hybridrec.checkpoint.manifest import MANIFEST, Manifest, TableEntry, read_manifest
from hybridrec.checkpoint.points import Layer, delta_layer
from hybridrec.checkpoint.saved_tables import layout_of
from hybridrec.checkpoint.sharded import MODEL, ShardedReader
from hybridrec.checkpoint.small_files import read_dense
from hybridrec.checkpoint.snapshot import resolve
from hybridrec.errors import HybridRecError, StateError
from hybridrec.store.row_export import RowChunk


class Follower:
    """The tables of a run as its newest snapshot and deltas have them. Made by `follow`.

    Threads may read while one calls `update`: each call reads one version; for several that belong together ask `now`
    once. The properties are those of the version of the moment.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self._lock = threading.Lock()
        self._storages: dict[Key, RowStorage] = {}
        self._now: FollowedTables | None = None
        self.update()

    def __repr__(self) -> str:
        now = self.now
        tables = ", ".join(f"{name!r}: {len(rows.ids)} rows" for (_, name), rows in now.versions.items())
        return (
            f"Follower({str(self._path)!r}, step {now.step}, {now.number} deltas after {now.snapshot.name}, {tables})"
        )

    @property
    def now(self) -> FollowedTables:
        """The tables as they are now; they stay so, and keep what they need in memory until they are let go of."""
        if self._now is None:
            raise StateError(f"nothing of {self._path} was read.")
        return self._now

    @property
    def snapshot(self) -> Path:
        """The snapshot that it began with."""
        return self.now.snapshot

    @property
    def number(self) -> int:
        """How many deltas it has applied to it."""
        return self.now.number

    @property
    def step(self) -> int:
        """Training batches whose updates it has."""
        return self.now.step

    @property
    def dense(self) -> Mapping[str, Tensor]:
        """See `FollowedTables.dense`."""
        return self.now.dense

    @property
    def table_names(self) -> list[str]:
        """See `FollowedTables.table_names`."""
        return self.now.table_names

    def rows(self, table: str, *, collection: str | None = None) -> RowChunk:
        """See `FollowedTables.rows`."""
        return self.now.rows(table, collection=collection)

    def embeddings(
        self, table: str, ids_N: Ids, *, collection: str | None = None, unknown: Unknown = "initial"
    ) -> tuple[Tensor, Tensor]:
        """See `FollowedTables.embeddings`."""
        return self.now.embeddings(table, ids_N, collection=collection, unknown=unknown)

    def update(self) -> bool:
        """Apply what was written since; whether there was something.

        If a newer snapshot is there, it is read, and its deltas are followed from then on. Each delta is verified
        before it changes anything; it is applied whole.

        Raises:
            StateError: A delta is missing, in the place of another, cut or altered: names its number. The tables are
                as before it.
        """
        with self._lock:
            while True:
                newest = resolve(self._path)
                try:
                    return self._follow(newest)
                except (HybridRecError, OSError):
                    if (newest / MANIFEST).is_file():
                        raise  # else its writer let it go meanwhile: there is a newer one

    def _follow(self, newest: Path) -> bool:
        is_new = self._now is None or newest != self.now.snapshot
        if is_new:
            self._take(self._snapshot_layer(newest))
        snapshot, first = self.now.snapshot, self.now.number + 1
        last, digest = newest_delta(snapshot)
        if last < first - 1:
            raise StateError(f"{snapshot} ends at delta {last}, {first - 1} were applied. Follow it anew.")
        for number in range(first, last + 1):
            delta = read_delta(snapshot, number, self.now.digest)
            self._take(delta_layer(snapshot, delta, self.now.entries))
        if last and digest != self.now.digest:
            raise StateError(f"delta {last} of {snapshot} is not the one that was written last. Follow it anew.")
        return is_new or last >= first

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _snapshot_layer(self, folder: Path) -> Layer:
        return Layer(folder=folder, manifest=read_manifest(folder))

    def _take(self, layer: Layer) -> None:
        """The next version: a snapshot, or what is now with a delta."""
        for file in layer.manifest.files():
            layer.verify(file)
        for storage in self._storages.values():
            storage.reclaim()
        marks = {key: storage.mark for key, storage in self._storages.items()}
        try:
            entries = {(c.name, table.name): table for c in layer.manifest.collections for table in c.tables}
            taken = {key: self._rows_after(layer, key, entry) for key, entry in entries.items()}
            dense = read_dense(layer.folder / layer.manifest.dense.name)
            sharded = ShardedReader(layer.folder, layer.manifest.sharded).read_whole(MODEL)
        except BaseException as e:
            for key, mark in marks.items():
                self._storages[key].roll_back(mark)
            if isinstance(e, HybridRecError) and not isinstance(layer.manifest, Manifest):
                raise StateError(f"delta {layer.manifest.number} cannot be applied: {e}") from e
            raise
        before, is_snapshot = self._now, isinstance(layer.manifest, Manifest)
        self._now = FollowedTables(
            snapshot=layer.folder if before is None or is_snapshot else before.snapshot,
            number=0 if isinstance(layer.manifest, Manifest) else layer.manifest.number,
            step=layer.manifest.step,
            digest=layer.manifest.digest,
            dense=dense["model"] | sharded,
            entries=entries,
            versions={key: rows for key, (rows, _) in taken.items()},
            banks=dense["banks"] if before is None or is_snapshot else before.banks,
        )
        self._storages = {key: rows.storage for key, (rows, _) in taken.items()}
        if before is not None:
            for rows, left in taken.values():
                rows.storage.retire(before, left)

    def _rows_after(self, layer: Layer, key: Key, entry: TableEntry) -> tuple[FollowedRows, NDArray[np.int64]]:
        layout = layout_of(entry)
        before = None if self._now is None else self._now.versions.get(key)
        if before is None or self._now is None or layout_of(self._now.entries[key]) != layout:
            storage = RowStorage(layout.record_floats)
            storage.reserve(entry.rows)
            before = FollowedRows.none(storage)
        removed = None if isinstance(layer.manifest, Manifest) else layer.removed(*key)
        return before.after(_chunks(layer, entry), layout, removed)


def _chunks(layer: Layer, entry: TableEntry) -> Iterator[RowChunk]:
    for file in entry.files:
        yield from read_rows(layer.folder, entry, file, layout_of(entry))


def follow(path: str | Path) -> Follower:
    """Read the newest snapshot of a run and its deltas; `Follower.update` takes in what comes later.

    The tables are in host memory, embeddings and optimizer states: 4 bytes a float, 20 a row. While a delta or a newer
    snapshot is applied: beside that the rows that changed, and 17 bytes a row of tables where ids came or went.

    Args:
        path: Folder of snapshots, as given to `DeltaWriter`; or one snapshot, whose deltas alone are followed then.

    Raises:
        StateError: There is no complete snapshot; or it, or a delta, is damaged or missing: names it.
    """
    return Follower(path)
