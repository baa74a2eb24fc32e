"""A snapshot's deltas: what the manifest of one says, where they are, and that each follows the one before."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrec.checkpoint.files import remove_folder, replace_file, sync_folder
from hybridrec.checkpoint.manifest import (
    MANIFEST,
    CollectionEntry,
    FileEntry,
    check_counts,
    check_writers,
    collection_of,
    decoded,
    digest_of,
    read_json,
)
from hybridrec.checkpoint.snapshot import DELTAS
from hybridrec.checkpoint.writer_lock import WriterLock
from hybridrec.errors import StateError

DELTA_FORMAT = 2
_NEWEST, _UNFINISHED = "newest", ".unfinished_"


@dataclass(frozen=True, kw_only=True)
class RemovedEntry:
    """Ids that left one table on one rank."""

    collection: str
    table: str
    file: FileEntry
    """int64 [``file.rows``], little-endian, ascending."""

    def __post_init__(self) -> None:
        """`ValueError` for a number of ids that the file does not have."""
        if self.file.bytes != 8 * self.file.rows:
            raise ValueError(f"{self.file.name!r} has {self.file.rows:,} ids in {self.file.bytes:,} bytes")


@dataclass(frozen=True, kw_only=True)
class DeltaManifest:
    """One delta: rows trained and ids removed since the snapshot, or since the delta before."""

    number: int
    """From 1."""
    previous: str
    """Digest of the manifest before: of delta ``number - 1``, or of the snapshot."""
    step: int
    """Training batches that were committed: where a loader resumes."""
    world_size: int
    """W, which need not be that of the snapshot."""
    collections: tuple[CollectionEntry, ...]
    """Files of their tables: rows to put in, or in the place of others, after ids were removed."""
    removed: tuple[RemovedEntry, ...]
    dense: FileEntry
    """As of a snapshot: parameters that are not hashed tables, and the optimizer."""
    ranks: tuple[FileEntry, ...]
    """As of a snapshot: what each rank has for itself."""
    sharded: tuple[FileEntry, ...] = ()
    """As of a snapshot: tensors that torch itself shards."""

    def __post_init__(self) -> None:
        """`ValueError` for a file of a rank that there was not."""
        check_counts("of the manifest", number=self.number)
        check_writers(self.files(), self.step, self.world_size)

    def files(self) -> tuple[FileEntry, ...]:
        """All but the manifest itself."""
        shards = [file for c in self.collections for table in c.tables for file in table.files]
        return (self.dense, *self.ranks, *self.sharded, *shards, *(entry.file for entry in self.removed))

    def encode(self) -> bytes:
        """What its file holds."""
        content = {"format": DELTA_FORMAT, **dataclasses.asdict(self)}
        content["sha256"] = digest_of(content)
        return json.dumps(content, indent=1, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of what the manifest says, and so of the whole chain up to here."""
        return digest_of({"format": DELTA_FORMAT, **dataclasses.asdict(self)})


def delta_folder(snapshot: Path, number: int) -> Path:
    """Where a delta is."""
    return snapshot / DELTAS / f"{number:08d}"


class ChainEndedError(StateError):
    """There is no chain that a delta could be added to; a snapshot begins a new one."""


def begin_delta(snapshot: Path, number: int, lock: WriterLock) -> str:
    """Make the folder in which a delta is written; its name. On one rank.

    What is left of deltas that were not written to their end is removed.

    Raises:
        StateError: This process is writing a delta of the snapshot already; names it.
        OSError: It cannot be made.
    """
    folder = unfinished_delta(snapshot, number)
    for other in folder.parent.glob(f"{_UNFINISHED}*"):
        if lock.is_written(_name_in_root(other)):
            raise StateError(
                f"save_delta: this process is writing {other.name.removeprefix(_UNFINISHED)} of {folder.parent} "
                "already, by another DeltaWriter. Call finish() of that one first."
            )
        remove_folder(other)
    folder.parent.mkdir(exist_ok=True)
    sync_folder(snapshot)
    folder.mkdir()
    lock.write(_name_in_root(folder))
    return folder.name


