"""`DeltaWriter`: a snapshot, and after it what changed, delta by delta. See docs/design/checkpoint.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridrec.checkpoint import contents
from hybridrec.checkpoint.delta_chain import (
    DeltaManifest,
    RemovedEntry,
    begin_delta,
    publish_delta,
    unfinished_delta,
)
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.files import remove_folder, sync_folder, write_file, write_rows
from hybridrec.checkpoint.manifest import FileEntry, read_manifest
from hybridrec.checkpoint.saving import (
    chunk_rows_of,
    collection_entry,
    encoded,
    files_of,
    folder_name,
    merged,
    require_here,
    save,
    with_files,
)
from hybridrec.checkpoint.sharded import ShardedWriter
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import dense_tensors, hashed_collections
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError, StateError


class DeltaWriter:
    """Writes snapshots, and between them deltas, which another process follows (`follow`). All calls are collective.

    A chain ends with the process that writes it: begin with `save_full`, after a restart too.

    Example:
        writer = DeltaWriter("snapshots", model, optimizer, pipeline=pipeline)
        writer.save_full()
        while training:
            pipeline.progress(batches)
            if pipeline.batches_committed % 100 == 0:
                writer.save_delta()
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Any = None,
        *,
        pipeline: HybridTrainPipelineSparseDist | None = None,
        keep: int | None = None,
        max_removed: int = 2**20,
    ) -> None:
        """
        Args:
            path: See `save`, and so on.
            model: What `DistributedModelParallel` returned.
            optimizer: Of the model; saved in full snapshots.
            pipeline: Of the model; counts the batches.
            keep: How many snapshots to keep, each with its deltas.
            max_removed: Ids that a table with ``full_policy="evict"`` may lose on a rank between two deltas; 8 bytes
                each. Beyond it the chain ends, by an error of `save_delta`.

        Raises:
            ConfigError: ``max_removed`` is negative.
        """
        if isinstance(max_removed, bool) or not isinstance(max_removed, int) or not 0 <= max_removed < 2**32:
            raise ConfigError(f"DeltaWriter: max_removed={max_removed!r}. Pass a number of ids, 0 to 2^32 - 1.")
        self._root, self._model, self._optimizer, self._pipeline = Path(path), model, optimizer, pipeline
        self._keep, self._max_removed = keep, max_removed
        self._collections = hashed_collections(model)
        self._host_group = next(iter(self._collections.values())).host_group
        self._snapshot: Path | None = None
        self._number, self._digest = 0, ""
        self._marks: dict[str, int] = {}
        # Of deltas that could not be written: (collection, table) -> ids
        self._carried: dict[tuple[str, str], Tensor] = {}

    def save_full(self, extra: Any = None) -> Path:
        """Write a snapshot, the beginning of a chain; see `save`. If it fails the chain before goes on.

        Args:
            extra: See `save`.

        Raises:
            StateError: Also: the host budget has no room for `max_removed` ids; then there is a snapshot and no chain.
        """
        what = self._root, self._model, self._optimizer
        folder = save(*what, pipeline=self._pipeline, extra=extra, keep=self._keep)
        ranks = Ranks(self._host_group)
        self._snapshot = None
        with ranks.together():
            digest = read_manifest(folder).digest
            for module in self._collections.values():
                for t, table in enumerate(module.lookup.tables):
                    may_lose = table.spec.full_policy == "evict"
                    module.lookup.log.group.track_removals(t, self._max_removed if may_lose else 0)
        self._snapshot, self._number, self._digest = folder, 0, digest
        self._marks, self._carried = self._final_ordinals(), {}
        return folder

    def save_delta(self) -> Path:
        """Write what changed since the snapshot or the delta before; its folder.

        It is the state after the last committed batch. If it cannot be written, training goes on, and the next delta
        has what this one would have had.

        Raises:
            StateError: It cannot be written; or what changed is not known: no `save_full`, more than ``max_removed``
                ids left, rows were imported or loaded since. Call `save_full` then.
            BackendError: A rank is gone.
        """
        with watched(self._host_group, "save"):
            for module in self._collections.values():
                module.take_back_prepared()
            return self._save_delta(Ranks(self._host_group))

    def close(self) -> None:
        """End the chain: ids that leave are not kept any more."""
        self._snapshot = None
        for module in self._collections.values():
            for t in range(len(module.lookup.tables)):
                module.lookup.log.group.track_removals(t, None)

    def _final_ordinals(self) -> dict[str, int]:
        return {c: module.lookup.log.group.final_ordinal for c, module in self._collections.items()}

    def _save_delta(self, ranks: Ranks) -> Path:
        snapshot, number = self._snapshot, self._number + 1
        if snapshot is None:
            raise StateError("save_delta: there is no snapshot that it could follow. Call save_full() first.")
        with ranks.together():
            if ranks.rank == 0:
                begin_delta(snapshot, number)
        target, folder = snapshot, unfinished_delta(snapshot, number)
        try:
            with ranks.together():
                tensors = contents.sharded_tensors(self._model, None)
            writer = ShardedWriter(folder, tensors, ranks, is_staged=False) if tensors else None
            with ranks.together():
                mine = self._write(folder, ranks.rank)
                parts = ([], []) if writer is None else writer.write()
                marks = self._final_ordinals()
            everyone = ranks.gather((*mine, parts))
            sharded: tuple[FileEntry, ...] = ()
            with ranks.together():
                if ranks.rank == 0:
                    sharded = files_of(writer, folder, [one[3] for one in everyone])
            manifest = self._manifest(number, everyone, ranks.from_first(sharded))
            with ranks.together():
                if ranks.rank == 0:
                    for file in manifest.files():
                        require_here(folder, file)
                    target = publish_delta(snapshot, manifest)
        except BaseException:
            if ranks.rank == 0:
                remove_folder(folder)
            raise
        self._number, self._digest, self._marks, self._carried = number, manifest.digest, marks, {}
        published: Path = ranks.from_first(target)
        return published

    def _write(self, folder: Path, rank: int) -> tuple[FileEntry | None, list[Any], list[RemovedEntry]]:
        """This rank's files: (dense part, entries of collections, removed ids)."""
        files: dict[tuple[str, str], FileEntry] = {}
        removed, entries = [], []
        for c, module in self._collections.items():
            entry = collection_entry(c, module)
            rows = module.lookup.export_tables(above_score=self._marks[c])
            try:
                for t, table in enumerate(module.lookup.tables):
                    where = f"{folder_name(c)}/{folder_name(table.name)}/{rank:05d}"
                    if len(ids := self._removed(c, module, t)):
                        data = ids.numpy().astype("<i8", copy=False).tobytes()
                        file = write_file(folder, f"removed/{where}.ids", data, rank)
                        file = dataclasses.replace(file, rows=len(ids))
                        removed.append(RemovedEntry(collection=c, table=table.name, file=file))
                    name = f"rows/{where}.rows"
                    files[c, table.name] = write_rows(folder, name, rows[table.name], chunk_rows_of(table), rank)
            finally:
                for one in rows.values():
                    one.close()
            entries.append(with_files(entry, files))
        dense = None
        if rank == 0:
            tensors = contents.copy_of(dict(dense_tensors(self._model)), "model")
            dense = write_file(folder, "dense.pt", encoded({"model": tensors}), 0)
        sync_folder(folder)
        return dense, entries, removed

    def _removed(self, c: str, module: ShardedHashCollection, t: int) -> Tensor:
        """Ids that left since the last delta that was written; kept until one is."""
        name = module.lookup.tables[t].name
        try:
            ids = module.lookup.log.group.removed_ids(t)
        except StateError as e:
            raise StateError(f"save_delta: what changed in table {name!r} is not known. Call save_full(). {e}") from e
        if (c, name) in self._carried:
            ids = torch.unique(torch.cat([self._carried[c, name], ids]))
        self._carried[c, name] = ids
        return ids

    def _manifest(self, number: int, everyone: list[Any], sharded: tuple[FileEntry, ...]) -> DeltaManifest:
        log = next(iter(self._collections.values())).lookup.log
        return DeltaManifest(
            number=number,
            previous=self._digest,
            step=log.committed if self._pipeline is None else self._pipeline.batches_committed,
            collections=tuple(map(merged, zip(*(one[1] for one in everyone), strict=True))),
            removed=tuple(entry for one in everyone for entry in one[2]),
            dense=everyone[0][0],
            sharded=sharded,
        )
