"""Tables as Parquet files: `export_parquet`, and how one is read back. pyarrow is imported when one is touched."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrec.checkpoint.row_file import RowFile, dim_error, file_error
from hybridrec.checkpoint.saved_tables import Chunks, SavedTable, export_tables
from hybridrec.errors import ConfigError

_BUFFER_BYTES = 2**20
"""Of a column that is read: without it pyarrow holds a whole row group."""


def export_parquet(
    path: str | Path,
    out: str | Path,
    *,
    tables: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write each table at a point to ``OUT/TABLE.parquet``: ``id`` int64, ``embedding`` fixed-size list of float32.

    Tables of 16 bits come as float32 too, which holds their values and which every reader knows. Chunk by chunk, a row
    group each, ascending by id: memory does not depend on the size of a table. Needs pyarrow; no model, no device and
    no TorchRec.

    Args:
        path: As of `load`: a folder of snapshots, a snapshot, or a delta.
        out: Folder, made if it is missing.
        tables: Names; None: all.
        progress: Is told the rows of each chunk that was written.

    Returns:
        The files, one a table.

    Raises:
        ConfigError: pyarrow is missing, there is no such table, two collections have a table of one name, or a file
            exists.
        StateError: The snapshot is damaged: names the file. Nothing was written.
    """
    _pyarrow()
    return export_tables(path, out, "parquet", _write, tables=tables, progress=progress)


def _write(path: Path, table: SavedTable) -> Iterator[int]:
    pa, pq = _pyarrow()
    row = pa.list_(pa.field("element", pa.float32(), nullable=False), table.dim)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("embedding", row, nullable=False)])
    # Ids ascend, so that their statistics find a row group. Floats have neither repetitions for a dictionary nor
    # anything to compress.
    how = {"compression": "none", "use_dictionary": False, "write_statistics": ["id"]}
    with pq.ParquetWriter(path, schema, write_page_checksum=True, **how) as writer:
        for ids_N, weights_ND in table.chunks():
            values = pa.array(weights_ND.to(torch.float32).contiguous().flatten().numpy())
            embeddings = pa.FixedSizeListArray.from_arrays(values, type=row)
            batch = pa.record_batch([pa.array(ids_N.numpy()), embeddings], schema=schema)
            writer.write_batch(batch, row_group_size=len(ids_N))
            yield len(ids_N)


class ParquetFile(RowFile):
    """Columns ``id``, int64, and ``embedding``, lists of float32 or float16; other columns do not matter."""

    def _open(self) -> int:
        pa, pq = _pyarrow()
        self._errors = (pa.ArrowException, OSError)
        try:
            self._file = pq.ParquetFile(
                self._path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
        except self._errors as e:
            raise self._damaged(e) from e
        self._check(pa, self._file.schema_arrow)
        return int(self._file.metadata.num_rows)

    def _check(self, pa: Any, schema: Any) -> None:
        names = schema.names
        for name in ("id", "embedding"):
            if names.count(name) != 1:
                raise file_error(self._path, f"has the columns {names}", "Needed: one 'id' and one 'embedding'.")
        if (kind := schema.field("id").type) != pa.int64():
            raise file_error(self._path, f"has the column 'id' as {kind}", "Accepted: int64.")
        kind = schema.field("embedding").type
        is_fixed = pa.types.is_fixed_size_list(kind)
        is_list = is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not is_list or kind.value_type not in (pa.float32(), pa.float16()):
            raise file_error(
                self._path, f"has the column 'embedding' as {kind}", "Accepted: lists of float32 or float16."
            )
        if is_fixed and kind.list_size != self._dim:
            raise dim_error(self._path, kind.list_size, self._dim)

    def chunks(self, n: int) -> Chunks:
        for batch in self._batches(n, ["id", "embedding"], None):
            ids_N = self._ids_of(batch)
            yield ids_N, self._embeddings_of(batch, ids_N)

    def part(self, n: int, part: int, num_parts: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        for group in range(self._file.num_row_groups):
            is_mine = group % num_parts == part
            for batch in self._batches(n, ["id", "embedding"] if is_mine else ["id"], [group]):
                ids_N = self._ids_of(batch)
                yield ids_N, self._embeddings_of(batch, ids_N) if is_mine else None

    def _batches(self, n: int, columns: list[str], groups: list[int] | None) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(n, columns=columns, row_groups=groups)
        except self._errors as e:
            raise self._damaged(e) from e

    def _ids_of(self, batch: Any) -> Tensor:
        column = batch.column("id")
        if column.null_count:
            raise file_error(self._path, f"has {column.null_count:,} rows without an id", "Remove them.")
        return torch.from_numpy(np.array(column))  # a copy: arrow's memory cannot be written

    def _embeddings_of(self, batch: Any, ids_N: Tensor) -> Tensor:
        column = batch.column("embedding")
        if column.null_count:
            first = ids_N[column.is_null().to_numpy(zero_copy_only=False).argmax()]
            raise file_error(self._path, f"has no embedding of id {first}", "Remove its row, or give it one.")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != self._dim).any():
            wrong = (lengths != self._dim).argmax()
            raise dim_error(self._path, f"{lengths[wrong]} (id {ids_N[wrong]})", self._dim)
        values = column.flatten()
        if values.null_count:
            first = ids_N[values.is_null().to_numpy(zero_copy_only=False).argmax() // self._dim]
            raise file_error(self._path, f"has an empty place in the embedding of id {first}", "Fill it.")
        weights = values.to_numpy(zero_copy_only=False).astype(np.float32)
        return torch.from_numpy(weights).view(len(ids_N), self._dim)

    def _damaged(self, error: Exception) -> ConfigError:
        return file_error(self._path, f"cannot be read as Parquet: {error}", "Write or copy it again.")


def _pyarrow() -> tuple[Any, Any]:
    """Pyarrow and its Parquet module.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise ConfigError(
            f"Parquet files need pyarrow, which cannot be imported ({e}). Install it: pip install pyarrow."
        ) from e
