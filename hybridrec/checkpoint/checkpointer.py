"""`Checkpointer`: when a training loop saves, when it stops, and where it goes on."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrec.checkpoint import writer_lock
from hybridrec.checkpoint.delta_chain import ChainEndedError
from hybridrec.checkpoint.delta_writer import DeltaWriter
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.loading import Loaded, load
from hybridrec.checkpoint.saving import Saving, save
from hybridrec.checkpoint.snapshot import latest
from hybridrec.checkpoint.writer_lock import WriterLock
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import dense_tensors, hashed_collections
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError

logger = logging.getLogger("hybridrec")


class Checkpointer:
    """Saves every so many batches, and once more when the job is asked to end.

    With ``delta_every`` it writes deltas between snapshots: what changed since, which other processes `follow`, and
    with which a job that is resumed loses less.

    A SIGTERM to any rank (what schedulers and torchrun send) lets all ranks save after the same batch and stop. As a
    context manager it puts the former handler of that signal back. All calls are collective.

    Example:
        with Checkpointer("snapshots", model, optimizer, pipeline, every=1000) as checkpointer:
            first = checkpointer.resume()  # batches that are behind us
            batches = iter(loader_from(first))
            while not checkpointer.is_stopping:
                pipeline.progress(batches)  # StopIteration at the end: checkpointer.save() saves then
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
        delta_every: int | None = None,
        keep: int = 3,
        in_background: bool = False,
        stops_on_sigterm: bool = True,
        max_removed: int = 2**20,
    ) -> None:
        """
        Args:
            path: Folder of snapshots, the same on all ranks.
            model: See `save`.
            optimizer: See `save`.
            pipeline: Of the model; counts the batches.
            every: Batches between two snapshots; None: only when the job is asked to end.
            delta_every: Batches between two deltas, less than ``every``; None: snapshots alone. Where what changed is
                not known any more (see `DeltaWriter.save_delta`) a snapshot is written in place of a delta.
            keep: How many snapshots to keep, each with its deltas.
            in_background: Whether rows are written while training goes on; a snapshot or delta is visible some batches
                later, and a delta that is due before that is left to the next one.
            stops_on_sigterm: Whether to take over SIGTERM; only possible on the main thread.
            max_removed: See `DeltaWriter`.

        Raises:
            ConfigError: ``every`` or ``delta_every`` is not positive, or ``delta_every`` not below ``every``; or
                SIGTERM is to be taken over on another thread than the main one. Nothing was locked.
            StateError: Another job writes its snapshots to ``path``, or this process has a `Checkpointer` for it, by
                whatever path, that is not closed.
        """
        _check_batches(every=every, delta_every=delta_every)
        if stops_on_sigterm and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"Checkpointer on thread {threading.current_thread().name!r}: only the main thread can take over "
                "SIGTERM. Make it there, or pass stops_on_sigterm=False."
            )
        self._path, self._model, self._optimizer, self._pipeline = Path(path).absolute(), model, optimizer, pipeline
        self._every, self._delta_every, self._keep = every, delta_every, keep
        self._seen = pipeline.batches_committed
        self._host_group = host_group = next(iter(hashed_collections(model).values())).host_group
        # Of its own: the host group belongs to the pipeline while batches are in flight.
        ranks = dist.get_process_group_ranks(host_group)
        self._group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        self._ranks = Ranks(self._group or host_group)
        self._in_background = in_background
        self._saving: Saving | None = None
        self._saved: Any = None
        """`_state` of the last snapshot that was begun."""
        self._deltas: DeltaWriter | None = None
        if delta_every is not None:
            self._deltas = DeltaWriter(
                path,
                model,
                optimizer,
                pipeline=pipeline,
                keep=keep,
                max_removed=max_removed,
                group=self._group,
            )
        self._was_asked = False
        self.is_stopping = False
        """Whether the job was asked to end: a snapshot was written, and the loop should."""
        self.loaded: Loaded | None = None
        """What `resume` found."""
        self._lock: WriterLock | None = None
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
            saving, self._saving = self._saving, None  # not `finish`: the other ranks may not come
            if saving is not None:
                saving.give_up()
            if self._deltas is not None:
                self._deltas.give_up()
        self.close()

    def close(self) -> None:
        """Put the former handler of SIGTERM back, and finish the snapshot that is being written. Collective then.

        Raises:
            StateError: The snapshot could not be written. It is closed nevertheless.
        """
        try:
            self._finish()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Of all that is not this object's own."""
        if self._deltas is not None:
            self._deltas.close()
        if self._takes_signal:
            self._takes_signal = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)
        if self._lock is not None:
            self._lock.release()

    def _lock_folder(self) -> None:
        if self._ranks.rank != 0:
            return
        with contextlib.suppress(OSError):  # one that cannot be written can be resumed from; `save` says what is wrong
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = writer_lock.acquire(self._path, sole="Checkpointer")

    def resume(self) -> int:
        """Load the newest snapshot with its deltas, if there is one: how many batches are behind us.

        Errors as of `load`.
        """
        with watched(self._host_group, "resume"):
            is_there = any(self._ranks.gather(latest(self._path) is not None))
        if not is_there:
            return 0
        if self._deltas is not None:
            self.loaded = self._deltas.resume()
        else:
            self.loaded = load(self._path, self._model, self._optimizer, pipeline=self._pipeline)
        self._seen = 0 if self.loaded is None else self.loaded.batches_committed
        return self._seen

    def after_batch(self, extra: Any = None) -> None:
        """To be called after each `progress`: saves if it is time, or if a rank was asked to end.

        Args:
            extra: See `save`.
        """
        self.is_stopping, is_written = self._agree()
        if is_written:
            self._finish()
        before, self._seen = self._seen, self._pipeline.batches_committed  # stays, then leaps, where gradients add up
        if self._is_due(self._every, before) and not (self.is_stopping and self._deltas):
            self._finish()
            self._save_full(extra)
        elif self.is_stopping:
            self._finish()
            self._save_delta(extra) if self._deltas else self._save_full(extra)
        elif self._is_due(self._delta_every, before) and not self._is_writing:
            self._save_delta(extra)

    def save(self, extra: Any = None) -> None:
        """Save now, at the end of the data for instance, after what is still being written in the background.

        A snapshot, with deltas too. It is visible when `close` has returned, or the ``with`` was left. If the last one
        of this `Checkpointer` is as new (the same batches, rows, parameters, learning rates), and ``extra`` is None,
        that one stays the newest, and nothing is written. Errors as of `save`.

        Args:
            extra: See `save`.
        """
        self._finish()
        with watched(self._host_group, "save"):
            is_new = any(self._ranks.gather(extra is not None or self._saved != self._state()))
        if is_new:
            self._save_full(extra)

    def _state(self) -> Any:
        """What changes when this rank's part of a snapshot would be another, without reading it."""
        return (
            self._pipeline.batches_committed,
            [m.lookup.num_imports for m in hashed_collections(self._model).values()],
            [tensor._version for _, tensor in dense_tensors(self._model)],
            [float(group.get("lr", 0)) for group in getattr(self._optimizer, "param_groups", ())],
        )

    def _is_due(self, every: int | None, before: int) -> bool:
        return every is not None and before // every < self._seen // every

    @property
    def _is_in_background(self) -> bool:
        """Whether what is begun now is written by a thread."""
        return self._in_background and not self.is_stopping

    def _save_full(self, extra: Any) -> None:
        what = self._path, self._model, self._optimizer
        if self._deltas is not None:
            (self._deltas.start_full if self._is_in_background else self._deltas.save_full)(extra)
        elif self._is_in_background:
            self._saving = Saving(*what, pipeline=self._pipeline, extra=extra, keep=self._keep, group=self._group)
            self._saving.start()
        else:
            save(*what, pipeline=self._pipeline, extra=extra, keep=self._keep)
        self._saved = self._state()

    def _save_delta(self, extra: Any) -> None:
        if self._deltas is None:
            return
        if not self._deltas.has_begun:
            self._save_full(extra)
            return
        try:
            (self._deltas.start_delta if self._is_in_background else self._deltas.save_delta)(extra)
        except ChainEndedError as e:
            if self._ranks.rank == 0:
                logger.warning("a snapshot is written in place of a delta: %s", e)
            self._save_full(extra)

    @property
    def _is_writing(self) -> bool:
        return self._saving is not None or (self._deltas is not None and self._deltas.is_writing)

    @property
    def _is_written(self) -> bool:
        """Whether `_finish` need not wait for this rank."""
        saving = self._saving is None or self._saving.is_written
        return saving and (self._deltas is None or self._deltas.is_written)

    def _finish(self) -> None:
        saving, self._saving = self._saving, None
        saved, self._saved = self._saved, None  # unless it fails
        if saving is not None:
            saving.finish()
        if self._deltas is not None:
            self._deltas.finish()
        self._saved = saved

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._was_asked = True

    def _agree(self) -> tuple[bool, bool]:
        """(whether any rank was asked to end, whether all have written what they have to)."""
        mine = (self._was_asked, not self._is_written)
        if self._group is None or not (self._takes_signal or self._in_background):
            return mine[0], not mine[1]
        asked = torch.tensor(mine, dtype=torch.int64)
        with watched(self._host_group, "after_batch"):
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), not bool(asked[1])


def _check_batches(*, every: int | None, delta_every: int | None) -> None:
    for name, value in (("every", every), ("delta_every", delta_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"Checkpointer: {name}={value!r}. Pass a number of batches, 1 or more, or None.")
    if every is not None and delta_every is not None and delta_every >= every:
        raise ConfigError(
            f"Checkpointer: delta_every={delta_every!r}, every={every!r}: deltas are written between two snapshots. "
            "Pass delta_every below every, or leave it out."
        )
