"""`NominalParameter`: costs nothing, carries attributes, and never becomes memory."""

from __future__ import annotations

import copy
import pickle
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridrec.config import HashEmbeddingBagConfig
from hybridrec.errors import ConfigError
from hybridrec.modules.hash_embedding_bag import HashEmbeddingBagCollection
from hybridrec.modules.nominal_parameter import NominalParameter, nominal_parameter
from tests.unit.modules.batches import apply_optimizer_in_backward, random_batch, tables, trainable

MESSAGE = (
    r"was not sharded: DistributedModelParallel got no sharder for 'HashEmbeddingBagCollection' or "
    r"'HashEmbeddingCollection', or an empty plan"
    r".*sharders=get_default_hybrid_sharders\(host_env\) to both the planner .* and DistributedModelParallel"
)
MATERIALISATIONS: list[Callable[[Tensor], Any]] = [
    lambda p: torch.empty_like(p, device="cpu"),
    lambda p: torch.empty_like(p, device=torch.device("cpu")),
    lambda p: torch.zeros_like(p, device="cpu"),
    lambda p: torch.ones_like(p, device="cpu"),
    lambda p: torch.full_like(p, 0.5, device="cpu"),
    lambda p: torch.rand_like(p, device="cpu"),
    lambda p: torch.randn_like(p, device="cpu"),
]


@pytest.mark.parametrize("num_embeddings", [1, 10**12])
@pytest.mark.parametrize("materialise", MATERIALISATIONS)
def test_materialising_is_refused(materialise: Callable[[Tensor], Any], num_embeddings: int) -> None:
    with pytest.raises(ConfigError, match=MESSAGE):
        materialise(nominal_parameter(num_embeddings, 4))


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["itself", "inside a model"])
def test_to_empty_is_refused_and_loses_nothing(wrap: Callable[[nn.Module], nn.Module]) -> None:
    collection = trainable()
    collection(random_batch(("u", "v", "i", "w"), 4, seed=1)).values().sum().backward()
    rows = collection.num_rows()
    with pytest.raises(ConfigError, match=MESSAGE):
        wrap(collection).to_empty(device="cpu")
    assert collection.num_rows() == rows


def test_copying_values_out_is_refused_by_torch() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        nominal_parameter(10, 4).to("cpu")


def test_what_stays_on_meta_is_a_plain_tensor() -> None:
    parameter = nominal_parameter(10**12, 4)
    for tensor in (torch.zeros_like(parameter), parameter.detach(), parameter + 1, torch.empty_like(parameter)):
        assert type(tensor) is Tensor
        assert tensor.device.type == "meta"


@pytest.mark.parametrize(
    "move", [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to("meta")]
)
def test_moving_a_model_keeps_rows(move: Callable[[nn.Module], nn.Module]) -> None:
    collection = trainable(torch.optim.Adagrad, lr=0.1)
    features = random_batch(("u", "v", "i", "w"), 4, seed=1)
    collection(features).values().sum().backward()
    before = collection(features).values().detach()
    move(nn.Sequential(collection, nn.Linear(1, 1)))
    assert torch.equal(collection(features).values(), before)
    weight = collection.embedding_bags["user"].weight
    assert isinstance(weight, NominalParameter)
    assert weight.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"table 'user': its rows are torch.float32, they cannot become {dtype}"):
        nn.Sequential(trainable()).to(dtype)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_attributes_survive(clone: Callable[[Any], Any], optimizer: type) -> None:
    parameter = nominal_parameter(10**12, 4)
    apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.5})
    parameter.note = {"a": [1]}  # type: ignore[attr-defined]
    other = clone(parameter)
    assert type(other) is NominalParameter
    assert other is not parameter
    assert (other.shape, other.requires_grad, other.is_leaf) == (parameter.shape, True, True)
    assert other._optimizer_classes == [optimizer]
    assert other._optimizer_kwargs == [{"lr": 0.5}]
    assert other._optimizer_kwargs[0] is not parameter._optimizer_kwargs[0]
    assert other.note == {"a": [1]}
    assert other._in_backward_optimizers[0].param_groups[0]["params"][0] is other


def test_deepcopy_keeps_what_is_shared_shared() -> None:
    parameter = nominal_parameter(5, 4)
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second


def test_a_frozen_parameter_stays_frozen() -> None:
    parameter = nominal_parameter(5, 4, requires_grad=False)
    assert not copy.deepcopy(parameter).requires_grad
    assert not pickle.loads(pickle.dumps(parameter)).requires_grad


def test_a_trillion_rows_cost_no_memory() -> None:
    random_batch(("t",), 4, seed=1)  # what is allocated once is allocated before measuring
    trainable(torch.optim.Adam, lr=0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    collection = HashEmbeddingBagCollection([HashEmbeddingBagConfig(10**12, 128, "t")])
    apply_optimizer_in_backward(torch.optim.Adam, collection.parameters(), {"lr": 0.1})
    other = pickle.loads(pickle.dumps(copy.deepcopy(collection)))
    other(random_batch(("t",), 4, seed=1)).values().sum().backward()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 16 * 1024
    assert other.embedding_bags["t"].weight.shape == (10**12, 128)


def test_tables_of_one_collection_are_named_in_repr() -> None:
    assert repr(nominal_parameter(10**12, 4)) == "NominalParameter(shape=[1000000000000, 4], requires_grad=True)"
    assert len(list(HashEmbeddingBagCollection(tables()).parameters())) == 3
