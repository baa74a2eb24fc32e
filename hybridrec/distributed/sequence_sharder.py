"""The sharder of hashed collections of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.types import ShardingEnv, ShardingType

from hybridrec._compat.torchrec import EmbeddingComputeKernel
from hybridrec.distributed.sequence_lookup import SequenceLookup
from hybridrec.distributed.sharded_collection import ShardedHashCollection
from hybridrec.distributed.sharded_embedding import ShardedHashEmbeddingCollection
from hybridrec.distributed.sharder import HashCollectionSharder
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.modules.hash_embedding import HashEmbeddingCollection


class HybridHashEmbeddingCollectionSharder(HashCollectionSharder):
    """Shards `HashEmbeddingCollection` over all ranks: row-wise, or tables or columns of tables on single ranks."""

    _lookup_class = SequenceLookup

    def __init__(
        self,
        host_env: ShardingEnv | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        use_index_dedup: bool = False,
        *,
        sharding_type: str | ShardingType | None = None,
        kernel_type: str | EmbeddingComputeKernel | None = None,
        host_memory_bytes: int | None = None,
    ) -> None:
        """
        Args:
            host_env: As for embedding bags.
            fused_params: As for embedding bags.
            qcomm_codecs_registry: As for embedding bags.
            use_index_dedup: Whether an id that a feature of a batch repeats travels once, and its row too. Changes no
                bit of the result; gradients travel for every id.
            sharding_type: As for embedding bags.
            kernel_type: As for embedding bags.
            host_memory_bytes: As for embedding bags.

        Raises:
            ConfigError: An argument cannot be honoured.
        """
        super().__init__(
            host_env,
            fused_params,
            qcomm_codecs_registry,
            sharding_type=sharding_type,
            kernel_type=kernel_type,
            host_memory_bytes=host_memory_bytes,
        )
        self._dedups = bool(use_index_dedup)

    @property
    def module_type(self) -> type[HashCollection]:
        return HashEmbeddingCollection

    def _sharded(self, *args: Any, **kwargs: Any) -> ShardedHashCollection:
        return ShardedHashEmbeddingCollection(*args, **kwargs, dedups=self._dedups)
