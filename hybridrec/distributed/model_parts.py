"""A model's hashed collections, other sharded modules, other tensors. Wrappers of data parallelism add no name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError


def hashed_collections(model: nn.Module) -> dict[str, ShardedHashCollection]:
    """Path without wrappers -> collection.

    Raises:
        ConfigError: There is none, or one is inside of another sharded module.
    """
    found = {name: module for name, module in _sharded(model, "") if isinstance(module, ShardedHashCollection)}
    for name, module in sharded_modules(model):
        if any(isinstance(part, ShardedHashCollection) for part in module.modules()):
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) is sharded and has a hashed collection inside, which "
                "hybridrec.checkpoint cannot save. Shard the collection by itself."
            )
    if not found:
        raise ConfigError(
            "the model has no sharded hashed collection. Pass what DistributedModelParallel returned; the state_dict() "
            "of an unsharded model has its rows."
        )
    return found


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path without wrappers, module) of those that are sharded and not hashed: tables of TorchRec itself."""
    return ((name, module) for name, module in _sharded(model, "") if not isinstance(module, ShardedHashCollection))


def _sharded(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(module, (DistributedModelParallel, DistributedDataParallel)):
        yield from _sharded(module.module, prefix)
    elif isinstance(module, ShardedModule):
        yield prefix.rstrip("."), module
    else:
        for name, child in module.named_children():
            yield from _sharded(child, f"{prefix}{name}.")


def dense_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers outside of sharded modules, by their path without wrappers."""
    if isinstance(module, (DistributedModelParallel, DistributedDataParallel)):
        yield from dense_tensors(module.module, prefix)
        return
    if isinstance(module, ShardedModule):
        return
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, child in module.named_children():
        yield from dense_tensors(child, f"{prefix}{name}.")


def without_wrapper(name: str) -> str:
    """The path of a module or parameter without the parts that data parallelism adds."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_dmp_wrapped_module"))
