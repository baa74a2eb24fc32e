"""`import_rows`: rows that were trained elsewhere, by id, into a sharded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridrec.backend import HOST
from hybridrec.checkpoint.arguments import Ids, as_tensor
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.model_parts import hashed_collections
from hybridrec.distributed.routing import TablePart
from hybridrec.distributed.rows_state_dict import owner_of
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError
from hybridrec.modules.hash_table import PROTECTED_BATCHES
from hybridrec.row_type import RowType
from hybridrec.store.row_export import RowChunk


def import_rows(model: nn.Module, table: str, ids_N: Ids, weights_ND: Tensor | NDArray[np.float32]) -> None:
    """Insert rows by id, or replace those that live; their optimizer state begins anew.

    For a table larger than memory call it for one chunk after the other. The rows count as used after all that are
    there, and the next batch may evict them (``max_rows``): none in flight needs them. Collective: all ranks pass the
    same rows, each keeps those that it owns.

    Args:
        model: What `DistributedModelParallel` returned.
        table: Its name; one collection alone may have it.
        ids_N: int64 [N], any values, in host memory: a tensor, a numpy array or a list; of an id that comes twice the
            last row counts.
        weights_ND: float32 [N, D], a tensor or a numpy array; they are rounded to the table's type.

    Raises:
        ConfigError: There is no such table, or ids or weights are not as they should be. Nothing changed.
        StateError: A batch is in flight, or the host budget has no room; a rank that had room keeps its rows.
    """
    module = collection_with(model, table, call="import_rows")
    module.take_back_prepared()
    ranks = Ranks(module.host_group)
    with ranks.together():
        ids_N, weights_ND = as_tensor(ids_N, "import_rows: ids"), as_tensor(weights_ND, "import_rows: weights")
        check_rows(module, table, ids_N, weights_ND)
        module.lookup.require_idle()
    with ranks.together():
        group = module.lookup.log.group
        score = group.ordinal + 1
        group.set_ordinal(score + PROTECTED_BATCHES)  # they are not among what the last batches used
        for part, shard in parts_of(module, table):
            mine = owner_of(ids_N, ranks.world_size) == ranks.rank if part.owner is None else slice(None)
            scores_N = torch.full_like(ids_N[mine], score)
            put(module.lookup, part, shard, ids_N[mine], scores_N, weights_ND[mine])


def collection_with(model: nn.Module, table: str, *, call: str) -> ShardedHashCollection:
    """The one collection that has a table; `ConfigError` if there is none, or are several."""
    collections = hashed_collections(model).values()
    found = [m for m in collections if any(c.name == table for c in m.table_configs)]
    if len(found) != 1:
        names = sorted(c.name for m in collections for c in m.table_configs)
        what = "no collection has" if not found else f"{len(found)} collections have"
        raise ConfigError(f"{call}: {what} the table {table!r}. Tables: {names}.")
    return found[0]


def parts_of(module: ShardedHashCollection, table: str) -> Iterator[tuple[TablePart, ShardTable]]:
    """The table, or those of its columns that this rank has."""
    for part, shard in zip(module.parts, module.lookup.tables, strict=True):
        if part.table.name == table:
            yield part, shard


def check_rows(module: ShardedHashCollection, table: str, ids_N: Tensor, weights_ND: Tensor) -> None:
    """Raise `ConfigError` unless these can be rows of a table."""
    dim = next(c.embedding_dim for c in module.table_configs if c.name == table)
    if ids_N.dtype != torch.int64 or ids_N.dim() != 1 or ids_N.device != HOST:
        raise ConfigError(
            f"import_rows: ids are {ids_N.dtype} {list(ids_N.shape)} on {ids_N.device}. Accepted: int64 [N] in host "
            "memory."
        )
    if weights_ND.dtype != torch.float32 or weights_ND.shape != (len(ids_N), dim) or weights_ND.device != HOST:
        raise ConfigError(
            f"import_rows: weights are {weights_ND.dtype} {list(weights_ND.shape)} on {weights_ND.device}. Accepted: "
            f"float32 [{len(ids_N):,}, {dim}] in host memory: the embedding_dim of table {table!r}."
        )
    check_range(weights_ND, next(c.row_type for c in module.table_configs if c.name == table), table, "import_rows")


def check_range(weights_ND: Tensor, row_type: RowType, table: str, where: str) -> None:
    """Raise `ConfigError` if weights would become infinite in the table's type."""
    if bool((weights_ND.to(row_type.dtype).isinf() & weights_ND.isfinite()).any()):
        raise ConfigError(
            f"{where}: weights reach {weights_ND.abs().max().item():.6g}, table {table!r} holds {row_type.dtype}, up "
            f"to {torch.finfo(row_type.dtype).max:.6g} (its data_type). Use DataType.FP32, or smaller weights."
        )


def put(
    lookup: PooledLookup,
    part: TablePart,
    shard: ShardTable,
    ids_N: Tensor,
    scores_N: Tensor,
    weights_ND: Tensor,
    states: Sequence[Tensor] = (),
) -> None:
    """Put rows into what this rank has of a table.

    Args:
        lookup: Of the collection.
        part: The columns.
        shard: Their rows.
        ids_N: int64 [N], of this rank.
        scores_N: int64 [N].
        weights_ND: float32 [N, D], of all columns.
        states: float32 [N, D] each, of all columns: its row-sized states. Empty: every state begins anew.
    """
    layout = shard.layout
    slices = layout.record_slices
    columns = slice(part.first_column, part.first_column + part.dim)
    records = torch.empty((len(ids_N), layout.record_floats))
    records[:, slices["weights"]] = layout.row_type.words(weights_ND[:, columns])
    for state in layout.states:
        records[:, slices[state.name]] = state.initial_value
    if states:
        for state, values_ND in zip(layout.row_states, states, strict=True):
            records[:, slices[state.name]] = values_ND[:, columns]
    lookup.import_rows(shard.name, RowChunk.of_records(ids_N.contiguous(), scores_N, records, layout))
