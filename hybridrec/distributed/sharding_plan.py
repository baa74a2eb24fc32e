"""The sharders that a script passes to planner and model."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import ModuleSharder, ShardingEnv

from hybridrec._compat.default_sharders import set_default_sharders, torchrec_default_sharders
from hybridrec._compat.torchrec import EmbeddingBagCollectionSharder
from hybridrec.distributed.plain_sharder import HybridEmbeddingBagCollectionSharder
from hybridrec.distributed.sequence_sharder import HybridHashEmbeddingCollectionSharder
from hybridrec.distributed.sharder import HybridHashEmbeddingBagCollectionSharder

__all__ = [
    "HybridEmbeddingBagCollectionSharder",
    "HybridHashEmbeddingBagCollectionSharder",
    "HybridHashEmbeddingCollectionSharder",
    "get_default_hybrid_sharders",
    "register_default_sharders",
    "unregister_default_sharders",
]


def get_default_hybrid_sharders(
    host_env: ShardingEnv | None = None, host_memory_bytes: int | None = None
) -> list[ModuleSharder[Any]]:
    """TorchRec's default sharders, with ours for hashed collections and for plain embedding bag collections.

    Args:
        host_env: Environment whose process group is a gloo group of all ranks, for example
            ``ShardingEnv(world_size=w, rank=r, pg=dist.new_group(backend="gloo"))``. None: that of the default process
            group, which must be gloo. A group that the model uses too is not used for ids: sharding makes another one
            of its ranks, because a pipeline sends ids on a thread of its own.
        host_memory_bytes: Host memory that the shards of all hashed collections on one rank may take together. None:
            0.8 x min(cgroup limit, available memory) / LOCAL_WORLD_SIZE.

    Raises:
        ConfigError: The environment has no gloo group, or ``host_memory_bytes`` is not positive.
    """
    others = [s for s in torchrec_default_sharders() if not isinstance(s, EmbeddingBagCollectionSharder)]
    return [
        HybridHashEmbeddingBagCollectionSharder(host_env, host_memory_bytes=host_memory_bytes),
        HybridHashEmbeddingCollectionSharder(host_env, host_memory_bytes=host_memory_bytes),
        HybridEmbeddingBagCollectionSharder(host_env),
        *others,
    ]


def register_default_sharders(host_env: ShardingEnv | None = None, host_memory_bytes: int | None = None) -> None:
    """Let TorchRec take `get_default_hybrid_sharders` wherever it is given no sharders, in this process.

    After it ``DistributedModelParallel(model)``, ``shard(...)``, ``shard_modules(model)`` and
    ``planner.collective_plan(model)`` know hashed collections. TorchRec has no registry of its own: its
    ``get_default_sharders`` is wrapped, which concerns every model of the process. Nothing else of hybridrec does this
    by itself. Calling it again replaces what was registered.

    Args:
        host_env: As for `get_default_hybrid_sharders`.
        host_memory_bytes: As for `get_default_hybrid_sharders`.

    Raises:
        ConfigError: See `get_default_hybrid_sharders`. Nothing changed.
    """
    set_default_sharders(get_default_hybrid_sharders(host_env, host_memory_bytes))


def unregister_default_sharders() -> None:
    """Give TorchRec its own default sharders back."""
    set_default_sharders(None)
