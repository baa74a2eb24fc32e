"""`Checkpointer`: when a training loop saves, when it stops, and where it goes on."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrec.checkpoint import writer_lock
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.loading import Loaded, load
from hybridrec.checkpoint.saving import Saving, save
from hybridrec.checkpoint.snapshot import latest
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import hashed_collections
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError


class Checkpointer:
    """Saves every so many batches, and once more when the job is asked to end.

    A SIGTERM to any rank (what schedulers and torchrun send) lets all ranks save after the same batch and stop. As a
    context manager it puts the former handler of that signal back. All calls are collective.

    Example:
        with Checkpointer("snapshots", model, optimizer, pipeline, every=1000) as checkpointer:
            first = checkpointer.resume()  # batches that are behind us
            batches = iter(loader_from(first))
            while not checkpointer.is_stopping:
                pipeline.progress(batches)
                checkpointer.after_batch()
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Any,
        pipeline: HybridTrainPipelineSparseDist,
        *,
        every: int | None = None,
        keep: int = 3,
        in_background: bool = False,
        stops_on_sigterm: bool = True,
    ) -> None:
        """
        Args:
            path: Folder of snapshots, the same on all ranks.
            model: See `save`.
            optimizer: See `save`.
            pipeline: Of the model; counts the batches.
            every: Batches between two snapshots; None: only when the job is asked to end.
            keep: How many snapshots to keep.
            in_background: Whether rows are written while training goes on; a snapshot is visible some batches later.
            stops_on_sigterm: Whether to take over SIGTERM; only possible on the main thread.

        Raises:
            ConfigError: ``every`` is not positive.
            StateError: Another job writes its snapshots to ``path``.
        """
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"Checkpointer: every={every!r}. Pass a number of batches, 1 or more, or None.")
        self._path, self._model, self._optimizer, self._pipeline = Path(path), model, optimizer, pipeline
        self._every, self._keep = every, keep
        self._seen = pipeline.batches_committed
        self._host_group = host_group = next(iter(hashed_collections(model).values())).host_group
        # Of its own: the host group belongs to the pipeline while batches are in flight.
        ranks = dist.get_process_group_ranks(host_group)
        self._group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        self._ranks = Ranks(self._group or host_group)
        self._in_background = in_background
        self._saving: Saving | None = None
        self._was_asked = False
        self.is_stopping = False
        """Whether the job was asked to end: a snapshot was written, and the loop should."""
        self.loaded: Loaded | None = None
        """What `resume` found."""
        self._locks_folder = False
        with watched(host_group, "open snapshots"), self._ranks.together():
            self._lock_folder()
        self._former = signal.signal(signal.SIGTERM, self._ask) if stops_on_sigterm else None
        self._takes_signal = stops_on_sigterm

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, StopIteration):  # which all ranks see at the end of their data
            self._saving = None  # the other ranks may not come
        self.close()

    def close(self) -> None:
        """Put the former handler of SIGTERM back, and finish the snapshot that is being written. Collective then."""
        self._finish()
        if self._takes_signal:
            self._takes_signal = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)
        if self._locks_folder:
            self._locks_folder = False
            writer_lock.release(self._path)

    def _lock_folder(self) -> None:
        if self._ranks.rank != 0:
            return
        with contextlib.suppress(OSError):  # one that cannot be written can be resumed from; `save` says what is wrong
            self._path.mkdir(parents=True, exist_ok=True)
            writer_lock.acquire(self._path)
            self._locks_folder = True

    def resume(self) -> int:
        """Load the newest snapshot, if there is one: how many batches are behind us. Errors as of `load`."""
        with watched(self._host_group, "resume"):
            is_there = any(self._ranks.gather(latest(self._path) is not None))
        if not is_there:
            return 0
        self.loaded = load(self._path, self._model, self._optimizer, pipeline=self._pipeline)
        self._seen = self.loaded.batches_committed
        return self._seen

    def after_batch(self, extra: Any = None) -> None:
        """To be called after each `progress`: saves if it is time, or if a rank was asked to end.

        Args:
            extra: See `save`.
        """
        self.is_stopping, is_written = self._agree()
        if self._saving is not None and is_written:
            self._finish()
        seen, self._seen = self._seen, self._pipeline.batches_committed  # it stays, then leaps, where gradients add up
        is_due = self._every is not None and seen // self._every < self._seen // self._every
        if not is_due and not self.is_stopping:
            return
        self._finish()
        what = self._path, self._model, self._optimizer
        if self._in_background and not self.is_stopping:
            self._saving = Saving(*what, pipeline=self._pipeline, extra=extra, keep=self._keep, group=self._group)
            self._saving.start()
        else:
            save(*what, pipeline=self._pipeline, extra=extra, keep=self._keep)

    def _finish(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._was_asked = True

    def _agree(self) -> tuple[bool, bool]:
        """(whether any rank was asked to end, whether all have written what they have to)."""
        mine = (self._was_asked, self._saving is not None and not self._saving.is_written)
        if self._group is None or not (self._takes_signal or self._in_background):
            return mine[0], not mine[1]
        asked = torch.tensor(mine, dtype=torch.int64)
        with watched(self._host_group, "after_batch"):
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), not bool(asked[1])
