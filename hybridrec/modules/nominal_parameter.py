"""A parameter that TorchRec's planner and optimizers can look at, and that nobody can turn into memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from hybridrec._compat.unplanned import REMEDY
from hybridrec.errors import ConfigError, StateError

_META = torch.device("meta")
_MATERIALISING = frozenset(
    {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
)

_VALUES = frozenset({"tolist", "numpy", "item", "__array__", "__getitem__", "__setitem__"})
_WRITES = frozenset({"uniform_", "normal_", "trunc_normal_", "fill_", "zero_", "copy_"})
"""What would read or write rows, by the names of functions: without an error it would be lost on the meta device."""


class NominalParameter(nn.Parameter):
    """A weight of nominal shape ``[num_embeddings, D]`` on the meta device: 10**12 rows cost nothing.

    It carries what others attach to a parameter (`apply_optimizer_in_backward`, the planner) through deepcopy and
    pickle, and refuses to be materialised: `DistributedModelParallel` does that with each meta parameter of a module
    that it did not shard, which would silently turn a hashed table into a dense one, or take all memory.
    """

    # What torch's `_apply_optimizer_in_backward` attaches, once for each call.
    _optimizer_classes: list[type[torch.optim.Optimizer]]
    _optimizer_kwargs: list[dict[str, Any]]
    _in_backward_optimizers: list[torch.optim.Optimizer]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Self:
        """Wrap a tensor; on the meta device unless the caller probes a conversion."""
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run any function as on a plain tensor, but refuse those that would allocate the nominal shape."""
        kwargs = kwargs or {}
        if func in _MATERIALISING and torch.device(kwargs.get("device") or _META) != _META:
            raise ConfigError(_not_sharded())
        name = getattr(func, "__name__", "")
        if name in _VALUES or (name in _WRITES and not _is_copy_of_meta(name, args)):
            raise StateError(_no_values(name, next(v for v in (*args, *kwargs.values()) if isinstance(v, cls))))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NominalParameter:
        """Copy with all attributes; their references to this parameter become references to the copy."""
        if id(self) in memo:
            return cast(NominalParameter, memo[id(self)])
        result = type(self)(self.detach().clone(), self.requires_grad)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle shape and attributes; the state comes last, as attributes may refer to this parameter."""
        return nominal_parameter, (*self.shape, self.requires_grad, self.dtype), dict(self.__dict__)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Attributes from a pickle."""
        self.__dict__.update(state)

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter's
        """Say what it is rather than print values that do not exist."""
        return f"NominalParameter(shape={list(self.shape)}, requires_grad={self.requires_grad})"


def nominal_parameter(
    num_embeddings: int, dim: int, requires_grad: bool = True, dtype: torch.dtype = torch.float32
) -> NominalParameter:
    """A [num_embeddings, dim] parameter without memory."""
    data = torch.empty((num_embeddings, dim), device=_META, dtype=dtype)
    return NominalParameter(data, requires_grad)


def conversion_probe(dim: int, like: torch.Tensor) -> NominalParameter:
    """A parameter of no rows where ``like`` is: tells moves (harmless) from ``to_empty`` (refused) before rows move."""
    return NominalParameter(like.new_empty((0, dim)), requires_grad=False)


def _no_values(name: str, parameter: torch.Tensor) -> str:
    return (
        f"{name} of the parameter of a hashed table: it has the nominal shape {list(parameter.shape)} and holds no "
        "rows, which have ids and no numbers. Read them with collection.embedding_bags[table].read(ids); what they "
        "start with is initializer= of the table's config."
    )


def _is_copy_of_meta(name: str, args: Sequence[Any]) -> bool:
    """A ``state_dict()`` of a hashed collection is loaded: rows come beside this parameter."""
    return name == "copy_" and len(args) > 1 and getattr(args[1], "device", None) == _META


def _not_sharded() -> str:
    return (
        "this hashed collection was not sharded: DistributedModelParallel got no sharder for "
        "'HashEmbeddingBagCollection' or 'HashEmbeddingCollection', or an empty plan, and now materialises its nominal "
        f"parameters as dense memory. {REMEDY}"
    )
