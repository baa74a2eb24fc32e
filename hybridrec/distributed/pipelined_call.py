"""What stands in place of a sharded collection's ``forward`` while a pipeline has the model.

Called inside `progress`, with what was sent ahead for it, it returns what was prepared ahead. Any other call is
an ordinary forward: the pipeline takes back what it prepared, so that the call sees the state that was trained so far.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.train_pipeline import BaseForward
from hybridrec.backend import HOST
from hybridrec.distributed.batch_contents import is_as_before, versions_of
from hybridrec.distributed.in_flight import InFlightBatch
from hybridrec.errors import ConfigError, IdError

logger = logging.getLogger("hybridrec")


class DeclaredInput:
    """In place of what tracing finds: the user says what of a batch a collection is called with."""

    def __init__(self, name: str, declared: str | Callable[[Any], KeyedJaggedTensor]) -> None:
        """
        Args:
            name: Of the module in the model.
            declared: A field of the batch (``"features"``, ``"inputs.sparse"``), or a function from a batch to a KJT.
        """
        self._name = name
        self._of: Callable[[Any], Any] = operator.attrgetter(declared) if isinstance(declared, str) else declared
        self._what = repr(declared) if isinstance(declared, str) else getattr(declared, "__name__", repr(declared))

    def build_args_kwargs(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """As TorchRec's recipes are asked.

        Raises:
            IdError: The batch has no such field, the function raised or wrote into the batch, or what it gave is no
                KJT.
        """
        before = [] if isinstance(self._of, operator.attrgetter) else versions_of(batch)
        try:
            value = self._of(batch)
        except Exception as e:
            raise IdError(
                f"{self._name}: inputs says that it is called with {self._what} of the batch, which raised "
                f"{type(e).__name__}: {e}. Correct inputs={{{self._name!r}: ...}}, or the batch."
            ) from e
        if not is_as_before(before):
            raise IdError(
                f"{self._name}: inputs says that it is called with {self._what} of the batch, which wrote into the "
                "batch's tensors in place. Let the function leave the batch as it is, and change it in the loader."
            )
        if not isinstance(value, KeyedJaggedTensor):
            raise IdError(
                f"{self._name}: inputs says that it is called with {self._what} of the batch, which is a "
                f"{type(value).__name__}. Name a field that holds a KeyedJaggedTensor, or give a function that returns "
                "the field."
            )
        return [value], {}


class CallOwner(Protocol):
    """The pipeline, as its calls see it."""

    computing: InFlightBatch | None
    """The batch whose forward runs now."""

    def withdraw(self) -> None:
        """Take back what was prepared for batches to come."""

    def detach(self) -> Any:
        """Give the model back."""

    def prepared(self, call: PipelinedCall, batch: InFlightBatch) -> Callable[[], Any]:
        """What finishes a collection's forward of a batch. To be called once."""

    def give_back(self, call: PipelinedCall, batch: InFlightBatch) -> None:
        """What was prepared for a collection in the batch that computes is not used."""


