"""The sharded collections of a model while a pipeline has it: which are prefetched, which are not, and their requests.

What a collection is called with is known ahead if the user says it (``inputs``), or if tracing the model's forward
finds it. Any other collection is left alone: its forward is the ordinary one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.train_pipeline import ShardedModule, rewrite_model
from hybridrec.backend import DeviceBackend
from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.distributed.pipelined_call import CallOwner, DeclaredInput, PipelinedCall, calls_of
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError
from hybridrec.metrics import CollectionReport, PipelineReport

logger = logging.getLogger("hybridrec")


Inputs = Mapping[str, str | Callable[[Any], KeyedJaggedTensor]]
"""Path of a sharded collection in the model -> the field of a batch that it is called with, by name or by function."""


def _inner(model: nn.Module) -> nn.Module:
    """The model that was sharded: paths begin there."""
    return model.module if isinstance(model, DistributedModelParallel) else model


def _sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module, of every sharded collection of a model that is not a part of another, in the model's order."""
    found: dict[str, nn.Module] = {}
    for name, module in _inner(model).named_modules():
        if isinstance(module, ShardedModule) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


class ModelCalls:
    """Puts `PipelinedCall`s into a model and takes them out again; prepares what plain collections need."""

    def __init__(
        self,
        owner: CallOwner,
        backend: DeviceBackend,
        device: torch.device,
        dist_stream: Any,
        *,
        inputs: Inputs | None = None,
        is_strict: bool = False,
    ) -> None:
        """
        Args:
            owner: The pipeline.
            backend: Of the device.
            device: Of the model.
            dist_stream: On which plain collections send their ids; None: the device has no streams.
            inputs: What the user says that collections are called with.
            is_strict: Whether a collection that is not prefetched is refused.

        Raises:
            ConfigError: ``inputs`` is no mapping of paths to fields or functions.
        """
        self._inputs, self._is_strict = _checked_inputs(inputs), is_strict
        self._owner, self._backend, self._device, self._dist_stream = owner, backend, device, dist_stream
        self.hashed: list[PipelinedCall] = []
        """Calls of hashed collections, in the order in which the model calls them."""
        self._plain: list[PipelinedCall] = []
        self._is_attached = False
        self._model: nn.Module | None = None
        self._why_not: dict[str, str] = {}
        """Collection that is not prefetched -> why not."""

    @property
    def is_attached(self) -> bool:
        """Whether the model still has all of this pipeline's calls."""
        return self._is_attached and all(calls_of(call.module) is call for call in (*self.hashed, *self._plain))

    def check(self, model: nn.Module) -> dict[str, ShardedHashCollection]:
        """The hashed collections of a model.

        Raises:
            ConfigError: ``inputs`` names what is no sharded collection.
        """
        sharded = _sharded_modules(model)
        unknown = [path for path in self._inputs if path not in sharded]
        if unknown:
            raise ConfigError(
                f"inputs names {', '.join(map(repr, unknown))}, where {type(model).__name__} has no sharded "
                f"collection. It has {', '.join(map(repr, sharded)) or 'none'}: paths as in named_modules() of the "
                "model that was sharded."
            )
        everything = _inner(model).named_modules()
        return {n: m for n, m in everything if isinstance(m, ShardedHashCollection)}

    def attach(self, model: nn.Module, batch: Any) -> None:
        """Put the calls in, taking those of other pipelines out.

        Args:
            model: Of the pipeline.
            batch: Any batch; models that are traced with concrete arguments take them from it.

        Raises:
            ConfigError: A collection cannot be prefetched, and the pipeline is strict. No call was put in; those
                of other pipelines are out.
        """
        for module in model.modules():
            other = calls_of(module)
            owner = other.owner() if other is not None else None
            if owner is not None and owner is not self._owner:
                owner.detach()
            elif other is not None:
                other.restore()
        if model is not self._model:
            self._find_calls(model, batch)
            self._model = model
        for call in (*self.hashed, *self._plain):
            call.install()
        self._is_attached = True

    def _find_calls(self, model: nn.Module, batch: Any) -> None:
        """A call for every collection of which it is known what of a batch it is called with."""
        sharded = _sharded_modules(model)
        calls = {n: self._call(n, DeclaredInput(n, field), sharded[n]) for n, field in self._inputs.items()}
        why_not: dict[str, str] = {}
        if len(calls) < len(sharded):
            traced, why_not = self._trace(model, batch, [n for n in sharded if n not in calls])
            calls.update(traced)
        if why_not and self._is_strict:
            raise ConfigError(
                f"strict=True, and {type(model).__name__} has collections that cannot be prefetched:\n"
                + "\n".join(f"  {_message(name, why)}" for name, why in why_not.items())
            )
        for name, why in why_not.items():
            logger.warning("%s", _message(name, why))
        self._why_not = why_not
        is_hashed = {n: isinstance(c.module, ShardedHashCollection) for n, c in calls.items()}
        self.hashed = [call for name, call in calls.items() if is_hashed[name]]
        self._plain = [call for name, call in calls.items() if not is_hashed[name]]

    def _call(self, name: str, args: Any, module: Any) -> PipelinedCall:
        return PipelinedCall(self._owner, name, args, module, is_strict=self._is_strict)

    def _trace(
        self, model: nn.Module, batch: Any, names: Iterable[str]
    ) -> tuple[dict[str, PipelinedCall], dict[str, str]]:
        """What tracing says of some collections: their calls, or why there is none."""
        calls: dict[str, PipelinedCall] = {}
        repeated: set[str] = set()

        def pipelined_forward(name: str, args: Any, module: Any, context: Any, stream: Any) -> PipelinedCall:
            if name in calls:
                repeated.add(name)
            else:
                calls[name] = self._call(name, args, module)
            return calls[name]

        try:
            rewrite_model(model=model, context=None, dist_stream=None, batch=batch, pipelined_forward=pipelined_forward)
        except Exception as e:
            why = f"the model's forward cannot be traced symbolically ({type(e).__name__}: {_first_line(e)})"
            return {}, dict.fromkeys(names, why)
        finally:
            for call in calls.values():
                call.restore()
        found: dict[str, PipelinedCall] = {}
        why_not: dict[str, str] = {}
        for name in names:
            if name in repeated:
                why_not[name] = "the model calls it more than once in a forward"
            elif name not in calls:
                why_not[name] = "tracing found no call of it with fields of the batch as they are"
            elif isinstance(calls[name].module, ShardedHashCollection) and not _gets_kjt(calls[name], batch):
                why_not[name] = "the model makes the KeyedJaggedTensor that it passes"
            else:
                found[name] = calls[name]
        order = [name for name in calls if name in found]
        return {name: found[name] for name in order}, why_not

    def report(self, model: nn.Module) -> PipelineReport:
        """Every sharded collection of a model, and whether it is prefetched."""
        calls = {call.name: call for call in (*self.hashed, *self._plain)} if model is self._model else {}
        return PipelineReport(
            collections=tuple(
                self._report_of(name, module, calls.get(name)) for name, module in _sharded_modules(model).items()
            )
        )

    def _report_of(self, name: str, module: nn.Module, call: PipelinedCall | None) -> CollectionReport:
        if call is not None or name in self._inputs:
            reason = "declared in inputs" if name in self._inputs else "found by tracing"
        else:
            reason = self._why_not.get(name, "not known before the first batch")
        if call is not None and call.num_ordinary:
            reason = f"{reason}, but {call.why_ordinary}"
        return CollectionReport(
            name=name,
            is_hashed=isinstance(module, ShardedHashCollection),
            is_prefetched=call is not None,
            reason=reason,
            ordinary_calls=call.num_ordinary if call is not None else 0,
        )

    def detach(self) -> None:
        """Take the calls out."""
        for call in (*self.hashed, *self._plain):
            if calls_of(call.module) is call:
                call.restore()
        for call in self.hashed:
            call.module.lookup.growth.batches_in_flight = 1
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
                built = batch.arguments[call.name] = call.args.build_args_kwargs(batch.device)
                args, kwargs = call.module.preprocess_input(*built)
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

    def give_back_unused(self, batch: InFlightBatch) -> None:
        """The batch's forward is over: what it did not call leaves no trace."""
        for call in (*self.hashed, *self._plain):
            call.give_back_unused(batch)

    def give_back(self, call: PipelinedCall, batch: InFlightBatch) -> None:
        """What was prepared for a collection in the batch that computes is not used."""
        if call in self.hashed:
            call.module.unmap_batch(batch.contexts[self.hashed.index(call)])
        elif batch.plain is not None:
            self.wait_plain_sizes(batch)
            batch.plain.pop(call.name)[1].wait()

    def prepared(self, call: PipelinedCall, batch: InFlightBatch) -> Callable[[], Any]:
        """What finishes a collection's forward of a batch."""
        if isinstance(call.module, ShardedHashCollection):
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


def _checked_inputs(inputs: Inputs | None) -> Inputs:
    """
    Raises:
        ConfigError: It is no mapping of paths to fields or functions.
    """
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs has type {type(inputs).__name__}. Pass a mapping from paths of sharded collections to fields of "
            'the batch, like {"sparse.collection": "features"}.'
        )
    for path, field in inputs.items():
        if not isinstance(path, str) or not (callable(field) or (isinstance(field, str) and field)):
            raise ConfigError(
                f"inputs[{path!r}] is {field!r}. Accepted: a path in the model -> the name of a field of the batch, or "
                "a function from a batch to its KeyedJaggedTensor."
            )
    return dict(inputs)


def _message(name: str, why: str) -> str:
    return (
        f"{name}: not prefetched, since {why}. It is trained all the same, more slowly. If it is called once a forward "
        f'with a field of the batch, say which: HybridTrainPipelineSparseDist(..., inputs={{{name!r}: "field"}}).'
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
