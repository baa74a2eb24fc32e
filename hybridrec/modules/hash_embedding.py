"""`HashEmbeddingCollection`: hashed tables under the interface of TorchRec's `EmbeddingCollection`.

Unsharded it trains on one device and is the readable reference of the sharded one; `DistributedModelParallel` replaces
it by `ShardedHashEmbeddingCollection`. Letters of shapes: `hybridrec.types`.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hybridrec.backend import HOST
from hybridrec.config import embedding_names
from hybridrec.errors import ConfigError
from hybridrec.modules.hash_collection import HashCollection
from hybridrec.modules.hash_table import HashEmbedding
from hybridrec.modules.input_check import check_sequences


class HashEmbeddingCollection(HashCollection, EmbeddingCollectionInterface):
    """A row for every id of a batch, not pooled, from tables whose ids are any int64 values.

    Drop-in for `torchrec.EmbeddingCollection`: same arguments, inputs, outputs and order of outputs. What is different
    for hashed tables is said at `HashEmbeddingBagCollection`; it holds here too.

    Example:
        tables = [HashEmbeddingConfig(10**12, 3, "t1", feature_names=["f1"], planned_rows=10**6)]
        collection = HashEmbeddingCollection(tables)
        #         i = 0    i = 1   i = 2    <- samples
        # "f1"   [7, -7]    []     [2**62]
        features = KeyedJaggedTensor(["f1"], torch.tensor([7, -7, 2**62]), lengths=torch.tensor([2, 0, 1]))
        collection(features)["f1"].values()   # [3, 3]: row(7), row(-7), row(2**62)
    """

    def __init__(
        self, tables: list[EmbeddingConfig], device: str | torch.device | None = None, need_indices: bool = False
    ) -> None:
        """
        Args:
            tables: `HashEmbeddingConfig` or TorchRec's `EmbeddingConfig`, all of one dim. Copied, never changed.
            device: Where the unsharded collection keeps rows and computes. None, and the meta device: host memory.
            need_indices: Whether outputs carry their ids, as ``weights()``.

        Raises:
            ConfigError: A table or the device is not accepted.
        """
        super().__init__()
        self._init_tables(tables, EmbeddingConfig, device)
        dims = {table.embedding_dim: table.name for table in reversed(self._tables)}
        if len(dims) > 1:
            listed = ", ".join(f"{name!r} has {dim}" for dim, name in reversed(dims.items()))
            raise ConfigError(
                f"tables: the tables of one collection of sequences have one embedding_dim; {listed}. Make a "
                "HashEmbeddingCollection for each dim."
            )
        self._need_indices = bool(need_indices)
        self.embeddings = nn.ModuleDict(
            {table.name: HashEmbedding(table, self._target_device) for table in self._tables}
        )
        self._names = embedding_names(self._tables)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Copies of the configs that were given, with feature names filled in as TorchRec does."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """D, of all tables."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the outputs of each table: ``feature``, or ``feature@table`` if several tables use it."""
        return self._names

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up.

        Args:
            features: KJT of int32 or int64 ids, keys in any order, further keys ignored, as are weights.

        Returns:
            Name of the output -> JaggedTensor of float32 [ids of the feature, D] on `target_device`, with the
            feature's lengths and, if `need_indices`, its ids as ``weights()``.

        Raises:
            IdError: See `check_sequences`.
            CapacityError: A training batch does not fit ``max_rows``.
        """
        check_sequences(features, self._tables, where=type(self).__name__)
        keys, device = features.keys(), self.target_device
        lengths_FB = features.lengths().view(len(keys), features.stride())
        counts = lengths_FB.sum(1).tolist()
        ids_F = dict(zip(keys, features.values().split(counts), strict=True))
        lengths_F = dict(zip(keys, lengths_FB.to(device).unbind(), strict=True))
        rows = self._look_up(
            [torch.cat([ids_F[f] for f in table.feature_names]).to(HOST, torch.int64) for table in self._tables]
        )
        outputs = {}
        for table, names, rows_ND in zip(self._tables, self._names, rows, strict=True):
            parts = rows_ND.split([len(ids_F[f]) for f in table.feature_names])
            for feature, name, part in zip(table.feature_names, names, parts, strict=True):
                ids = ids_F[feature].to(device) if self._need_indices else None
                outputs[name] = JaggedTensor(values=part, lengths=lengths_F[feature], weights=ids)
        return outputs

    def _tables_by_name(self) -> nn.ModuleDict:
        return self.embeddings
