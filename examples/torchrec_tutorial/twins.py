"""The tutorial's two tables twice, with the same rows: TorchRec's, and hashed ones.

TorchRec's tables have row numbers, 0 to 47. Ours have ids, any int64; `IDS` gives each row number an id. Whatever is
done to both must give the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from hybridrec import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    Uniform,
)

DIM = 64
ROWS = 48
FEATURES = ("product", "user")
"""Each has a table, ``product_table`` and ``user_table``."""
IDS = torch.cat([torch.tensor([0, -1, 2**63 - 1, -(2**63)]), torch.arange(1, ROWS - 3) * 0x1E3779B97F4A7C15])
"""int64 [ROWS]: the id of each row number. The products wrap around, so that ids are from the whole range of int64."""


def table_of(feature: str) -> str:
    """The name of a feature's table."""
    return f"{feature}_table"


def hashed_bags() -> HashEmbeddingBagCollection:
    """Two hashed tables that are pooled. Their size is nominal: rows come to be when they are trained."""
    return HashEmbeddingBagCollection(
        tables=[
            HashEmbeddingBagConfig(
                name=table_of(feature),
                embedding_dim=DIM,
                num_embeddings=10**12,
                planned_rows=1000,
                feature_names=[feature],
                initializer=Uniform(-0.5, 0.5),
            )
            for feature in FEATURES
        ]
    )


def hashed_sequences() -> HashEmbeddingCollection:
    """The same without pooling."""
    return HashEmbeddingCollection(
        tables=[
            HashEmbeddingConfig(
                name=table_of(feature),
                embedding_dim=DIM,
                num_embeddings=10**12,
                planned_rows=1000,
                feature_names=[feature],
                initializer=Uniform(-0.5, 0.5),
            )
            for feature in FEATURES
        ]
    )


def initial_rows() -> dict[str, Tensor]:
    """Table -> float32 [ROWS, DIM]: a function of seed, table and id alone, so that it can be asked at any time."""
    return {name: bag.read(IDS) for name, bag in hashed_bags().embedding_bags.items()}


def plain_bags() -> EmbeddingBagCollection:
    """TorchRec's collection, with our initial rows in it."""
    tables = [
        EmbeddingBagConfig(name=table_of(f), embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
        for f in FEATURES
    ]
    collection = EmbeddingBagCollection(tables=tables)
    set_rows(collection.embedding_bags)
    return collection


def plain_sequences() -> EmbeddingCollection:
    """TorchRec's collection of sequences, with our initial rows in it."""
    tables = [
        EmbeddingConfig(name=table_of(f), embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES
    ]
    collection = EmbeddingCollection(tables=tables)
    set_rows(collection.embeddings)
    return collection


@torch.no_grad()
def set_rows(modules: torch.nn.Module) -> None:
    """Put our initial rows into TorchRec's tables; sharded ones belong to a rank, the others' parts are empty."""
    rows = initial_rows()
    for name, parameter in modules.named_parameters():
        if parameter.numel():
            parameter.copy_(rows[name.split(".")[-2]].view_as(parameter))


def batch(seed: int, batch_size: int = 8) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids for both features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(FEATURES) * batch_size,), generator=generator)
    row_numbers = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(FEATURES), values=IDS[row_numbers], lengths=lengths)


def all_ids() -> KeyedJaggedTensor:
    """Every id once, a bag each: the pools of this batch are the rows."""
    lengths = torch.ones(len(FEATURES) * ROWS, dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(FEATURES), values=IDS.repeat(len(FEATURES)), lengths=lengths)


def numbered(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with row numbers in place of ids: what TorchRec's tables can look up."""
    numbers = (features.values()[:, None] == IDS).int().argmax(dim=1)
    return KeyedJaggedTensor(keys=features.keys(), values=numbers, lengths=features.lengths())
