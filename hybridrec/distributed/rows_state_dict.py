"""Rows of hashed tables in an ordinary ``state_dict``: for each table and rank ids, scores and records.

The keys name the rank, so that the state_dicts of all ranks can be merged into one, and nothing takes one rank's rows
for another's: ``{collection}.rows.{table}.rank_{r}_of_{W}.ids``, ``.scores``, ``.records``, and
``{collection}.progress.rank_{r}_of_{W}`` (ordinal, steps, batches). Of a table that one rank has, it says
``whole`` in place of the rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.distributed.column_parts import covering, recut
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.routing import TablePart
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.errors import ConfigError
from hybridrec.native import mix64
from hybridrec.row_type import RowType
from hybridrec.store.row_export import RowChunk
from hybridrec.store.row_state_layout import RowStateLayout

WHOLE = "whole"
"""In the keys of a table that one rank has."""
_TABLE = re.compile(r"rows\.(.+)\.(?:rank_\d+_of_\d+|whole)\.ids", re.DOTALL)
_PROGRESS = re.compile(r"progress\.rank_(\d+)_of_(\d+)")
_ROWS = re.compile(rf"rows\.(.+)\.(?:rank_(\d+)_of_(\d+)|{WHOLE})\.(?:ids|scores|records(?:_\w+)?)")


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
    parts: Sequence[TablePart],
) -> None:
    """Add this rank's committed rows to a state_dict, as copies in host memory; arguments as of `take_rows`."""
    who = f"rank_{rank}_of_{size}"
    for part, table in zip(parts, lookup.tables, strict=True):
        chunks = list(lookup.export_rows(table.name))
        where = f"{prefix}rows.{table.name}.{who if part.owner is None else WHOLE}"
        none = torch.empty(0, dtype=torch.int64)
        destination[f"{where}.ids"] = torch.cat([none, *(c.ids_N for c in chunks)])
        destination[f"{where}.scores"] = torch.cat([none, *(c.scores_N for c in chunks)])
        records = [torch.empty((0, table.layout.record_floats)), *(c.records(table.layout) for c in chunks)]
        destination[f"{where}.{_records_name(table)}"] = torch.cat(records)
    log = lookup.log
    destination[f"{prefix}progress.{who}"] = torch.tensor([log.committed_ordinal, log.committed, log.num_batches])


def _records_name(table: ShardTable) -> str:
    """``"records"``, with the type of the weights unless it is float32: rows of another type are not found."""
    row_type = table.spec.row_type
    return "records" if row_type is RowType.FLOAT32 else f"records_{row_type.name.lower()}"


def is_of_rows(key: str, prefix: str) -> bool:
    """Whether `put_rows` makes such a key for a collection."""
    return key.startswith((f"{prefix}rows.", f"{prefix}progress."))


def unexpected_keys(state: Mapping[str, Any], prefix: str, tables: Collection[str]) -> list[str]:
    """Keys of a collection that `put_rows` makes for none of its tables, or for a rank whose progress is not there."""
    known = set(_ranks_in(state, prefix))
    unexpected = []
    for key in state:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or _PROGRESS.fullmatch(name):
            continue
        found = _ROWS.fullmatch(name)
        is_known = found is not None and (found[2] is None or (int(found[2]), int(found[3])) in known)
        names = set() if found is None else {found[1], found[1].rpartition("[")[0]}  # the second: of columns of a table
        if not is_known or names.isdisjoint(tables):
            unexpected.append(key)
    return unexpected


def collections_in(keys: Iterable[Any]) -> list[str]:
    """What the keys of each collection begin with, of those in a state_dict for which `put_rows` was called."""
    found = (re.fullmatch(rf"((?:.*\.)?){_PROGRESS.pattern}", str(key), re.DOTALL) for key in keys)
    return sorted({m[1] for m in found if m is not None})


