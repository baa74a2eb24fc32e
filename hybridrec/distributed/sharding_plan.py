"""The sharders that a script passes to planner and model."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from hybridrec._compat.torchrec import EmbeddingBagCollectionSharder
from hybridrec.distributed.plain_sharder import HybridEmbeddingBagCollectionSharder
from hybridrec.distributed.sharder import HybridHashEmbeddingBagCollectionSharder

__all__ = [
    "HybridEmbeddingBagCollectionSharder",
    "HybridHashEmbeddingBagCollectionSharder",
    "get_default_hybrid_sharders",
]


def get_default_hybrid_sharders(
    host_env: ShardingEnv, host_memory_bytes: int | None = None
) -> list[ModuleSharder[Any]]:
    """TorchRec's default sharders, with ours for hashed and for plain embedding bag collections.

    Args:
        host_env: Environment whose process group is a gloo group of all ranks, for example
            ``ShardingEnv(world_size=w, rank=r, pg=dist.new_group(backend="gloo"))``. The group is for hybridrec alone:
            a pipeline uses it on a thread of its own.
        host_memory_bytes: Host memory that the shards of all hashed collections on one rank may take together. None:
            0.8 x min(cgroup limit, available memory) / LOCAL_WORLD_SIZE.

    Raises:
        ConfigError: The environment has no gloo group, or ``host_memory_bytes`` is not positive.
    """
    others = [s for s in get_default_sharders() if not isinstance(s, EmbeddingBagCollectionSharder)]
    return [
        HybridHashEmbeddingBagCollectionSharder(host_env, host_memory_bytes=host_memory_bytes),
        HybridEmbeddingBagCollectionSharder(host_env),
        *others,
    ]
