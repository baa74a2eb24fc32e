from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.config import HashEmbeddingBagConfig
from hybridrec.errors import ConfigError, StateError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from tests.unit.modules.batches import apply_optimizer_in_backward


def trained_collection() -> HashEmbeddingBagCollection:
    collection = HashEmbeddingBagCollection([HashEmbeddingBagConfig(100, 2, "t", feature_names=["f"])])

    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    train(collection, [5, -1, 3])
    return collection


def train(collection: HashEmbeddingBagCollection, ids: list[int]) -> None:
    features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    collection(features).values().sum().backward()


def test_an_unsharded_table_gives_what_it_reads() -> None:
    collection = trained_collection()
    (first, last) = collection.export_rows("t", chunk_rows=2)
    assert first.ids_N.tolist() == [-1, 3] and last.ids_N.tolist() == [5]
    ids = torch.tensor([-1, 3])
    assert torch.equal(first.weights_ND, collection.embedding_bags["t"].read(ids))
    assert first.states["sum"].shape == (2, 2) and bool((first.states["sum"] > 0).all())
    assert first.scores_N.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="there is no table 'u'. Tables: \\['t'\\]"):
        collection.export_rows("u")


def test_an_unsharded_table_that_is_trained_meanwhile_says_so() -> None:
    collection = trained_collection()
    export = collection.export_rows("t", chunk_rows=1)
    next(export)
    train(collection, [5])
    with pytest.raises(StateError, match="table 't': its rows changed while they were exported"):
        next(export)
