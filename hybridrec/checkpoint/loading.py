"""`load`: a snapshot back into a model, on any number of ranks. See docs/design/checkpoint.md."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridrec.checkpoint import contents
from hybridrec.checkpoint.column_rows import digests_of_columns, require_same_rows
from hybridrec.checkpoint.entries import table_entry
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.finite import NonFiniteRows
from hybridrec.checkpoint.manifest import MANIFEST, CollectionEntry, FileEntry, TableEntry
from hybridrec.checkpoint.points import Layer, Point, read_point, rows_at
from hybridrec.checkpoint.saved_initializers import needs_bank
from hybridrec.checkpoint.saving import MAX_THREADS, log_done
from hybridrec.checkpoint.sharded import ShardedReader, check_sharded
from hybridrec.checkpoint.small_files import describing, is_plain, read_dense, read_own
from hybridrec.distributed.column_parts import columns_of, covering, recut
from hybridrec.distributed.gradient_order import put_gradient_order, warn_of_order
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import dense_tensors, hashed_collections
from hybridrec.distributed.rows_state_dict import owner_of
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.sharded_tensors import reload, set_optimizer_steps
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError, StateError
from hybridrec.store.row_export import RowChunk, side_by_side
from hybridrec.store.row_state_layout import RowStateLayout

_WHERE = "the snapshot"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a snapshot says of where training was."""

    path: Path
    """The snapshot; or the last of its deltas that were taken in."""
    batches_committed: int
    """Training batches before it: skip so many, and go on. Saved without a pipeline: batches whose backward ran, and
    whose step, where gradients are accumulated."""
    world_size: int
    """W of the run that wrote it."""
    extra: Any
    """What this rank had given to `save`; None at another W."""
    extras: tuple[Any, ...]
    """What each rank of that run had given."""
    non_finite: Mapping[str, int]
    """Table -> rows that this rank loaded and that hold NaN or infinity, of tables that have some. A warning names them
    too; they are as they were saved."""


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    pipeline: HybridTrainPipelineSparseDist | None = None,
) -> Loaded:
    """Put a snapshot, and its deltas, into a model: training goes on as if it had not been interrupted.

    The number of ranks, the sizes of caches and the tiers may be others than those of the run that wrote it. All files
    are verified before anything changes; rows and dense part that the model has now are replaced. torch's random
    numbers go on where they were, if W is the same. Collective.

    Args:
        path: A folder of snapshots: the newest one with all its deltas. Or a snapshot: that alone. Or a delta, such as
            ``step_000000001000/deltas/00000003``: with what is before it.
        model: What `DistributedModelParallel` returned, with the tables of the snapshot.
        optimizer: As it was given to `save`; None: not loaded.
        pipeline: Of the model; batches in flight are dropped, and it counts on from the snapshot.

    Raises:
        ConfigError: The model has another dim, optimizer, seed or initializer of a table, or other tables or parameters
            than the snapshot; names both. Nothing changed.
        StateError: A file is missing, cut or altered, batches are in flight, or a snapshot of the model is being
            written; names it. Nothing changed. Or the rows do not fit the host budget: then the model is half
            loaded, and says so.
        BackendError: A rank is gone.
    """
    return load_point(path, model, optimizer, pipeline=pipeline)[0]


def load_point(
    path: str | Path, model: nn.Module, optimizer: Any, *, pipeline: HybridTrainPipelineSparseDist | None
) -> tuple[Loaded, Point]:
    """`load`, and where the run is now in its chain of deltas."""
    collections = hashed_collections(model)
    group = next(iter(collections.values())).host_group
    with watched(group, "load"):
        if pipeline is not None:
            pipeline.reset()
        for module in collections.values():
            module.take_back_prepared()
        return _Reader(collections, Ranks(group)).read(path, model, optimizer, pipeline)


