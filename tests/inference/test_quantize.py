"""Hashed collections under TorchRec's own steps to a served model, beside its own collections."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.ao.quantization as quant
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import DataType, QuantConfig
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

from hybridrec import ConfigError, HashEmbeddingBagCollection, HashEmbeddingCollection
from hybridrec.inference import (
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
    freeze,
    set_unknown_row,
)
from tests.inference.collections import hostile_batch, jagged, pooled, sequences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
HASHED = {HashEmbeddingBagCollection: QuantHashEmbeddingBagCollection}


class Model(nn.Module):
    """A hashed and a dense collection, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hashed = pooled()
        self.plain = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "plain", feature_names=["small"])])
        self.over = nn.Linear(20, 1)

    def forward(self, features: KeyedJaggedTensor, small: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([self.hashed(features).values(), self.plain(small).values()], 1))


def qconfig(dtype: torch.dtype, output: torch.dtype = torch.float32, **per_table: torch.dtype) -> QuantConfig:
    observer = quant.PlaceholderObserver
    return QuantConfig(
        activation=observer.with_args(dtype=output),
        weight=observer.with_args(dtype=dtype),
        per_table_weight_dtype=per_table or None,
    )


def small_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["small"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("torch_dtype", "dtype"),
    [
        (torch.qint8, "int8"),
        (torch.int8, "int8"),
        (torch.quint4x2, "int4"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
    ],
)
def test_quantize_dynamic_makes_what_freeze_makes(torch_dtype: torch.dtype, dtype: str) -> None:
    model = Model()
    quantised = quant.quantize_dynamic(model, {HashEmbeddingBagCollection: qconfig(torch_dtype)}, mapping=HASHED)
    assert (
        type(quantised.hashed) is QuantHashEmbeddingBagCollection and type(model.hashed) is HashEmbeddingBagCollection
    )
    want = freeze(model.hashed, dtype=dtype)
    assert torch.equal(quantised.hashed(hostile_batch()).values(), want(hostile_batch()).values())
    assert quantised.hashed.report == want.report
    assert torch.allclose(quantised(hostile_batch(), small_batch()), model(hostile_batch(), small_batch()), atol=0.2)


def test_quantize_embeddings_takes_hashed_collections_as_additional_ones() -> None:
    model = Model()
    quantised = quantize_embeddings(
        model,
        torch.qint8,
        inplace=False,
        additional_qconfig_spec_keys=[HashEmbeddingBagCollection],
        additional_mapping=dict[type[nn.Module], type[nn.Module]](HASHED),
    )
    assert type(quantised.hashed) is QuantHashEmbeddingBagCollection
    assert type(quantised.plain) is QuantEmbeddingBagCollection
    want = freeze(model.hashed, dtype="int8")
    assert torch.equal(quantised.hashed(hostile_batch()).values(), want(hostile_batch()).values())


def test_dtypes_of_tables_output_dtype_and_unknown_rows_are_honoured() -> None:
    model = set_unknown_row(Model(), "zero")
    config = qconfig(torch.qint8, torch.float16, word=torch.float32, user=torch.quint4x2)
    hashed = quant.quantize_dynamic(model, {HashEmbeddingBagCollection: config}, mapping=HASHED).hashed
    types = [c.data_type for c in hashed.embedding_bag_configs()]
    assert types == [DataType.INT4, DataType.INT8, DataType.FP32]
    want = freeze(model.hashed, dtype={"user": "int4", "item": "int8", "word": "fp32"}, unknown_row="zero")
    got = hashed(hostile_batch()).values()
    assert got.dtype == torch.float16 and torch.equal(got, want(hostile_batch()).values().half())


def test_sequences_are_quantised_too() -> None:
    model = nn.ModuleDict({"sequences": sequences()})
    mapping = {HashEmbeddingCollection: QuantHashEmbeddingCollection}
    spec = {HashEmbeddingCollection: qconfig(torch.qint8)}
    quantised = quant.quantize_dynamic(model, spec, mapping=mapping)["sequences"]
    want = jagged(sequences()(hostile_batch()))
    assert type(quantised) is QuantHashEmbeddingCollection
    assert [c.data_type for c in quantised.embedding_configs()] == [DataType.INT8] * 2
    assert 0 < (jagged(quantised(hostile_batch())) - want).abs().max() < 1e-2


def test_what_cannot_be_honoured_is_refused() -> None:
    model = Model()
    for config, message in (
        (qconfig(torch.quint2x4), "weight dtype torch.quint2x4 of table 'user' is not available"),
        (qconfig(torch.int8, torch.int8), "activation dtype torch.int8 is not available"),
    ):
        with pytest.raises(ConfigError, match=message):
            quant.quantize_dynamic(model, {HashEmbeddingBagCollection: config}, mapping=HASHED)
    with pytest.raises(ConfigError, match="unknown_row='one'"):
        set_unknown_row(model, "one")
    with pytest.raises(ConfigError, match="Linear has no hashed collection"):
        set_unknown_row(nn.Linear(1, 1), "zero")


@pytest.fixture
def devices_propagate() -> Iterator[None]:
    """Without it TorchRec's inference sharding asks for CUDA."""
    before = get_propogate_device()
    set_propogate_device(True)
    yield
    set_propogate_device(before)


@pytest.mark.usefixtures("devices_propagate")
def test_torchrecs_inference_steps_leave_frozen_tables_whole() -> None:
    model = Model()
    mapping = {
        torch.typename(HashEmbeddingBagCollection): QuantHashEmbeddingBagCollection,
        torch.typename(EmbeddingBagCollection): QuantEmbeddingBagCollection,
    }
    quantised = quantize_inference_model(copy.deepcopy(model), quantization_mapping=mapping)
    want = quantised.hashed(hostile_batch()).values()
    assert torch.equal(want, freeze(model.hashed, dtype="int8")(hostile_batch()).values())
    sharded, _ = shard_quant_model(quantised, world_size=1, compute_device="cpu", sharding_device="cpu")
    assert type(sharded.hashed) is QuantHashEmbeddingBagCollection
    assert type(sharded.plain).__name__ == "ShardedQuantEmbeddingBagCollection"
    assert torch.equal(sharded.hashed(hostile_batch()).values(), want)
