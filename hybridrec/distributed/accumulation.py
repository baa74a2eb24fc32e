"""`accumulate_gradients`: torch's own way to accumulate, for hashed tables too."""

from __future__ import annotations

from torch import nn

from hybridrec._compat.torchrec import ShardedEmbeddingModule
from hybridrec.distributed.gradient_group import refuse_waiting
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.errors import ConfigError, StateError
from hybridrec.modules.hash_collection import HashCollection


def accumulate_gradients(model: nn.Module, is_on: bool = True) -> None:
    """Let backwards keep the gradients of hashed rows until ``fused_optimizer.step()``, and sum them.

    Then a loop accumulates as with dense parameters: ``zero_grad()``, forward and backward of any number of batches,
    ``step()``, with an optimizer that ``model.fused_optimizer`` is part of. A step equals, bit for bit, that of one
    batch with the samples of all, one batch after the other. Divide the loss if a mean is wanted.
    `HybridTrainPipelineSparseDist` does it by itself with ``accumulation_steps``.

    Args:
        model: Has at least one sharded hashed collection.
        is_on: False: from now on every backward steps the rows.

    Raises:
        ConfigError: It has none, or one that is not sharded, or tables of TorchRec's own that are stepped in every
            backward.
        StateError: Gradients wait; or the collection is compared by `hybridrec.debug.verified`. Nothing changed.
    """
    unsharded = [name for name, module in model.named_modules() if isinstance(module, HashCollection)]
    if unsharded:
        raise ConfigError(
            f"accumulate_gradients: {unsharded[0] or type(model).__name__!r} is not sharded, and steps its rows in "
            "every backward. Shard the model first; one rank will do."
        )
    modules = [module for module in model.modules() if isinstance(module, ShardedHashCollection)]
    if not modules:
        raise ConfigError(
            f"accumulate_gradients: {type(model).__name__} has no sharded hashed collection. Pass the model that "
            "DistributedModelParallel made."
        )
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ShardedEmbeddingModule)
        and not isinstance(module, ShardedHashCollection)
        and module.fused_optimizer.params
    ]
    if plain and is_on:
        raise ConfigError(
            f"accumulate_gradients: {plain[0]!r} is one of TorchRec's own collections, whose fused kernels step rows "
            "in every backward. Use hashed tables there, or TorchRec's compute kernel 'dense'."
        )
    refuse_waiting([module.lookup.gradients for module in modules], "accumulate_gradients")
    if is_on and any("compute" in vars(module.lookup) for module in modules):
        raise StateError(
            "accumulate_gradients: a collection is compared by hybridrec.debug.verified, which compares after every "
            "batch. Leave that with statement first."
        )
    for module in modules:
        module.lookup.gradients.is_on = bool(is_on)
