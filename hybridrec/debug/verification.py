"""`verified`: training beside a plain, unlimited table, compared bit for bit with it at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from hybridrec.debug.difference import Verification
from hybridrec.debug.shadow import ShadowCollection, is_shadowed
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError, StateError


@contextlib.contextmanager
def verified(model: nn.Module, *, steps: int | None = None) -> Iterator[Verification]:
    """Compare what is trained inside the ``with`` with a plain, unlimited table, at every step.

    Works with and without a train pipeline, on any number of ranks; each compares the rows that it owns. Nothing that
    is trained changes. Costs about three times the time of lookup and update, a copy of the rows that are used, and 8
    bytes for each row that lives when it begins. Rows that other code writes meanwhile (a checkpoint that is loaded)
    are taken for errors.

    Args:
        model: Has at least one sharded hashed collection.
        steps: After how many training batches of a collection to stop comparing; None: at the end of the ``with``.

    Raises:
        VerifyError: The first difference, out of the forward or the backward that meets it. On the rank that owns the
            row alone: other ranks may then wait for it.
        ConfigError: The model has no sharded hashed collection, or ``steps`` is no positive int.
        StateError: A collection of it is compared already, by a ``with`` around this one. That one goes on.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"verified: model has type {type(model).__name__}. Pass the model that DistributedModelParallel made."
        )
    modules = [m for m in model.modules() if isinstance(m, ShardedHashCollection)]
    if not modules:
        raise ConfigError(
            f"verified: {type(model).__name__} has no sharded hashed collection. Pass the model that "
            "DistributedModelParallel made."
        )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"verified: steps={steps!r}. Pass a positive int, or None for no limit.")
    if any(is_shadowed(module) for module in modules):
        raise StateError(
            f"verified: a collection of {type(model).__name__} is compared already, by a verified() that is still "
            "open. Leave that one first, or use its result."
        )
    if any(module.lookup.gradients.is_on for module in modules):
        raise StateError(
            f"verified: {type(model).__name__} accumulates gradients, and is compared after every batch. Turn it off: "
            "accumulate_gradients(model, False), or a pipeline with accumulation_steps=1."
        )
    result = Verification()
    shadows = [ShadowCollection(module, result, steps) for module in modules]
    try:
        for shadow in shadows:
            shadow.begin()
        yield result
    finally:
        for shadow in shadows:
            shadow.end()
