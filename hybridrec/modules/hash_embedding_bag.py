"""`HashEmbeddingBagCollection`: hashed tables under the interface of TorchRec's `EmbeddingBagCollection`.

Unsharded it trains on one device and is the readable reference of the sharded one; `DistributedModelParallel` replaces
it by `ShardedHashEmbeddingBagCollection`. Letters of shapes: `hybridrec.types`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hybridrec.backend import HOST
from hybridrec.config import TableConfig, embedding_names
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.modules.hash_table import HashEmbeddingBag
from hybridrec.modules.input_check import check_features
from hybridrec.modules.variable_batch import expand, filled_lengths, inverse_of


class HashEmbeddingBagCollection(HashCollection, EmbeddingBagCollectionInterface):
    """Pooled lookups in tables whose ids are any int64 values.

    Drop-in for `torchrec.EmbeddingBagCollection`: same arguments, inputs, outputs and order of outputs. Differences:

    - an id needs no place below ``num_embeddings``, which is nominal; its row exists from the first training batch
      that uses it, and before that it reads its initial row;
    - parameters have the nominal shape and no memory. Rows are trained in the backward by the optimizer that
      `apply_optimizer_in_backward` attached to them; a backward without one is an error;
    - a forward in eval mode, under ``torch.no_grad()``, or with ``requires_grad=False`` of a table changes nothing.

    One backward through one forward is one training batch: all tables step once, each row of the batch with the sum
    of the gradients of its occurrences. A forward whose graph is dropped leaves no trace.

    Example:
        tables = [HashEmbeddingBagConfig(10**12, 3, "t1", feature_names=["f1"], planned_rows=10**6)]
        collection = HashEmbeddingBagCollection(tables)
        #         i = 0    i = 1   i = 2    <- bags
        # "f1"   [7, -7]    []     [2**62]
        features = KeyedJaggedTensor(["f1"], torch.tensor([7, -7, 2**62]), lengths=torch.tensor([2, 0, 1]))
        collection(features).values()   # [3, 3]: row(7) + row(-7), zeros, row(2**62)
    """

    def __init__(
        self, tables: list[EmbeddingBagConfig], is_weighted: bool = False, device: str | torch.device | None = None
    ) -> None:
        """
        Args:
            tables: `HashEmbeddingBagConfig` or TorchRec's `EmbeddingBagConfig`. Copied, never changed.
            is_weighted: Whether batches carry a weight for each id.
            device: Where the unsharded collection keeps rows and computes. None, and the meta device: host memory.

        Raises:
            ConfigError: A table or the device is not accepted.
        """
        super().__init__()
        self._init_tables(tables, EmbeddingBagConfig, device)
        self._is_weighted = bool(is_weighted)
        self.embedding_bags = nn.ModuleDict(
            {table.name: HashEmbeddingBag(table, self._target_device) for table in self._tables}
        )
        self._output_names = [name for names in embedding_names(self._tables) for name in names]
        self._output_dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Copies of the configs that were given, with feature names filled in as TorchRec does."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches must carry a weight for each id."""
        return self._is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: KJT of int32 or int64 ids, keys in any order, further keys ignored; float32 weights if the
                collection is weighted (ignored if not). Gradients reach the weights. Features with different
                numbers of bags (VBE) need inverse indices; B is the number of examples then.

        Returns:
            KeyedTensor of float32 [B, sum of D over features] on `target_device`. SUM: sum of ``w * row``; MEAN: that,
            divided by the number of ids, weighted or not; 0 for an empty bag.

        Raises:
            IdError: See `check_features`.
            CapacityError: A training batch does not fit ``max_rows``.
        """
        check_features(features, self._tables, self._is_weighted, where=type(self).__name__)
        batches = _by_table(features, self._tables, self._is_weighted, self.target_device)
        rows = self._look_up([batch.ids_N for batch in batches])
        pools = [_pool(batch, r, bag) for batch, r, bag in zip(batches, rows, self._bags(), strict=True)]
        pooled = torch.cat([column for of_table in pools for column in of_table], 1)
        inverse_FB = inverse_of(features, [name for table in self._tables for name in table.feature_names])
        if inverse_FB is not None:
            pooled = expand(pooled, inverse_FB.to(pooled.device), self._output_dims)
        return KeyedTensor(keys=self._output_names, length_per_key=self._output_dims, values=pooled)

    def _tables_by_name(self) -> nn.ModuleDict:
        return self.embedding_bags


@dataclass(frozen=True, kw_only=True)
class _TableBatch:
    """What one table sees of a batch: its features one after the other."""

    ids_N: Tensor
    """int64 [N], host memory."""
    lengths: Tensor
    """int64 [F, B] on the device of the rows."""
    weights_N: Tensor | None
    """float32 [N] on the device of the rows, with the graph of the user's weights."""
    is_mean: bool


def _by_table(
    features: KeyedJaggedTensor, tables: Sequence[TableConfig], is_weighted: bool, device: torch.device
) -> list[_TableBatch]:
    keys = features.keys()
    lengths = filled_lengths(features)
    counts = lengths.sum(dim=1).tolist()
    ids = features.values().to(HOST, torch.int64).split(counts)
    weights = features.weights().to(device).split(counts) if is_weighted else None
    position = {key: k for k, key in enumerate(keys)}
    batches = []
    for table in tables:
        used = [position[name] for name in table.feature_names]
        batches.append(
            _TableBatch(
                ids_N=torch.cat([ids[k] for k in used]),
                lengths=lengths[used].to(device),
                weights_N=None if weights is None else torch.cat([weights[k] for k in used]),
                is_mean=table.pooling == PoolingType.MEAN,
            )
        )
    return batches


def _pool(batch: _TableBatch, rows_ND: Tensor, bag: HashEmbeddingBag) -> Sequence[Tensor]:
    """For each feature float32 [B, D]."""
    num_features, batch_size = batch.lengths.shape
    lengths = batch.lengths.flatten()
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    pooled = F.embedding_bag(
        torch.arange(len(rows_ND), device=rows_ND.device),
        rows_ND,
        offsets,
        mode="sum",
        per_sample_weights=batch.weights_N,
        include_last_offset=True,
    )
    if rows_ND.requires_grad:
        pooled.register_hook(bag.clipped)
    if batch.is_mean:
        pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
    return pooled.view(num_features, batch_size, rows_ND.shape[1]).unbind()
