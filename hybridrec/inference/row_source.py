"""Where the rows of a collection that is frozen come from."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import nn

from hybridrec.config import TableConfig
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.store.row_export import RowChunk, RowExport

RowSource = ShardedHashCollection | HashCollection
"""A hashed collection, sharded or not."""


def row_source_of(module: nn.Module) -> RowSource:
    """A collection whose rows can be frozen.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(module, (ShardedHashCollection, HashCollection)):
        return module
    raise ConfigError(
        f"freeze: module has type {type(module).__name__}. Pass a hashed collection, sharded or not, such as "
        "model.module.collection."
    )


def check_parts(source: RowSource) -> None:
    """
    Raises:
        ConfigError: A table's columns are on several ranks.
    """
    if not isinstance(source, ShardedHashCollection):
        return
    for part in source.routing.parts:
        if not part.is_whole:
            raise ConfigError(
                f"freeze: table {part.table.name!r} is sharded 'column_wise'. Rows are encoded as a whole, and no rank "
                "has one. Shard it 'row_wise' or 'table_wise', or freeze an unsharded collection with its rows."
            )


def export_of(source: RowSource, table: TableConfig, chunk_rows: int) -> RowExport:
    """The rows that this rank has of a table, ascending by id; none if another rank has the table. Collective."""
    if not isinstance(source, ShardedHashCollection):
        return source.export_rows(table.name, chunk_rows=chunk_rows)
    source.take_back_prepared()
    if table.name not in source.lookup.table_names:
        return RowExport(0, chunk_rows, _no_chunk, lambda: None)
    return source.lookup.export_rows(table.name, chunk_rows=chunk_rows)


def _no_chunk(n: int) -> RowChunk:
    raise StopIteration  # nobody asks for rows of an export that has none


def group_of(source: RowSource) -> dist.ProcessGroup | None:
    """Of the ranks that have the other rows, in host memory; None: there are none."""
    return source.host_group if isinstance(source, ShardedHashCollection) else None


def is_pooled(source: RowSource) -> bool:
    """Whether bags are pooled, or ids have a row each."""
    return hasattr(source, "embedding_bag_configs")


def is_weighted(source: RowSource) -> bool:
    """Whether ids carry weights."""
    return is_pooled(source) and bool(cast(Any, source).is_weighted())


def need_indices(source: RowSource) -> bool:
    """Whether the outputs of a collection of sequences carry their ids."""
    return not is_pooled(source) and bool(cast(Any, source).need_indices())
