"""Rows of hashed tables in an ordinary ``state_dict``: for each table and rank ids, scores and records.

The keys name the rank, so that the state_dicts of all ranks can be merged into one, and nothing takes one rank's rows
for another's: ``{collection}.rows.{table}.rank_{r}_of_{W}.ids``, ``.scores``, ``.records``, and
``{collection}.progress.rank_{r}_of_{W}`` (ordinal, committed batches).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.errors import ConfigError
from hybridrec.native import mix64
from hybridrec.row_type import RowType
from hybridrec.store.row_export import RowChunk

_PROGRESS = re.compile(r"progress\.rank_(\d+)_of_(\d+)")


def owner_of(ids_N: Tensor, world_size: int) -> Tensor:
    """int64 [N]: the rank of each id of a row-wise table, ``mix64(id) % W`` with the key unsigned."""
    keys = mix64(ids_N)
    half = (keys >> 1) & (2**63 - 1)  # without the lowest bit, so that it is not negative
    return (half % world_size * 2 + (keys & 1)) % world_size


def put_rows(lookup: PooledLookup, destination: MutableMapping[str, Any], prefix: str, rank: int, size: int) -> None:
    """Add this rank's committed rows to a state_dict, as copies in host memory."""
    who = f"rank_{rank}_of_{size}"
    for table in lookup.tables:
        chunks = list(lookup.export_rows(table.name))
        where = f"{prefix}rows.{table.name}.{who}"
        none = torch.empty(0, dtype=torch.int64)
        destination[f"{where}.ids"] = torch.cat([none, *(c.ids_N for c in chunks)])
        destination[f"{where}.scores"] = torch.cat([none, *(c.scores_N for c in chunks)])
        records = [torch.empty((0, table.layout.record_floats)), *(c.records(table.layout) for c in chunks)]
        destination[f"{where}.{_records_name(table)}"] = torch.cat(records)
    log = lookup.log
    destination[f"{prefix}progress.{who}"] = torch.tensor([log.group.ordinal, log.committed])


def _records_name(table: ShardTable) -> str:
    """``"records"``, with the type of the weights unless it is float32: rows of another type are not found."""
    row_type = table.spec.row_type
    return "records" if row_type is RowType.FLOAT32 else f"records_{row_type.name.lower()}"


def is_of_rows(key: str, prefix: str) -> bool:
    """Whether `put_rows` makes such a key for a collection."""
    return key.startswith((f"{prefix}rows.", f"{prefix}progress."))


def take_rows(
    lookup: PooledLookup, state: Mapping[str, Any], prefix: str, rank: int, size: int, row_wise: Collection[str]
) -> None:
    """Replace all rows by those of a state_dict: of this rank, or, saved by another number of ranks, of all of them.

    Args:
        lookup: This rank's.
        state: The state_dict.
        prefix: Of the collection's keys.
        rank: This one.
        size: W.
        row_wise: Tables of which this rank has the rows of the ids that hash to it.

    Raises:
        ConfigError: Rows of a rank or table are missing, or have another width. Nothing changed.
        StateError: A batch is in flight. Nothing changed.
    """
    sources = _sources(state, prefix, rank, size)
    parts = {table.name: _parts(state, f"{prefix}rows.{table.name}", sources, table) for table in lookup.tables}
    progress = [state[f"{prefix}progress.rank_{r}_of_{w}"].tolist() for r, w in sources]
    ordinal, committed = (max(values) for values in zip(*progress, strict=True))
    lookup.forget_rows(ordinal=int(ordinal), committed=int(committed))
    for table in lookup.tables:
        for ids_N, scores_N, records in parts[table.name]:
            mine = owner_of(ids_N, size) == rank if table.name in row_wise else torch.ones_like(ids_N, dtype=torch.bool)
            rows = RowChunk.of_records(ids_N[mine], scores_N[mine], records[mine], table.layout)
            lookup.import_rows(table.name, rows)


def _parts(
    state: Mapping[str, Any], where: str, sources: list[tuple[int, int]], table: ShardTable
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A table's rows: of every rank, or, of a table that one rank had, of that one."""
    names = [f"{where}.rank_{r}_of_{w}" for r, w in sources]
    present = [name for name in names if f"{name}.ids" in state]
    return [_part(state, name, table) for name in (present if len(present) == 1 else names)]


def _sources(state: Mapping[str, Any], prefix: str, rank: int, size: int) -> list[tuple[int, int]]:
    """The (rank, W) whose rows are to be read."""
    found = [_PROGRESS.fullmatch(key.removeprefix(prefix)) for key in state if key.startswith(prefix)]
    known = sorted((int(m[1]), int(m[2])) for m in found if m is not None)
    if (rank, size) in known:
        return [(rank, size)]
    sizes = {w for _, w in known}
    if len(sizes) == 1 and [r for r, _ in known] == list(range(min(sizes))):
        return known
    raise ConfigError(
        f"load_state_dict: {prefix or 'the collection'}: the state_dict has rows of the ranks "
        f"{[f'{r} of {w}' for r, w in known] or 'none'}, this is rank {rank} of {size}. Load what this rank saved, or "
        "merge the state_dicts of all ranks; hybridrec.checkpoint does that by itself."
    )


def _part(state: Mapping[str, Any], where: str, table: ShardTable) -> tuple[Tensor, Tensor, Tensor]:
    try:
        ids_N, scores_N, records = (
            state[f"{where}.{what}"].to(HOST) for what in ("ids", "scores", _records_name(table))
        )
    except KeyError as e:
        raise ConfigError(
            f"load_state_dict: the state_dict has no {e.args[0]!r}. Load what was saved whole, into tables of the same "
            "data_type."
        ) from None
    if records.shape != (len(ids_N), table.layout.record_floats):
        raise ConfigError(
            f"load_state_dict: {where}.records has shape {list(records.shape)}, table {table.name!r} has records of "
            f"{table.layout.record_floats} floats (embedding_dim={table.layout.dim} and the states of "
            f"{table.optimizer.kind!r}). Load it into the model that it was saved from."
        )
    return ids_N, scores_N, records
