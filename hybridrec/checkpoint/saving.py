"""`save`: a snapshot of a model at a step boundary. See docs/design/checkpoint.md."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrec.checkpoint import contents, snapshot
from hybridrec.checkpoint.delta_chain import DeltaManifest, RemovedEntry
from hybridrec.checkpoint.entries import collection_entry, files_of, folder_name, merged, require_here, with_files
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.files import sync_folder, sync_tree, write_file, write_rows
from hybridrec.checkpoint.manifest import MANIFEST, CollectionEntry, FileEntry, Manifest
from hybridrec.checkpoint.sharded import ShardedWriter
from hybridrec.checkpoint.small_files import encoded
from hybridrec.checkpoint.writer_lock import WriterLock
from hybridrec.distributed.gradient_order import gradient_order
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import dense_tensors, hashed_collections
from hybridrec.distributed.sharded_tensors import optimizer_steps
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError
from hybridrec.store.initializer import Bank
from hybridrec.store.row_export import ShardRows

logger = logging.getLogger("hybridrec")

MAX_THREADS = 4
"""That read or write files of a snapshot at a time, on a rank: as many as torch has, but no more."""

_NICENESS = 10
"""Of the thread that writes while training goes on: where all cores are busy it gets a tenth of what others get."""


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    pipeline: HybridTrainPipelineSparseDist | None = None,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write a snapshot: all rows with their optimizer state, everything else of the model, the optimizer.

    It is the state after the last committed batch; batches that a pipeline prepares are taken back and prepared again.
    It is written beside, forced to disk, and becomes visible by one rename: a snapshot that can be seen is complete.
    If a rank fails, all raise the same error, older snapshots are as before, and training can go on. Collective.

    Args:
        path: Folder of snapshots, made if it is missing; the same on all ranks, on a file system that all see.
        model: What `DistributedModelParallel` returned.
        optimizer: Also saved: what the training loop steps. Its values are not a part of the model.
        pipeline: Of the model; counts the batches.
        extra: This rank's own: tensors, numbers, strings, lists and dicts of them, such as a loader's state.
        keep: How many snapshots to keep, this one included; None: all.

    Returns:
        The folder of this snapshot.

    Raises:
        ConfigError: An argument, or what a part of it holds, cannot be saved.
        StateError: It cannot be written, or a collection cannot be read; names what.
        BackendError: A rank is gone.
    """
    saving = Saving(path, model, optimizer, pipeline=pipeline, extra=extra, keep=keep, goes_on=False)
    saving.write()
    return saving.finish()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank has written."""

    dense: FileEntry | None
    """Of rank 0."""
    own: FileEntry
    """Generators, extra."""
    entries: list[CollectionEntry]
    sharded: tuple[list[FileEntry], list[Any]]
    """See `ShardedWriter.write`."""
    removed: list[RemovedEntry]
    """Of a delta."""


class Saving:
    """A snapshot that is written while training goes on: made at a step boundary, finished at a later one.

    Rows that are written back meanwhile are copied aside first (`ShardRows`), everything else is copied at once: of
    tables that TorchRec shards each rank copies its part to host memory.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Any = None,
        *,
        pipeline: HybridTrainPipelineSparseDist | None = None,
        extra: Any = None,
        keep: int | None = None,
        group: dist.ProcessGroup | None = None,
        goes_on: bool = True,
    ) -> None:
        """What is saved is the state now. Collective; errors as of `save`.

        Args:
            path: See `save`, and so on.
            model: What is saved.
            optimizer: Of the model.
            pipeline: Of the model.
            extra: This rank's own.
            keep: How many snapshots to keep.
            group: gloo group of the model's ranks, over which they talk in `finish`; None: the host group, which a
                pipeline must not use then.
            goes_on: Whether the model may train before `write` has returned; else tables that TorchRec shards are not
                copied.
        """
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"save: keep={keep!r}. Pass how many snapshots to keep, 1 or more, or None for all.")
        self._root, self._keep = Path(path).absolute(), keep
        self._lock: WriterLock | None = None
        self._collections = hashed_collections(model)
        self._host_group = next(iter(self._collections.values())).host_group
        self._group = group or self._host_group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._when_it_ends, self._is_given_up, self._is_writing = threading.Lock(), False, False
        """Whichever of the two changes last sees that what was written has to go: `give_up`, or the thread."""
        self._files: dict[tuple[str, str], FileEntry] = {}
        self._rows: dict[tuple[str, str], ShardRows] = {}
        self._sharded: ShardedWriter | None = None
        self._sharded_parts: tuple[list[FileEntry], list[Any]] = ([], [])
        self._removed: list[RemovedEntry] = []
        self._digest, self._began = "", time.monotonic()
        with watched(self._host_group, "save"):
            for module in self._collections.values():
                module.take_back_prepared()
            self._begin(Ranks(self._host_group), model, optimizer, pipeline, extra, goes_on)

    def _begin(self, ranks: Ranks, model: nn.Module, optimizer: Any, pipeline: Any, extra: Any, goes_on: bool) -> None:
        committed = [module.lookup.log.num_batches for module in self._collections.values()]
        self._step = max(committed) if pipeline is None else pipeline.batches_committed
        self._rank, name = ranks.rank, ""
        with ranks.together():
            self._gradient_order = gradient_order(model)
        with ranks.together():
            if self._rank == 0:
                name = self._open()
        self._name: str = ranks.from_first(name)
        self._folder = self._unfinished()
        try:
            with ranks.together():
                self._own, self._dense = self._copies(model, optimizer, extra)
                sharded = contents.sharded_tensors(model, optimizer)
                for c, module in self._collections.items():
                    for table, rows in module.lookup.export_tables(above_score=self._mark(c)).items():
                        self._rows[c, table] = rows
            if sharded:
                self._sharded = ShardedWriter(self._folder, sharded, ranks, is_staged=goes_on)
        except BaseException:
            self._give_up()
            raise
        self._entries = [collection_entry(c, module) for c, module in self._collections.items()]
        self._chunk_rows = {(c.name, t.name): t.chunk_rows for c in self._entries for t in c.tables}

    def start(self) -> None:
        """Write this rank's part on a thread of its own, which stands back where training needs all cores."""
        thread = threading.Thread(target=self._write_in_background, name="hybridrec-save", daemon=True)
        self._is_writing = True
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._is_writing = False
            raise
        self._thread = thread

    @property
    def is_written(self) -> bool:
        """Whether `finish` need not wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def _write_in_background(self) -> None:
        if sys.platform == "linux":  # where it is that of the thread, not of the process
            os.nice(_NICENESS)
        self._write(num_threads=1)
        with self._when_it_ends:
            self._is_writing = False
            is_given_up = self._is_given_up
        if is_given_up:
            self._give_up()

    def write(self) -> None:
        """Write this rank's part; what goes wrong is raised by `finish`."""
        self._write(num_threads=min(MAX_THREADS, torch.get_num_threads()))

    def _write(self, num_threads: int) -> None:
        try:
            self._small = self._write_small()
            if self._sharded is not None:
                self._sharded_parts = self._sharded.write()
            with ThreadPoolExecutor(num_threads) as pool:
                written = list(pool.map(self._write_table, self._rows))
            self._files = dict(zip(self._rows, written, strict=True))
            self._write_more()
            sync_tree(self._folder)
        except Exception as e:  # raised by `finish`, on all ranks
            self._error = e
        finally:
            self._close()

    def _write_table(self, key: tuple[str, str]) -> FileEntry:
        c, name = key
        file = f"rows/{folder_name(c)}/{folder_name(name)}/{self._rank:05d}.rows"
        return write_rows(self._folder, file, self._rows[key], self._chunk_rows[key], self._rank)

    @property
    def digest(self) -> str:
        """Of the manifest, after `finish`."""
        return self._digest

    def finish(self) -> Path:
        """Wait until all ranks have written, and make the snapshot visible. Collective; errors as of `save`."""
        if self._thread is not None:
            self._thread.join()
        try:
            with watched(self._host_group, "save"):
                self._publish(Ranks(self._group))
        except BaseException:
            self._give_up()
            raise
        self._release()
        return self._published()

    def give_up(self) -> None:
        """In place of `finish`, and not collective: what was written is removed, once the thread has ended."""
        with self._when_it_ends:
            self._is_given_up = True
            is_writing = self._is_writing
        if not is_writing:
            self._give_up()

    def _publish(self, ranks: Ranks) -> None:
        with ranks.together():
            if self._error is not None:
                raise self._error
        entries = [with_files(entry, self._files) for entry in self._entries]
        dense, own = self._small
        part = RankPart(dense=dense, own=own, entries=entries, sharded=self._sharded_parts, removed=self._removed)
        everyone: list[RankPart] = ranks.gather(part)
        with ranks.together():
            if self._rank == 0:
                sharded = files_of(self._sharded, self._folder, [one.sharded for one in everyone])
                manifest = self._manifest(everyone, sharded)
                for file in manifest.files():
                    require_here(self._folder, file)
                write_file(self._folder, MANIFEST, manifest.encode(), 0)
                sync_folder(self._folder)
                self._show(manifest)
                self._digest = manifest.digest
                log_done("saved", self._published(), [manifest], self._began)
        self._digest = ranks.from_first(self._digest)

    # ---- what a delta does otherwise ---------------------------------------------------------------------------------

    def _open(self) -> str:
        """Make the folder in which is written, and lock what it is in; a name for it. On one rank."""
        name, self._lock = snapshot.begin(self._root, self._step)
        return name

    def _unfinished(self) -> Path:
        """Where that folder is."""
        return snapshot.unfinished(self._root, self._name)

    def _mark(self, collection: str) -> int:
        """Rows are written whose score is above it."""
        return 0

    def _banks(self) -> dict[str, dict[str, torch.Tensor]]:
        """Of tables with an ``init_fn``, what initial rows are chosen from: collection -> table -> float32 [n, D]."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for c, module in self._collections.items():
            for table in module.table_configs:
                if isinstance(table.initializer, Bank):
                    found.setdefault(c, {})[table.name] = torch.from_numpy(table.initializer.rows)
        return found

    def _write_more(self) -> None:
        """Write what is neither rows nor small."""

    def _manifest(self, everyone: list[RankPart], sharded: tuple[FileEntry, ...]) -> Manifest | DeltaManifest:
        """Of what all ranks wrote: [W]."""
        return Manifest(
            **self._common(everyone, sharded),
            versions={"hybridrec": version("hybridrec"), "torch": torch.__version__},
        )

    def _common(self, everyone: list[RankPart], sharded: tuple[FileEntry, ...]) -> dict[str, Any]:
        """What the manifests of snapshots and deltas have both."""
        return {
            "step": self._step,
            "world_size": len(everyone),
            "collections": tuple(map(merged, zip(*(one.entries for one in everyone), strict=True))),
            "dense": everyone[0].dense,
            "ranks": tuple(one.own for one in everyone),
            "sharded": sharded,
        }

    def _show(self, manifest: Any) -> None:
        """Make it visible. On one rank."""
        snapshot.publish(self._root, self._name, self._keep)

    def _published(self) -> Path:
        """Where it is then."""
        return self._root / self._name

    def _discard(self) -> None:
        """Remove what was written. On one rank."""
        snapshot.give_up(self._root, self._name)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        for rows in self._rows.values():
            rows.close()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _give_up(self) -> None:
        self._close()
        if self._lock is not None:  # of rank 0, until it is released
            self._discard()
        self._release()

    def _copies(self, model: nn.Module, optimizer: Any, extra: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What this rank has beside rows, and what rank 0 has for all, as it is now."""
        device = next(iter(self._collections.values())).lookup.device
        rates = {} if optimizer is None else contents.learning_rates(optimizer)
        own = {
            "extra": contents.copy_of(extra, "extra"),
            "random": contents.random_state(device),
            "rates": contents.copy_of(rates, "learning rates"),
            "steps": optimizer_steps(model),
        }
        if self._rank != 0:
            return own, None
        state = None if optimizer is None else contents.optimizer_state(optimizer)
        return own, {
            "model": contents.copy_of(dict(dense_tensors(model)), "model"),
            "optimizer": contents.copy_of(state, "optimizer"),
            "banks": self._banks(),
            "gradient_order": self._gradient_order,
        }

    def _write_small(self) -> tuple[FileEntry | None, FileEntry]:
        own = write_file(self._folder, f"ranks/{self._rank:05d}.pt", encoded(self._own), self._rank)
        if self._dense is None:
            return None, own
        dense = write_file(self._folder, "dense.pt", encoded(self._dense), 0)
        self._dense = None  # the rows take longer
        return dense, own


def log_done(what: str, folder: Path, manifests: Sequence[Manifest | DeltaManifest], began: float) -> None:
    """Tell what was saved or loaded; ``began`` is a time of `time.monotonic`."""
    rows = sum(table.rows for m in manifests for c in m.collections for table in c.tables)
    total = sum(file.bytes for m in manifests for file in m.files())
    seconds = time.monotonic() - began
    logger.info("%s %s: step %d, %d rows, %d bytes, %.1f s", what, folder, manifests[-1].step, rows, total, seconds)
