"""Every kernel agrees with embedding_bag and torch.optim, and with the other kernel, after 200 steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridrec.kernels.optimizer import OptimizerKind
from tests.unit.kernels.kernel_cases import (
    PAIRS,
    Reference,
    all_states,
    make_kernel,
    make_spec,
    random_batch,
    train,
)

STEPS = 200
TOLERANCE = 1e-6


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    difference: Tensor = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-30))


DIMS = {"torch": [(1,), (3,), (64,), (3, 8, 4, 8)], "tbe": [(4,), (64,), (4, 8, 64, 8)]}
CASES = [(kernel, kind, dims) for kernel, kind in PAIRS for dims in DIMS[kernel]]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("kernel_name", "kind", "dims"), CASES)
def test_equals_torch_after_200_steps(
    kernel_name: str, kind: OptimizerKind, dims: tuple[int, ...], is_weighted: bool
) -> None:
    # The first table has two features; a batch repeats slots within and between them.
    spec = make_spec(kind, dims, feature_table=[0, *range(len(dims))], is_weighted=is_weighted)
    kernel = make_kernel(kernel_name, spec)
    reference = Reference(kernel)
    for step in range(1, STEPS + 1):
        batch = random_batch(spec, seed=step)
        output = train(kernel, batch, step=step)
        expected = reference.train(batch)
        assert relative_error(output, expected) < TOLERANCE, f"output of step {step}"
    for t in range(len(dims)):
        arrays = kernel.slot_arrays(t)
        assert relative_error(arrays.weights, reference.rows[t].detach()) < TOLERANCE
        for state, actual in zip(spec.optimizer.row_states(), all_states(arrays), strict=True):
            expected = reference.optimizers[t].state[reference.rows[t]][state.name].view(actual.shape)
            assert relative_error(actual, expected) < TOLERANCE, state.name


@pytest.mark.parametrize(
    ("kernel_name", "kind", "more"),
    [
        ("torch", "sgd", {"weight_decay": 0.1}),
        ("torch", "adagrad", {"eps": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
        ("torch", "rowwise_adagrad", {"eps": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
        ("torch", "adam", {"eps": 0.1, "beta1": 0.5, "beta2": 0.7, "weight_decay": 0.1}),
        ("torch", "adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("torch", "sgd", {"max_gradient": 0.25}),
        ("tbe", "sgd", {"max_gradient": 0.25}),
        ("tbe", "adagrad", {"max_gradient": 0.25}),
        ("tbe", "adagrad", {"eps": 0.1, "initial_accumulator_value": 0.5}),
        ("tbe", "rowwise_adagrad", {"eps": 0.1, "initial_accumulator_value": 0.5}),
    ],
)
def test_every_argument_is_honoured(kernel_name: str, kind: OptimizerKind, more: dict[str, float]) -> None:
    spec = make_spec(kind, (8,), more=more)
    kernel = make_kernel(kernel_name, spec)
    reference = Reference(kernel)
    without = {name: make_kernel(kernel_name, make_spec(kind, (8,), more=_all_but(more, name))) for name in more}
    for step in range(1, 21):
        batch = random_batch(spec, seed=step)
        train(kernel, batch, step=step)
        reference.train(batch)
        for other in without.values():
            train(other, batch, step=step)
    assert relative_error(kernel.slot_arrays(0).weights, reference.rows[0].detach()) < TOLERANCE
    for name, other in without.items():
        # The argument matters here: the test would notice if it was dropped.
        assert relative_error(other.slot_arrays(0).weights, reference.rows[0].detach()) > 1e-4, name


def _all_but(arguments: dict[str, float], name: str) -> dict[str, float]:
    return {k: v for k, v in arguments.items() if k != name}


@pytest.mark.parametrize(("kernel_name", "kind"), PAIRS)
def test_learning_rate_changes_midway(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8,), learning_rate=0.5)
    kernel = make_kernel(kernel_name, spec)
    reference = Reference(kernel)
    for step in range(1, 41):
        if step == 20:
            kernel.learning_rate = 0.01
            assert kernel.learning_rate == 0.01
            reference.set_learning_rate(0.01)
        batch = random_batch(spec, seed=step)
        train(kernel, batch, step=step)
        reference.train(batch)
    assert relative_error(kernel.slot_arrays(0).weights, reference.rows[0].detach()) < TOLERANCE


@pytest.mark.parametrize(("kernel_name", "kind"), PAIRS)
def test_learning_rate_is_that_of_the_forward(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8,))
    kernel, expected = make_kernel(kernel_name, spec), make_kernel(kernel_name, spec)
    batch = random_batch(spec, seed=1)
    output, saved = kernel.forward(batch.slots, batch.offsets, batch.weights)
    kernel.learning_rate = 7.0
    kernel.backward(saved, batch.grad, step=1)
    train(expected, batch, step=1)
    assert torch.equal(kernel.slot_arrays(0).weights, expected.slot_arrays(0).weights)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_kernels_agree(kind: OptimizerKind, is_weighted: bool) -> None:
    spec = make_spec(kind, (8, 64), feature_table=(0, 0, 1), is_weighted=is_weighted)
    ours, fbgemm = make_kernel("torch", spec), make_kernel("tbe", spec)
    for step in range(1, STEPS + 1):
        batch = random_batch(spec, seed=step)
        assert relative_error(train(ours, batch, step=step), train(fbgemm, batch, step=step)) < TOLERANCE
    for t in range(2):
        assert relative_error(ours.slot_arrays(t).weights, fbgemm.slot_arrays(t).weights) < TOLERANCE


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("kernel_name", "kind"), PAIRS)
def test_a_slot_that_occurs_1000_times_is_stepped_once(
    kernel_name: str, kind: OptimizerKind, is_weighted: bool
) -> None:
    spec = make_spec(kind, (4,), num_slots=3, feature_table=(0, 0), is_weighted=is_weighted)
    kernel = make_kernel(kernel_name, spec)
    reference = Reference(kernel)
    batch = random_batch(spec, seed=3, num_bags=400, max_length=5, num_used_slots=2)
    assert batch.slots.shape[0] > 1000
    train(kernel, batch, step=1)
    reference.train(batch)
    assert relative_error(kernel.slot_arrays(0).weights, reference.rows[0].detach()) < TOLERANCE
