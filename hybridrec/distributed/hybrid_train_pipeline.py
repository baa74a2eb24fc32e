"""`HybridTrainPipelineSparseDist`: while a batch computes, the next ones are copied, routed, mapped and swapped in.

See docs/design/pipeline.md. This module owns the order: which batch is taken when, which stage is asked for when, and
what happens when the iterator, the mode or the caller changes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torchrec.streamable import Pipelineable

from hybridrec._compat.train_pipeline import TrainPipelineSparseDist
from hybridrec.backend import resolve_backend
from hybridrec.distributed.end_of_data import EndOfData, Groups
from hybridrec.distributed.host_thread import HostThread, host_thread_of
from hybridrec.distributed.in_flight import BatchState, InFlightBatch, Mode, Source
from hybridrec.distributed.model_calls import Inputs, ModelCalls
from hybridrec.distributed.pipeline_arguments import MAX_DEPTH, check_arguments
from hybridrec.distributed.pipeline_clock import PipelineClock
from hybridrec.distributed.pipelined_call import PipelinedCall
from hybridrec.distributed.stages import HostStages, stage
from hybridrec.distributed.step_group import StepGroup
from hybridrec.distributed.watchdog import DEAD_SECONDS, watch_of
from hybridrec.errors import ConfigError, StateError
from hybridrec.metrics import PipelineReport, PipelineStats
from hybridrec.types import UnevenRanks

logger = logging.getLogger("hybridrec")

MANY_SOURCES = 4


class HybridTrainPipelineSparseDist(TrainPipelineSparseDist):
    """Trains batch after batch, with the same bits as a plain loop, and prepares the next ones meanwhile.

    ``model(batch)`` returns ``(loss, output)``. Up to ``pipe_n_batch`` batches are taken from the iterator and not yet
    released, the computing one included. Everything that a batch has prepared can be taken back: a direct call of the
    model, another iterator, another mode or `reset` finds the shards as if only the batches that were returned existed.

    All ranks make the same calls in the same order. One caller at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: str | torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: bool = False,
        pipe_n_batch: int = 3,
        *,
        uneven_ranks: UnevenRanks | str = UnevenRanks.STOP,
        make_empty_batch: Callable[[Any], Any] | None = None,
        inputs: Inputs | None = None,
        strict: bool = False,
        dead_rank_seconds: float | None = DEAD_SECONDS,
        accumulation_steps: int = 1,
    ) -> None:
        """
        Args:
            model: Sharded, on ``device``.
            optimizer: What `progress` steps.
            device: Where dense part and slots are.
            execute_all_batches: Whether batches that were taken when the iterator ends are still computed. False: they
                are dropped and counted, and each batch costs a small exchange over the device group.
            apply_jit: Must be False.
            return_loss: Whether `progress` returns ``(output, losses)`` instead of the output.
            pipe_n_batch: Depth, 1 (serial) to 12.
            uneven_ranks: What happens when a rank's iterator ends before another's. ``"stop"``: all ranks stop after
                the last batch that all had; what some took beyond is dropped, counted and warned of. ``"drain"``: the
                rank goes on with empty batches until all have ended. One value on all ranks; for models with hashed
                collections.
            make_empty_batch: For ``"drain"``: a function from a batch (full or empty) to one without samples.
            inputs: For models that cannot be traced symbolically: path of a sharded collection in the model -> what it
                is called with, the name of a field of the batch or a function from a batch to its KeyedJaggedTensor.
                Other collections are found by tracing. One that is not found is trained, but not ahead; see `report`.
            strict: Whether `progress` raises for such a collection.
            dead_rank_seconds: How long a rank may be silent while this one waits for it, before it counts as dead, 10
                or more; None: for ever, as under a debugger that stops a process.
            accumulation_steps: N: one step, of rows too, for N batches; what waits when the iterator ends is stepped.

        Raises:
            ConfigError: An argument cannot be honoured, or the model's host group is not its own.
        """
        parsed = check_arguments(
            model, optimizer, device, apply_jit=apply_jit, depth=pipe_n_batch, dead_rank_seconds=dead_rank_seconds
        )
        self._backend = resolve_backend(parsed.type)
        parsed = self._backend.indexed(parsed)  # the host thread has a current device of its own
        super().__init__(model, optimizer, parsed, execute_all_batches=bool(execute_all_batches))
        self._end_of_data = EndOfData(
            uneven_ranks,
            make_empty_batch,
            depth=pipe_n_batch,
            executes_all=self._execute_all_batches,
            device=parsed,
        )
        self._model: nn.Module = model
        self._return_loss, self._depth = bool(return_loss), pipe_n_batch
        has_streams = not self._backend.is_host_memory
        self._memcpy_stream = self._backend.make_stream(parsed) if has_streams else None
        self._data_dist_stream = self._backend.make_stream(parsed) if has_streams else None
        self._calls = ModelCalls(
            self, self._backend, parsed, self._data_dist_stream, inputs=inputs, is_strict=bool(strict)
        )
        self._dead_rank_seconds = dead_rank_seconds
        self._group = StepGroup(accumulation_steps, depth=pipe_n_batch, max_open=MAX_DEPTH)
        self._use(model)
        self._stages: HostStages | None = None
        self._sources: list[Source] = []
        self._num_taken = self._num_committed = self._num_dropped = self._num_queued = 0
        self._clock = PipelineClock()
        self._in_progress = threading.Lock()
        self._updates_before = 0
        """`_num_updates` when the forward of the last batch began."""
        self._failure: BaseException | None = None
        """What this rank raised, alone as far as it knows: the ranks' host threads may not be in step any more."""
        self._has_warned_of_sources = False
        self._bytes_before = (0, 0, 0)
        now = self.stats()
        self._bytes_before = (now.load_bytes, now.write_back_bytes, now.copied_bytes)
        self.computing: InFlightBatch | None = None
        """The batch whose forward runs now."""

    # ---- what users call -----------------------------------------------------------------------------------------

    @property
    def batches_committed(self) -> int:
        """Training batches whose step is over, empty ones included: where a loader resumes."""
        return self._num_committed

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Compute the iterator's next batch: forward and, in training mode with grad enabled, backward and step.

        Args:
            dataloader_iter: An iterator of `Pipelineable` batches: ``iter(loader)``, made once an epoch.

        Returns:
            What the model returned beside the losses; with ``return_loss`` that and the losses.

        Raises:
            StopIteration: The iterator ended and its batches are computed, or another rank's did; see
                ``uneven_ranks``. The next call asks the iterator again.
            HybridRecError: A rank refused the batch: it is left out, the shards are as before, and all ranks raise.
            BackendError: A rank was killed or stopped; names it, and the stage in which this rank waited.
            Exception: What the iterator, the model, the optimizer or a stage raised. Of several ranks one may be the
                only one that knows, so that `reset`, on all of them, has to come before the next call.
            StateError: It did not.

        A batch is read, on another thread, until it was returned: an iterator must not write over what it gave. An
        iterator that is left before its end keeps what was taken from it for when it comes back; `reset` lets go.
        """
        if not self._in_progress.acquire(blocking=False):
            raise StateError("progress() was called while it runs, by another thread or by what it calls. Wait for it.")
        try:
            return self._progress(dataloader_iter)
        except RuntimeError as e:
            explained = None if self._watch is None else self._watch.explain(e)
            if explained is None:
                raise
            raise explained from e
        finally:
            self._in_progress.release()

    def _progress(self, dataloader_iter: Iterator[Any]) -> Any:
        self._require_whole()
        source = self._select(dataloader_iter)
        self._fill(source)
        if not source.queue:
            self._begin_anew(source)
            raise StopIteration
        batch = source.queue[0]
        stages = self._stages
        assert stages is not None
        try:
            self._wait(source, batch)
            result = None if batch.ended_ranks is not None else self._compute(source, batch)
        except BaseException as e:
            self._give_up(source, batch, e)
            raise
        if batch.ended_ranks is not None:
            self._end(source, batch.ended_ranks)
            raise StopIteration
        source.queue.popleft()
        source.num_steps += 1
        stages.release(batch)
        batch.move_to(BatchState.RELEASED)
        self._clock.add_stages(batch.times)
        return result

    def stats(self) -> PipelineStats:
        """What the pipeline did so far on this rank. Not collective."""
        tables = [table for module in self._hashed for table in module.stats()]
        return PipelineStats(
            depth=self._depth,
            batches_taken=self._num_taken,
            batches_committed=self._num_committed,
            batches_dropped=self._num_dropped,
            batches_in_flight=sum(not b.is_end for source in self._sources for b in source.queue)
            + self._group.num_taken,
            stage_seconds=self._clock.stage_seconds(),
            stall_seconds=self._clock.stall_seconds(),
            load_bytes=sum(table.load_bytes for table in tables) - self._bytes_before[0],
            write_back_bytes=sum(table.write_back_bytes for table in tables) - self._bytes_before[1],
            copied_bytes=sum(module.copied_bytes for module in self._hashed) - self._bytes_before[2],
        )

    def report(self) -> PipelineReport:
        """Which sharded collections are prepared ahead, and why the others are not. Not collective."""
        return self._calls.report(self._model)

    def flush(self) -> None:
        """Write every row that is newer on the device back to the host's store. Batches in flight stay."""
        self.withdraw()
        for module in self._hashed:
            module.lookup.flush()

    def reset(self) -> None:
        """Drop the batches in flight, and count them: what remains is the state after the committed ones."""
        self._failure = None
        self.withdraw()
        self._num_dropped += self._group.drop(self._optimizer)
        for source in self._sources:
            self._drop(source)
        self._sources.clear()

    def resume_at(self, batches_committed: int) -> None:
        """Count on from a snapshot that was loaded; nothing may be in flight."""
        self._num_committed = batches_committed

    def detach(self) -> nn.Module:
        """Give the model its own forward back. Batches in flight stay, and `progress` attaches again by itself."""
        self.withdraw()
        self._calls.detach()
        self._model_attached = False
        return self._model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Take the model, or another one with the same collections, for the next `progress`."""
        if model is not None and model is not self._model:
            if self._group.num_batches or any(source.queue for source in self._sources):
                raise StateError(
                    "attach(model): batches of the model before are in flight. Let progress() drain them, or reset()."
                )
            self._calls.detach()
            self._use(model)
            self._model = self._model_fwd = model
        self._model_attached = True

    def _use(self, model: nn.Module) -> None:
        self._hashed = tuple(self._calls.check(model).values())
        self._thread: HostThread = host_thread_of(module.host_group for module in self._hashed)
        spread = [module for module in self._hashed if module.host_group.size() > 1]
        self._groups = Groups(host=spread[0].host_group, device=spread[0].device_group) if spread else None
        """None: there is one rank."""
        self._watch = watch_of(self._groups.host) if self._groups is not None else None
        if self._watch is not None and self._groups is not None:
            self._watch.give_up_after(self._dead_rank_seconds)
            self._watch.abort_also(self._groups.device)
        self._end_of_data.has_met = False
        self._group.use(model, self._hashed)
        self._frozen: list[tuple[bool, ...]] = [module.frozen_tables for module in self._hashed]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            "TorchRec's stages are not this pipeline's: call progress(), reset(), flush(), detach(), attach()."
        )

    fill_pipeline = enqueue_batch = dequeue_batch = copy_batch_to_gpu = inplace_copy_batch_to_gpu = _refuse
    start_sparse_data_dist = wait_sparse_data_dist = clear_sparse_data_dist_inputs = _refuse

    # ---- for the calls that stand in the model -------------------------------------------------------------------

    def withdraw(self) -> None:
        """Take back what was mapped ahead; see `HostStages.withdraw`. Collective."""
        if self._watch is not None and self._watch.verdict is not None:
            raise self._watch.error()  # what the host thread does may never end
        if self._stages is not None:
            self._stages.withdraw(batch for source in self._sources for batch in source.queue)

    def prepared(self, call: PipelinedCall, batch: InFlightBatch) -> Callable[[], Any]:
        """For `PipelinedCall`."""
        return self._calls.prepared(call, batch)

    def give_back(self, call: PipelinedCall, batch: InFlightBatch) -> None:
        """For `PipelinedCall`."""
        self._calls.give_back(call, batch)

    # ---- order ---------------------------------------------------------------------------------------------------

    def _select(self, iterator: Iterator[Any]) -> Source:
        """The source of an iterator in the mode in force; what other sources mapped is taken back."""
        if not hasattr(iterator, "__next__"):
            raise ConfigError(
                f"progress() got a {type(iterator).__name__}, which is no iterator. Pass iter(loader), made once "
                "before the loop: a new one at every call would begin anew."
            )
        before, self._frozen = self._frozen, [module.frozen_tables for module in self._hashed]
        if self._thread.claim(self) or self._frozen != before:
            self.withdraw()  # what was mapped before the user froze a table, or let it train, is mapped anew
        is_training = self._model.training and torch.is_grad_enabled()
        mode = Mode(
            is_training=is_training,
            modules=tuple(module.training and is_training for module in self._hashed),
        )
        if self._sources and self._sources[-1].iterator is iterator and self._sources[-1].mode == mode:
            return self._sources[-1]
        if self._sources:
            self.withdraw()
        found = next((s for s in self._sources if s.iterator is iterator and s.mode == mode), None)
        self._sources = [s for s in self._sources if s.queue and s is not found]
        self._sources.append(found or Source(iterator=iterator, mode=mode))
        if len(self._sources) > MANY_SOURCES and not self._has_warned_of_sources:
            self._has_warned_of_sources = True
            logger.warning(
                "the pipeline holds batches of %d iterators that were left before their end, for when they come back. "
                "reset() lets go of them.",
                len(self._sources) - 1,
            )
        return self._sources[-1]

    def _fill(self, source: Source) -> None:
        """Take batches until the pipeline is as deep as it should be, and ask for their stages."""
        if source.queue and not self._calls.is_attached:
            self._attach_to(source.queue[0].host)
        while len(source.queue) < self._depth and not source.has_ended:
            batch = self._take(source)
            if batch is not None:
                assert self._stages is not None
                self._stages.distribute(batch)
                source.queue.append(batch)
            else:
                source.has_ended = True
                if not self._execute_all_batches:
                    self._drop(source)
            self._ask_for_maps(source)
        self._ask_for_maps(source)

    def _ask_for_maps(self, source: Source) -> None:
        """MAP in order. From depth 3 on a batch is mapped when the next one's ids are on their way, not before."""
        holds_back_last = self._depth >= 3 and not source.has_ended and len(source.queue) > 1
        for batch in itertools.islice(source.queue, len(source.queue) - int(holds_back_last)):
            if batch.mapping is None:
                assert self._stages is not None
                self._stages.map(batch)

    def _take(self, source: Source) -> InFlightBatch | None:
        """What comes next in the queue, on its way to the device; None if there is nothing for any rank."""
        index = self._num_queued
        host = None if source.is_exhausted else self._load(source, index)
        if source.is_exhausted:
            if self._groups is None:
                return None
            host = self._end_of_data.empty_batch()
        batch = InFlightBatch(
            index=index, mode=source.mode, host=host, device=None, arrived=None, is_end=source.is_exhausted
        )
        try:
            if not batch.is_end:
                self._check(batch)
                self._end_of_data.saw(host, is_alone=self._groups is None)
            if host is not None:  # before the ranks ask each other: what fails here, fails before anybody waits
                if not self._calls.is_attached:
                    self._attach_to(host)
                start = time.perf_counter()
                with stage(batch, "copy", self._watch):
                    self._copy(batch)
                self._clock.add_stall("copy", time.perf_counter() - start)
            if self._groups is not None and self._end_of_data.is_over(source, batch, self._groups):
                self._num_dropped += not batch.is_end
                return None
            if host is None:
                if not self._calls.is_attached:
                    self._attach_to(host)
                # Plain collections send ids for the batch behind the one that computes: any will do, nobody reads them.
                previous = source.queue[-1] if source.queue else batch
                batch.device, batch.copied = previous.device, previous.copied
        except BaseException:
            self._num_dropped += not batch.is_end
            raise
        self._num_queued += 1  # on all ranks alike: batches have one number
        return batch

    def _load(self, source: Source, index: int) -> Any:
        """The iterator's next batch; None, and the source is exhausted, if there is none."""
        start = time.perf_counter()
        watching = contextlib.nullcontext() if self._watch is None else self._watch.stage("load", index)
        with record_function(f"## load {index} ##"), watching:
            try:
                host = next(source.iterator)
            except StopIteration:
                source.is_exhausted = True
                return None
            finally:
                self._clock.add("load", time.perf_counter() - start)
        self._num_taken += 1
        return host

    def _check(self, batch: InFlightBatch) -> None:
        if not isinstance(batch.host, (Tensor, Pipelineable)):
            raise ConfigError(
                f"the iterator gave a {type(batch.host).__name__}; batch {batch.index} is left out. Yield objects of a "
                "class that derives from torchrec.streamable.Pipelineable: to(), record_stream() and pin_memory()."
            )

    def _end(self, source: Source, ended_ranks: Sequence[int]) -> None:
        """The oldest batch turned out to be none, on all ranks alike: let go of what is behind it."""
        assert self._stages is not None and self._groups is not None
        for batch in source.queue:
            if batch.mapping is None:
                self._stages.map(batch)  # for its verdict: how many batches other ranks lose
        self._thread.settle()
        everyone = set(range(self._groups.host.size()))
        taken = Counter(r for b in source.queue if b.ended_ranks is not None for r in everyone - set(b.ended_ranks))
        self._end_of_data.warn(source.num_steps, ended_ranks, taken)
        self._drop(source)
        self._begin_anew(source)

    def _begin_anew(self, source: Source) -> None:
        """`progress` says that the source ended: after that its iterator is asked again."""
        source.is_exhausted = source.has_ended = False
        source.num_steps = 0
        if source.mode.is_training and self._group.num_batches:
            self._step_group()

    def _copy(self, batch: InFlightBatch) -> None:
        """COPY: the batch to the device, without waiting where its memory is pinned."""
        if self._memcpy_stream is None:
            batch.device = batch.host.to(device=self._device, non_blocking=True)
            return
        # The loader may have worked on the device, on this thread's stream.
        batch.arrived = self._backend.record_event(self._backend.current_stream(self._device))
        self._memcpy_stream.wait_event(batch.arrived)
        with self._backend.use_stream(self._memcpy_stream):
            batch.device = batch.host.to(device=self._device, non_blocking=True)
        batch.copied = self._backend.record_event(self._memcpy_stream)

    def _attach_to(self, batch: Any) -> None:
        """Put this pipeline's calls into the model."""
        self._calls.attach(self._model, batch)
        self._model_attached = True
        host_group = None if self._groups is None else self._groups.host
        self._stages = HostStages(self._calls.hashed, self._thread, self._backend, self._device, host_group)
        for call in self._calls.hashed:
            call.module.lookup.growth.batches_in_flight = self._group.num_open

    # ---- one batch's step ----------------------------------------------------------------------------------------

    def _wait(self, source: Source, batch: InFlightBatch) -> None:
        assert self._stages is not None
        start = time.perf_counter()
        with record_function(f"## stall {batch.index} ##"):
            try:
                while not self._stages.wait_mapped(batch):
                    self.withdraw()
                    self._ask_for_maps(source)
            finally:
                self._clock.add_wait(start, time.perf_counter(), batch.times)

    def _compute(self, source: Source, batch: InFlightBatch) -> Any:
        next_batch = source.queue[1] if len(source.queue) > 1 else None
        if not batch.is_as_taken:
            raise StateError(
                f"the ids of batch {batch.index} were written over after the iterator gave them, while they were on "
                "their way to other ranks. Let the loader give tensors that it does not use again, or choose depth 1."
            )
        if batch.mode.is_training and not self._group.num_batches:
            self._optimizer.zero_grad()
        if self._memcpy_stream is not None:
            current = self._backend.current_stream(self._device)
            current.wait_event(batch.copied)
            batch.device.record_stream(current)
        self._calls.start_plain(batch)
        if next_batch is not None:
            self._calls.start_plain(next_batch)
        batch.move_to(BatchState.COMPUTING)
        if batch.mode.is_training:
            self._group.add(is_end=batch.is_end)
        self._updates_before = self._num_updates()
        self.computing = batch
        try:
            with stage(batch, "forward", self._watch):
                losses, output = self._checked(self._model_fwd(batch.device))
                self._calls.give_back_unused(batch)
        except StopIteration as e:  # it would look like the iterator's end
            raise RuntimeError("the model raised StopIteration") from e
        finally:
            self.computing = None
        if next_batch is not None:
            self._calls.wait_plain_sizes(next_batch)
        if batch.mode.is_training:
            with stage(batch, "backward", self._watch):
                self._backward(losses)
            if self._group.is_full:
                with stage(batch, "optimizer", self._watch):
                    self._step_group()
        return (output, losses) if self._return_loss else output

    def _num_updates(self) -> int:
        """Batches whose rows were stepped so far, in all hashed collections, those that are not prefetched too."""
        return sum(module.lookup.log.committed for module in self._hashed)

    def _backward(self, losses: Tensor) -> None:
        torch.sum(losses, dim=0).backward()

    def _step_group(self) -> None:
        self._group.step(self._optimizer_step)
        self._num_committed += self._group.num_batches
        self._group.clear()

    def _optimizer_step(self) -> None:
        self._optimizer.step()

    def _checked(self, result: Any) -> tuple[Tensor, Any]:
        if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise ConfigError(
                f"the model returned a {type(result).__name__}, not (losses, output) with a tensor of losses. Return "
                "both from its forward; output may be anything."
            )
        return result[0], result[1]

    def _give_up(self, source: Source, batch: InFlightBatch, error: BaseException) -> None:
        """A batch failed: it is left out. Unless its rows were stepped already, the shards are as before it."""
        assert self._stages is not None
        is_trained = batch.state is BatchState.COMPUTING and self._num_updates() > self._updates_before
        if is_trained:
            self._num_committed += self._group.num_batches
            self._group.clear()
            error.add_note(f"Batch {batch.index} counts as committed: rows were stepped before this happened.")
        elif batch.state is not BatchState.COMPUTING or not batch.mode.is_training:
            self._num_dropped += not batch.is_end
        source.queue.popleft()
        source.num_steps += 1
        if self._groups is None:
            if not batch.is_refused:
                self.withdraw()
        elif not batch.is_refused:
            # The other ranks may know of nothing, and wait for this one in a collective: nothing collective here.
            self._failure = error
        self._stages.release(batch)
        if batch.state is BatchState.COMPUTING and batch.mode.is_training:
            self._num_dropped += self._group.drop(self._optimizer)
        batch.move_to(BatchState.DROPPED)

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise StateError(
                f"this pipeline failed before, in a way that other ranks may not know of "
                f"({type(self._failure).__name__}: {self._failure}). Call reset() on all ranks, then go on from batch "
                f"{self._num_committed} (batches_committed), or start again from the last checkpoint."
            ) from self._failure

    def _drop(self, source: Source) -> None:
        if source.queue:
            self.withdraw()
        for batch in source.queue:
            if self._stages is not None:
                self._stages.release(batch)
            batch.move_to(BatchState.DROPPED)
        self._num_dropped += sum(not batch.is_end for batch in source.queue)
        source.queue.clear()
