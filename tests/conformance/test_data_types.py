"""TorchRec's data types into and out of hashed collections: jagged tensors, keyed ones, shared tables and features."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hybridrec import HashEmbeddingBagCollection, HashEmbeddingBagConfig, StateError
from tests.conformance.twins import KEYS, TABLES, batch, dense, hashed, numbered


def test_torchs_embedding_bag_beside_one_hashed_table() -> None:
    """The tutorial's first step: one table, ids that are rows, offsets of bags."""
    collection = HashEmbeddingBagCollection([HashEmbeddingBagConfig(50, 8, "t", feature_names=["f"])])
    bag, embedding = nn.EmbeddingBag(50, 8, mode="sum"), nn.Embedding(50, 8)
    with torch.no_grad():
        for module in (bag, embedding):
            module.weight.copy_(collection.embedding_bags["t"].read(torch.arange(50)))
    ids, offsets = torch.tensor([3, 7, 7, 49, 0]), torch.tensor([0, 2, 2, 5])
    features = KeyedJaggedTensor(["f"], ids, offsets=offsets)
    torch.testing.assert_close(collection(features)["f"], bag(ids, offsets[:-1]))
    one_each = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(5, dtype=torch.int64))
    assert torch.equal(collection(one_each)["f"], embedding(ids))


def jagged() -> dict[str, JaggedTensor]:
    bags = {"u": [[5, -1], []], "v": [[2**63 - 1], [7]], "i": [[], [-(2**63)]], "w": [[0], [1, 2]]}
    return {
        key: JaggedTensor.from_dense([torch.tensor(bag, dtype=torch.int64) for bag in value])
        for key, value in bags.items()
    }


def test_jagged_tensors_carry_raw_ids() -> None:
    user = jagged()["u"]
    assert user.offsets().tolist() == [0, 2, 2] and user.lengths().tolist() == [2, 0]
    assert [bag.tolist() for bag in user.to_dense()] == [[5, -1], []]
    assert "[[5, -1], []]" in str(user)


def test_keyed_jagged_tensors_made_of_them_are_looked_up() -> None:
    features = KeyedJaggedTensor.from_jt_dict(jagged())
    assert features.keys() == list(KEYS)
    assert features.lengths().tolist() == [2, 0, 1, 1, 0, 1, 1, 2]
    collection = hashed()
    output = collection(features)
    rows = {name: bag.read(features.values()) for name, bag in collection.embedding_bags.items()}
    assert torch.equal(output["u"], torch.stack([rows["user"][0] + rows["user"][1], torch.zeros(4)]))
    assert torch.equal(output["i@item"], torch.stack([torch.zeros(8), rows["item"][4]]))
    assert torch.equal(output["w"], torch.stack([rows["word"][5], rows["word"][6] + rows["word"][7]]))
    again = KeyedJaggedTensor.from_jt_dict(features.to_dict())
    assert torch.equal(collection(again).values(), output.values())


@pytest.mark.parametrize("is_training", [True, False])
def test_keyed_tensors_come_out_as_torchrecs(is_training: bool) -> None:
    mine, reference = hashed(torch.optim.SGD, lr=0.1).train(is_training), dense()
    features = batch(4)
    got, expected = mine(features), reference(numbered(features))
    assert type(got) is KeyedTensor and got.keys() == expected.keys()
    assert got.length_per_key() == expected.length_per_key()
    assert got.offset_per_key() == expected.offset_per_key() and got.key_dim() == expected.key_dim()
    assert got.values().requires_grad is is_training
    by_key = got.to_dict()
    assert list(by_key) == got.keys() and all(torch.equal(by_key[key], got[key]) for key in by_key)
    torch.testing.assert_close(got.values(), expected.values())
    regrouped = KeyedTensor.regroup([got], [["u", "w"], ["i@item"]])
    assert [tuple(part.shape) for part in regrouped] == [(6, 8), (6, 8)]


def test_the_collection_has_torchrecs_members() -> None:
    mine, reference = hashed(torch.optim.SGD, lr=0.1), dense()
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert list(mine.embedding_bags) == list(reference.embedding_bags) == [table["name"] for table in TABLES]
    assert mine.is_weighted() is reference.is_weighted()
    assert [c.feature_names for c in mine.embedding_bag_configs()] == [
        c.feature_names for c in reference.embedding_bag_configs()
    ]
    lines = [str(module).replace("Hash", "").splitlines() for module in (mine, reference)]
    assert [line.split("(")[:2] for line in lines[0]] == [line.split("(")[:2] for line in lines[1]]
    assert mine.embedding_bags["user"].weight.shape == (10**12, 4)  # nominal: no memory, no values


def test_a_deep_copy_is_a_collection_of_its_own() -> None:
    first = hashed(torch.optim.SGD, lr=0.5)
    second, features = copy.deepcopy(first), batch(5)
    before = second(features).values().detach()
    first(features).values().sum().backward()
    assert torch.equal(second.eval()(features).values(), before)
    second.train()(features).values().sum().backward()
    assert torch.equal(second.eval()(features).values(), first.eval()(features).values())
    assert not torch.equal(first(features).values(), before)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.tolist(),
        lambda weight: weight[3],
        lambda weight: weight.__setitem__(3, 1.0),
        lambda weight: nn.init.uniform_(weight),
        lambda weight: nn.init.xavier_uniform_(weight),
        lambda weight: weight.copy_(torch.zeros(4)),
    ],
)
def test_rows_are_neither_read_nor_written_through_the_nominal_weight(use: Callable[[Tensor], object]) -> None:
    """TorchRec's weight is a matrix of rows; ours would lose the write, or allocate the nominal shape."""
    collection = hashed()
    with torch.no_grad(), pytest.raises(StateError, match=r"holds no rows.*embedding_bags\[table\]\.read\(ids\)"):
        use(collection.embedding_bags["user"].weight)
    assert collection.load_state_dict(hashed().state_dict()).missing_keys == []