class PipelinedCall(BaseForward):
    """In place of one sharded module's ``forward``."""

    def __init__(self, owner: CallOwner, name: str, args: Any, module: Any, *, is_strict: bool = False) -> None:
        """
        Args:
            owner: Held weakly: a model outlives its pipelines.
            name: Of the module in the model.
            args: The recipe from a batch to the module's arguments: TorchRec's, found by tracing, or a `DeclaredInput`.
            module: The sharded module.
            is_strict: Whether a call inside `progress` that cannot use what was prepared raises.
        """
        super().__init__(name, args, module, None, None)
        self._owner = weakref.ref(owner)
        self.module = module
        self._is_strict = is_strict
        self._had_own_forward = "forward" in module.__dict__
        self._original = module.forward
        self._called_for = -1  # index of a batch
        self.num_ordinary = 0
        """Batches for which what was prepared could not be used."""
        self.why_ordinary = ""
        """Why not, the last time."""

    @property
    def is_declared(self) -> bool:
        """Whether the user said what the module is called with; else tracing found it."""
        return isinstance(self.args, DeclaredInput)

    def owner(self) -> CallOwner | None:
        """The pipeline; None if it is gone."""
        return self._owner()

    def arguments_of(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """What the model's forward passes to the module for a batch, prepared for its input dist."""
        args, kwargs = self.args.build_args_kwargs(batch)
        args, kwargs = self.module.preprocess_input(args, kwargs)
        return list(args), dict(kwargs)

    def install(self) -> None:
        """Stand in the module's forward."""
        self.module.forward = self

    def restore(self) -> None:
        """Give the module its own forward back."""
        if self._had_own_forward:
            self.module.forward = self._original
        else:
            self.module.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None:
            return self._original(*args, **kwargs)
        batch = owner.computing
        if batch is not None and self._called_for != batch.index:
            self._called_for = batch.index
            if self._is_as_expected(batch, args, kwargs):
                return owner.prepared(self, batch)()
            self._is_ordinary(
                "the model passes something else than "
                + ("inputs says" if self.is_declared else "what tracing its forward found")
                + ". Pass a field of the batch as it is, and decide outside forward what is looked up"
            )
            owner.withdraw()
            owner.give_back(self, batch)
        else:
            if batch is not None:
                self._is_ordinary("the model calls it more than once in a forward")
            owner.withdraw()
        return self._original(*args, **kwargs)

    def give_back_unused(self, batch: InFlightBatch) -> None:
        """A forward is over: if it did not call the module, take back what was prepared, as if it never had been.

        What batches to come prepared goes first, since in a plain loop they would not come behind this one.
        """
        owner = self._owner()
        if owner is None or self._called_for == batch.index:
            return
        self._called_for = batch.index
        self._is_ordinary("the model does not call it in every forward")
        owner.withdraw()
        owner.give_back(self, batch)

    def _is_ordinary(self, why: str) -> None:
        """Note that what was prepared is of no use, before anything happens because of it."""
        if self._is_strict:
            raise ConfigError(f"{self.name}: {why}. strict=True asks for a prefetch of every call.")
        if why != self.why_ordinary:
            logger.warning("%s: %s; such a call is not prefetched.", self.name, why)
        self.num_ordinary += 1
        self.why_ordinary = why

    def _is_as_expected(self, batch: InFlightBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model passes what was sent ahead.

        Asked anew for the batch on the device, a function of the user's may give what it did not give for that on the
        host: so what was sent decides. Where that is on another device its shape does, and the function is asked.
        """
        if self.is_declared and not args and len(kwargs) == 1:  # the parameter's name does not matter
            args, kwargs = tuple(kwargs.values()), {}
        if not batch.is_as_taken:  # on a device that is the host, the model may have written the ids in place
            return False
        sent, given = batch.arguments[self.name], (args, kwargs)
        if _agree(_is_same, sent, given):
            return True
        return _agree(_is_copy, sent, given) and _agree(_is_same, self.args.build_args_kwargs(batch.device), given)


def _agree(is_same: Callable[[Any, Any], bool], expected: Any, given: Any) -> bool:
    """Whether two pairs of arguments and keyword arguments agree, one by one."""
    (args, kwargs), (given_args, given_kwargs) = expected, given
    return (
        len(args) == len(given_args)
        and kwargs.keys() == given_kwargs.keys()
        and all(map(is_same, args, given_args))
        and all(is_same(kwargs[name], value) for name, value in given_kwargs.items())
    )


def _is_copy(sent: Any, given: Any) -> bool:
    """Whether a KJT can be a copy of what was sent: in host memory by all values, elsewhere by its shape, unwaited."""
    if not isinstance(sent, KeyedJaggedTensor) or not isinstance(given, KeyedJaggedTensor):
        return False
    pairs = (
        (sent.values(), given.values()),
        (sent.weights_or_none(), given.weights_or_none()),
        (sent.lengths(), given.lengths()),
        (_inverse(sent), _inverse(given)),
    )
    return (
        sent.keys() == given.keys()
        and sent.stride_per_key() == given.stride_per_key()
        and all(_is_copied(first, second) for first, second in pairs)
    )


def _is_copied(sent: Tensor | None, given: Tensor | None) -> bool:
    if sent is None or given is None:
        return sent is given
    if sent.shape != given.shape or sent.device != HOST or given.device != HOST:
        return sent.shape == given.shape
    return sent.dtype == given.dtype and torch.equal(sent, given)


def _is_same(expected: Any, given: Any) -> bool:
    """Whether two arguments are one object, or KJTs of the same tensors."""
    if expected is given:
        return True
    if not isinstance(expected, KeyedJaggedTensor) or not isinstance(given, KeyedJaggedTensor):
        return False
    bounds = (  # either may be computed from the other, by whoever asks first
        (expected.lengths_or_none(), given.lengths_or_none()),
        (expected.offsets_or_none(), given.offsets_or_none()),
    )
    return (
        expected.keys() == given.keys()
        and expected.values() is given.values()
        and expected.weights_or_none() is given.weights_or_none()
        and any(first is not None and first is second for first, second in bounds)
        and expected.stride_per_key() == given.stride_per_key()
        and _inverse(expected) is _inverse(given)
    )


def _inverse(features: KeyedJaggedTensor) -> Any:
    inverse = features.inverse_indices_or_none()
    return None if inverse is None else inverse[1]


def calls_of(module: Any) -> PipelinedCall | None:
    """What stands in place of a module's forward, or None."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, PipelinedCall) else None
