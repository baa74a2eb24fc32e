"""Collections and batches that the tests of `hybridrec.modules` share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import PoolingType

from hybridrec.config import HashEmbeddingBagConfig
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection

with warnings.catch_warnings():  # the package's own use of torch.jit, at import
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

EXTREME_IDS = (0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62), 10**12)


def tables(**changes: Any) -> list[HashEmbeddingBagConfig]:
    """Three tables: SUM and MEAN, a feature that two tables share, a table that two features share."""
    return [
        HashEmbeddingBagConfig(10**12, 3, "user", feature_names=["u", "v"], **changes),
        HashEmbeddingBagConfig(50, 8, "item", feature_names=["i"], pooling=PoolingType.MEAN, **changes),
        HashEmbeddingBagConfig(7, 1, "word", feature_names=["i", "w"], **changes),
    ]


def random_ids(count: int, generator: torch.Generator) -> Tensor:
    """int64 [count] with repetitions, among them ids at the ends of the range."""
    pool = torch.tensor([*EXTREME_IDS, *range(100, 112)])
    return pool[torch.randint(len(pool), (count,), generator=generator)]


def random_batch(
    keys: Sequence[str], batch_size: int, seed: int, *, is_weighted: bool = False, longest: int = 4
) -> KeyedJaggedTensor:
    """A KJT with bags of 0 .. ``longest`` ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (len(keys) * batch_size,), generator=generator)
    count = int(lengths.sum())
    weights = torch.randn(count, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(list(keys), random_ids(count, generator), weights=weights, lengths=lengths)


def trainable(
    optimizer: type = torch.optim.SGD, is_weighted: bool = False, **kwargs: Any
) -> HashEmbeddingBagCollection:
    """A collection of `tables` with an optimizer."""
    collection = HashEmbeddingBagCollection(tables(), is_weighted=is_weighted)
    apply_optimizer_in_backward(optimizer, collection.parameters(), kwargs or {"lr": 0.1})
    return collection


class DenseTwin:
    """A `torchrec.EmbeddingBagCollection` whose row k holds the k-th id of the pool."""

    def __init__(self, collection: HashEmbeddingBagCollection, optimizer: type, **kwargs: Any) -> None:
        """Copy the initial rows of ``collection``, which must be untrained."""
        self.pool = torch.unique(torch.tensor([*EXTREME_IDS, *range(100, 112)]))
        configs = [
            EmbeddingBagConfig(
                num_embeddings=len(self.pool),
                embedding_dim=config.embedding_dim,
                name=config.name,
                feature_names=list(config.feature_names),
                pooling=PoolingType.SUM if collection.is_weighted() else config.pooling,
            )
            for config in collection.embedding_bag_configs()
        ]
        self._divides_item = collection.is_weighted()
        self.module = EmbeddingBagCollection(configs, is_weighted=collection.is_weighted())
        with torch.no_grad():
            for name, bag in self.module.embedding_bags.items():
                bag.weight.copy_(collection.embedding_bags[name].read(self.pool))
        self.optimizer = optimizer(self.module.parameters(), **kwargs)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up the same ids. torch knows no weighted mean: then "item" is summed there, and divided here."""
        numbered = KeyedJaggedTensor(
            features.keys(),
            torch.searchsorted(self.pool, features.values().to(torch.int64)),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
        )
        pooled = self.module(numbered)
        if not self._divides_item:
            return pooled
        lengths = features["i"].lengths().clamp(min=1).unsqueeze(1)
        values = [pooled[key] / lengths if key == "i@item" else pooled[key] for key in pooled.keys()]  # noqa: SIM118
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), torch.cat(values, dim=1))
