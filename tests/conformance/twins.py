"""A hashed collection and TorchRec's own on the same numbers: row k of every table of TorchRec's is the k-th id's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Uniform
from tests.unit.modules.batches import apply_optimizer_in_backward

IDS = torch.unique(torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, -(2**62), *range(100, 125)]))
"""int64, ascending: every id that the batches hold."""
KEYS = ("u", "v", "i", "w")
TABLES: tuple[dict[str, Any], ...] = (
    {"name": "user", "embedding_dim": 4, "feature_names": ["u", "v"]},
    {"name": "item", "embedding_dim": 8, "feature_names": ["i"], "pooling": PoolingType.MEAN},
    {"name": "word", "embedding_dim": 4, "feature_names": ["i", "w"]},
)
"""A table of two features, a feature of two tables, SUM and MEAN."""


def hashed(optimizer: type | None = None, *, is_weighted: bool = False, **kwargs: Any) -> HashEmbeddingBagCollection:
    """`TABLES`, hashed, with an optimizer in the backward."""
    configs = [
        HashEmbeddingBagConfig(num_embeddings=10**12, planned_rows=100, initializer=Uniform(-0.5, 0.5), **table)
        for table in TABLES
    ]
    collection = HashEmbeddingBagCollection(configs, is_weighted=is_weighted)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, collection.parameters(), dict(kwargs))
    return collection


def dense(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """TorchRec's collection with the initial rows of `hashed`."""
    configs = [EmbeddingBagConfig(num_embeddings=len(IDS), **table) for table in TABLES]
    collection = EmbeddingBagCollection(configs, is_weighted=is_weighted)
    rows = initial_rows()
    with torch.no_grad():
        for name, bag in collection.embedding_bags.items():
            bag.weight.copy_(rows[name])
    return collection


def initial_rows() -> dict[str, Tensor]:
    """Table -> float32 [len(IDS), D]."""
    return {name: bag.read(IDS) for name, bag in hashed().embedding_bags.items()}


def batch(seed: int, batch_size: int = 6, *, longest: int = 3, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to ``longest`` of `IDS`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (len(KEYS) * batch_size,), generator=generator)
    count = int(lengths.sum())
    values = IDS[torch.randint(len(IDS), (count,), generator=generator)]
    weights = torch.rand(count, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(list(KEYS), values, weights=weights, lengths=lengths)


def numbered(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with rows in place of ids: what TorchRec's collection looks up."""
    return KeyedJaggedTensor(
        features.keys(),
        torch.searchsorted(IDS, features.values()),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
    )