def _name_in_root(folder: Path) -> str:
    """Of a delta, in the folder of snapshots."""
    return "/".join(folder.parts[-3:])


def why_not_next(snapshot: Path, number: int, digest: str) -> str:
    """Why a delta cannot be added behind the one with a number and digest (0: the snapshot); ``""`` if it can."""
    if not (snapshot / MANIFEST).is_file():
        return f"{snapshot} is not there any more"
    try:
        last = newest_delta(snapshot)
    except StateError as e:
        return str(e)
    if last != ((number, digest) if number else (0, "")):
        return f"{snapshot} ends with delta {last[0]}, which this job did not write; delta {number} was its last one"
    return ""


def unfinished_delta(snapshot: Path, number: int) -> Path:
    """Where a delta is while it is written."""
    return snapshot / DELTAS / f"{_UNFINISHED}{number:08d}"


def publish_delta(snapshot: Path, manifest: DeltaManifest) -> None:
    """Make a written delta, whose manifest is in its folder, visible, and the newest. On one rank."""
    folder, target = unfinished_delta(snapshot, manifest.number), delta_folder(snapshot, manifest.number)
    remove_folder(target)  # of an attempt that failed after its rename
    folder.rename(target)
    replace_file(snapshot / DELTAS / _NEWEST, f"{manifest.number} {manifest.digest}\n".encode())


def newest_delta(snapshot: Path) -> tuple[int, str]:
    """(number, digest) of the last delta of a chain; (0, "") without deltas.

    Raises:
        StateError: The file that names it is damaged, or missing although there is more than delta 1.
    """
    path = snapshot / DELTAS / _NEWEST
    try:
        text, digest = path.read_text().split()
        number = int(text)
        if number < 1:
            raise ValueError(f"there is no delta {number}")
        return number, digest
    except FileNotFoundError:
        # A writer that dies may leave delta 1 without it, and no later one: see `publish_delta`.
        later = sorted(f.name for f in path.parent.glob("*") if f.name.isdecimal() and int(f.name) > 1)
        if not later:
            return 0, ""
        if path.exists():  # written since
            return newest_delta(snapshot)
        raise StateError(
            f"{path} is missing, but delta {later[-1]} is there. Load the snapshot, or an older one."
        ) from None
    except (OSError, ValueError) as e:
        raise StateError(f"{path} is damaged: it names no delta. Load the snapshot, or an older one.") from e


def read_delta(snapshot: Path, number: int, previous: str) -> DeltaManifest:
    """The manifest of a delta.

    Args:
        snapshot: Whose chain it is.
        number: Of the delta.
        previous: Digest of the manifest that it must follow.

    Raises:
        StateError: It is missing, damaged, or another one is in its place; names the number.
    """
    folder = delta_folder(snapshot, number)
    if not (folder / MANIFEST).is_file():
        raise StateError(f"delta {number} of {snapshot} is missing: later ones cannot be applied. {_REMEDY}")
    manifest = decoded(folder / MANIFEST, read_json(folder / MANIFEST, DELTA_FORMAT), _delta)
    if manifest.number != number:
        raise StateError(f"delta {number} of {snapshot}: delta {manifest.number} is in its place. {_REMEDY}")
    if manifest.previous != previous:
        raise StateError(f"delta {number} of {snapshot} does not follow what is before it. {_REMEDY}")
    return manifest


_REMEDY = "Follow a newer snapshot."


def _delta(content: dict[str, Any]) -> DeltaManifest:
    collections = tuple(collection_of(c) for c in content.pop("collections"))
    removed = tuple(RemovedEntry(file=FileEntry(**r.pop("file")), **r) for r in content.pop("removed"))
    dense, ranks = FileEntry(**content.pop("dense")), tuple(FileEntry(**f) for f in content.pop("ranks"))
    sharded = tuple(FileEntry(**f) for f in content.pop("sharded"))
    return DeltaManifest(collections=collections, removed=removed, dense=dense, ranks=ranks, sharded=sharded, **content)
