"""Plain `EmbeddingBagCollection`s beside hashed ones: TorchRec's sharding, with two differences for row-wise tables.

Row-wise is offered on every device, and its pools are summed in rank order, so that batches of unequal size work on
gloo and the sum has the same bits everywhere. Ids are rows, as in TorchRec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import (
    Awaitable,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hybridrec._compat.torchrec import (
    EmbeddingBagCollectionSharder,
    EmbeddingShardingContext,
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    ShardedEmbeddingBagCollection,
)
from hybridrec.backend import HOST
from hybridrec.distributed.host_env import check_host_env
from hybridrec.distributed.host_memory import local_world_size
from hybridrec.distributed.output_dist import RankOrderPooledDist


class HybridEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder for `EmbeddingBagCollection`, with row-wise tables on every device."""

    def __init__(
        self,
        host_env: ShardingEnv | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            host_env: Environment whose process group is a gloo group of all ranks; None: the default group's.
            fused_params: TorchRec's.
            qcomm_codecs_registry: TorchRec's; with a codec for reduce-scatter, TorchRec's own output dist is used.

        Raises:
            ConfigError: The environment has no gloo group.
        """
        super().__init__(
            fused_params=dict(fused_params) if fused_params else None,
            qcomm_codecs_registry=dict(qcomm_codecs_registry) if qcomm_codecs_registry else None,
        )
        check_host_env(host_env)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, and row-wise."""
        types: list[str] = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        return _ShardedPlainCollection(
            module,
            _placed_on(params, env, device),
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


def _placed_on(
    params: dict[str, ParameterSharding], env: ShardingEnv, device: torch.device | None
) -> dict[str, ParameterSharding]:
    """The same plan with placements on the model's device type, so that a plan made for another type serves too.

    TorchRec plans for the host where it does not know the accelerator, and names no index for devices new to it.
    """
    if device is None:
        return params

    def placement(rank: int) -> str:
        if device == HOST:
            return f"rank:{rank}/{device.type}"
        index = device.index if rank == env.rank and device.index is not None else rank % local_world_size()
        return f"rank:{rank}/{device.type}:{index}"

    placed = {}
    for name, planned in params.items():
        spec = planned.sharding_spec
        if isinstance(spec, EnumerableShardingSpec):
            shards = [ShardMetadata(s.shard_offsets, s.shard_sizes, placement(s.placement.rank())) for s in spec.shards]
            planned = dataclasses.replace(planned, sharding_spec=EnumerableShardingSpec(shards))
        placed[name] = planned
    return placed


class _ShardedPlainCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, with our row-wise sharding."""

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: list[Any], env: ShardingEnv, device: torch.device | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if sharding_infos[0].param_sharding.sharding_type != ShardingType.ROW_WISE.value:
            return super().create_embedding_bag_sharding(sharding_infos, env, device, *args, **kwargs)
        return _RowWise(sharding_infos, env, device, qcomm_codecs_registry=kwargs.get("qcomm_codecs_registry"))


class _RowWise(RwPooledEmbeddingSharding):
    """Row-wise, pools summed in rank order.

    Ids and pools travel over the model's group: the host group belongs to the thread that works ahead of training.
    """

    _pg: dist.ProcessGroup  # TorchRec's

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        theirs = super().create_output_dist(device)
        if self.qcomm_codecs_registry:
            return theirs
        return _RowWiseOutputDist(theirs, self._pg)


class _RowWiseOutputDist(torch.nn.Module):
    """Ours, but TorchRec's for batches that vary per feature."""

    def __init__(self, theirs: RwPooledEmbeddingDist, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._theirs = theirs
        self._ours = RankOrderPooledDist(group)

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Awaitable[Tensor]:
        if sharding_ctx is None or sharding_ctx.variable_batch_per_feature:
            return self._theirs(local_embs, sharding_ctx)
        return self._ours(local_embs, sharding_ctx.batch_size_per_rank)
