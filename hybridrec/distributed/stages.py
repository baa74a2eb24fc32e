"""DIST, MAP and SWAP of batches ahead of training: one function a stage, all on the host thread.

What the thread is given, it does in that order, so the ranks' collectives meet. While it works for batches to come, the
training thread computes. A job waits for the training thread in one place only: MAP, when slots are pinned by batches
whose backward is still to come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from hybridrec.backend import DeviceBackend
from hybridrec.distributed.batch_contents import versions_of
from hybridrec.distributed.host_thread import HostThread, Job
from hybridrec.distributed.in_flight import BatchState, InFlightBatch, StageTime
from hybridrec.distributed.pipelined_call import PipelinedCall
from hybridrec.distributed.verdict import DataEnded, Withdrawn, agree
from hybridrec.distributed.watchdog import GroupBroken, Watch, watch_of

_LOOK_SECONDS = 2.0
"""How often a caller that waits for a stage looks whether a rank is gone."""


@contextlib.contextmanager
def stage(batch: InFlightBatch, name: str, watch: Watch | None) -> Iterator[None]:
    """Time a stage of a batch and show it to `torch.profiler`, and to the watch over the ranks."""
    start = time.perf_counter()
    try:
        watching = contextlib.nullcontext() if watch is None else watch.stage(name, batch.index)
        with record_function(f"## {name} {batch.index} ##"), watching:
            yield
    finally:
        batch.times.append(StageTime(name, start, time.perf_counter()))


class HostStages:
    """Runs the stages of one pipeline's batches on the host thread. All methods are for the training thread."""

    def __init__(
        self,
        calls: Sequence[PipelinedCall],
        thread: HostThread,
        backend: DeviceBackend,
        device: torch.device,
        host_group: dist.ProcessGroup | None,
    ) -> None:
        """
        Args:
            calls: The hashed collections, in the order in which their collectives are issued.
            thread: Of their host groups.
            backend: Of the device.
            device: Where the slots are.
            host_group: Over which the ranks agree on a batch for which no collection is prepared; None: one rank.
        """
        self._calls = list(calls)
        self._thread = thread
        self._backend, self._device, self._host_group = backend, device, host_group
        self._watch = None if host_group is None else watch_of(host_group)
        self._stream = backend.make_stream(device)
        self._has_withdrawn = False
        """A batch was taken back: none after it may be mapped before it. Cleared while the thread has nothing to do."""
        for call in self._calls:
            thread.add_waiter(call.module.lookup.log)

    def distribute(self, batch: InFlightBatch) -> None:
        """DIST: begin to send the batch's ids to their owners."""
        batch.contexts = [call.module.create_context() for call in self._calls]
        for call, context in zip(self._calls, batch.contexts, strict=True):
            context.has_ended = batch.is_end
            try:
                if batch.host is None:
                    raise DataEnded
                arguments = call.arguments_of(batch.host)
            except Exception as e:  # the others wait for this rank's ids: it has none, and says so in the verdict
                context.error, arguments = e, ([None], {})
            batch.arguments[call.name] = arguments
            batch.versions += versions_of(arguments)
        batch.distributing = self._thread.submit(lambda: self._distribute(batch))

    def map(self, batch: InFlightBatch) -> None:
        """MAP, the ranks' verdict and SWAP."""
        batch.is_withdrawn = False
        batch.mapping = self._thread.submit(lambda: self._map(batch))

    def wait_mapped(self, batch: InFlightBatch) -> bool:
        """Return when a batch, the next to compute, is mapped and its rows move.

        Returns:
            Whether it is; False if a rank had to take it back. Then `withdraw` all and map them again.

        Raises:
            BaseException: What its stages raised. Nothing of the batch is left in the shards.
        """
        assert batch.distributing is not None and batch.mapping is not None
        batch.must_not_wait = True
        for call in self._calls:
            call.module.lookup.log.wake()
        self._wait(batch.distributing)
        self._wait(batch.mapping)
        if batch.is_withdrawn:
            return False
        for state in (BatchState.DISTRIBUTED, BatchState.MAPPED):
            if batch.state is not state:
                batch.move_to(state)
        return True

    def _wait(self, job: Job) -> None:
        """Wait for a job, unless a rank is gone and the job does not even notice."""
        while not job.is_done_within(_LOOK_SECONDS):
            if self._watch is not None and self._watch.verdict is not None and not job.is_done_within(_LOOK_SECONDS):
                raise self._watch.error()
        job.wait()

    def withdraw(self, batches: Iterable[InFlightBatch]) -> None:
        """Take back what was mapped and not computed, so that the shards hold what was trained and nothing else.

        Collective: all ranks call it at the same place, as their host threads may have to give up a batch together.
        The batches keep their ids and are mapped anew by `map`.
        """
        self._thread.settle()
        for batch in sorted(batches, key=lambda b: -b.index):
            if batch.mapping is None or batch.state is BatchState.COMPUTING:
                continue
            batch.mapping = None
            for call, context in reversed(list(zip(self._calls, batch.contexts, strict=True))):
                call.module.unmap_batch(context)
            if batch.state is BatchState.MAPPED:
                batch.move_to(BatchState.DISTRIBUTED)
        self._has_withdrawn = False

    def release(self, batch: InFlightBatch) -> None:
        """The batch's step is over, well or not: what its backward did not train is undone."""
        for call, context in reversed(list(zip(self._calls, batch.contexts, strict=True))):
            call.module.release_batch(context)

    # ---- on the host thread --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Grad mode, device and stream belong to a thread, and this is not the user's."""
        self._backend.use_device(self._device)
        with torch.no_grad(), self._backend.use_stream(self._stream):
            yield

    def _distribute(self, batch: InFlightBatch) -> None:
        with self._on_device(), stage(batch, "dist", self._watch):
            if batch.arrived is not None:
                self._stream.wait_event(batch.arrived)
            requests = []
            for call, context in zip(self._calls, batch.contexts, strict=True):
                args, kwargs = batch.arguments[call.name]
                requests.append(call.module.input_dist(context, *args, **kwargs))
            batch.dist_inputs = [request.wait() for request in requests]  # sizes are known, ids are on their way

    def _map(self, batch: InFlightBatch) -> None:
        assert batch.distributing is not None
        if batch.distributing.error is not None:
            return  # the group is broken: `wait_mapped` raises it
        if self._has_withdrawn:
            batch.is_withdrawn = True
            return
        with self._on_device():
            with stage(batch, "wait", self._watch):
                for c, request in enumerate(batch.dist_inputs):
                    if hasattr(request, "wait"):
                        batch.dist_inputs[c] = request.wait()
            with stage(batch, "map", self._watch):
                if not self._map_all(batch):
                    batch.is_withdrawn = self._has_withdrawn = True
            if batch.is_withdrawn or batch.ended_ranks is not None:
                return
            with stage(batch, "swap", self._watch):
                for call, context in zip(self._calls, batch.contexts, strict=True):
                    call.module.swap_batch(context)

    def _map_all(self, batch: InFlightBatch) -> bool:
        """MAP every collection, or none."""

        def may_wait() -> bool:
            if self._thread.is_settling:
                raise Withdrawn
            return not batch.must_not_wait

        pairs = list(zip(self._calls, batch.contexts, strict=True))
        if not pairs:
            self._agree_without_calls(batch)
        for c, (call, context) in enumerate(pairs):
            is_mapped = False
            try:
                is_mapped = call.module.map_batch(context, batch.dist_inputs[c], may_wait)
            except DataEnded as e:
                batch.ended_ranks = e.ranks
                return True
            except GroupBroken:
                raise
            except Exception:
                batch.is_refused = True
                raise
            finally:
                if not is_mapped:
                    for earlier, its_context in reversed(pairs[:c]):
                        earlier.module.unmap_batch(its_context)
            if not is_mapped:
                return False
        return True

    def _agree_without_calls(self, batch: InFlightBatch) -> None:
        """The verdict on a batch whose collections are all looked up by ordinary calls: only ends are told."""
        error = DataEnded() if batch.host is None else None
        agreed = agree(error, self._host_group, mode=int(batch.mode.is_training), has_ended=batch.is_end)
        if isinstance(agreed, DataEnded):
            batch.ended_ranks = agreed.ranks
        elif agreed is not None:
            batch.is_refused = True
            raise agreed
