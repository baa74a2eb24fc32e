"""What stands in place of a sharded collection's ``forward`` while a pipeline has the model.

Called inside `progress`, with what the traced model passes to it, it returns what was prepared ahead. Any other call is
an ordinary forward: the pipeline takes back what it prepared, so that the call sees the state that was trained so far.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec._compat.train_pipeline import BaseForward
from hybridrec.distributed.in_flight import InFlightBatch

logger = logging.getLogger("hybridrec")


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


class PipelinedCall(BaseForward):  # type: ignore[misc]
    """In place of one sharded module's ``forward``; made by TorchRec's rewriting of the model."""

    def __init__(self, owner: CallOwner, name: str, args: Any, module: Any) -> None:
        """
        Args:
            owner: Held weakly: a model outlives its pipelines.
            name: Of the module in the model.
            args: TorchRec's recipe: from a batch to the module's arguments.
            module: The sharded module.
        """
        super().__init__(name, args, module, None, None)
        self._owner = weakref.ref(owner)
        self.module = module
        self._had_own_forward = "forward" in module.__dict__
        self._original = module.forward
        self._called_for = -1  # index of a batch
        self._has_warned = False

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
            if self._is_as_traced(batch, args, kwargs):
                return owner.prepared(self, batch)()
            owner.withdraw()
            owner.give_back(self, batch)
        else:
            owner.withdraw()
        return self._original(*args, **kwargs)

    def _is_as_traced(self, batch: InFlightBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model passes what tracing it said that it would."""
        expected, named = self.args.build_args_kwargs(batch.device)
        is_same = (
            batch.is_as_taken  # on a device that is the host, the model may have written the ids in place
            and len(args) == len(expected)
            and kwargs.keys() == named.keys()
            and all(map(_is_same, expected, args))
            and all(_is_same(named[name], value) for name, value in kwargs.items())
        )
        if not is_same and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the model passes something else than what tracing its forward found, so this call is not "
                "prefetched. Pass a field of the batch as it is, and decide outside forward what is looked up.",
                self.name,
            )
        return is_same


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
