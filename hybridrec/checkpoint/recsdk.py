"""`import_recsdk`: tables that Ascend RecSDK has saved, into a sharded model: training goes on with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hybridrec.checkpoint.arguments import check_names
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.pretrained import collection_with, parts_of, put
from hybridrec.checkpoint.recsdk_files import MERGED, RANKS, RecsdkSave, read_recsdk
from hybridrec.checkpoint.recsdk_scan import Ages, Scan, chunks, scan, tensor_of
from hybridrec.distributed.model_parts import hashed_collections
from hybridrec.distributed.rows_state_dict import owner_of
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError, StateError
from hybridrec.modules.hash_table import PROTECTED_BATCHES

logger = logging.getLogger("hybridrec")

_LAST_ORDINAL = 2**32 - 4


@dataclass(frozen=True, kw_only=True)
class ImportedTable:
    """What became of one table."""

    table: str
    rows: int
    """Read, over all ranks; a row that several saves have counts as often."""
    states: tuple[str, ...]
    """Optimizer states that came along; the others began anew."""
    times: int
    """Ids whose time of last use (or score) was saved; rows are evicted in that order."""
    unused: Mapping[str, int]
    """What was saved and has no place here -> how many."""


@dataclass(frozen=True, kw_only=True)
class RecsdkImport:
    """What `import_recsdk` did."""

    tables: tuple[ImportedTable, ...]
    not_saved: tuple[str, ...]
    """Tables of the model that the save has not: they are as they were."""


def import_recsdk(
    path: str | Path | Sequence[str | Path],
    model: nn.Module,
    *,
    tables: Collection[str] | None = None,
    adam_step: int | None = None,
    with_states: bool = True,
    world_size: int | None = None,
    cut_tails: bool = False,
) -> RecsdkImport:
    """Insert the rows that RecSDK saved, or replace those that live, with the state of their optimizer.

    Its W and this run's may be any. Files are read twice by every rank, chunk by chunk: once to verify, once to take
    the rows. Beside the tables that needs 16 bytes for every row of one table that the rank owns, and 64 for every time
    of last use of one table. Learning rates and the dense part are not in these files. Collective.

    Args:
        path: A save, see `read_recsdk`; or a full one and the incremental ones after it, in order.
        model: What `DistributedModelParallel` returned, with tables of the same names and dims.
        tables: Names of those to take; None: all that were saved.
        adam_step: Batches that had been trained: what Adam goes on from, which RecSDK does not save. Needed if a table
            has Adam or AdamW.
        with_states: False: rows alone; their optimizer begins anew.
        world_size: W of the run that saved. Needed only if the ids leave open whether the last ranks are missing.
        cut_tails: Whether an array may be followed by what its attribute does not count: hybrid_torchrec leaves that
            behind when it saves less into the folder of an older save. Never pass it for saves of torchrec_embcache,
            which puts the new rows behind the old ones.

    Returns:
        What was imported, and what has no place here, which is logged too.

    Raises:
        ConfigError: The model has no such table, or one of another dim or optimizer; or the save is of a kind that is
            not known. Nothing changed.
        StateError: A file or rank is missing, cut or longer than it should be, an id comes twice, or a batch is in
            flight; names the file. Nothing changed. Or the rows do not fit the host budget: then the collections say
            that they were imported in part.
        BackendError: A rank is gone.
    """
    collections = hashed_collections(model)
    group = next(iter(collections.values())).host_group
    ranks = Ranks(group)
    with watched(group, "import_recsdk"):
        for module in collections.values():
            module.take_back_prepared()
        with ranks.together():
            saves = _read([path] if isinstance(path, (str, Path)) else list(path), world_size, cut_tails=cut_tails)
            names = _wanted(saves, tables)
            targets = {name: collection_with(model, name, call="import_recsdk") for name in names}
        job = _Import(saves, targets, ranks, with_states=with_states)
        job.check(adam_step, world_size)
        job.apply(adam_step)
    others = sorted({c.name for m in collections.values() for c in m.table_configs} - set(names))
    return RecsdkImport(tables=job.report(), not_saved=tuple(others))


# ---- the saves ------------------------------------------------------------------------------------------------------


def _read(paths: list[str | Path], world_size: int | None, *, cut_tails: bool) -> list[RecsdkSave]:
    if not paths:
        raise ConfigError("import_recsdk: no path was given. Pass a save, or a full one and the incremental ones.")
    saves = [read_recsdk(path) for path in paths]
    for number, save in enumerate(saves):
        if len(saves) > 1 and save.layout != MERGED:
            raise ConfigError(f"{save.path} is of the layout {save.layout!r}, which has no increments. Pass it alone.")
        if save.is_incremental is not None and save.is_incremental != (number > 0):
            kind, place = ("an incremental", "first") if save.is_incremental else ("a full", f"number {number + 1}")
            raise ConfigError(f"{save.path} is {kind} save and comes {place}. Pass a full save, then its increments.")
        if world_size is not None and world_size != save.world_size:
            has = (
                "merged the files of all ranks" if save.world_size is None else f"has those of {save.world_size} ranks"
            )
            raise ConfigError(
                f"import_recsdk: world_size={world_size}, but {save.path} {has}. Bring all, or leave it out."
            )
        _check_tails(save, cut_tails=cut_tails)
    return saves


def _check_tails(save: RecsdkSave, *, cut_tails: bool) -> None:
    may_cut = save.layout == RANKS
    for array in (array for table in save.tables for part in table.parts for array in part.arrays):
        if array.tail_bytes and not (may_cut and cut_tails):
            way_out = " If hybrid_torchrec wrote it, the first rows are the new ones: pass cut_tails=True."
            raise StateError(
                f"{array.path} has {array.tail_bytes:,} bytes more than its attribute tells: an older save was in that "
                "folder, and torchrec_embcache writes new rows behind the old ones. Save again into an empty folder."
                f"{way_out if may_cut else ''}"
            )


def _wanted(saves: Sequence[RecsdkSave], tables: Collection[str] | None) -> list[str]:
    """Names of the tables to take, in the order of the full save."""
    check_names(tables, "import_recsdk")
    saved = [table.name for table in saves[0].tables]
    asked = [("tables=", name) for name in tables or ()]
    for where, name in [*asked, *((str(save.path), t.name) for save in saves[1:] for t in save.tables)]:
        if name not in saved:
            raise ConfigError(f"import_recsdk: {where}: {name!r} is not in {saves[0].path}. Tables there: {saved}.")
    return saved if tables is None else [name for name in saved if name in tables]


# ---- the import ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Optimizer:
    """What a table is trained with, as far as its rows are concerned."""

    kind: str
    row_states: tuple[str, ...]
    has_row_wise: bool


class _Import:
    """Saves on their way into a model, on one rank."""

    def __init__(
        self,
        saves: list[RecsdkSave],
        targets: dict[str, ShardedHashCollection],
        ranks: Ranks,
        *,
        with_states: bool,
    ) -> None:
        self._saves, self._targets, self._ranks, self._with_states = saves, targets, ranks, with_states
        self._modules = list(dict.fromkeys(targets.values()))
        self._saved = {name: [t for save in saves for t in save.tables if t.name == name] for name in targets}
        self._optimizers: dict[str, _Optimizer] = {}
        self._scans: dict[str, Scan] = {}

    def check(self, adam_step: int | None, world_size: int | None) -> None:
        """Everything that must hold before a row changes."""
        ranks = self._ranks
        seen = [[(t.name, t.rows, t.dim, t.num_moments) for t in save.tables] for save in self._saves]
        is_same = all(other == seen for other in ranks.gather(seen))
        for one in ranks.gather(self._own_optimizers()):
            self._optimizers |= one
        with ranks.together():
            if not is_same:
                raise ConfigError(
                    f"import_recsdk: the ranks see different files under {self._saves[0].path}. Use a shared folder."
                )
            for name in self._targets:
                self._check_table(name)
            self._check_step(adam_step)
            for module in self._modules:
                module.lookup.require_idle()
        with ranks.together():
            mine = {name: self._scan(name) for name in self._targets if self._has(name)}
        everyone = ranks.gather(mine)
        self._scans = {name: scan for one in everyone for name, scan in one.items()}
        with ranks.together():
            if self._saves[0].layout == RANKS and world_size is None:
                self._check_complete()
            for module in self._modules:
                if self._new_ordinal(module) > _LAST_ORDINAL:
                    raise StateError(
                        f"import_recsdk: {self._levels(module):,} different times of last use, behind the batches so "
                        f"far, go beyond the last ordinal, {_LAST_ORDINAL:,}. Import into a new model."
                    )

    def _has(self, name: str) -> bool:
        return any(True for _ in parts_of(self._targets[name], name))

    def _own_optimizers(self) -> dict[str, _Optimizer]:
        found = {}
        for name, module in self._targets.items():
            for _, shard in parts_of(module, name):
                states, is_wise = shard.layout.row_states, bool(shard.layout.row_wise_states)
                found[name] = _Optimizer(shard.optimizer.kind, tuple(s.name for s in states), is_wise)
        return found

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def _check_table(self, name: str) -> None:
        dim = next(c.embedding_dim for c in self._targets[name].table_configs if c.name == name)
        optimizer = self._optimizers[name]
        for save, table in ((s, t) for s in self._saves for t in s.tables if t.name == name):
            where = f"{save.path}: table {name!r}"
            if table.rows and table.dim != dim:
                raise ConfigError(
                    f"{where} has rows of {table.dim} columns, embedding_dim is {dim} here. Make them alike."
                )
            if not self._with_states:
                continue
            if any(part.has_state_file for part in table.parts):
                raise ConfigError(
                    f"{where} has optimizer values (opt_values), in an order that is not documented. Pass "
                    "with_states=False for the rows alone."
                )
            if optimizer.has_row_wise or len(optimizer.row_states) != table.num_moments:
                kind = "one value a row" if optimizer.has_row_wise else f"{len(optimizer.row_states)}"
                raise ConfigError(
                    f"{where} was saved with {table.num_moments} moments (SGD has 0, Adagrad 1, Adam 2), its optimizer "
                    f"here, {optimizer.kind!r}, has {kind}. Train it with the optimizer that it had, or pass "
                    "with_states=False for the rows alone."
                )

    def _adam_modules(self) -> list[ShardedHashCollection]:
        """Whose step matters to rows that come with their moments."""
        if not self._with_states:
            return []
        found = (module for name, module in self._targets.items() if self._optimizers[name].kind == "adam")
        return list(dict.fromkeys(found))

    def _check_step(self, adam_step: int | None) -> None:
        adam = [name for name, module in self._targets.items() if module in self._adam_modules()]
        if adam_step is None and adam:
            raise ConfigError(
                f"import_recsdk: the moments of {adam} go on from a step of Adam that RecSDK does not save. Pass "
                "adam_step=, the number of batches it was trained with."
            )
        if adam_step is None:
            return
        if isinstance(adam_step, bool) or not isinstance(adam_step, int) or adam_step < 0 or not adam:
            what = "no table that comes with its moments has Adam" if not adam else "accepted: an int, 0 or more"
            raise ConfigError(f"import_recsdk: adam_step={adam_step!r}, but {what}. Leave it out, or correct it.")
        for module in self._adam_modules():
            if module.lookup.log.committed not in (0, adam_step):
                raise ConfigError(
                    f"import_recsdk: adam_step={adam_step:,}, but the collection has trained "
                    f"{module.lookup.log.committed:,} steps, and all its tables share one. Import into a new model."
                )

    def _scan(self, name: str) -> Scan:
        row_type = next(c.row_type for c in self._targets[name].table_configs if c.name == name)
        of_ranks = self._saves[0].layout == RANKS
        return scan(name, self._saved[name], row_type, lambda ids: self._mine(name, ids), of_ranks=of_ranks)

    def _check_complete(self) -> None:
        """Ids of ranks 0 .. W - 1 may be those of W of 2 W ranks: then all of ``id // W`` are even."""
        divisor = math.gcd(*(scan.divisor for scan in self._scans.values()))
        save = self._saves[0]
        if divisor != 1 and any(table.rows for tables in self._saved.values() for table in tables):
            raise StateError(
                f"{save.path} has the ranks 0 to {(save.world_size or 1) - 1}, and its ids do not tell whether there "
                f"were more, whose folders are missing. If there were none, pass world_size={save.world_size}."
            )

    # ---- changing ----------------------------------------------------------------------------------------------------

    def apply(self, adam_step: int | None) -> None:
        """Take the rows."""
        bases = {id(module): module.lookup.log.group.ordinal for module in self._modules}
        try:
            with self._ranks.together():
                for module in self._modules:
                    module.lookup.log.group.set_ordinal(self._new_ordinal(module))
                for name, module in self._targets.items():
                    if self._has(name):
                        self._take(name, module, bases[id(module)])
        except Exception as e:
            for module in self._modules:
                module.lookup.log.broken = f"tables of RecSDK were imported only in part: {type(e).__name__}: {e}"
            raise
        for module in self._adam_modules():
            module.lookup.log.committed = adam_step or 0

    def _levels(self, module: ShardedHashCollection) -> int:
        return max(self._scans[name].levels for name, target in self._targets.items() if target is module)

    def _new_ordinal(self, module: ShardedHashCollection) -> int:
        """So that what is imported can be evicted at once: it is not among what the last batches used."""
        return module.lookup.log.group.ordinal + self._levels(module) + 1 + PROTECTED_BATCHES

    def _take(self, name: str, module: ShardedHashCollection, base: int) -> None:
        ages = Ages([part for table in self._saved[name] for part in table.parts])
        for part in (part for table in self._saved[name] for part in table.parts):
            arrays = [part.weights.map(), *(m.map() for m in part.moments if self._with_states)]
            for rows, ids in chunks(part):
                mine = self._mine(name, ids)
                scores = torch.from_numpy(base + 1 + ages.of(ids[mine]))
                weights, *moments = (tensor_of(array[rows][mine]) for array in arrays)
                for columns, shard in parts_of(module, name):
                    put(module.lookup, columns, shard, tensor_of(ids[mine]), scores, weights, moments)

    def _mine(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of a table of which this rank has rows: whose."""
        owner = next(part.owner for part, _ in parts_of(self._targets[name], name))
        if owner is not None or self._ranks.world_size == 1:
            return np.ones(len(ids), np.bool_)
        is_mine: NDArray[np.bool_] = (owner_of(tensor_of(ids), self._ranks.world_size) == self._ranks.rank).numpy()
        return is_mine

    def report(self) -> tuple[ImportedTable, ...]:
        """The same on all ranks; rank 0 logs what has no place."""
        found = tuple(self._report(name) for name in self._targets)
        for one in found if self._ranks.rank == 0 else ():
            for what, n in one.unused.items():
                logger.warning(
                    "import_recsdk: table %r: %s have no place here and were left out: %d", one.table, what, n
                )
        return found

    def _report(self, name: str) -> ImportedTable:
        tables, scan = self._saved[name], self._scans[name]
        parts = [part for table in tables for part in table.parts]
        left_out = 0 if self._with_states else 1
        counts = {
            "admission counts": sum(p.num_counts for p in parts),
            "times of ids without a row": scan.num_without_row,
            "times that RecSDK counted and did not write": sum(p.lost_times for p in parts),
            "moments of rows": left_out * sum(t.num_moments * t.rows for t in tables),
            "optimizer values of rows": left_out * sum(p.keys.shape[0] for p in parts if p.has_state_file),
            "bytes of an older save": sum(a.tail_bytes for p in parts for a in p.arrays),
        }
        return ImportedTable(
            table=name,
            rows=sum(table.rows for table in tables),
            states=self._optimizers[name].row_states if self._with_states else (),
            times=scan.times,
            unused={what: n for what, n in counts.items() if n},
        )
