"""Rows of 16 bits: float32 arithmetic on what they hold, one rounding a step, in kernels and unsharded collections."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import SGD
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec import ConfigError, HashEmbeddingBagCollection, HashEmbeddingBagConfig, Uniform
from hybridrec.backend import HOST
from hybridrec.kernels.factory import group_tables, kernel_choice
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec, refuse_stochastic_rounding
from hybridrec.kernels.torch_kernel import TorchKernel
from hybridrec.modules.nominal_parameter import nominal_parameter
from hybridrec.row_type import RowType
from tests.unit.kernels.kernel_cases import Batch, Reference, all_states, make_spec, random_batch, train
from tests.unit.modules.batches import apply_optimizer_in_backward

HALVES = [RowType.BFLOAT16, RowType.FLOAT16]
KINDS: list[OptimizerKind] = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
DATA_TYPES = {RowType.BFLOAT16: DataType.BF16, RowType.FLOAT16: DataType.FP16}


def make_kernel(kind: OptimizerKind, dims: tuple[int, ...], row_type: RowType, **fields: object) -> TorchKernel:
    """Rows are random, and those of 16 bits the same, rounded."""
    spec = replace(make_spec(kind, dims, feature_table=[0, *range(len(dims))], **fields), row_type=row_type)
    kernel = TorchKernel(spec)
    generator = torch.Generator().manual_seed(3)
    for t, dim in enumerate(dims):
        arrays = kernel.slot_arrays(t)
        rows = torch.randn((arrays.weights.shape[0], dim), generator=generator).bfloat16().half().float()
        arrays.weights.copy_(row_type.words(rows))
    return kernel


def weights(kernel: TorchKernel, table: int) -> Tensor:
    return kernel.spec.row_type.values(kernel.slot_arrays(table).weights, kernel.spec.tables[table].dim)


@pytest.mark.parametrize("row_type", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_step_is_the_float32_step_rounded(row_type: RowType, kind: OptimizerKind, is_weighted: bool) -> None:
    """Beside a float32 kernel that gets the rounded rows back after every step: the same pools, states and rows."""
    dims = (1, 5, 8)
    half = make_kernel(kind, dims, row_type, is_weighted=is_weighted)
    full = make_kernel(kind, dims, RowType.FLOAT32, is_weighted=is_weighted)
    for step in range(1, 30):
        batch = random_batch(full.spec, seed=step)
        assert torch.equal(train(half, batch, step=step), train(full, batch, step=step))
        for t in range(len(dims)):
            theirs = full.slot_arrays(t)
            assert all(map(torch.equal, all_states(half.slot_arrays(t)), all_states(theirs)))
            assert torch.equal(weights(half, t), theirs.weights.to(row_type.dtype))
            theirs.weights.copy_(weights(half, t))


@pytest.mark.parametrize("row_type", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_optim_with_float32_state_after_200_steps(row_type: RowType, kind: OptimizerKind) -> None:
    """Against a parameter that is rounded after each step of torch.optim in float64: at most one rounding apart a step.

    Where float32 and float64 fall on two sides of a tie, the rows are a unit apart from then on, and their gradients
    here do not depend on them. State is compared as float32.
    """
    kernel = make_kernel(kind, (6,), row_type)
    float32 = make_kernel(kind, (6,), RowType.FLOAT32)
    reference = Reference(float32)
    epsilon = torch.finfo(row_type.dtype).eps
    largest = 0.0
    for step in range(1, 201):
        batch = random_batch(kernel.spec, seed=step)
        train(kernel, batch, step=step)
        reference.train(batch)
        with torch.no_grad():
            reference.rows[0].copy_(reference.rows[0].to(row_type.dtype))
        largest = max(largest, float(reference.rows[0].detach().abs().max()))
    difference = (weights(kernel, 0).double() - reference.rows[0].detach()).abs()
    assert float(difference.max()) <= 2 * epsilon * largest
    assert float((difference > 0).double().mean()) < 0.05
    for state, actual in zip(kernel.spec.optimizer.row_states(), all_states(kernel.slot_arrays(0)), strict=True):
        expected = reference.optimizers[0].state[reference.rows[0]][state.name].view(actual.shape)
        assert actual.dtype == torch.float32
        assert float((actual.double() - expected).abs().max() / expected.abs().max()) < 1e-6


def test_stays_within_the_roundings_of_a_float32_table() -> None:
    half, full = (make_kernel("adagrad", (8,), row_type) for row_type in (RowType.BFLOAT16, RowType.FLOAT32))
    for step in range(1, 101):
        batch = random_batch(full.spec, seed=step)
        train(half, batch, step=step)
        train(full, batch, step=step)
    difference = (weights(half, 0).float() - weights(full, 0)).abs().max()
    bound = 100 * torch.finfo(torch.bfloat16).eps / 2 * max(float(weights(full, 0).abs().max()), 4.0)
    assert 0 < float(difference) < bound


def test_which_kernel_and_which_group() -> None:
    spec = OptimizerSpec(kind="sgd")
    choice = kernel_choice(spec, dim=8, is_weighted=False, device=HOST, row_type=RowType.BFLOAT16)
    assert choice.name == "torch" and "float32 rows here, not torch.bfloat16" in choice.reason
    assert kernel_choice(spec, dim=8, is_weighted=False, device=HOST).name == "tbe"
    groups = group_tables(
        [*HALVES, RowType.FLOAT32, *HALVES],
        dim=lambda _: 8,
        optimizer=lambda _: spec,
        name=lambda _: "torch",
        row_type=lambda t: t,
    )
    assert groups == [[t, t] for t in HALVES] + [[RowType.FLOAT32]]


# ---- the unsharded collection ------------------------------------------------------------------------------------


def collection(data_type: DataType, dim: int = 5) -> HashEmbeddingBagCollection:
    config = HashEmbeddingBagConfig(
        50, dim, "t", data_type=data_type, feature_names=["f"], initializer=Uniform(-0.25, 0.25)
    )
    module = HashEmbeddingBagCollection([config])
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.05, "eps": 1e-8})
    return module


def batch_of(seed: int) -> tuple[KeyedJaggedTensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (6,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    grad = torch.randn((6, 5), generator=generator)
    return KeyedJaggedTensor(["f"], ids, lengths=lengths), Batch(ids, offsets, None, grad)


@pytest.mark.parametrize("row_type", HALVES)
def test_unsharded_trains_the_bits_of_the_kernel(row_type: RowType) -> None:
    module = collection(DATA_TYPES[row_type])
    kernel = TorchKernel(replace(make_spec("adagrad", (5,), num_slots=9), row_type=row_type))
    start = module.bag_of("t").read(torch.arange(9))
    assert torch.equal(start, start.to(row_type.dtype).float())
    kernel.slot_arrays(0).weights.copy_(row_type.words(start))
    for step in range(1, 20):
        features, batch = batch_of(step)
        values = module(features).values()
        assert values.dtype == torch.float32
        assert torch.equal(values, train(kernel, batch, step=step))
        values.backward(batch.grad)
    rows = module.export_rows("t")
    for chunk in rows:
        assert chunk.weights_ND.dtype == row_type.dtype and chunk.states["sum"].dtype == torch.float32
        assert torch.equal(chunk.weights_ND, weights(kernel, 0)[chunk.ids_N])
        assert torch.equal(chunk.states["sum"], kernel.slot_arrays(0).row_states[0][chunk.ids_N])


def test_unsharded_rows_keep_their_type() -> None:
    module = collection(DataType.BF16)
    assert module.bag_of("t").weight.dtype == torch.bfloat16
    features, _ = batch_of(1)
    module(features).values().sum().backward()
    again = collection(DataType.BF16)
    again.load_state_dict(copy.deepcopy(module.state_dict()), strict=False)
    assert torch.equal(again(features).values(), module(features).values())
    with pytest.raises(
        ConfigError, match=r"rows in the state_dict are torch.bfloat16, those of the table torch.float32"
    ):
        collection(DataType.FP32).load_state_dict(module.state_dict(), strict=False)
    with pytest.raises(ConfigError, match=r"'t': its rows are torch.bfloat16, they cannot become torch.float32"):
        module.float()


def test_stochastic_rounding_is_refused_where_it_means_something() -> None:
    features, _ = batch_of(1)
    config = HashEmbeddingBagConfig(50, 5, "t", data_type=DataType.FP16, feature_names=["f"])
    module = HashEmbeddingBagCollection([config])
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1, "stochastic_rounding": True})
    with pytest.raises(ConfigError, match=r"'t': stochastic_rounding=True is not available"):
        module(features).values().sum().backward()
    assert module.num_rows() == {"t": 0}
    for arguments, row_type in (({"stochastic_rounding": True}, RowType.FLOAT32), ({}, RowType.BFLOAT16)):
        refuse_stochastic_rounding(arguments, row_type, table="t")
    refuse_stochastic_rounding({"stochastic_rounding": False}, RowType.FLOAT16, table="t")


def test_nominal_parameters_have_the_type() -> None:
    parameter = nominal_parameter(10, 4, dtype=torch.float16)
    assert parameter.dtype == copy.deepcopy(parameter).dtype == torch.float16
    assert parameter.__reduce_ex__(2)[0](*parameter.__reduce_ex__(2)[1]).dtype == torch.float16