class _Reader:
    """One snapshot on its way into a model, on one rank."""

    def __init__(self, collections: dict[str, ShardedHashCollection], ranks: Ranks) -> None:
        self._collections, self._ranks = collections, ranks
        self._non_finite = NonFiniteRows()

    def read(self, path: str | Path, model: nn.Module, optimizer: Any, pipeline: Any) -> tuple[Loaded, Point]:
        ranks, began = self._ranks, time.monotonic()
        with ranks.together():
            point = read_point(path)
            folder, manifest = point.last.folder, point.last.manifest
            self._check_tables(point)
        digests = set(ranks.gather(point.digest))
        with ranks.together():
            if len(digests) > 1:
                raise ConfigError(f"load: the ranks see different snapshots under {path}. Load from a shared folder.")
            files = _share(point, ranks)
            with ThreadPoolExecutor(min(MAX_THREADS, torch.get_num_threads())) as pool:
                list(pool.map(lambda pair: pair[0].verify(pair[1]), files))  # the list: raises what a call raised
            digests_of_rows = digests_of_columns(point, self._table_names(), files)
        everyone = ranks.gather(digests_of_rows)
        is_same = manifest.world_size == ranks.world_size
        with ranks.together():
            require_same_rows(point, everyone)
            dense = read_dense(folder / manifest.dense.name)
            owned = self._owned(point.last)
            with describing(folder / manifest.dense.name):
                self._check_dense(model, dense)
            if is_same:
                with describing(folder / manifest.ranks[ranks.rank].name):
                    contents.check_random_state(owned[ranks.rank]["random"], self._device())
            reader = ShardedReader(folder, manifest.sharded)
            sharded = contents.sharded_tensors(model, optimizer)
        self._check_sharded(reader, sharded, has_optimizer=optimizer is not None)
        with ranks.together(), describing(folder / manifest.dense.name):
            self._check_optimizer(optimizer, dense)
        for module in self._collections.values():
            with ranks.together():
                module.lookup.require_replaceable()
        try:
            with ranks.together():
                rates = {table: rate for own in owned for table, rate in own["rates"].items()}
                self._apply(point, model, optimizer, dense, rates, lambda: reader.read_into(sharded))
                reload(model, contents.weights_of(sharded))
                steps = [(path, n) for own in owned for path, n in own["steps"].items()]
                set_optimizer_steps(model, dict(sorted(steps, key=lambda entry: entry[1])))
            with ranks.together():
                unordered = put_gradient_order(model, dense["gradient_order"]) if is_same else []
        except Exception as e:
            for module in self._collections.values():  # on all ranks, so that none waits for one that refuses
                module.lookup.log.broken = f"a snapshot could be loaded only in part: {type(e).__name__}: {e}"
            raise
        if pipeline is not None:
            pipeline.resume_at(manifest.step)
        if is_same:
            contents.set_random_state(owned[ranks.rank]["random"], self._device())
        self._non_finite.report(folder)
        if ranks.rank == 0:
            warn_of_order(folder, unordered)
            log_done("loaded", folder, [layer.manifest for layer in point.layers], began)
        extras = tuple(own["extra"] for own in owned)
        loaded = Loaded(
            path=folder,
            batches_committed=manifest.step,
            world_size=manifest.world_size,
            extra=extras[ranks.rank] if is_same else None,
            extras=extras,
            non_finite=self._non_finite.counts,
        )
        return loaded, point

    def _device(self) -> torch.device:
        return next(iter(self._collections.values())).lookup.device

    # ---- what must hold before anything changes ----------------------------------------------------------------------

    def _check_tables(self, point: Point) -> None:
        saved = {c.name: c for c in point.collections}
        _check_names("collections", saved, self._collections)
        for name, module in self._collections.items():
            configs = {c.name: c for c in module.table_configs}
            columns = _by_table(saved[name], configs)
            _check_names(f"tables of collection {name!r}", columns, configs)
            for config in configs.values():
                _check_columns(config.name, list(columns[config.name].values()), config.embedding_dim)
            for part, table_now in zip(module.parts, module.lookup.tables, strict=True):
                entries = columns[part.table.name]
                now = table_entry(part, table_now)
                for source in covering(part, entries, _WHERE):
                    _check_table(entries[source.name], now)

    def _check_dense(self, model: nn.Module, dense: dict[str, Any]) -> None:
        tensors = dict(dense_tensors(model))
        _check_names("parameters and buffers", dense["model"], tensors)
        for name, tensor in tensors.items():
            saved = dense["model"][name]
            if _kind(saved) != _kind(tensor):
                raise ConfigError(
                    f"{name!r} is {_kind(saved)} in the snapshot and {_kind(tensor)} in the model. Load it into the "
                    "model that it was saved from."
                )
            if not is_plain(saved):  # a sparse buffer: whether it can be copied depends on more
                tensor.detach().clone().copy_(saved)

    def _check_optimizer(self, optimizer: Any, dense: dict[str, Any]) -> None:
        if optimizer is not None:
            if dense["optimizer"] is None:
                raise ConfigError("load: an optimizer was given, but none was given to save(). Leave it out.")
            contents.check_optimizer_state(optimizer, dense["optimizer"])

    def _check_sharded(self, reader: ShardedReader, now: dict[str, Any], *, has_optimizer: bool) -> None:
        """Collective: states of a table's optimizer are known to the ranks that have a part of it."""
        saved = reader.shapes if has_optimizer else contents.without_optimizer(reader.shapes)
        everyone = {name for one in self._ranks.gather(list(now)) for name in one}
        with self._ranks.together():
            _check_names("tables that TorchRec shards, and their states,", saved, everyone)
            check_sharded(saved, now)
            reader.check_into(now)

    def _owned(self, layer: Layer) -> list[dict[str, Any]]:
        """What each rank of the run had for itself."""
        manifest = layer.manifest
        if [file.rank for file in manifest.ranks] != list(range(manifest.world_size)):
            raise StateError(
                f"{layer.folder / MANIFEST} is damaged or forged: of {manifest.world_size} ranks it has the files of "
                f"{[file.rank for file in manifest.ranks]}. Load an older snapshot."
            )
        return [read_own(layer.folder / file.name) for file in manifest.ranks]

    def _table_names(self) -> dict[str, list[str]]:
        """Of each collection now."""
        return {name: [c.name for c in module.table_configs] for name, module in self._collections.items()}

    # ---- changing ----------------------------------------------------------------------------------------------------

    def _apply(
        self,
        point: Point,
        model: nn.Module,
        optimizer: Any,
        dense: dict[str, Any],
        rates: Any,
        read_sharded: Callable[[], None],
    ) -> None:
        for saved in point.collections:
            self._load_rows(point, saved, self._collections[saved.name])
        read_sharded()
        with torch.no_grad():
            for name, tensor in dense_tensors(model):
                tensor.copy_(dense["model"][name])
        if optimizer is not None:
            contents.load_optimizer_state(optimizer, dense["optimizer"], rates)

    def _load_rows(self, point: Point, saved: CollectionEntry, module: ShardedHashCollection) -> None:
        lookup = module.lookup
        num_batches = point.last.manifest.step
        lookup.forget_rows(ordinal=saved.ordinal, committed=saved.batches_committed, num_batches=num_batches)
        columns = _by_table(saved, {c.name for c in module.table_configs})
        for part, table in zip(module.parts, lookup.tables, strict=True):
            sources = covering(part, columns[part.table.name], _WHERE)
            is_row_wise = part.owner is None
            streams = [
                rows_at(
                    point,
                    saved.name,
                    source.name,
                    source.layout(table.layout),
                    is_wanted=functools.partial(self._may_have_mine, saved.name, source.name, is_row_wise),
                )
                for source in sources
            ]
            for chunks in side_by_side(streams):
                rows = recut(list(zip(sources, chunks, strict=True)), part, table.layout)
                rows = self._mine(rows, table.layout) if is_row_wise else rows
                self._non_finite.look(table.name, rows)
                lookup.import_rows(table.name, rows)

    def _may_have_mine(self, collection: str, table: str, is_row_wise: bool, layer: Layer, file: FileEntry) -> bool:
        """An id is of rank ``mix64(id) % W``: then and now alike modulo what both W have in common."""
        if not (is_row_wise and layer.table(collection, table).is_row_wise):
            return True
        common = math.gcd(layer.manifest.world_size, self._ranks.world_size)
        return (file.rank - self._ranks.rank) % common == 0

    def _mine(self, rows: RowChunk, layout: RowStateLayout) -> RowChunk:
        """Those of a row-wise table that belong to this rank."""
        if self._ranks.world_size == 1:
            return rows
        mine = owner_of(rows.ids_N, self._ranks.world_size) == self._ranks.rank
        return RowChunk.of_records(rows.ids_N[mine], rows.scores_N[mine], rows.records(layout)[mine], layout)


