"""The sharded collections of a model while a pipeline has it: which are hashed, which are plain, and their requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.train_pipeline import rewrite_model
from hybridrec.backend import DeviceBackend
from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.distributed.pipelined_call import CallOwner, PipelinedCall, calls_of
from hybridrec.distributed.sharded_embedding_bag import ShardedHashEmbeddingBagCollection
from hybridrec.errors import ConfigError

logger = logging.getLogger("hybridrec")


def _hashed_modules(model: nn.Module) -> dict[str, ShardedHashEmbeddingBagCollection]:
    """Name -> module, of every sharded hashed collection of a model, in the model's order."""
    return {n: m for n, m in model.named_modules() if isinstance(m, ShardedHashEmbeddingBagCollection)}


class ModelCalls:
    """Puts `PipelinedCall`s into a model and takes them out again; prepares what plain collections need."""

    def __init__(self, owner: CallOwner, backend: DeviceBackend, device: torch.device, dist_stream: Any) -> None:
        """
        Args:
            owner: The pipeline.
            backend: Of the device.
            device: Of the model.
            dist_stream: On which plain collections send their ids; None: the device has no streams.
        """
        self._owner, self._backend, self._device, self._dist_stream = owner, backend, device, dist_stream
        self.hashed: list[PipelinedCall] = []
        """Calls of hashed collections, in the order in which the model calls them."""
        self._plain: list[PipelinedCall] = []
        self._is_attached = False
        self._model: nn.Module | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the model still has all of this pipeline's calls."""
        return self._is_attached and all(calls_of(call.module) is call for call in (*self.hashed, *self._plain))

    def check(self, model: nn.Module) -> dict[str, ShardedHashEmbeddingBagCollection]:
        """The hashed collections of a model, unless one cannot be pipelined exactly.

        Raises:
            ConfigError: The host group of a hashed collection is also its device group.
        """
        modules = _hashed_modules(model)
        for name, module in modules.items():
            group = module.host_group
            if group.size() > 1 and group is module.device_group:
                raise ConfigError(
                    f"{name}: its host group is the model's own process group. Ids are sent ahead on a thread of "
                    "their own, and one group cannot serve two threads in one order. Pass host_env with a group of its "
                    "own: ShardingEnv(world_size=..., rank=..., pg=dist.new_group(backend='gloo'))."
                )
        return modules

    def attach(self, model: nn.Module, batch: Any) -> None:
        """Put the calls in, taking those of other pipelines out.

        Args:
            model: Of the pipeline.
            batch: Any batch; models that are traced with concrete arguments take them from it.

        Raises:
            ConfigError: The model's forward cannot be traced.
        """
        for module in model.modules():
            other = calls_of(module)
            owner = other.owner() if other is not None else None
            if owner is not None and owner is not self._owner:
                owner.detach()
            elif other is not None:
                other.restore()
        if model is not self._model:
            self.hashed, self._plain = [], []
            self._trace(model, batch)
            self._model = model
        for call in (*self.hashed, *self._plain):
            call.install()
        self._is_attached = True

    def _trace(self, model: nn.Module, batch: Any) -> None:
        calls: dict[str, PipelinedCall] = {}
        repeated: set[str] = set()

        def pipelined_forward(name: str, args: Any, module: Any, context: Any, stream: Any) -> PipelinedCall:
            if name in calls:
                repeated.add(name)
            else:
                calls[name] = PipelinedCall(self._owner, name, args, module)
            return calls[name]

        try:
            rewrite_model(model=model, context=None, dist_stream=None, batch=batch, pipelined_forward=pipelined_forward)
        except Exception as e:
            raise ConfigError(
                f"{type(model).__name__}: its forward cannot be traced symbolically, so what its collections look up "
                f"cannot be known ahead ({type(e).__name__}: {e}). Keep data-dependent branches and loops out of the "
                "forward around the collections, or train without the pipeline."
            ) from e
        finally:
            for call in calls.values():
                call.restore()
        for name in repeated:
            logger.warning("%s: the model calls it more than once in a forward, so it is not prefetched.", name)
            del calls[name]
        for call in calls.values():
            is_hashed = isinstance(call.module, ShardedHashEmbeddingBagCollection)
            if is_hashed and not _gets_kjt(call, batch):
                logger.warning(
                    "%s: the model makes the KeyedJaggedTensor that it passes, so this collection is not prefetched. "
                    "Make it a field of the batch.",
                    call.name,
                )
                continue
            (self.hashed if is_hashed else self._plain).append(call)

    def detach(self) -> None:
        """Take the calls out."""
        for call in (*self.hashed, *self._plain):
            if calls_of(call.module) is call:
                call.restore()
        for call in self.hashed:
            call.module.lookup.batches_in_flight = 1
        self._is_attached = False

    def start_plain(self, batch: InFlightBatch) -> None:
        """Begin to send a batch's ids for the plain collections, if that did not begin yet."""
        if batch.plain is not None:
            return
        batch.plain = requests = {}
        with self._on_dist_stream():
            if self._dist_stream is not None:
                self._dist_stream.wait_event(batch.copied)
                batch.device.record_stream(self._dist_stream)
            for call in self._plain:
                args, kwargs = call.arguments_of(batch.device)
                context = call.module.create_context()
                requests[call.name] = (context, call.module.input_dist(context, *args, **kwargs))

    def wait_plain_sizes(self, batch: InFlightBatch) -> None:
        """Wait for the sizes of what `start_plain` sends, so that the ids themselves are on their way."""
        if batch.plain_sizes_known:
            return
        assert batch.plain is not None
        batch.plain_sizes_known = True
        with self._on_dist_stream():
            for name, (context, request) in batch.plain.items():
                batch.plain[name] = (context, request.wait())

    def give_back(self, call: PipelinedCall, batch: InFlightBatch) -> None:
        """What was prepared for a collection in the batch that computes is not used."""
        if call in self.hashed:
            call.module.unmap_batch(batch.contexts[self.hashed.index(call)])
        elif batch.plain is not None:
            self.wait_plain_sizes(batch)
            batch.plain.pop(call.name)[1].wait()

    def prepared(self, call: PipelinedCall, batch: InFlightBatch) -> Callable[[], Any]:
        """What finishes a collection's forward of a batch."""
        if isinstance(call.module, ShardedHashEmbeddingBagCollection):
            position = self.hashed.index(call)
            context, keys = batch.contexts[position], batch.dist_inputs[position]
            return lambda: call.module.compute_and_output_dist(context, keys)
        self.wait_plain_sizes(batch)
        assert batch.plain is not None
        context, request = batch.plain.pop(call.name)

        def finish() -> Any:
            with self._on_dist_stream():
                data = request.wait()
            if self._dist_stream is not None:
                current = self._backend.current_stream(self._device)
                current.wait_stream(self._dist_stream)
                data.record_stream(current)
                context.record_stream(current)
            return call.module.compute_and_output_dist(context, data)

        return finish

    def _on_dist_stream(self) -> Any:
        stream = self._dist_stream
        return self._backend.use_stream(self._backend.current_stream(self._device) if stream is None else stream)


def _gets_kjt(call: PipelinedCall, batch: Any) -> bool:
    """Whether tracing found where in a batch a collection's KJT is. It loses what a forward makes of tensors."""
    try:
        args, kwargs = call.arguments_of(batch)
    except Exception:  # this batch has no such field; the verdict will say so on all ranks
        return True
    return all(isinstance(value, KeyedJaggedTensor) for value in (*args, *kwargs.values()))
