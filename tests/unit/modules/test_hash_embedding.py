"""The unsharded collection of sequences against `torchrec.EmbeddingCollection`, on the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hybridrec.config import HashEmbeddingBagConfig, HashEmbeddingConfig
from hybridrec.errors import CapacityError, ConfigError, IdError, StateError
from hybridrec.modules.hash_embedding import HashEmbeddingCollection
from tests.unit.modules.batches import EXTREME_IDS, apply_optimizer_in_backward, random_batch

KEYS = ("w", "unused", "i", "v", "u")
POOL = torch.unique(torch.tensor([*EXTREME_IDS, *range(100, 112)]))
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (RowWiseAdagrad, {"lr": 0.1}),
]


def configs(**changes: Any) -> list[HashEmbeddingConfig]:
    """A feature that two tables share, a table that two features share."""
    return [
        HashEmbeddingConfig(10**12, 4, "user", feature_names=["u", "v"], **changes),
        HashEmbeddingConfig(50, 4, "item", feature_names=["i"], **changes),
        HashEmbeddingConfig(7, 4, "word", feature_names=["i", "w"], **changes),
    ]


def trainable(optimizer: type = torch.optim.SGD, *, need_indices: bool = False, **kwargs: Any) -> Any:
    collection = HashEmbeddingCollection(configs(), need_indices=need_indices)
    apply_optimizer_in_backward(optimizer, collection.parameters(), kwargs or {"lr": 0.1})
    return collection


class Twin:
    """TorchRec's collection, whose row k holds the k-th id of the pool."""

    def __init__(self, collection: HashEmbeddingCollection) -> None:
        dense = [
            EmbeddingConfig(
                num_embeddings=len(POOL),
                embedding_dim=c.embedding_dim,
                name=c.name,
                feature_names=list(c.feature_names),
            )
            for c in collection.embedding_configs()
        ]
        self.module = EmbeddingCollection(dense, need_indices=collection.need_indices())
        with torch.no_grad():
            for name, table in self.module.embeddings.items():
                table.weight.copy_(collection.embeddings[name].read(POOL))

    def __call__(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return self.module(  # type: ignore[no-any-return]
            KeyedJaggedTensor(
                features.keys(),
                torch.searchsorted(POOL, features.values().to(torch.int64)),
                weights=features.weights_or_none(),
                lengths=features.lengths(),
            )
        )


def values_of(outputs: dict[str, JaggedTensor]) -> Tensor:
    return torch.cat([jt.values() for jt in outputs.values()])


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize(("batch_size", "longest"), [(1, 4), (5, 4), (5, 0)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_outputs_equal_torchrecs(batch_size: int, longest: int, need_indices: bool, is_weighted: bool) -> None:
    collection = trainable(need_indices=need_indices)
    twin = Twin(collection)
    features = random_batch(KEYS, batch_size, seed=1, longest=longest, is_weighted=is_weighted)
    expected = twin(features)
    for actual in (collection(features), collection.eval()(features)):
        assert list(actual) == list(expected) == ["u", "v", "i@item", "i@word", "w"]
        for name, theirs in expected.items():
            ours = actual[name]
            assert torch.equal(ours.values(), theirs.values()) and ours.values().dtype == torch.float32
            assert torch.equal(ours.lengths(), theirs.lengths())
            assert torch.equal(ours.offsets(), theirs.offsets())
            assert [len(part) for part in ours.to_dense()] == [len(part) for part in theirs.to_dense()]
            if need_indices:
                assert torch.equal(torch.searchsorted(POOL, ours.weights()), theirs.weights())
            else:
                assert ours.weights_or_none() is None and theirs.weights_or_none() is None


@pytest.mark.parametrize(("optimizer", "kwargs"), OPTIMIZERS)
def test_training_equals_torch_optimizers(optimizer: type, kwargs: dict[str, Any]) -> None:
    collection = trainable(optimizer, **kwargs)
    twin = Twin(collection)
    dense_optimizer = optimizer(twin.module.parameters(), **kwargs)
    for step in range(10):
        features = random_batch(KEYS, 6, seed=step)
        actual, expected = values_of(collection(features)), values_of(twin(features))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        target = torch.randn(actual.shape, generator=torch.Generator().manual_seed(step))
        ((actual - target) ** 2).sum().backward()
        dense_optimizer.zero_grad()
        ((expected - target) ** 2).sum().backward()
        dense_optimizer.step()
    for name, table in twin.module.embeddings.items():
        rows = collection.embeddings[name].read(POOL)
        torch.testing.assert_close(rows, table.weight.detach(), rtol=1e-6, atol=1e-7)
    assert collection.num_rows() != {"user": 0, "item": 0, "word": 0}


def test_a_repeated_id_is_stepped_once_by_the_sum_of_its_gradients() -> None:
    """Adagrad tells one step of g + h from two steps of g and h."""
    collection = HashEmbeddingCollection([HashEmbeddingConfig(10, 1, "t", feature_names=["f", "g"])])
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 1.0})
    before = collection.embeddings["t"].read(torch.tensor([5]))
    features = KeyedJaggedTensor(["f", "g"], torch.tensor([5, 5, 5]), lengths=torch.tensor([2, 1]))
    gradients = torch.tensor([[1.0], [2.0], [4.0]])
    outputs = collection(features)
    (torch.cat([outputs["f"].values(), outputs["g"].values()]) * gradients).sum().backward()
    assert collection.embeddings["t"].get_extra_state()["states"][0].item() == 49.0
    assert torch.equal(before - collection.embeddings["t"].read(torch.tensor([5])), torch.ones(1, 1))


def test_interface_and_printing_are_torchrecs() -> None:
    small = [HashEmbeddingConfig(10, 4, "a", feature_names=["f"]), HashEmbeddingConfig(7, 4, "f")]
    ours, theirs = HashEmbeddingCollection(small, need_indices=True), EmbeddingCollection(small, need_indices=True)
    assert repr(ours).replace("HashEmbedding", "Embedding") == repr(theirs)
    assert ours.embedding_dim() == theirs.embedding_dim() == 4
    assert ours.embedding_names_by_table() == theirs.embedding_names_by_table() == [["f@a"], ["f@f"]]
    assert ours.need_indices() is theirs.need_indices() is True
    assert [c.feature_names for c in ours.embedding_configs()] == [c.feature_names for c in theirs.embedding_configs()]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert ours.device.type == "meta" and ours.target_device.type == "cpu"


def test_only_a_backward_changes_anything() -> None:
    collection = trainable()
    features = random_batch(KEYS, 5, seed=2)
    collection(features)
    collection.eval()(features)
    with torch.no_grad():
        collection.train()(features)
    assert collection.num_rows() == {"user": 0, "item": 0, "word": 0}
    loss = values_of(collection(features)).sum()
    loss.backward(retain_graph=True)
    assert collection.get_extra_state() == {"num_batches": 1} and all(collection.num_rows().values())
    with pytest.raises(StateError, match="HashEmbeddingCollection: second backward"):
        loss.backward()


def test_deepcopy_and_state_dict_keep_rows() -> None:
    collection = trainable()
    features = random_batch(KEYS, 5, seed=2)
    values_of(collection(features)).square().sum().backward()
    clone, other = copy.deepcopy(collection), trainable()
    other.load_state_dict(collection.state_dict())
    for same in (clone, other):
        assert torch.equal(values_of(same(features)), values_of(collection(features)))
        values_of(same(features)).sum().backward()
        assert not torch.equal(values_of(same(features)), values_of(collection(features)))


def test_max_rows_is_a_capacity() -> None:
    collection = HashEmbeddingCollection(configs(max_rows=2, full_policy="error"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    with pytest.raises(CapacityError, match="max_rows=2"):
        collection(random_batch(KEYS, 9, seed=2))


def test_what_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"one embedding_dim; 'a' has 4, 'b' has 8"):
        HashEmbeddingCollection([HashEmbeddingConfig(9, 4, "a"), HashEmbeddingConfig(9, 8, "b")])
    with pytest.raises(ConfigError, match=r"type HashEmbeddingBagConfig\. Pass HashEmbeddingConfig or EmbeddingConfig"):
        HashEmbeddingCollection([HashEmbeddingBagConfig(9, 4, "a")])
    with pytest.raises(ConfigError, match="planned_rows=0 is not positive"):
        HashEmbeddingConfig(9, 4, "a", planned_rows=0)
    collection = HashEmbeddingCollection([EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="a")])
    variable = KeyedJaggedTensor(
        ["a"],
        torch.tensor([1, 2]),
        lengths=torch.tensor([2]),
        stride_per_key_per_rank=[[1]],
        inverse_indices=(["a"], torch.tensor([[0, 0]])),
    )
    with pytest.raises(IdError, match=r"variable \(stride_per_key_per_rank or inverse_indices\)"):
        collection(variable)
    with pytest.raises(IdError, match="the batch lacks 'a'"):
        collection(random_batch(["b"], 2, seed=1))
