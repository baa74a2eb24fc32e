"""`ShardedHashEmbeddingCollection`: what `DistributedModelParallel` puts in place of hashed tables of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hybridrec.config import TableConfig
from hybridrec.distributed.input_dist import HashInputDist
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.routing import Routing
from hybridrec.distributed.sequence_input_dist import ReceivedIds, SentIds, SequenceInputDist
from hybridrec.distributed.sequence_output_dist import SequenceAwaitable, SequenceDist, SequenceOutputs, SequenceRoute
from hybridrec.distributed.sharded_collection import HashBatchContext, ShardedHashCollection
from hybridrec.modules.hash_embedding import HashEmbeddingCollection
from hybridrec.modules.input_check import check_sequences


@dataclass
class SequenceBatchContext(HashBatchContext):
    """And by which way rows come back. Tensors are in host memory; from SWAP on where the output is."""

    lengths_dtype: torch.dtype = torch.int64
    ids_dtype: torch.dtype = torch.int64
    outputs: SequenceOutputs | None = None
    """From DIST on."""
    sent: SentIds | None = None
    """From DIST on."""
    keys: KeyedJaggedTensor | None = None
    """That this rank owns; from MAP on."""
    received: ReceivedIds | None = None
    """From MAP on."""
    route: SequenceRoute | None = None
    """From SWAP on."""


class ShardedHashEmbeddingCollection(ShardedHashCollection):
    """Sharded hashed tables whose rows are not pooled: each id gets its own (docs/design/sequences.md)."""

    TABLES_NAME = "embeddings"
    embeddings: nn.ModuleDict

    def __init__(
        self,
        module: HashEmbeddingCollection,
        tables: Sequence[TableConfig],
        lookup: PooledLookup,
        routing: Routing,
        *,
        device_group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
        output_dtype: torch.dtype = torch.float32,
        dedups: bool = False,
    ) -> None:
        """
        Args:
            module: What is sharded.
            tables: Its tables, resolved, in its order.
            lookup: This rank's shards, a `SequenceLookup`.
            routing: Who looks up what, in the order in which features are fed.
            device_group: Rows travel over it.
            host_group: Ids and verdicts travel over it (gloo).
            device: Where the output is.
            output_dtype: What rows are rounded to, at the end.
            dedups: Whether an id that a feature repeats travels once. Changes no bit of the result.
        """
        super().__init__(
            tables, lookup, routing, is_weighted=False, device_group=device_group, host_group=host_group, device=device
        )
        self._output_dtype = output_dtype
        self._configs = module.embedding_configs()
        self._need_indices = module.need_indices()
        self._names = module.embedding_names_by_table()
        self._dim = module.embedding_dim()
        input_dist = HashInputDist(host_group, routing.shared_features, routing.owned_features)
        self._input_dists = [input_dist]
        cells = [dim // routing.cell_dim for dim in routing.feature_dims]
        self._sequence_dist = SequenceInputDist(input_dist, host_group, cells, dedups=dedups)
        self._output_dists = [SequenceDist(device_group)]
        self._features = [
            (name, [first + i for first in routing.first_features[table.name]])
            for table, names in zip(tables, self._names, strict=True)
            for i, name in enumerate(names)
        ]

    def create_context(self) -> SequenceBatchContext:
        return SequenceBatchContext(is_training=self._trains())

    def _check_batch(self, features: KeyedJaggedTensor, ctx: HashBatchContext) -> None:
        check_sequences(features, self._table_configs, where=type(self).__name__)

    def _look_at(self, ctx: SequenceBatchContext, features: KeyedJaggedTensor) -> None:
        ctx.lengths_dtype, ctx.ids_dtype = features.lengths().dtype, features.values().dtype

    def _send_ids(self, ctx: SequenceBatchContext, features: KeyedJaggedTensor) -> list[Awaitable[Awaitable[Any]]]:
        lengths_FB = features.lengths().view(len(features.keys()), features.stride())
        ctx.outputs = SequenceOutputs(
            features=self._features,
            dims=self._routing.feature_dims,
            counts=lengths_FB.sum(1).tolist(),
            lengths_FB=lengths_FB.to(ctx.lengths_dtype),
            ids_N=features.values().to(ctx.ids_dtype) if self._need_indices else None,
        )
        awaitables, ctx.sent = self._sequence_dist.send(features)
        return awaitables

    def _received(self, ctx: SequenceBatchContext, dist_input: Any) -> KeyedJaggedTensor:
        if ctx.keys is None:
            samples = getattr(ctx.sharding_contexts[0], "batch_size_per_rank", None)
            ctx.keys, ctx.received = self._sequence_dist.receive(dist_input, samples)
        return ctx.keys

    def _upload(self, ctx: SequenceBatchContext) -> None:
        assert ctx.outputs is not None and ctx.sent is not None and ctx.received is not None
        ctx.outputs = self._uploaded(ctx.outputs)
        ctx.route = SequenceRoute(sent=self._uploaded(ctx.sent), received=self._uploaded(ctx.received))

    def _uploaded(self, value: Any) -> Any:
        """A dataclass with its tensors where the output is."""
        upload = self._lookups[0].upload
        tensors = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{n: upload(t) for n, t in tensors.items() if isinstance(t, Tensor)})

    def output_dist(self, ctx: SequenceBatchContext, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.mapped is not None and ctx.outputs is not None and ctx.route is not None
        uploaded = [ctx.outputs.lengths_FB, *ctx.route.tensors()]
        if ctx.outputs.ids_N is not None:
            uploaded.append(ctx.outputs.ids_N)
        self._lookups[0].use(uploaded, ctx.mapped.ready)
        rows = output[0].reshape(-1, self._routing.cell_dim)  # a rank without tables does not know it
        return SequenceAwaitable(self._output_dists[0](rows, ctx.route), ctx.outputs, self._output_dtype)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """As they were given to the unsharded collection."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the outputs of each table."""
        return self._names

    def embedding_dim(self) -> int:
        """D, of all tables."""
        return self._dim

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._need_indices

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return HashEmbeddingCollection
