"""`check_features`: every refusal by its message, and what passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from hybridrec.config import resolve_tables
from hybridrec.errors import IdError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from hybridrec.modules.input_check import check_features
from tests.unit.modules.batches import random_batch, tables

TABLES = resolve_tables(tables())
KEYS = ["u", "v", "i", "w"]


def batch(**changes: Any) -> KeyedJaggedTensor:
    """Two bags of one id for each feature, changed."""
    fields = {"keys": KEYS, "values": torch.arange(8), "lengths": torch.ones(8, dtype=torch.int64), **changes}
    return KeyedJaggedTensor(**fields)


def variable(index: Any, names: list[str] = KEYS) -> KeyedJaggedTensor:
    """Features of 2, 2, 3 and 1 bags."""
    return batch(stride_per_key_per_rank=[[2], [2], [3], [1]], inverse_indices=(names, torch.as_tensor(index)))


REFUSALS: list[tuple[Any, str]] = [
    (torch.arange(8), r"^here: the batch has type Tensor\. Pass a torchrec KeyedJaggedTensor"),
    ({"u": torch.arange(8)}, r"the batch has type dict"),
    (batch(values=torch.arange(8.0)), r"ids have dtype torch\.float32\. Accepted: torch\.int64, torch\.int32"),
    (batch(values=torch.arange(8).to(torch.int16)), r"ids have dtype torch\.int16"),
    (batch(values=torch.arange(8).to(torch.uint64)), r"ids have dtype torch\.uint64.*values\.view\(torch\.int64\)"),
    (batch(values=torch.arange(8).view(4, 2)), r"ids have shape \[4, 2\]\. Pass a tensor of one dimension"),
    (
        batch(keys=["u", "x", "y", "w"]),
        r"lacks 'v' \(table 'user'\), 'i' \(table 'item'\), 'i' \(table 'word'\)\. It has 'u'",
    ),
    (batch(keys=["u", "v", "i", "u"]), r"feature 'u' more than once"),
    (batch(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 1, 2])), r"lengths add up to 9 but there are 8 ids"),
    (batch(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])), r"lengths add up to 7 but there are 8 ids"),
    (
        batch(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 3, -1])),
        r"a length is -1 \(feature 'w', bag 1\)\. Lengths are counts",
    ),
    (batch(lengths=torch.ones(7, dtype=torch.int64)), r"7 lengths for 4 features of 1 bags"),
    (batch(lengths=None, offsets=torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])), r"offsets begin with 1"),
    (batch(lengths=None, offsets=torch.tensor([0, 2, 1, 3, 4, 5, 6, 7, 8])), r"a length is -1"),
    (
        batch(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 1, 2])),
        r"but there are 8 ids \(by feature: 'u' 2, 'v' 2, 'i' 2, 'w' 3\)",
    ),
    (batch(lengths=torch.tensor([9, 0, 0, 0, 0, 0, 0, 0])), r"is 9 \(feature 'u', bag 0\) but there are 8 ids"),
    (
        batch(lengths=torch.tensor([1, 2, 0, 1, 1, 1, 1, 1]), offsets=torch.arange(9)),
        r"feature 'u', bag 1 has length 2, but its offsets are 1 and 2\. Pass lengths or offsets, not both",
    ),
    (batch(offsets=torch.arange(8), stride=2), r"8 offsets for 8 bags"),
    # ---- variable batch per feature ----
    (
        batch(stride_per_key_per_rank=[[2], [2], [3], [1]]),
        r"different numbers of bags \('u' 2, 'v' 2, 'i' 3, 'w' 1\) but the batch has no inverse_indices",
    ),
    (batch(stride_per_key_per_rank=[[2], [2], [3], [2]]), r"8 lengths for 4 features .* of 2, 2, 3, 2 bags"),
    (batch(stride_per_key_per_rank=[[2], [2], [4]]), r"8 lengths for 4 features .* of 2, 2, 4 bags"),
    (batch(stride_per_key_per_rank=[[2], [2], [5], [-1]]), r"8 lengths for 4 features .* of 2, 2, 5, -1 bags"),
    (variable([[0, 2], [0, 1], [2, 1], [0, 0]]), r"of feature 'u' reach from 0 to 2, but it has 2 bags"),
    (variable([[0, 1], [0, 1], [2, 1], [0, -1]]), r"inverse_indices of feature 'w' reach from -1 to 0"),
    (variable([[0, 1], [0, 1], [2, 1], [0, 0]], ["u", "v", "i", "x"]), r"inverse_indices name feature 'w' 0 times"),
    (variable([[0, 1], [0, 1], [2, 1], [0, 0]], ["u", "v", "i", "u"]), r"inverse_indices name feature 'u' 2 times"),
    (variable([[0, 1], [0, 1], [2, 1]]), r"inverse_indices have dtype torch\.int64 and shape \[3, 2\] for 4 feature"),
    (variable([0, 1, 2, 0]), r"inverse_indices have dtype torch\.int64 and shape \[4\]"),
    (variable([[0.0], [1.0], [2.0], [0.0]]), r"inverse_indices have dtype torch\.float32"),
]

WEIGHT_REFUSALS: list[tuple[KeyedJaggedTensor, str]] = [
    (batch(), r"weighted but the batch has no weights.*is_weighted=False"),
    (batch(weights=torch.ones(8, dtype=torch.float64)), r"weights have dtype torch\.float64.*weights\.float\(\)"),
    (batch(weights=torch.ones(8, dtype=torch.int64)), r"weights have dtype torch\.int64"),
    (batch(weights=torch.ones(7)), r"weights have shape \[7\] for 8 ids"),
    (batch(weights=torch.ones(8, 1)), r"weights have shape \[8, 1\] for 8 ids"),
]


@pytest.mark.parametrize(("features", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_refused(features: Any, message: str) -> None:
    with pytest.raises(IdError, match=message):
        check_features(features, TABLES, False, where="here")


@pytest.mark.parametrize(("features", "message"), WEIGHT_REFUSALS, ids=[m for _, m in WEIGHT_REFUSALS])
def test_refused_if_weighted(features: KeyedJaggedTensor, message: str) -> None:
    check_features(features, TABLES, False, where="here")
    with pytest.raises(IdError, match=message):
        check_features(features, TABLES, True, where="here")


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_passes_and_leaves_the_batch_alone(is_weighted: bool, batch_size: int) -> None:
    features = random_batch([*KEYS, "unused"], batch_size, seed=1, is_weighted=is_weighted)
    ids, lengths = features.values().clone(), features.lengths().clone()
    check_features(features, TABLES, is_weighted, where="here")
    assert torch.equal(features.values(), ids)
    assert torch.equal(features.lengths(), lengths)


def test_variable_batches_pass() -> None:
    for index in ([[0, 1], [0, 1], [2, 1], [0, 0]], torch.empty(4, 0, dtype=torch.int32)):
        check_features(variable(index), TABLES, False, where="here")
    check_features(batch(stride_per_key_per_rank=[[2], [2], [2], [2]]), TABLES, False, where="here")
    named = ["w", "other", "i", "v", "u"]  # another order, and further names
    check_features(variable([[0], [99], [2], [1], [1]], named), TABLES, False, where="here")


def test_passes_without_lengths_and_with_int32() -> None:
    check_features(batch(lengths=None, offsets=torch.arange(9)), TABLES, False, where="here")
    check_features(batch(lengths=torch.ones(8, dtype=torch.int32), values=torch.arange(8).int()), TABLES, False, "here")


def test_the_collection_checks_before_it_looks_anything_up() -> None:
    collection = HashEmbeddingBagCollection(tables())
    with pytest.raises(IdError, match=r"^HashEmbeddingBagCollection: lengths add up to 9"):
        collection(batch(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 1, 2])))
