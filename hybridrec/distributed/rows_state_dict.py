"""Rows of hashed tables in an ordinary ``state_dict``: for each table and rank ids, scores and records.

The keys name the rank, so that the state_dicts of all ranks can be merged into one, and nothing takes one rank's rows
for another's: ``{collection}.rows.{table}.rank_{r}_of_{W}.ids``, ``.scores``, ``.records``, and
``{collection}.progress.rank_{r}_of_{W}`` (ordinal, committed batches). Of a table that one rank has, it says
``whole`` in place of the rank.
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

WHOLE = "whole"
"""In the keys of a table that one rank has."""
_PROGRESS = re.compile(r"progress\.rank_(\d+)_of_(\d+)")


def owner_of(ids_N: Tensor, world_size: int) -> Tensor:
    """int64 [N]: the rank of each id of a row-wise table, ``mix64(id) % W`` with the key unsigned."""
    keys = mix64(ids_N)
    half = (keys >> 1) & (2**63 - 1)  # without the lowest bit, so that it is not negative
    return (half % world_size * 2 + (keys & 1)) % world_size


def put_rows(
    lookup: PooledLookup,
    destination: MutableMapping[str, Any],
    prefix: str,
    rank: int,
    size: int,
    row_wise: Collection[str],
) -> None:
    """Add this rank's committed rows to a state_dict, as copies in host memory; arguments as of `take_rows`."""
    who = f"rank_{rank}_of_{size}"
    for table in lookup.tables:
        chunks = list(lookup.export_rows(table.name))
        where = f"{prefix}rows.{table.name}.{who if table.name in row_wise else WHOLE}"
        none = torch.empty(0, dtype=torch.int64)
        destination[f"{where}.ids"] = torch.cat([none, *(c.ids_N for c in chunks)])
        destination[f"{where}.scores"] = torch.cat([none, *(c.scores_N for c in chunks)])
        records = [torch.empty((0, table.layout.record_floats)), *(c.records(table.layout) for c in chunks)]
        destination[f"{where}.{_records_name(table)}"] = torch.cat(records)
    log = lookup.log
    destination[f"{prefix}progress.{who}"] = torch.tensor([log.committed_ordinal, log.committed])


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
    """Replace all rows by those of a state_dict: what this rank saved, or what is its own of what all ranks saved.

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
    parts = {}
    for table in lookup.tables:
        where = f"{prefix}rows.{table.name}"
        if f"{where}.{WHOLE}.ids" in state:
            parts[table.name] = [_part(state, f"{where}.{WHOLE}", table)]
            continue
        if table.name not in row_wise:
            _require_all(sources, f"{where}: one rank has it now, and")
        parts[table.name] = [_part(state, f"{where}.rank_{r}_of_{w}", table) for r, w in sources]
    progress = [state[f"{prefix}progress.rank_{r}_of_{w}"].tolist() for r, w in sources]
    ordinal, committed = (max(values) for values in zip(*progress, strict=True))
    lookup.forget_rows(ordinal=int(ordinal), committed=int(committed))
    for table in lookup.tables:
        for ids_N, scores_N, records in parts[table.name]:
            mine = owner_of(ids_N, size) == rank if table.name in row_wise else torch.ones_like(ids_N, dtype=torch.bool)
            rows = RowChunk.of_records(ids_N[mine], scores_N[mine], records[mine], table.layout)
            lookup.import_rows(table.name, rows)


def _sources(state: Mapping[str, Any], prefix: str, rank: int, size: int) -> list[tuple[int, int]]:
    """The (rank, W) whose rows are to be read: of all ranks if they are there, else of this one."""
    found = [_PROGRESS.fullmatch(key.removeprefix(prefix)) for key in state if key.startswith(prefix)]
    known = sorted((int(m[1]), int(m[2])) for m in found if m is not None)
    if (rank, size) in known and not _are_all(known):
        return [(rank, size)]
    _require_all(known, f"{prefix or 'the collection'}: this is rank {rank} of {size}, and")
    return known


def _are_all(ranks: list[tuple[int, int]]) -> bool:
    """Whether these (rank, W) are all ranks of one run."""
    sizes = {w for _, w in ranks}
    return len(sizes) == 1 and [r for r, _ in ranks] == list(range(min(sizes)))


def _require_all(ranks: list[tuple[int, int]], where: str) -> None:
    if not _are_all(ranks):
        raise ConfigError(
            f"load_state_dict: {where} the state_dict has rows of the ranks "
            f"{[f'{r} of {w}' for r, w in ranks] or 'none'}. Load what this rank saved, with the tables sharded alike, "
            "or merge the state_dicts of all ranks; hybridrec.checkpoint does that by itself."
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
