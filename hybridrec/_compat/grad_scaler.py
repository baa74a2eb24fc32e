"""torch's `GradScaler` beside rows that are stepped within the backward: refused, before anything changed.

A scaler multiplies the loss and divides the gradients of parameters again when the optimizer steps. Rows of hashed
tables are stepped earlier, with the gradient that arrives: 65,536 times too large, or infinite, and nobody would tell.
Nothing in a backward tells that its loss was scaled, so the one place that knows it, `GradScaler.scale`, is asked to
look whether the loss depends on hashed tables.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybridrec.errors import ConfigError

MARK = "steps_rows_in_backward"
"""Attribute, True, of the autograd functions whose backward steps rows."""
_WRAPPED = "_hybridrec_wrapped"


def refuse_scaled_losses() -> None:
    """Let every `GradScaler` class that exists now refuse losses that depend on hashed tables. Idempotent.

    Subclasses with a `scale` of their own (FSDP's, a device's) are found among those that are imported.
    """
    pending: list[type] = [torch.amp.GradScaler]
    while pending:
        scaler = pending.pop()
        pending.extend(scaler.__subclasses__())
        scale = vars(scaler).get("scale")
        if scale is not None and not hasattr(scale, _WRAPPED):
            scaler.scale = _checked(scale)  # type: ignore[attr-defined]  # a type in general has none


def _checked(scale: Any) -> Any:
    @functools.wraps(scale)
    def checked(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            outputs = outputs if isinstance(outputs, (Tensor, list, tuple)) else tuple(outputs)
            _check(type(self).__name__, outputs)
        return scale(self, outputs)

    setattr(checked, _WRAPPED, True)
    return checked


def _check(scaler: str, outputs: Any) -> None:
    """
    Raises:
        ConfigError: An output depends on hashed tables. No row and no gradient changed.
    """
    if any(_steps_rows(node) for node in _nodes(outputs)):
        raise ConfigError(
            f"{scaler}.scale(loss): the loss depends on hashed tables, whose rows are stepped within the backward, "
            "with the scaled gradient. Train the dense part in bfloat16 (torch.autocast(device_type, "
            f"dtype=torch.bfloat16)), which needs no scaler, or pass {scaler}(enabled=False)."
        )


def _steps_rows(node: Any) -> bool:
    return bool(getattr(getattr(type(node), "_forward_cls", None), MARK, False))


def _nodes(outputs: Any) -> Iterator[Any]:
    """Every autograd node that the outputs depend on, once."""
    pending = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                pending.append(after)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Iterable):
        for part in outputs:
            yield from _tensors(part)
