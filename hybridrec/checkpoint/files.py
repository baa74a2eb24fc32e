"""Files of snapshots: written with their hash and forced to disk, folders that appear by one rename, reading back."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.checkpoint.manifest import FileEntry, TableEntry
from hybridrec.errors import StateError
from hybridrec.store.row_export import RowChunk, ShardRows
from hybridrec.store.row_state_layout import RowStateLayout

_BLOCK_BYTES = 8 * 2**20
_BLOCK_IDS = 2**15
REMOVED = ".removed."
"""What the name of a folder begins with while it is removed."""


class HashedFile:
    """A file that is written once from its beginning; its length and SHA-256 are known at the end."""

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        """The file must not exist; folders in ``name`` are made."""
        self._name, self._rank, self._rows = name, rank, 0
        self._digest, self._bytes, self._sent = hashlib.sha256(), 0, 0
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "xb", buffering=0)

    def write(self, data: memoryview, *, rows: int = 0) -> None:
        """All of it, or an `OSError`."""
        self._digest.update(data)
        self._bytes += data.nbytes
        self._rows += rows
        data = data.cast("B")
        while data.nbytes:
            data = data[self._file.write(data) :]
        if self._bytes - self._sent >= _BLOCK_BYTES:
            self._send()

    def _send(self) -> None:
        """Let the system begin to put what was written on disk: `finish` has less to wait for."""
        if hasattr(os, "posix_fadvise"):  # Linux does so when told that pages are not needed, and keeps them meanwhile
            os.posix_fadvise(self._file.fileno(), self._sent, self._bytes - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self._bytes

    def finish(self) -> FileEntry:
        """Force it to disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(
            name=self._name, rank=self._rank, bytes=self._bytes, sha256=self._digest.hexdigest(), rows=self._rows
        )

    def close(self) -> None:
        """Give it up; legal after `finish`."""
        self._file.close()


def write_file(folder: Path, name: str, data: bytes | memoryview, rank: int) -> FileEntry:
    """A whole small file, forced to disk."""
    file = HashedFile(folder, name, rank)
    try:
        file.write(memoryview(data))
        return file.finish()
    finally:
        file.close()


class _Chunk:
    """Some rows as they are in a file: ids int64 [n], scores uint32 [n], records float32 [n, R], little-endian."""

    def __init__(self, num_rows: int, record_floats: int) -> None:
        self.num_rows = num_rows
        whole = np.empty(num_rows * (12 + 4 * record_floats), dtype=np.uint8)
        ids, scores, records = np.split(whole, [8 * num_rows, 12 * num_rows])
        self.data = whole.data
        self._ids_N = torch.from_numpy(ids.view("<i8"))
        self._records = torch.from_numpy(records.view("<f4").reshape(num_rows, record_floats))
        self._scores, self._wide_N = scores.view("<u4"), torch.empty(num_rows, dtype=torch.int64)

    def fill(self, rows: ShardRows) -> None:
        """The next ones."""
        rows.read(self._ids_N, self._wide_N, self._records)
        self._scores[:] = self._wide_N.numpy()


def write_rows(folder: Path, name: str, rows: ShardRows, chunk_rows: int, rank: int) -> FileEntry:
    """A table's shard, chunk after chunk of ``chunk_rows`` rows, the last one shorter. Memory: one chunk."""
    file = HashedFile(folder, name, rank)
    try:
        chunk = _Chunk(min(chunk_rows, rows.num_left), rows.layout.record_floats)
        while rows.num_left:
            if rows.num_left < chunk.num_rows:
                chunk = _Chunk(rows.num_left, rows.layout.record_floats)
            chunk.fill(rows)
            file.write(chunk.data, rows=chunk.num_rows)
        return file.finish()
    finally:
        file.close()
        rows.close()


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).data).cast("B") if array.size else memoryview(b"")


def read_rows(folder: Path, table: TableEntry, file: FileEntry, layout: RowStateLayout) -> Iterator[RowChunk]:
    """The chunks of a shard, in order. The file was verified.

    Raises:
        StateError: The file is shorter than it was.
    """
    path = folder / file.name
    with open(path, "rb", buffering=0) as stream:
        for first in range(0, file.rows, table.chunk_rows):
            yield _read_chunk(stream, path, min(table.chunk_rows, file.rows - first), layout)


