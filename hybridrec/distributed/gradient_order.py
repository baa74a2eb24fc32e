"""The order in which data parallelism adds the ranks' gradients: it is saved, and put back where W is the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridrec._compat import data_parallel
from hybridrec.distributed.model_parts import without_wrapper

logger = logging.getLogger("hybridrec")

_MIN_RANKS = 3
"""A sum of two does not depend on their order, and half of a gradient is exact."""


def gradient_order(model: nn.Module) -> dict[str, Any]:
    """Path of a `DistributedDataParallel` -> its order, as plain values. Collective."""
    return {path: _of(ddp) for path, ddp in _data_parallel(model) if not data_parallel.why_not(ddp)}


def _of(ddp: DistributedDataParallel) -> dict[str, Any]:
    buckets = data_parallel.buckets_of(ddp) if data_parallel.moves_buckets(ddp) else None
    gradients = {name: p.grad for name, p in data_parallel.reduced_parameters(ddp).items() if p.grad is not None}
    return {
        "buckets": buckets,
        "is_between": data_parallel.is_between(ddp),
        "with_gradient": [name for name, grad in gradients.items() if grad.layout == torch.strided],
    }


def put_gradient_order(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Let the next step add gradients as it would have done where `gradient_order` was taken. Collective.

    Gradients that are there become zeros, or go, as there were some at that time.

    Returns:
        What may not be as it was, and why; of each module in question.
    """
    reasons = [(path, _put(ddp, saved.get(path))) for path, ddp in _data_parallel(model)]
    return [f"of {path or 'the model'}, {reason}" for path, reason in reasons if reason]


def _put(ddp: DistributedDataParallel, saved: Mapping[str, Any] | None) -> str:
    moves = data_parallel.moves_buckets(ddp)
    if why := data_parallel.why_not(ddp):
        return why if moves else ""
    if saved is None:
        return "the snapshot does not tell it" if moves else ""
    for name, parameter in data_parallel.reduced_parameters(ddp).items():
        parameter.grad = torch.zeros_like(parameter) if name in saved["with_gradient"] else None
    if not data_parallel.put_buckets(ddp, saved["buckets"]):
        return "its buckets are others here (bucket_cap_mb, static_graph, find_unused_parameters)"
    if saved["is_between"]:
        return "the snapshot is of the first step of a static graph, and the order is learned in the second"
    return ""


def warn_of_order(folder: Path, reasons: list[str]) -> None:
    """Tell what `put_gradient_order` returned."""
    if reasons:
        logger.warning(
            "%s: the order in which data parallelism adds gradients could not be put back (%s): last bits of the dense "
            "part may differ from those of a run that was not interrupted. They do not with DistributedModelParallel("
            "data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)), which "
            "has one order from its first step on.",
            folder,
            "; ".join(reasons),
        )


def _data_parallel(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Those whose order matters, by path.

    With those around the tables that TorchRec has on every rank: it keeps its lookups in a plain list.
    """
    for path, module in model.named_modules():
        places = [(path, module), *((f"{path}.{n}", part) for n, part in enumerate(getattr(module, "_lookups", ())))]
        for place, part in places:
            if isinstance(part, DistributedDataParallel) and part.process_group.size() >= _MIN_RANKS:
                yield without_wrapper(place), part
