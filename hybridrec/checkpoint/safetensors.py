"""Tables as safetensors files: `export_safetensors`, and how one is read back.

The format (a length, a JSON header, raw tensors) is written and read by hand: the package of that name would need the
table in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridrec.checkpoint.row_file import RowFile, dim_error, file_error
from hybridrec.checkpoint.saved_tables import Chunks, SavedTable, export_tables
from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType

_DTYPES = {RowType.FLOAT32: "F32", RowType.BFLOAT16: "BF16", RowType.FLOAT16: "F16"}
"""The format's names."""
_ITEM_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2}
_LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


def export_safetensors(
    path: str | Path,
    out: str | Path,
    *,
    tables: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write each table at a point to ``OUT/TABLE.safetensors``: ``id`` int64 [R], ``embedding`` [R, D].

    Embeddings have the table's type: float32, bfloat16 or float16. Chunk by chunk, ascending by id: memory does not
    depend on the size of a table. Needs no model, no device and no TorchRec.

    Args:
        path: As of `load`: a folder of snapshots, a snapshot, or a delta.
        out: Folder, made if it is missing.
        tables: Names; None: all.
        progress: Is told the rows of each chunk that was written.

    Returns:
        The files, one a table.

    Raises:
        ConfigError: There is no such table, two collections have a table of one name, or a file exists.
        StateError: The snapshot is damaged: names the file. Nothing was written.
    """
    return export_tables(path, out, "safetensors", _write, tables=tables, progress=progress)


def _write(path: Path, table: SavedTable) -> Iterator[int]:
    room = len(_header(table, table.most_rows))
    num_rows = 0
    with open(path, "wb") as file:
        file.seek(room)
        for ids_N in table.ids():  # one pass over the snapshot for each tensor
            file.write(ids_N.numpy().astype("<i8", copy=False).data)
            num_rows += len(ids_N)
        for _, weights_ND in table.chunks():
            file.write(weights_ND.contiguous().view(torch.uint8).numpy().data)
            yield len(weights_ND)
        file.seek(0)
        file.write(_header(table, num_rows, room))  # now that it is known how many ids there are


def _header(table: SavedTable, num_rows: int, room: int = 0) -> bytes:
    """What a file of so many rows begins with, in so many bytes at least."""
    id_bytes, row_bytes = num_rows * 8, num_rows * table.dim * table.row_type.dtype.itemsize
    text = json.dumps(
        {
            "__metadata__": {"format": "pt", "table": table.name},
            "id": {"dtype": "I64", "shape": [num_rows], "data_offsets": [0, id_bytes]},
            "embedding": {
                "dtype": _DTYPES[table.row_type],
                "shape": [num_rows, table.dim],
                "data_offsets": [id_bytes, id_bytes + row_bytes],
            },
        }
    ).encode()
    text = text.ljust(max(room - 8, len(text) + -len(text) % 8))
    return len(text).to_bytes(8, "little") + text


class SafetensorsFile(RowFile):
    """``id`` I64 [R] and ``embedding`` F32, BF16 or F16 [R, D], wherever in the file; other tensors do not matter."""

    def _open(self) -> int:
        header = _Header(self._path)
        self._id, shape, _ = header.tensor("id", ("I64",), "[R]")
        self._embedding, (rows, columns), dtype = header.tensor("embedding", tuple(_DTYPES.values()), "[R, D]")
        if shape != [rows]:
            raise file_error(self._path, f"has {shape[0]:,} ids and {rows:,} embeddings", "Row by row they belong.")
        if columns != self._dim:
            raise dim_error(self._path, columns, self._dim)
        self._dtype = next(row_type.dtype for row_type, name in _DTYPES.items() if name == dtype)
        return rows

    def chunks(self, n: int) -> Chunks:
        for first in range(0, self.rows, n):
            yield self._ids(first, n), self._embeddings(first, n)

    def part(self, n: int, part: int, num_parts: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        for number, first in enumerate(range(0, self.rows, n)):
            is_mine = number % num_parts == part
            yield self._ids(first, n), self._embeddings(first, n) if is_mine else None

    def _ids(self, first: int, n: int) -> Tensor:
        return self._read(self._id + first * 8, min(n, self.rows - first), 1, torch.int64).flatten()

    def _embeddings(self, first: int, n: int) -> Tensor:
        at = self._embedding + first * self._dim * self._dtype.itemsize
        return self._read(at, min(n, self.rows - first), self._dim, self._dtype).to(torch.float32)

    def _read(self, at: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        data = np.empty(rows * columns * dtype.itemsize, dtype=np.uint8)
        with open(self._path, "rb") as file:
            file.seek(at)
            if file.readinto(data.data) != len(data):
                raise file_error(self._path, "ends too early", "It changed while it was read.")
        return torch.from_numpy(data).view(dtype).view(rows, columns)


class _Header:
    """What a file says of its tensors, which nobody has checked yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._start = 8 + length
            text = file.read(length) if self._start <= self._size and length <= _LARGEST_HEADER else b""
        try:
            self._header = json.loads(text)
        except (ValueError, RecursionError):
            self._header = None
        if not isinstance(self._header, dict):
            raise file_error(path, "is neither Parquet nor safetensors", "Write the table in one of these formats.")

    def tensor(self, name: str, dtypes: tuple[str, ...], shape: str) -> tuple[int, list[int], str]:
        """(where it begins in the file, shape, dtype) of a tensor that lies in the file as a whole."""
        if name not in self._header:
            there = sorted(set(self._header) - {"__metadata__"})
            raise file_error(
                self._path, f"has no tensor {name!r}, but {there}", "Needed: 'id' [R], 'embedding' [R, D]."
            )
        entry = self._header[name]
        try:
            dtype, found, (begin, end) = str(entry["dtype"]), list(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as e:
            raise self._damaged(name, entry) from e
        if dtype not in dtypes or len(found) != len(shape.split()):
            raise file_error(
                self._path, f"has {name!r} as {dtype} {found}", f"Accepted: {' or '.join(dtypes)} {shape}."
            )
        if not all(type(x) is int and x >= 0 for x in (*found, begin, end)):
            raise self._damaged(name, entry)
        if end - begin != math.prod(found) * _ITEM_BYTES[dtype] or self._start + end > self._size:
            raise self._damaged(name, entry)
        return self._start + begin, found, dtype

    def _damaged(self, name: str, entry: object) -> ConfigError:
        return file_error(self._path, f"is damaged: tensor {name!r} is said to be {entry}", "Write or copy it again.")
