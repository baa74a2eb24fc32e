"""What torch itself shards in a model: tables of TorchRec beside hashed ones, with their optimizer states.

By name, as the tensors that they are: `ShardedTensor` or `DTensor`, or whole ones of tables that every rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

from hybridrec._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from hybridrec._compat.torchrec import FusedOptimizer, torch_optimizer
from hybridrec.distributed.model_parts import sharded_modules
from hybridrec.errors import ConfigError


def is_sharded(value: Any) -> bool:
    """Whether ranks have parts of a tensor."""
    return isinstance(value, (ShardedTensor, DTensor))


def is_fused(optimizer: Any) -> bool:
    """Whether it runs inside the backward: its state is that of sharded tables."""
    return isinstance(optimizer, FusedOptimizer)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch that wrappers of TorchRec have inside; itself without them."""
    return torch_optimizer(optimizer)


def sharded_weights(model: nn.Module) -> dict[str, Any]:
    """``"{path of the module}.{key}"`` -> tensor of its ``state_dict()``; the same names on every rank. Views.

    Raises:
        ConfigError: Something in it is no tensor; names it.
    """
    found = {
        f"{path}.{key}": value for path, module in sharded_modules(model) for key, value in module.state_dict().items()
    }
    for name, value in found.items():
        if not isinstance(value, (Tensor, ShardedTensor)):
            raise ConfigError(
                f"{name!r} has type {type(value).__name__}, which hybridrec.checkpoint cannot save. Save the module "
                "apart, with torch.distributed.checkpoint."
            )
    return found


def fused_states(optimizer: FusedOptimizer) -> Iterator[tuple[str, Any]]:
    """(``"{parameter}:{state}"``, tensor) of the tables that this rank has a part of; none of hashed ones. Views."""
    for name, parameter in optimizer.params.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}:{key}", value


def reload(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Tell modules that the tensors of `sharded_weights` were written into: they drop what they had cached of them."""
    for path, module in sharded_modules(model):
        prefix = f"{path}."
        state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        module.load_state_dict(state)


def optimizer_steps(model: nn.Module) -> dict[str, int]:
    """Path of a module -> steps of its optimizers, which FBGEMM counts beside their states; 0 where it does not."""
    return {path: max((int(kernel.iter) for kernel in _kernels(m)), default=0) for path, m in sharded_modules(model)}


def set_optimizer_steps(model: nn.Module, steps: Mapping[str, int]) -> None:
    """Count on from `optimizer_steps`; of the ranks the greatest, since some have no part of a module's tables."""
    for path, module in sharded_modules(model):
        for kernel in _kernels(module):
            for counter in (kernel.iter, kernel.iter_cpu):
                counter.fill_(steps.get(path, 0))


def _kernels(module: nn.Module) -> Iterator[Any]:
    """Those of TorchRec's lookups, which are in a plain list: ``modules()`` of the module does not have them."""
    lookups = (lookup for m in module.modules() for lookup in getattr(m, "_lookups", ()))
    parts = (part for lookup in lookups for part in lookup.modules())
    return (part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen))


def check_trained_alike(model: nn.Module, weights: Mapping[str, Any], trained: Iterator[Tensor]) -> None:
    """Refuse parts of tables that an optimizer outside of the backward trains: its state is of this rank's part alone.

    Args:
        model: The whole one.
        weights: `sharded_weights`.
        trained: The parameters of that optimizer.

    Raises:
        ConfigError: Names the table.
    """
    names = {id(p): f"{path}.{key}" for path, module in sharded_modules(model) for key, p in module.named_parameters()}
    for parameter in trained:
        name = names.get(id(parameter), "")
        if is_sharded(weights.get(name)):
            raise ConfigError(
                f"{name!r} is sharded, and trained by an optimizer of its own on every rank (compute kernel 'dense'): "
                "hybridrec.checkpoint cannot save its states. Give it to apply_optimizer_in_backward and plan it with "
                "the kernel 'fused', or 'data_parallel'."
            )
