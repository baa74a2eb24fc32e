"""Hashed tables whose ids are small, as TorchRec's own collections: row i is that of id i."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hybridrec.backend import HOST, resolve_backend
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.points import read_point
from hybridrec.checkpoint.saved_initializers import Banks, initializer_of, needs_bank, read_banks
from hybridrec.checkpoint.saved_tables import SavedTable, saved_tables
from hybridrec.config import Initializer, TableConfig, resolve_tables
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import CapacityError, ConfigError
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.native import initial_rows, mix64
from hybridrec.row_type import RowType
from hybridrec.store.initializer import initial_spec

_CHUNK_ROWS = 65536

Source = str | Path | nn.Module
"""The path of a snapshot, a folder of them, or a delta; or a hashed collection."""


def to_embedding_bag_collection(
    source: Source,
    tables: Sequence[EmbeddingBagConfig] | None = None,
    *,
    num_embeddings: Mapping[str, int] | None = None,
    is_weighted: bool | None = None,
) -> EmbeddingBagCollection:
    """A TorchRec `EmbeddingBagCollection` in host memory with the embeddings of hashed tables, for small ids.

    Row i of a table is that of id i; where there is none, id i's initial row, as the hashed table reads it in eval
    mode. Rows are float32, which holds those of 16 bits too. Optimizer states stay behind. Of a sharded collection
    this is collective, and every rank gets all rows.

    Args:
        source: A folder of snapshots, a snapshot, or a delta, as of `load`; or a hashed collection, sharded or not.
        tables: Configs of the tables that are wanted, hashed or plain; of a snapshot, which knows neither features nor
            pooling, they must be given. None: those of the collection.
        num_embeddings: Table name -> rows, in place of the config's, which may be nominal. All ids must be below.
        is_weighted: Whether batches carry weights. None: as the collection; of a snapshot, no.

    Returns:
        The collection; nothing in it knows of ``source``.

    Raises:
        ConfigError: An argument is not accepted; a table has another dim, or ids that are negative or too large: says
            how many, and one of them.
        CapacityError: The rows do not fit into host memory.
        StateError: The snapshot is damaged, or rows of a batch are still to be moved.
    """
    if is_weighted is None:
        is_weighted = bool(getattr(source, "is_weighted", bool)())
    with _converted(source, tables, EmbeddingBagConfig, num_embeddings) as (plain, fill):
        collection = EmbeddingBagCollection(tables=plain, is_weighted=is_weighted, device=HOST)
        fill({name: bag.weight.data for name, bag in collection.embedding_bags.items()})
    return collection


def to_embedding_collection(
    source: Source,
    tables: Sequence[EmbeddingConfig] | None = None,
    *,
    num_embeddings: Mapping[str, int] | None = None,
    need_indices: bool | None = None,
) -> EmbeddingCollection:
    """A TorchRec `EmbeddingCollection`; as `to_embedding_bag_collection`, for sequences.

    Args:
        source: As there.
        tables: As there.
        num_embeddings: As there.
        need_indices: Whether outputs carry their ids. None: as the collection; of a snapshot, no.
    """
    if need_indices is None:
        need_indices = bool(getattr(source, "need_indices", bool)())
    with _converted(source, tables, EmbeddingConfig, num_embeddings) as (plain, fill):
        collection = EmbeddingCollection(tables=plain, need_indices=need_indices, device=HOST)
        fill({name: table.weight.data for name, table in collection.embeddings.items()})
    return collection


@contextlib.contextmanager
def _converted(
    source: Source,
    tables: Sequence[Any] | None,
    kind: type[BaseEmbeddingConfig],
    num_embeddings: Mapping[str, int] | None,
) -> Iterator[tuple[list[Any], Callable[[Mapping[str, Tensor]], None]]]:
    """Plain configs, and what fills the weights of a collection that was made from them."""
    configs = _configs(source, tables, kind, num_embeddings or {})
    names = [config.name for config in configs]
    origin = _of_snapshot(source, names) if isinstance(source, str | Path) else _of_collection(source, names)
    for config in configs:
        _check(config, origin.tables[config.name])
    with contextlib.nullcontext() if origin.ranks is None else watched(origin.ranks.group, "export"):
        with origin.together():
            _check_memory(configs)
        with torch.random.fork_rng(devices=[]):  # TorchRec draws rows, which are replaced
            yield [_plain(config, kind) for config in configs], lambda weights: _fill(origin, weights)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _configs(
    source: Source, tables: Sequence[Any] | None, kind: type[BaseEmbeddingConfig], num_embeddings: Mapping[str, int]
) -> tuple[TableConfig, ...]:
    if tables is None:
        method = "embedding_bag_configs" if kind is EmbeddingBagConfig else "embedding_configs"
        if not hasattr(source, method):
            what = "a snapshot" if isinstance(source, str | Path) else type(source).__name__
            raise ConfigError(f"tables=None: {what} has no {kind.__name__}s. Pass those of the tables.")
        tables = getattr(source, method)()
    if unknown := sorted(set(num_embeddings) - {config.name for config in tables}):
        raise ConfigError(f"num_embeddings: there is no table {unknown[0]!r}. Tables: {[c.name for c in tables]}.")
    changed = [replace(c, num_embeddings=num_embeddings.get(c.name, c.num_embeddings)) for c in tables]
    return resolve_tables(changed, kind)


def _check(config: TableConfig, table: _Table) -> None:
    if config.embedding_dim != table.dim:
        raise ConfigError(
            f"table {config.name!r}: embedding_dim is {config.embedding_dim} in its config and {table.dim} in what is "
            "exported. Pass the config that it was trained with."
        )


def _check_memory(configs: Sequence[TableConfig]) -> None:
    needed = {config.name: config.num_embeddings * (4 * config.embedding_dim + 1) for config in configs}
    available, _ = resolve_backend(HOST.type).memory_bytes(HOST)
    if sum(needed.values()) > available:
        name = max(needed, key=needed.__getitem__)
        raise CapacityError(
            f"all rows of the plain tables take {sum(needed.values()):,} bytes of host memory, {available:,} are "
            f"available; most are of table {name!r}, {needed[name]:,}. Pass num_embeddings, the number of its ids."
        )


def _plain(config: TableConfig, kind: type[BaseEmbeddingConfig]) -> BaseEmbeddingConfig:
    fields = {"name": config.name, "feature_names": list(config.feature_names), "embedding_dim": config.embedding_dim}
    if kind is EmbeddingBagConfig:
        fields["pooling"] = config.pooling
    return kind(num_embeddings=config.num_embeddings, **fields)


# ---- where rows come from --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What a hashed table says of its rows."""

    name: str
    dim: int
    row_type: RowType
    seed: int
    initializer: Initializer


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """Tables, and their rows as this rank has them."""

    tables: Mapping[str, _Table]
    chunks: Callable[[str], Iterator[tuple[Tensor, Tensor, int]]]
    """Ids int64 [n], weights [n, d], and the column at which they begin, of a table."""
    ranks: Ranks | None = None
    """Who has the other rows."""

    def together(self) -> AbstractContextManager[None]:
        """A step that may fail on one rank: see `Ranks.together`."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together()


def _of_snapshot(path: str | Path, names: Sequence[str]) -> _Origin:
    point = read_point(path)
    saved = {table.name: table for table in saved_tables(point, names)}
    for table in saved.values():
        table.verify()
    has_banks = any(needs_bank(table.parts[0].initializer) for table in saved.values())
    banks = read_banks(point.snapshot, point.layers[0].manifest.dense) if has_banks else {}
    tables = {name: _saved(table, banks) for name, table in saved.items()}
    return _Origin(tables=tables, chunks=lambda name: ((*chunk, 0) for chunk in saved[name].chunks()))


def _saved(table: SavedTable, banks: Banks) -> _Table:
    first = table.parts[0]
    bank = banks.get(table.collection, {}).get(table.name)
    return _Table(
        name=table.name,
        dim=table.dim,
        row_type=table.row_type,
        seed=first.seed,
        initializer=initializer_of(first.initializer, bank, table.name, "Pass the collection, or a newer snapshot."),
    )


def _of_collection(source: nn.Module, names: Sequence[str]) -> _Origin:
    if not isinstance(source, ShardedHashCollection | HashCollection):
        raise ConfigError(
            f"source has type {type(source).__name__}. Pass a hashed collection, sharded or not, such as "
            "model.module.collection, or the path of a snapshot."
        )
    tables = {
        c.name: _Table(name=c.name, dim=c.embedding_dim, row_type=c.row_type, seed=c.seed, initializer=c.initializer)
        for c in source.table_configs
    }
    if missing := sorted(set(names) - set(tables)):
        raise ConfigError(f"there is no table {missing[0]!r} in the collection. Tables: {sorted(tables)}.")

    def chunks(name: str) -> Iterator[tuple[Tensor, Tensor, int]]:
        parts = [(name, 0)]
        if isinstance(source, ShardedHashCollection):
            parts = [(p.name, p.first_column) for p in source.routing.parts if p.table.name == name]
        for part, first in parts:
            for chunk in source.export_rows(part, chunk_rows=_CHUNK_ROWS):
                yield chunk.ids_N, chunk.weights_ND, first

    if not isinstance(source, ShardedHashCollection):
        return _Origin(tables=tables, chunks=chunks)
    source.take_back_prepared()  # the host group is a pipeline's before
    return _Origin(tables=tables, chunks=chunks, ranks=Ranks(source.host_group))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _fill(origin: _Origin, weights: Mapping[str, Tensor]) -> None:
    """Write the rows of every id below the number of rows."""
    ranks = origin.ranks
    for name, weight_ND in weights.items():
        weight_ND.zero_()
        is_there_N = torch.zeros(len(weight_ND), dtype=torch.uint8)
        with origin.together():
            outside = _put(origin.chunks(name), weight_ND, is_there_N)
        _refuse_outside(name, len(weight_ND), [outside] if ranks is None else ranks.gather(outside))
        if ranks is not None and ranks.world_size > 1:
            # A row's bits are on one rank, and zeros on the others: as integers their sum is exact.
            dist.all_reduce(weight_ND.view(torch.int32), group=ranks.group)
            dist.all_reduce(is_there_N, group=ranks.group)
        _put_initial(origin.tables[name], weight_ND, is_there_N)


def _put(chunks: Iterator[tuple[Tensor, Tensor, int]], weight_ND: Tensor, is_there_N: Tensor) -> tuple[int, int | None]:
    """Write what chunks hold: (how many ids have no place, one of them)."""
    count, example = 0, None
    for ids, weights, first in chunks:
        has_place = (ids >= 0) & (ids < len(weight_ND))
        if not bool(has_place.all()):
            homeless = ids[~has_place]
            count += len(homeless) if first == 0 else 0  # every part of columns has the same ids
            example = int(homeless[0])
            ids, weights = ids[has_place], weights[has_place]
        weight_ND[ids, first : first + weights.shape[1]] = weights.to(torch.float32)
        if first == 0:
            is_there_N[ids] = 1
    return count, example


def _refuse_outside(name: str, num_rows: int, everyone: Sequence[tuple[int, int | None]]) -> None:
    count = sum(n for n, _ in everyone)
    if count:
        example = next(id_ for _, id_ in everyone if id_ is not None)
        raise ConfigError(
            f"table {name!r}: {count:,} ids are no rows of a plain table of {num_rows:,}, such as {example}. Pass a "
            "larger num_embeddings if all ids are small and not negative; a plain table cannot hold others."
        )


def _put_initial(table: _Table, weight_ND: Tensor, is_there_N: Tensor) -> None:
    """Write the initial rows of ids that have none of their own."""
    missing_N = (is_there_N == 0).nonzero().flatten()
    if not len(missing_N):
        return
    spec = initial_spec(table.name, table.dim, table.seed, table.initializer, table.row_type)
    for ids in missing_N.split(_CHUNK_ROWS):
        weight_ND[ids] = initial_rows(spec, mix64(ids.contiguous())).to(torch.float32)
