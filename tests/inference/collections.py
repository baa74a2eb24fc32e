"""Trained collections and batches that the tests of `hybridrec.inference` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    Normal,
)
from tests.unit.modules.batches import EXTREME_IDS, apply_optimizer_in_backward, random_batch

FEATURES = ("u", "v", "i", "w")


def pooled(is_weighted: bool = False, steps: int = 4, **changes: Any) -> HashEmbeddingBagCollection:
    """SUM and MEAN, a feature that two tables share, a table that two features share; a bank, a normal, a default."""
    configs = [
        HashEmbeddingBagConfig(10**12, 3, "user", feature_names=["u", "v"], initializer=Normal(0.0, 0.5)),
        HashEmbeddingBagConfig(50, 8, "item", feature_names=["i"], pooling=PoolingType.MEAN, **changes),
        HashEmbeddingBagConfig(7, 1, "word", feature_names=["i", "w"], init_fn=torch.nn.init.normal_),
    ]
    collection = HashEmbeddingBagCollection(configs, is_weighted=is_weighted)
    train(collection, steps, is_weighted=is_weighted)
    return collection.eval()


def sequences(need_indices: bool = False, steps: int = 4) -> HashEmbeddingCollection:
    """Tables of one dim, with a feature that two tables share and a table that two features share."""
    configs = [
        HashEmbeddingConfig(10**12, 4, "user", feature_names=["u", "v"]),
        HashEmbeddingConfig(50, 4, "item", feature_names=["v", "w"], seed=3),
    ]
    collection = HashEmbeddingCollection(configs, need_indices=need_indices)
    train(collection, steps)
    return collection.eval()


def train(collection: Any, steps: int, is_weighted: bool = False) -> None:
    """Steps whose gradients differ by column and by row."""
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    for step in range(steps):
        outputs = collection(batch(step, is_weighted=is_weighted))
        values = outputs.values() if isinstance(collection, HashEmbeddingBagCollection) else jagged(outputs)
        (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(step))).sum().backward()


def batch(seed: int, batch_size: int = 5, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids, from both ends of int64 and between, most of them seen in training."""
    return random_batch(FEATURES, batch_size, seed, is_weighted=is_weighted)


def hostile_batch(batch_size: int = 6, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Known ids, their neighbours, and ids that nobody saw; in an order and with a key that tables do not have."""
    pool = [*EXTREME_IDS, *(i + 1 for i in EXTREME_IDS if i < 2**63 - 1), *range(95, 118), 2**33, -(2**33)]
    generator = torch.Generator().manual_seed(5)
    keys = ["w", "nobody", "u", "i", "v"]
    lengths = torch.randint(5, (len(keys) * batch_size,), generator=generator)
    count = int(lengths.sum())
    values = torch.tensor(pool)[torch.randint(len(pool), (count,), generator=generator)]
    weights = torch.randn(count, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(keys, values, weights=weights, lengths=lengths)


def flat(features: KeyedJaggedTensor, names: list[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(values, lengths, weights) of the named features, as the core of a frozen collection takes them."""
    parts = [features[name] for name in names]
    weights = [part.weights_or_none() for part in parts]
    return (
        torch.cat([part.values() for part in parts]),
        torch.cat([part.lengths() for part in parts]),
        None if weights[0] is None else torch.cat(weights),
    )


def jagged(outputs: dict[str, Any]) -> Tensor:
    """The rows of all outputs."""
    return torch.cat([output.values() for output in outputs.values()])
