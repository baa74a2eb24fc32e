"""Frozen tables whose rows had 16 bits: the pools of evaluation, unknown ids included, also scripted and from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from hybridrec import Constant, HashEmbeddingBagConfig, Normal, Uniform
from hybridrec.config import resolve_table
from hybridrec.inference import freeze, load
from hybridrec.inference.initial_rows import initial_rows_of
from hybridrec.modules.hash_table import HashEmbeddingBag
from tests.inference.collections import hostile_batch, pooled

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",  # all of it, in favour of torch.export
    "ignore:TorchScript will treat type annotations:UserWarning",  # of TorchRec's KeyedJaggedTensor
    "ignore:The TorchScript type system doesn't support instance-level annotations:UserWarning",  # the same
)


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_pools_are_those_of_evaluation(tmp_path: Path, data_type: DataType) -> None:
    collection = pooled(data_type=data_type)
    features = hostile_batch()
    expected = collection(features).values()
    plain = pooled()(features).values()
    assert not torch.equal(expected, plain)
    frozen = freeze(collection, tmp_path / "frozen", dtype="fp32")
    scripted = torch.jit.script(freeze(collection, dtype="fp32"))
    for module in (frozen, load(tmp_path / "frozen"), scripted):
        assert torch.equal(module(features).values(), expected)


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
@pytest.mark.parametrize("given", [{"initializer": i} for i in (Uniform(-1, 2), Normal(0, 1), Constant(0.1))] + [{}])
def test_initial_rows_are_those_of_the_table(data_type: DataType, given: dict[str, object]) -> None:
    fields = given or {"init_fn": torch.nn.init.normal_}
    table = resolve_table(HashEmbeddingBagConfig(50, 5, "t", data_type=data_type, feature_names=["f"], **fields))
    ids = torch.tensor([0, -1, 2**63 - 1, -(2**63), *range(50)])
    expected = HashEmbeddingBag(table, torch.device("cpu")).read(ids)
    assert torch.equal(initial_rows_of(table)(ids), expected)