def read_rows_apart(
    folder: Path, table: TableEntry, file: FileEntry, layout: RowStateLayout, *, ids_only: bool = False
) -> Iterator[RowChunk]:
    """As `read_rows`; the file is open only while a chunk is read: of more files than may be open.

    Args:
        folder: Of the snapshot or delta.
        table: The file's.
        file: It was verified.
        layout: Of its records.
        ids_only: Whether nothing else is read: weights are [n, 0] then.

    Raises:
        StateError: The file is shorter than it was, or its ids do not ascend.
    """
    path, before = folder / file.name, None
    for first in range(0, file.rows, table.chunk_rows):
        n = min(table.chunk_rows, file.rows - first)
        with open(path, "rb", buffering=0) as stream:
            stream.seek(first * (12 + 4 * layout.record_floats))
            if ids_only:
                chunk = only_ids(torch.from_numpy(_read_array(stream, path, "<i8", n)))
            else:
                chunk = _read_chunk(stream, path, n, layout)
        before = _last_of(chunk, path, before)
        yield chunk


def read_ids(folder: Path, file: FileEntry) -> Iterator[RowChunk]:
    """Removed ids, ascending; the file was verified. Errors as of `read_rows_apart`."""
    path, before = folder / file.name, None
    for first in range(0, file.rows, _BLOCK_IDS):
        with open(path, "rb", buffering=0) as stream:
            stream.seek(8 * first)
            ids = _read_array(stream, path, "<i8", min(_BLOCK_IDS, file.rows - first))
        chunk = only_ids(torch.from_numpy(ids))
        before = _last_of(chunk, path, before)
        yield chunk


def _last_of(chunk: RowChunk, path: Path, before: int | None) -> int:
    """The last id of a chunk, whose ids ascend from what is before it."""
    ids = chunk.ids_N
    if not bool((ids[1:] > ids[:-1]).all()) or (before is not None and int(ids[0]) <= before):
        raise StateError(f"{path} is damaged or forged: its ids do not ascend. Use an older snapshot.")
    return int(ids[-1])


def only_ids(ids_N: Tensor) -> RowChunk:
    """Rows of which nothing else is known: scores 0, weights [N, 0]."""
    n = len(ids_N)
    return RowChunk(ids_N=ids_N, scores_N=torch.zeros(1, dtype=torch.int64).expand(n), weights_ND=torch.empty(n, 0))


def _read_chunk(stream: BinaryIO, path: Path, n: int, layout: RowStateLayout) -> RowChunk:
    ids = _read_array(stream, path, "<i8", n)
    scores = _read_array(stream, path, "<u4", n)
    records = _read_array(stream, path, "<f4", n * layout.record_floats).reshape(n, -1)
    scores_N = torch.from_numpy(scores.astype(np.int64))
    return RowChunk.of_records(torch.from_numpy(ids), scores_N, torch.from_numpy(records), layout)


def _read_array(stream: BinaryIO, path: Path, dtype: str, n: int) -> NDArray[Any]:
    array: NDArray[Any] = np.empty(n, dtype=dtype)
    view = _bytes_of(array)
    while view.nbytes:
        got = stream.readinto(view)  # type: ignore[attr-defined]  # files have it
        if not got:
            raise StateError(f"{path} is damaged: it ends too early. Load an older snapshot.")
        view = view[got:]
    return array


def verify(folder: Path, file: FileEntry) -> None:
    """Compare a file with its entry.

    Raises:
        StateError: It is missing, cut or altered; names it.
    """
    path = folder / file.name
    try:
        size, digest = _digest_of(path)
    except FileNotFoundError as e:
        raise StateError(f"{path} is missing. Load an older snapshot.") from e
    except OSError as e:
        raise StateError(f"{path} cannot be read: {e}.") from e
    if size != file.bytes:
        raise StateError(f"{path} is damaged: it has {size:,} bytes, {file.bytes:,} were written. Load an older one.")
    if digest != file.sha256:
        raise StateError(f"{path} is damaged: its contents are not what was written. Load an older snapshot.")


def entry_of(folder: Path, name: str, rank: int) -> FileEntry:
    """The entry of a file that something else wrote."""
    size, digest = _digest_of(folder / name)
    return FileEntry(name=name, rank=rank, bytes=size, sha256=digest)


def _digest_of(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file."""
    digest, size = hashlib.sha256(), 0
    block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as stream:
        while got := stream.readinto(block):
            digest.update(memoryview(block)[:got])
            size += got
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force the names in a folder, and in those in it, to disk."""
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def replace_file(path: Path, data: bytes) -> None:
    """A small file's new contents, all or nothing."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """A folder and what is in it, if it is there: first out of sight, so that it is never seen half removed."""
    hidden = folder if folder.name.startswith(REMOVED) else folder.with_name(f"{REMOVED}{folder.name.lstrip('.')}")
    if hidden != folder:
        shutil.rmtree(hidden, ignore_errors=True)  # of a job that was killed: in the way
    try:
        os.replace(folder, hidden)
    except OSError:
        hidden = folder
    shutil.rmtree(hidden, ignore_errors=True)
