"""A model's hashed collections, and every other tensor by name. Wrappers of data parallelism add no name."""

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
        ConfigError: There is none, or another sharded module, whose tables this cannot save.
    """
    found = dict(_sharded(model, ""))
    others = {name: m for name, m in found.items() if not isinstance(m, ShardedHashCollection)}
    if others:
        name, module = next(iter(others.items()))
        raise ConfigError(
            f"the model has the sharded module {name!r} ({type(module).__name__}), whose tables hybridrec.checkpoint "
            "does not save in this version. Hash its tables too, or save it apart with torch.distributed.checkpoint."
        )
    if not found:
        raise ConfigError(
            "the model has no sharded hashed collection. Pass what DistributedModelParallel returned; the state_dict() "
            "of an unsharded model has its rows."
        )
    return found


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
