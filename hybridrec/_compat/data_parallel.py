"""The order in which torch's `DistributedDataParallel` adds gradients: told, and put back. torch has no public way.

After its first steps a DDP module puts its parameters into buckets anew, in the order in which their gradients came.
The place in a bucket decides in which order a ring adds what the ranks have, so that three ranks and more get other
last bits from other buckets. Whether a gradient is there before the backward matters, too: DDP divides one that is in
its bucket already, and multiplies another by 1 / W while it copies it there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Buckets = list[list[str]]
"""Bucket -> names of its parameters in the wrapped module."""

_OF_MODULE = {
    "_ddp_init_helper": ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    "_build_params_for_reducer": (),
    "_build_debug_param_to_name_mapping": ("parameters",),
}
"""Method -> the parameters that it is given."""
_OF_INSTANCE = (
    "_comm_hooks",
    "_get_ddp_logging_data",
    "_has_rebuilt_buckets",
    "_module_parameters",
    "_use_python_reducer",
    "logger",
    "mixed_precision",
)
_OF_REDUCER = (
    "_check_reducer_finalized",
    "_get_zeros_like_grad_buckets",
    "_push_all_rebuilt_params",
    "_rebuild_buckets",
    "_remove_autograd_hooks",
    "_set_static_graph",
)


def moves_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether it is of those that order their buckets anew, and there is more than one order."""
    num_parameters = sum(parameter.requires_grad for parameter in ddp.module.parameters())
    return hasattr(ddp, "reducer") and (ddp.static_graph or not ddp.find_unused_parameters) and num_parameters > 1


def why_not(ddp: DistributedDataParallel) -> str:
    """Why its order can be neither told nor put back; empty where it can."""
    if not hasattr(ddp, "reducer"):
        return "it reduces all gradients in one hook"
    if missing := _missing(ddp):
        return f"torch {torch.__version__} has no {missing}"
    if ddp._use_python_reducer:
        return "torch.compile reduces its gradients (optimize_ddp='python_reducer')"
    if ddp.mixed_precision is not None:
        return "it has mixed_precision"
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        return "optimizers step its parameters in the backward"
    if not ddp._comm_hooks and "comm_hook" in ddp._get_ddp_logging_data():
        return "it has a built-in communication hook"
    return ""


def _missing(ddp: DistributedDataParallel) -> str:
    for name, parameters in _OF_MODULE.items():
        method = getattr(DistributedDataParallel, name, None)
        if method is None or set(parameters) - set(inspect.signature(method).parameters):
            return f"DistributedDataParallel.{name}({', '.join(parameters)})"
    missing = [f"DistributedDataParallel.{name}" for name in _OF_INSTANCE if not hasattr(ddp, name)]
    missing += [f"Reducer.{name}" for name in _OF_REDUCER if not hasattr(ddp.reducer, name)]
    return missing[0] if missing else ""


def buckets_of(ddp: DistributedDataParallel) -> Buckets | None:
    """Its buckets from the next step on; None while it does not know them. Collective; `why_not` is empty.

    What its last backward taught it, it would do at its next forward: it does it here, with the same result.
    """
    if not ddp._has_rebuilt_buckets:
        try:
            ddp.reducer._check_reducer_finalized()
        except RuntimeError:  # a backward failed, or left parameters out: its next forward says so
            return None
        ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    return _current(ddp) if ddp._has_rebuilt_buckets else None


def is_between(ddp: DistributedDataParallel) -> bool:
    """Whether it has a static graph, has made its first step, and learns its order in the second one."""
    return bool(ddp.static_graph and ddp._static_graph_delay_allreduce_enqueued and not ddp._has_rebuilt_buckets)


def put_buckets(ddp: DistributedDataParallel, buckets: Buckets | None) -> bool:
    """Let its next step use these buckets, and all steps after it; None: those of a new module, which may then learn.

    Collective; `why_not` is empty. Gradients that parameters have are in the buckets then.

    Returns:
        Whether it has exactly these buckets: with another ``bucket_cap_mb`` it has not.
    """
    parameters, expects_sparse = ddp._build_params_for_reducer()
    if buckets is not None:
        by_name, sparse = reduced_parameters(ddp), dict(zip(parameters, expects_sparse, strict=True))
        names = [name for bucket in buckets for name in bucket]
        if sorted(names) != sorted(by_name):
            return False
        parameters = [by_name[name] for name in names]
        expects_sparse = [sparse[parameter] for parameter in parameters]
    _make_reducer(ddp, parameters, expects_sparse)
    if buckets is None:
        return True
    # A new reducer takes the order of the list that it was made with for that in which gradients came.
    ddp.reducer._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    return {*map(tuple, _current(ddp))} == {*map(tuple, buckets)}


def _make_reducer(ddp: Any, parameters: Sequence[nn.Parameter], expects_sparse: Sequence[bool]) -> None:
    """As DDP itself does it when it is unpickled."""
    ddp.reducer._remove_autograd_hooks()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expects_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]  # not listed


def _current(ddp: DistributedDataParallel) -> Buckets:
    names: dict[Tensor, str] = {parameter: name for name, parameter in reduced_parameters(ddp).items()}
    return [[names[p] for p in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()]


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Name in the wrapped module -> parameter whose gradient it reduces."""
    reduced, _ = ddp._build_params_for_reducer()
    names: dict[nn.Parameter, str] = {}
    for path, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, f"{path}.{name}")
    return {names[parameter]: parameter for parameter in reduced}
