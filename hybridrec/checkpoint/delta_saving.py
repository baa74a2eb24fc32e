"""`DeltaSaving`: one delta on its way to disk, as `Saving` is a snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridrec.checkpoint import writer_lock
from hybridrec.checkpoint.delta_chain import (
    DeltaManifest,
    RemovedEntry,
    begin_delta,
    delta_folder,
    publish_delta,
    unfinished_delta,
)
from hybridrec.checkpoint.entries import folder_name
from hybridrec.checkpoint.files import remove_folder, write_file
from hybridrec.checkpoint.manifest import FileEntry
from hybridrec.checkpoint.saving import RankPart, Saving


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPlace:
    """Where a delta belongs, and what it has beside what a snapshot would."""

    snapshot: Path
    number: int
    previous: str
    """Digest of what is before it."""
    marks: Mapping[str, int]
    """Collection -> rows whose score is above it changed."""
    removed: Mapping[tuple[str, str], Tensor]
    """(collection, table) -> ids that left on this rank: int64, ascending."""


class DeltaSaving(Saving):
    """What changed, written while training goes on: made at a step boundary, finished at a later one."""

    def __init__(self, place: DeltaPlace, *arguments: Any, **keywords: Any) -> None:
        """``place``: of the delta; everything else: see `Saving`."""
        self._place = place
        super().__init__(place.snapshot.parent, *arguments, **keywords)

    def _open(self) -> str:
        self._lock = writer_lock.acquire(self._root)
        try:
            return begin_delta(self._place.snapshot, self._place.number, self._lock)
        except BaseException:
            self._release()
            raise

    def _unfinished(self) -> Path:
        return unfinished_delta(self._place.snapshot, self._place.number)

    def _banks(self) -> dict[str, dict[str, Tensor]]:
        return {}  # the snapshot has them

    def _mark(self, collection: str) -> int:
        return self._place.marks[collection]

    def _write_more(self) -> None:
        for (c, table), ids in self._place.removed.items():
            if not len(ids):
                continue
            data = ids.numpy().astype("<i8", copy=False).tobytes()
            name = f"removed/{folder_name(c)}/{folder_name(table)}/{self._rank:05d}.ids"
            file = dataclasses.replace(write_file(self._folder, name, data, self._rank), rows=len(ids))
            self._removed.append(RemovedEntry(collection=c, table=table, file=file))

    def _manifest(self, everyone: list[RankPart], sharded: tuple[FileEntry, ...]) -> DeltaManifest:
        return DeltaManifest(
            number=self._place.number,
            previous=self._place.previous,
            removed=tuple(entry for one in everyone for entry in one.removed),
            **self._common(everyone, sharded),
        )

    def _show(self, manifest: DeltaManifest) -> None:
        publish_delta(self._place.snapshot, manifest)

    def _published(self) -> Path:
        return delta_folder(self._place.snapshot, self._place.number)

    def _discard(self) -> None:
        remove_folder(self._unfinished())