def _share(point: Point, ranks: Ranks) -> list[tuple[Layer, FileEntry]]:
    """The files that this rank verifies: each is by one rank, and bytes are about even.

    At the same W those that it wrote and will import: the system has them in memory then, when they are read again.
    """
    files = point.files()
    if all(layer.manifest.world_size == ranks.world_size for layer in point.layers):
        return [(layer, file) for layer, file in files if file.rank == ranks.rank]
    loads = [0] * ranks.world_size
    mine = []
    for layer, file in sorted(files, key=lambda pair: (-pair[1].bytes, pair[0].folder, pair[1].name)):
        rank = loads.index(min(loads))
        loads[rank] += file.bytes
        if rank == ranks.rank:
            mine.append((layer, file))
    return mine


def _by_table(saved: CollectionEntry, tables: Collection[str]) -> dict[str, dict[str, TableEntry]]:
    """Name of a table -> what was saved of it, by name: itself, or columns of it.

    Args:
        saved: What was saved.
        tables: Names of the tables that there are, quick to look up.
    """
    found: dict[str, dict[str, TableEntry]] = {}
    for entry in saved.tables:
        table, _, _ = columns_of(entry.name, tables)
        found.setdefault(table, {})[entry.name] = entry
    return found


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}"


def _check_names(what: str, saved: Any, now: Any) -> None:
    missing, unexpected = sorted(set(now) - set(saved)), sorted(set(saved) - set(now))
    if missing or unexpected:
        raise ConfigError(
            f"load: {what} differ. Not in the snapshot: {missing or 'none'}; only in the snapshot: "
            f"{unexpected or 'none'}. Load it into the model that it was saved from."
        )


