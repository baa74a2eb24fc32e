"""`ShardedHashEmbeddingBagCollection`: what `DistributedModelParallel` puts in place of a hashed collection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hybridrec.config import TableConfig
from hybridrec.distributed.input_dist import HashInputDist
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.output_columns import OutputColumns, PooledAwaitable
from hybridrec.distributed.output_dist import RankOrderPooledDist
from hybridrec.distributed.routing import Routing
from hybridrec.distributed.sharded_collection import HashBatchContext, ShardedHashCollection
from hybridrec.errors import IdError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from hybridrec.modules.input_check import check_features


@dataclass
class PooledBatchContext(HashBatchContext):
    """And what pooling needs."""

    divisors: Tensor | None = None
    """float32 [S, F]: by what MEAN divides this rank's bags, features in the order of the lookup; None without MEAN
    tables. In host memory; from SWAP on where the output is."""
    inverse: Tensor | None = None
    """int64 [F, B]: the bag of each example of a variable batch (else None: examples are bags). Where: as above."""


class ShardedHashEmbeddingBagCollection(ShardedHashCollection):
    """Sharded hashed tables that are pooled: pools travel, and partial ones are added in rank order."""

    TABLES_NAME = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        module: HashEmbeddingBagCollection,
        tables: Sequence[TableConfig],
        lookup: PooledLookup,
        routing: Routing,
        *,
        device_group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            module: What is sharded.
            tables: Its tables, resolved, in its order.
            lookup: This rank's shards.
            routing: Who looks up what, in the order in which features are fed.
            device_group: Pools travel over it.
            host_group: Ids and verdicts travel over it (gloo).
            device: Where the output is.
            output_dtype: What pools are rounded to, at the end.
        """
        super().__init__(
            tables,
            lookup,
            routing,
            is_weighted=module.is_weighted(),
            device_group=device_group,
            host_group=host_group,
            device=device,
        )
        self._configs = module.embedding_bag_configs()
        self._input_dists = [HashInputDist(host_group, routing.shared_features, routing.owned_features)]
        self._output_dists = [RankOrderPooledDist(device_group, routing.owned_dims)]
        self._columns = OutputColumns(tables, routing.parts, device, output_dtype)

    def create_context(self) -> PooledBatchContext:
        return PooledBatchContext(is_training=self._trains())

    def _check_batch(self, features: KeyedJaggedTensor, ctx: HashBatchContext) -> None:
        check_features(features, self._table_configs, self._is_weighted, where=type(self).__name__)
        self._check_weights_need_no_grad(features, ctx.is_training)

    def _check_weights_need_no_grad(self, features: KeyedJaggedTensor, is_training: bool) -> None:
        weights = features.weights_or_none()
        if self._is_weighted and weights is not None and weights.requires_grad and is_training:
            raise IdError(
                f"{type(self).__name__}: the KJT's weights require grad, which cannot travel back to the rank that "
                "they came from. Pass weights.detach(), or train weights in an unsharded collection."
            )

    def _look_at(self, ctx: PooledBatchContext, features: KeyedJaggedTensor) -> None:
        ctx.inverse = self._feature_order.inverse(features)

    def _send_ids(self, ctx: PooledBatchContext, features: KeyedJaggedTensor) -> list[Awaitable[Awaitable[Any]]]:
        if self._columns.has_mean:
            ctx.divisors = self._columns.divisors(features.lengths().view(len(features.keys()), features.stride()))
        return [self._input_dists[0](features)]

    def _upload(self, ctx: PooledBatchContext) -> None:
        lookup = self._lookups[0]
        ctx.divisors = None if ctx.divisors is None else lookup.upload(ctx.divisors)
        ctx.inverse = None if ctx.inverse is None else lookup.upload(ctx.inverse)

    def output_dist(self, ctx: PooledBatchContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        sizes = ctx.sharding_contexts[0].batch_size_per_rank
        assert ctx.mapped is not None
        uploaded = [t for t in (ctx.divisors, ctx.inverse) if t is not None]
        if uploaded:
            self._lookups[0].use(uploaded, ctx.mapped.ready)
        return PooledAwaitable(self._output_dists[0](output[0], sizes), self._columns, ctx.divisors, ctx.inverse)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As they were given to the unsharded collection."""
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return HashEmbeddingBagCollection