def take_rows(
    lookup: PooledLookup, state: Mapping[str, Any], prefix: str, rank: int, size: int, parts: Sequence[TablePart]
) -> None:
    """Replace all rows by those of a state_dict: what this rank saved, or what is its own of what all ranks saved.

    Args:
        lookup: This rank's.
        state: The state_dict.
        prefix: Of the collection's keys.
        rank: This one.
        size: W.
        parts: Of tables, in the order of the lookup: who has their rows.

    Raises:
        ConfigError: Rows of a rank or table are missing, or have another width. Nothing changed.
        StateError: A batch is in flight, rows are being exported, or columns of a table have different ids. Nothing
            changed. Or the rows do not fit the host budget: then the collection is half loaded, and says so.
    """
    sources = _sources(state, prefix, rank, size)
    found = [
        list(_rows_of(part, table, state, prefix, sources)) for part, table in zip(parts, lookup.tables, strict=True)
    ]
    progress = [state[f"{prefix}progress.rank_{r}_of_{w}"].tolist() for r, w in sources]
    ordinal, committed, num_batches = (int(max(values)) for values in zip(*progress, strict=True))
    lookup.require_replaceable()
    try:
        lookup.forget_rows(ordinal=ordinal, committed=committed, num_batches=num_batches)
        for part, table, chunks in zip(parts, lookup.tables, found, strict=True):
            for rows in chunks:
                if part.owner is None:
                    mine = owner_of(rows.ids_N, size) == rank
                    records = rows.records(table.layout)[mine]
                    rows = RowChunk.of_records(rows.ids_N[mine], rows.scores_N[mine], records, table.layout)
                lookup.import_rows(table.name, rows)
    except Exception as e:
        lookup.log.broken = f"a state_dict could be loaded only in part: {type(e).__name__}: {e}"
        raise


def _rows_of(
    part: TablePart, table: ShardTable, state: Mapping[str, Any], prefix: str, sources: list[tuple[int, int]]
) -> Iterator[RowChunk]:
    """What the sources have of a part of a table, with its columns."""
    saved = (_TABLE.fullmatch(key.removeprefix(prefix)) for key in state if key.startswith(f"{prefix}rows."))
    columns = covering(part, {m[1] for m in saved if m is not None}, "the state_dict")
    streams = []
    for one in columns:
        where, layout = f"{prefix}rows.{one.name}", one.layout(table.layout)
        if f"{where}.{WHOLE}.ids" in state:
            streams.append([_chunk(state, f"{where}.{WHOLE}", table, layout)])
            continue
        if part.owner is not None:
            _require_all(sources, f"{where}: one rank has it now, and")
        streams.append([_chunk(state, f"{where}.rank_{r}_of_{w}", table, layout) for r, w in sources])
    for chunks in zip(*streams, strict=True):
        yield recut(list(zip(columns, chunks, strict=True)), part, table.layout)


def _sources(state: Mapping[str, Any], prefix: str, rank: int, size: int) -> list[tuple[int, int]]:
    """The (rank, W) whose rows are to be read: of all ranks if they are there, else of this one."""
    known = _ranks_in(state, prefix)
    if (rank, size) in known and not _are_all(known):
        return [(rank, size)]
    _require_all(known, f"{prefix or 'the collection'}: this is rank {rank} of {size}, and")
    return known


def _ranks_in(state: Mapping[str, Any], prefix: str) -> list[tuple[int, int]]:
    """(rank, W), sorted, of all whose progress is there."""
    found = [_PROGRESS.fullmatch(key.removeprefix(prefix)) for key in state if key.startswith(prefix)]
    return sorted((int(m[1]), int(m[2])) for m in found if m is not None)


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


def _chunk(state: Mapping[str, Any], where: str, table: ShardTable, layout: RowStateLayout) -> RowChunk:
    try:
        ids_N, scores_N, records = (
            state[f"{where}.{what}"].to(HOST) for what in ("ids", "scores", _records_name(table))
        )
    except KeyError as e:
        raise ConfigError(
            f"load_state_dict: the state_dict has no {e.args[0]!r}. Load what was saved whole, into tables of the same "
            "data_type."
        ) from None
    if records.shape != (len(ids_N), layout.record_floats):
        raise ConfigError(
            f"load_state_dict: {where}.records has shape {list(records.shape)}, table {table.name!r} has records of "
            f"{layout.record_floats} floats (embedding_dim={layout.dim} and the states of "
            f"{table.optimizer.kind!r}). Load it into the model that it was saved from."
        )
    return RowChunk.of_records(ids_N, scores_N, records, layout)
