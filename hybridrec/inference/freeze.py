"""`freeze`, `load`: a hashed collection becomes a frozen one, in memory or in the files of a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import dtype_to_data_type

from hybridrec.config import TableConfig
from hybridrec.distributed.host_thread import settle_host_thread
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError
from hybridrec.inference.files import FileStorage, MappedFiles, MemoryStorage, Storage
from hybridrec.inference.frozen_tables import FrozenTable
from hybridrec.inference.manifest import config_from_entry, entry_of
from hybridrec.inference.quant_collections import (
    DATA_TYPES,
    FrozenParts,
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)
from hybridrec.inference.report import FreezeReport
from hybridrec.inference.row_format import RowFormat, parse_row_format
from hybridrec.inference.row_source import (
    RowSource,
    check_parts,
    group_of,
    is_pooled,
    is_weighted,
    need_indices,
    row_source_of,
)
from hybridrec.inference.table_writer import CHUNK_ROWS, TableWriter, array_shapes, together
from hybridrec.modules.hash_collection import HashCollection

QuantCollection = QuantHashEmbeddingBagCollection | QuantHashEmbeddingCollection

_UNKNOWN_ROWS = ("initial", "zero")
_UNKNOWN_ROW_ATTRIBUTE = "_hybridrec_unknown_row"


def freeze(
    module: nn.Module,
    path: str | Path | None = None,
    *,
    dtype: str | Mapping[str, str] = "int8",
    unknown_row: str = "initial",
    chunk_rows: int = CHUNK_ROWS,
) -> QuantCollection | None:
    """Make a collection that serves the rows as they are now. The collection itself is not changed.

    Args:
        module: A hashed collection, sharded or not. Of a sharded one, all ranks call this;
            batches in flight do not count, and what a pipeline prepared is taken back.
        path: A directory to write the arrays to, of this or of rank 0's machine; the result maps them. None: memory.
        dtype: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``; or table name -> dtype, all tables.
        unknown_row: What ids without a row read: ``"initial"``, their initial row, as in evaluation, or ``"zero"``.
            Either way they count in a mean.
        chunk_rows: Rows that are read, encoded and sent at a time.

    Returns:
        The frozen collection, in host memory; None on ranks other than 0.

    Raises:
        ConfigError: An argument is not accepted; ``path`` exists; a row has a value that ``dtype`` cannot hold.
        OSError: The files cannot be written. On all ranks alike, like the other errors; nothing is left of them.
    """
    source = row_source_of(module)
    group = group_of(source)
    if group is None:
        return _freeze(source, path, dtype, unknown_row, chunk_rows)
    settle_host_thread(group)
    with watched(group, "freeze"):
        return _freeze(source, path, dtype, unknown_row, chunk_rows)


def load(path: str | Path) -> QuantCollection:
    """A collection that `freeze` wrote. Its arrays are mapped: pages are read when they are used.

    Args:
        path: The directory.

    Returns:
        The collection, in host memory.

    Raises:
        ConfigError: There is none, of this version, or a file of it has another size.
    """
    files = MappedFiles(Path(path))
    manifest = files.manifest
    pooled = manifest["is_pooled"]
    configs, formats, tables = [], [], []
    for t, entry in enumerate(manifest["tables"]):
        config, row_format = config_from_entry(entry, t, files, is_pooled=pooled), RowFormat(entry["dtype"])
        shapes = array_shapes(row_format, config.embedding_dim, entry["rows"])
        arrays = {name: files.array(f"{t}.{name}", *shape) for name, shape in shapes.items()}
        configs.append(config)
        formats.append(row_format)
        has_initial_rows = manifest["unknown_row"] == "initial"
        tables.append(FrozenTable(config, row_format, **arrays, has_initial_rows=has_initial_rows))
    parts = FrozenParts(
        configs=tuple(configs),
        formats=tuple(formats),
        tables=tuple(tables),
        report=FreezeReport.from_json(manifest["report"]),
        is_weighted=manifest["is_weighted"],
        need_indices=manifest["need_indices"],
    )
    return _collection(parts, is_pooled=pooled)


def set_unknown_row(model: nn.Module, unknown_row: str) -> nn.Module:
    """Choose what unknown ids will read in the collections of a model that `quantize_dynamic` replaces.

    Args:
        model: Has hashed collections, not sharded.
        unknown_row: ``"initial"`` (what they read unless this is called) or ``"zero"``.

    Returns:
        The model.

    Raises:
        ConfigError: ``unknown_row`` is neither, or the model has no hashed collection.
    """
    _check_unknown_row(unknown_row)
    collections = [m for m in model.modules() if isinstance(m, HashCollection)]
    if not collections:
        raise ConfigError(
            f"set_unknown_row: {type(model).__name__} has no hashed collection. Call it before they are quantised; "
            "sharded ones are frozen by hybridrec.inference.freeze(..., unknown_row=...)."
        )
    for collection in collections:
        setattr(collection, _UNKNOWN_ROW_ATTRIBUTE, unknown_row)
    return model


def freeze_from_qconfig(module: HashCollection) -> QuantCollection:
    """What `quantize_dynamic` makes of a collection, by the `QuantConfig` that it attached."""
    qconfig: Any = module.qconfig
    output_dtype = qconfig.activation().dtype
    if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(
            f"QuantConfig: activation dtype {output_dtype} is not available as output. Accepted: torch.float32, "
            "torch.float16, torch.bfloat16."
        )
    per_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
    names = [config.name for config in module.table_configs]
    dtypes = {name: _format_of(per_table.get(name, qconfig.weight().dtype), name) for name in names}
    frozen = freeze(module, dtype=dtypes, unknown_row=getattr(module, _UNKNOWN_ROW_ATTRIBUTE, "initial"))
    assert frozen is not None  # it is not sharded
    frozen.output_dtype = output_dtype
    return frozen


def _freeze(
    source: RowSource, path: str | Path | None, dtype: str | Mapping[str, str], unknown_row: str, chunk_rows: int
) -> QuantCollection | None:
    group = group_of(source)
    is_writer = group is None or group.rank() == 0
    storage: Storage | None = None

    def check() -> tuple[RowFormat, ...]:
        check_parts(source)
        _check_unknown_row(unknown_row)
        if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
            raise ConfigError(f"freeze: chunk_rows={chunk_rows!r}. Pass an int >= 1.")
        formats = _formats(source.table_configs, dtype)
        if is_writer:
            nonlocal storage
            storage = MemoryStorage() if path is None else FileStorage(Path(path))
        return formats

    try:
        formats = together(group, check)
        writers = [TableWriter(source, t, row_format, chunk_rows, storage) for t, row_format in enumerate(formats)]
        for writer in writers:
            writer.write()
        return together(group, lambda: _finish(source, writers, storage, unknown_row))
    except BaseException:
        if storage is not None:
            storage.discard()
        raise


def _finish(
    source: RowSource, writers: list[TableWriter], storage: Storage | None, unknown_row: str
) -> QuantCollection | None:
    """The collection of what was written; nothing on ranks that wrote nothing."""
    if storage is None:
        return None
    report = FreezeReport(tables=tuple(writer.report() for writer in writers))
    formats = tuple(writer.row_format for writer in writers)
    if isinstance(storage, FileStorage):
        entries = [
            entry_of(config, t, writer.row_format, writer.num_rows, storage)
            for t, (config, writer) in enumerate(zip(source.table_configs, writers, strict=True))
        ]
        storage.finish(
            {
                "is_pooled": is_pooled(source),
                "is_weighted": is_weighted(source),
                "need_indices": need_indices(source),
                "unknown_row": unknown_row,
                "tables": entries,
                "report": report.to_json(),
            }
        )
        return load(storage.path)
    tables = tuple(
        FrozenTable(config, writer.row_format, **writer.arrays, has_initial_rows=unknown_row == "initial")
        for config, writer in zip(source.table_configs, writers, strict=True)
    )
    parts = FrozenParts(
        configs=source.table_configs,
        formats=formats,
        tables=tables,
        report=report,
        is_weighted=is_weighted(source),
        need_indices=need_indices(source),
    )
    return _collection(parts, is_pooled=is_pooled(source))


def _collection(parts: FrozenParts, *, is_pooled: bool) -> QuantCollection:
    return QuantHashEmbeddingBagCollection(parts) if is_pooled else QuantHashEmbeddingCollection(parts)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _formats(configs: tuple[TableConfig, ...], dtype: str | Mapping[str, str]) -> tuple[RowFormat, ...]:
    """Of every table."""
    if not isinstance(dtype, Mapping):
        return (parse_row_format(dtype, "freeze"),) * len(configs)
    names = [config.name for config in configs]
    if sorted(dtype) != sorted(names):
        raise ConfigError(
            f"freeze: dtype names the tables {', '.join(map(repr, dtype)) or 'none'}; the collection has "
            f"{', '.join(map(repr, names))}. Give each of them one, or one dtype for all."
        )
    return tuple(parse_row_format(dtype[name], f"freeze: table {name!r}") for name in names)


def _check_unknown_row(unknown_row: str) -> None:
    if unknown_row not in _UNKNOWN_ROWS:
        allowed = " or ".join(map(repr, _UNKNOWN_ROWS))
        raise ConfigError(f"unknown_row={unknown_row!r}. Accepted: {allowed}.")


def _format_of(dtype: torch.dtype, table: str) -> RowFormat:
    """Of a torch dtype, as TorchRec reads it: ``torch.quint4x2`` is int4."""
    try:
        data_type = dtype_to_data_type(dtype)
    except Exception:  # TorchRec's own says "Invalid data type" and no more
        data_type = None
    for row_format, name in DATA_TYPES.items():
        if name == data_type:
            return row_format
    raise ConfigError(
        f"QuantConfig: weight dtype {dtype} of table {table!r} is not available. Accepted: torch.float32, "
        "torch.float16, torch.int8 or torch.qint8, torch.quint4x2."
    )