def _check_columns(table: str, saved: list[TableEntry], dim: int) -> None:
    """What was saved of one table, against its columns now."""
    if sum(entry.dim for entry in saved) != dim:
        names = sorted(entry.name for entry in saved)
        cut = "" if names == [table] else f" ({names})"
        raise ConfigError(
            f"table {table!r}: embedding_dim is {sum(entry.dim for entry in saved)} in the snapshot{cut} and {dim} in "
            "the model. Load it into the model that it was saved from."
        )
    rows = {entry.name: entry.rows for entry in saved}
    if len(set(rows.values())) > 1:
        raise StateError(f"the snapshot has columns of one table with different rows: {rows}. Load another snapshot.")


def _check_table(saved: TableEntry, now: TableEntry) -> None:
    pairs = {
        "data_type": (saved.row_type, now.row_type),
        "optimizer": (saved.optimizer["kind"], now.optimizer["kind"]),
        "optimizer states": ([n for n, _ in saved.states], [n for n, _ in now.states]),
        "seed": (saved.seed, now.seed),
        "initializer": (saved.initializer, now.initializer),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            remedy = "Load it into the model that it was saved from."
            if name == "initializer" and needs_bank(saved.initializer) and needs_bank(now.initializer):
                remedy = (
                    "If it is the same init_fn, which makes other bits on another version of torch, give the config "
                    "init_fn=checkpoint.saved_init_fn(path, table)."
                )
            raise ConfigError(
                f"table {saved.name!r}: {name} is {before!r} in the snapshot and {after!r} in the model. {remedy}"
            )
