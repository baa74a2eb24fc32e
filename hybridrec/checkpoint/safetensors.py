"""`export_safetensors`: the tables of a snapshot as files that other tools read. Needs no model and no device.

The format (a length, a JSON header, raw tensors) is written by hand: a package that writes whole tensors would need the
table in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrec.checkpoint.files import read_rows
from hybridrec.checkpoint.manifest import TableEntry, read_manifest
from hybridrec.checkpoint.snapshot import resolve
from hybridrec.errors import ConfigError
from hybridrec.row_type import RowType
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout
from hybridrec.types import RowState

_DTYPES = {RowType.FLOAT32: "F32", RowType.BFLOAT16: "BF16", RowType.FLOAT16: "F16"}
"""The format's names."""


def export_safetensors(path: str | Path, out: str | Path) -> list[Path]:
    """Write each table of a snapshot to ``OUT/TABLE.safetensors``: ``id`` int64 [R], ``embedding`` [R, D].

    Chunk by chunk: memory does not depend on the size of a table. Rows are in the order of the snapshot's files.

    Args:
        path: A snapshot, or a folder of them: the newest.
        out: Folder, made if it is missing.

    Raises:
        ConfigError: Two collections have a table of one name, or a file exists.
        StateError: The snapshot is damaged.
    """
    folder = resolve(path)
    manifest = read_manifest(folder)
    tables = [table for collection in manifest.collections for table in collection.tables]
    names = [table.name for table in tables]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"export: the collections of {folder} have the tables {twice} twice: one file cannot hold both."
        )
    targets = [Path(out) / f"{table.name.replace(os.sep, '_')}.safetensors" for table in tables]
    if there := [str(target) for target in targets if target.exists()]:
        raise ConfigError(f"export: {there[0]} exists. Remove it, or choose another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)
    for table, target in zip(tables, targets, strict=True):
        _write(folder, table, target)
    return targets


def layout_of(table: TableEntry) -> RowStateLayout:
    """What a record of the table holds."""
    states = tuple(RowState(name=name, is_row_wise=is_row_wise) for name, is_row_wise in table.states)
    return RowStateLayout(dim=table.dim, states=states, row_type=RowType[table.row_type])


def _write(folder: Path, table: TableEntry, target: Path) -> None:
    row_type = RowType[table.row_type]
    id_bytes, row_bytes = table.rows * 8, table.rows * table.dim * row_type.dtype.itemsize
    header = json.dumps(
        {
            "__metadata__": {"format": "pt", "table": table.name},
            "id": {"dtype": "I64", "shape": [table.rows], "data_offsets": [0, id_bytes]},
            "embedding": {
                "dtype": _DTYPES[row_type],
                "shape": [table.rows, table.dim],
                "data_offsets": [id_bytes, id_bytes + row_bytes],
            },
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    columns: list[Callable[[RowChunk], NDArray[np.generic]]] = [
        lambda chunk: chunk.ids_N.numpy(),
        lambda chunk: chunk.weights_ND.contiguous().view(torch.uint8).numpy(),
    ]
    beside = target.with_name(f".{target.name}.unfinished")
    with open(beside, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for column in columns:  # one pass over the snapshot for each tensor
            for chunk in _chunks(folder, table):
                file.write(np.ascontiguousarray(column(chunk)).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, target)


def _chunks(folder: Path, table: TableEntry) -> Iterator[RowChunk]:
    for file in table.files:
        yield from read_rows(folder, table, file, layout_of(table))
