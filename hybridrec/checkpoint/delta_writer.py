"""`DeltaWriter`: a snapshot, and after it what changed, delta by delta. See docs/design/checkpoint.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrec.checkpoint.delta_chain import ChainEndedError, why_not_next
from hybridrec.checkpoint.delta_saving import DeltaPlace, DeltaSaving
from hybridrec.checkpoint.exchange import Ranks
from hybridrec.checkpoint.loading import Loaded, load_point
from hybridrec.checkpoint.points import Point
from hybridrec.checkpoint.saving import Saving
from hybridrec.checkpoint.snapshot import latest
from hybridrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from hybridrec.distributed.model_parts import hashed_collections
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.watchdog import watched
from hybridrec.errors import ConfigError, StateError


@dataclass(frozen=True, kw_only=True)
class _End:
    """What the next delta follows."""

    snapshot: Path
    number: int
    digest: str
    marks: dict[str, int]
    """Collection -> rows whose score is above it changed since."""


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What is on its way to disk."""

    saving: Saving
    number: int
    """Of the delta; 0: a snapshot."""
    marks: dict[str, int]


class DeltaWriter:
    """Writes snapshots, and between them deltas, which another process follows (`follow`), and which `load` takes in.

    Begin with `resume`, or with `save_full`. All calls are collective.

    Example:
        writer = DeltaWriter("snapshots", model, optimizer, pipeline=pipeline)
        if writer.resume() is None:
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            path: See `save`, and so on.
            model: What `DistributedModelParallel` returned.
            optimizer: Of the model.
            pipeline: Of the model; counts the batches.
            keep: How many snapshots to keep, each with its deltas.
            max_removed: Ids that a table with ``full_policy="evict"`` may lose on a rank between two deltas; 8 bytes
                each. Beyond it the chain ends, by an error of `save_delta`.
            group: See `Saving`; needed where a pipeline goes on between `start_full` or `start_delta` and `finish`.

        Raises:
            ConfigError: ``max_removed`` is negative.
        """
        if isinstance(max_removed, bool) or not isinstance(max_removed, int) or not 0 <= max_removed < 2**32:
            raise ConfigError(f"DeltaWriter: max_removed={max_removed!r}. Pass a number of ids, 0 to 2^32 - 1.")
        self._root, self._model, self._optimizer, self._pipeline = Path(path).absolute(), model, optimizer, pipeline
        self._keep, self._max_removed, self._group = keep, max_removed, group
        self._collections = hashed_collections(model)
        self._host_group = next(iter(self._collections.values())).host_group
        self._end: _End | None = None
        self._has_begun, self._why_ended = False, "there is no snapshot that it could follow"
        self._written: _Written | None = None
        # Left since what is visible last, and not in the shards' logs any more: (collection, table) -> ids
        self._carried: dict[tuple[str, str], Tensor] = {}

    def save_full(self, extra: Any = None) -> Path:
        """Write a snapshot, the beginning of a chain; see `save`. If it fails the chain before goes on.

        Args:
            extra: See `save`.

        Raises:
            StateError: Also: the host budget has no room for `max_removed` ids. Nothing was written then.
        """
        self._begin_full(extra, goes_on=False).write()
        return self._finish_now()

    def save_delta(self, extra: Any = None) -> Path:
        """Write what changed since the snapshot or the delta before; its folder, which `load` takes.

        It is the state after the last committed batch. If it cannot be written, training goes on, and the next delta
        has what this one would have had.

        Args:
            extra: See `save`.

        Raises:
            StateError: It cannot be written; or what changed is not known (then it is a `ChainEndedError`): no
                `save_full`, more than ``max_removed`` ids left, rows were imported or loaded since. Call `save_full`.
            BackendError: A rank is gone.
        """
        self._begin_delta(extra, goes_on=False).write()
        return self._finish_now()

    def start_full(self, extra: Any = None) -> None:
        """As `save_full`, its rows written by a thread; `finish` makes it visible, and raises what went wrong."""
        self._begin_full(extra, goes_on=True).start()

    def start_delta(self, extra: Any = None) -> None:
        """As `save_delta`, its rows written by a thread; `finish` makes it visible, and raises what went wrong."""
        self._begin_delta(extra, goes_on=True).start()

    @property
    def has_begun(self) -> bool:
        """Whether there was a chain, even if it ended."""
        return self._has_begun

    @property
    def is_writing(self) -> bool:
        """Whether something was started and not finished."""
        return self._written is not None

    @property
    def is_written(self) -> bool:
        """Whether `finish` need not wait for this rank."""
        return self._written is None or self._written.saving.is_written

    def finish(self) -> Path | None:
        """Wait for what was started, and make it visible; its folder, None if nothing was."""
        written, self._written = self._written, None
        if written is None:
            return None
        try:
            folder = written.saving.finish()
        except BaseException:
            if self._end is None:
                self._stop_logs()
            raise
        snapshot = self._end.snapshot if written.number and self._end is not None else folder
        self._end = _End(snapshot=snapshot, number=written.number, digest=written.saving.digest, marks=written.marks)
        self._carried, self._has_begun = {}, True
        return folder

    def give_up(self) -> None:
        """Let go of what was started, without the other ranks; nothing becomes visible."""
        written, self._written = self._written, None
        if written is not None:
            written.saving.give_up()

    def resume(self) -> Loaded | None:
        """Load the newest snapshot and its deltas (see `load`), and go on with that chain; None without a snapshot.

        Where the tables are cut otherwise than those of the snapshot, `save_delta` asks for a new one.
        """
        with watched(self._host_group, "resume"):
            self._take_back_prepared()  # the host group is a pipeline's before
            is_there = any(Ranks(self._host_group).gather(latest(self._root) is not None))
        if not is_there:
            return None
        loaded, point = load_point(self._root, self._model, self._optimizer, pipeline=self._pipeline)
        self._has_begun = True
        with watched(self._host_group, "load"):
            self._go_on(point, Ranks(self._host_group))
        return loaded

    def close(self) -> None:
        """End the chain: ids that leave are not kept any more. What was started and not finished is given up."""
        self.give_up()
        self._end, self._why_ended = None, "the writer was closed"
        self._stop_logs()

    # ---- the chain ---------------------------------------------------------------------------------------------------

    def _go_on(self, point: Point, ranks: Ranks) -> None:
        """Behind a point that was loaded just now."""
        mine = {(c, name) for c, module in self._collections.items() for name in module.lookup.table_names}
        everyone = {key for one in ranks.gather(mine) for key in one}
        if everyone != {(c.name, table.name) for c in point.collections for table in c.tables}:
            self._end_chain("tables, or columns of them, are on other ranks than those of the snapshot")
            return
        self._open_logs(ranks)
        self._carried = {}
        self._end = _End(
            snapshot=point.snapshot, number=point.number, digest=point.digest, marks=self._final_ordinals()
        )

    def _begin_full(self, extra: Any, *, goes_on: bool) -> Saving:
        self.finish()
        with watched(self._host_group, "save"):
            ranks = self._take_removed()
            if self._end is None:
                self._open_logs(ranks)
        try:
            saving = Saving(
                self._root,
                self._model,
                self._optimizer,
                pipeline=self._pipeline,
                extra=extra,
                keep=self._keep,
                group=self._group,
                goes_on=goes_on,
            )
        except BaseException:
            if self._end is None:
                self._stop_logs()
            raise
        self._written = _Written(saving=saving, number=0, marks=self._final_ordinals())
        return saving

    def _begin_delta(self, extra: Any, *, goes_on: bool) -> Saving:
        self.finish()
        with watched(self._host_group, "save"):
            self._take_removed()
        end = self._end
        if end is None:
            raise ChainEndedError(f"save_delta: {self._why_ended}. Call save_full() first.")
        place = DeltaPlace(
            snapshot=end.snapshot,
            number=end.number + 1,
            previous=end.digest,
            marks=end.marks,
            removed=dict(self._carried),
        )
        saving = DeltaSaving(
            place,
            self._model,
            self._optimizer,
            pipeline=self._pipeline,
            extra=extra,
            group=self._group,
            goes_on=goes_on,
        )
        self._written = _Written(saving=saving, number=end.number + 1, marks=self._final_ordinals())
        return saving

    def _finish_now(self) -> Path:
        folder = self.finish()
        if folder is None:
            raise StateError("what was written was given up meanwhile.")
        return folder

    def _take_removed(self) -> Ranks:
        """Carry the ids that left until now; if the chain is over, on any rank, it is on all."""
        self._take_back_prepared()
        ranks, end, reason = Ranks(self._host_group), self._end, ""
        if end is None:
            return ranks
        if ranks.rank == 0:
            reason = why_not_next(end.snapshot, end.number, end.digest)
            if not reason and latest(self._root) != end.snapshot:
                reason = f"{self._root} has a newer snapshot than {end.snapshot.name}"
        for c, module, t in self._tables():
            try:
                self._carry(c, module, t)
            except StateError as e:
                name = module.lookup.tables[t].name
                reason = reason or f"what changed in table {name!r} is not known: {e}"
        reason = next((told for told in ranks.gather(reason) if told), "")
        if reason:
            self._end_chain(reason.rstrip("."))
        return ranks

    def _take_back_prepared(self) -> None:
        for module in self._collections.values():
            module.take_back_prepared()

    def _carry(self, c: str, module: ShardedHashCollection, t: int) -> None:
        ids = module.lookup.log.group.removed_ids(t)
        key = c, module.lookup.tables[t].name
        self._carried[key] = torch.unique(torch.cat([self._carried[key], ids])) if key in self._carried else ids

    def _end_chain(self, reason: str) -> None:
        self._end, self._why_ended, self._carried = None, reason, {}

    def _open_logs(self, ranks: Ranks) -> None:
        """Begin to note the ids that leave. If a rank has no room, none does."""
        try:
            with ranks.together():
                for _, module, t in self._tables():
                    may_lose = module.lookup.tables[t].spec.full_policy == "evict"
                    module.lookup.log.group.track_removals(t, self._max_removed if may_lose else 0)
        except BaseException:
            self._stop_logs()
            raise

    def _stop_logs(self) -> None:
        for _, module, t in self._tables():
            module.lookup.log.group.track_removals(t, None)

    def _tables(self) -> Iterator[tuple[str, ShardedHashCollection, int]]:
        """(path, collection, index of a table)."""
        for c, module in self._collections.items():
            for t in range(len(module.lookup.tables)):
                yield c, module, t

    def _final_ordinals(self) -> dict[str, int]:
        return {c: module.lookup.log.group.final_ordinal for c, module in self._collections.items()}
