"""What must hold bit for bit, and the edges: nothing in a batch, one update a lookup, growing, reading."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridrec._compat.fbgemm import HAS_PREALLOCATED_HOST_BUFFERS
from hybridrec.errors import StateError
from hybridrec.kernels import torch_kernel
from hybridrec.kernels.base import KernelSpec
from hybridrec.kernels.optimizer import OptimizerKind
from tests.unit.kernels.kernel_cases import (
    KERNELS,
    PAIRS,
    Batch,
    all_states,
    everything,
    make_kernel,
    make_spec,
    random_batch,
    train,
)

pair = pytest.mark.parametrize(("kernel_name", "kind"), PAIRS)
weighted = pytest.mark.parametrize("is_weighted", [False, True])
each_kernel = pytest.mark.parametrize("kernel_name", ["torch", "tbe"])


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def large_batches(spec: KernelSpec, count: int = 3) -> list[Batch]:
    """Large enough for torch to use more than one thread."""
    return [random_batch(spec, seed=s, num_bags=600, max_length=9) for s in range(count)]


@weighted
@pair
def test_threads_and_repeats_give_the_same_bits(kernel_name: str, kind: OptimizerKind, is_weighted: bool) -> None:
    spec = make_spec(kind, (64, 4), num_slots=3000, feature_table=(0, 0, 1), is_weighted=is_weighted)
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        kernel = make_kernel(kernel_name, spec)
        outputs = [train(kernel, batch, step=i + 1) for i, batch in enumerate(large_batches(spec))]
        results.append(outputs + everything(kernel))
    assert equal(results[0], results[1])
    assert equal(results[1], results[2])


@weighted
@pytest.mark.parametrize("dims", [(4,), (8, 64, 8)])
@pair
def test_any_numbering_of_slots_gives_the_same_bits(
    kernel_name: str, kind: OptimizerKind, dims: tuple[int, ...], is_weighted: bool
) -> None:
    # Another cache size or another history of evictions is another numbering.
    spec = make_spec(kind, dims, num_slots=500, is_weighted=is_weighted)
    larger = make_spec(kind, dims, num_slots=2000, is_weighted=is_weighted)
    kernel, relabelled = make_kernel(kernel_name, spec), make_kernel(kernel_name, larger)
    place = torch.randperm(2000, generator=torch.Generator().manual_seed(5))[:500]
    for t in range(len(dims)):
        relabelled.slot_arrays(t).weights[place] = kernel.slot_arrays(t).weights
    for step in range(1, 6):
        batch = random_batch(spec, seed=step, num_bags=300)
        moved = Batch(place[batch.slots], batch.offsets, batch.weights, batch.grad)
        assert torch.equal(train(kernel, batch, step=step), train(relabelled, moved, step=step))
    for t in range(len(dims)):
        before, after = kernel.slot_arrays(t), relabelled.slot_arrays(t)
        assert torch.equal(before.weights, after.weights[place])
        for old, new in zip(all_states(before), all_states(after), strict=True):
            assert torch.equal(old, new[place])


@pytest.mark.parametrize("dim", [1, 3, 5, 17, 64])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_row_does_not_depend_on_its_neighbours(kind: OptimizerKind, dim: int) -> None:
    # One kernel gets all rows in one batch, the other one row a batch.
    spec = make_spec(kind, (dim,), num_slots=37)
    together, alone = make_kernel("torch", spec), make_kernel("torch", spec)
    for step in (1, 2):
        grad = torch.randn((37, dim), generator=torch.Generator().manual_seed(step))
        train(together, Batch(torch.arange(37), torch.arange(38), None, grad), step=step)
        for slot in range(37):
            train(alone, Batch(torch.tensor([slot]), torch.tensor([0, 1]), None, grad[slot : slot + 1]), step=step)
    assert equal(everything(together), everything(alone))


@pytest.mark.parametrize(
    ("kernel_name", "dim"),
    [("torch", 1), ("torch", 3), ("torch", 8), ("torch", 64), ("tbe", 4), ("tbe", 8), ("tbe", 64)],
)
@weighted
def test_rows_are_added_in_the_order_of_positions(kernel_name: str, dim: int, is_weighted: bool) -> None:
    # Values of very different size: any other order of additions gives other bits.
    spec = make_spec("sgd", (dim,), num_slots=50, is_weighted=is_weighted, learning_rate=1.0)
    kernel = make_kernel(kernel_name, spec)
    rows = kernel.slot_arrays(0).weights
    generator = torch.Generator().manual_seed(1)
    rows.mul_(10.0 ** torch.randint(-4, 5, (50, 1), generator=generator))
    slots = torch.randperm(50, generator=generator)
    weights = torch.full((50,), 0.5) if is_weighted else None  # a power of two: no rounding of its own
    output, _ = kernel.forward(slots, torch.tensor([0, 50]), weights)
    total = torch.zeros(dim)
    for slot in slots:
        total = total + rows[slot] * (0.5 if is_weighted else 1.0)
    assert torch.equal(output[0], total)
    backwards = kernel.forward(slots.flip(0), torch.tensor([0, 50]), weights)[0]
    assert not torch.equal(backwards[0], total)


@weighted
@pytest.mark.parametrize("num_bags", [30, 3000])
@each_kernel
def test_gradients_are_added_in_the_order_of_feature_bag_position(
    kernel_name: str, num_bags: int, is_weighted: bool
) -> None:
    torch.set_num_threads(2)
    spec = make_spec("sgd", (4,), num_slots=2, feature_table=(0, 0), is_weighted=is_weighted, learning_rate=1.0)
    kernel = make_kernel(kernel_name, spec)
    kernel.slot_arrays(0).weights.zero_()
    generator = torch.Generator().manual_seed(2)
    # Values of very different size: any other order of additions gives other bits.
    sizes = 10.0 ** torch.randint(-4, 5, (num_bags, 2), generator=generator)
    grad = torch.randn((num_bags, 8), generator=generator) * sizes.repeat_interleave(4, 1)
    weight = 0.5 if is_weighted else 1.0  # a power of two: no rounding of its own
    batch = Batch(
        torch.ones(2 * num_bags, dtype=torch.int64),
        torch.arange(2 * num_bags + 1),
        torch.full((2 * num_bags,), weight) if is_weighted else None,
        grad,
    )
    train(kernel, batch, step=1)
    total, backwards = torch.zeros(4), torch.zeros(4)
    occurrences = list(grad.view(num_bags, 2, 4).transpose(0, 1).reshape(-1, 4) * weight)
    for occurrence, last_first in zip(occurrences, reversed(occurrences), strict=True):
        total, backwards = total + occurrence, backwards + last_first
    assert torch.equal(kernel.slot_arrays(0).weights[1], -total)
    assert not torch.equal(total, backwards)


@pair
def test_rows_outside_the_batch_do_not_change(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8, 4), num_slots=40)
    kernel = make_kernel(kernel_name, spec)
    train(kernel, random_batch(spec, seed=1), step=1)  # so that Adam's states of all are not 0
    before = everything(kernel)
    train(kernel, random_batch(spec, seed=2, num_used_slots=11), step=2)
    after = everything(kernel)
    assert all(torch.equal(b[11:], a[11:]) for b, a in zip(before, after, strict=True))
    assert not any(torch.equal(b[:11], a[:11]) for b, a in zip(before, after, strict=True))


@pair
@pytest.mark.parametrize("num_bags", [0, 3])
def test_a_batch_without_ids_is_zero_and_changes_nothing(kernel_name: str, kind: OptimizerKind, num_bags: int) -> None:
    spec = make_spec(kind, (8, 4))
    kernel = make_kernel(kernel_name, spec)
    before = everything(kernel)
    batch = Batch(
        torch.empty(0, dtype=torch.int64),
        torch.zeros(2 * num_bags + 1, dtype=torch.int64),
        None,
        torch.ones((num_bags, 12)),
    )
    output = train(kernel, batch, step=1)
    assert torch.equal(output, torch.zeros((num_bags, 12)))
    assert equal(everything(kernel), before)


@each_kernel
def test_empty_bags_and_empty_features(kernel_name: str) -> None:
    spec = make_spec("sgd", (8, 4, 8), learning_rate=1.0)
    kernel = make_kernel(kernel_name, spec)
    rows, before = kernel.slot_arrays(2).weights.clone(), everything(kernel)
    # Features 0 and 1 have no ids; of feature 2, the bags 0 and 2 are empty.
    batch = Batch(torch.tensor([6, 7]), torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 2, 2]), None, torch.ones((3, 20)))
    output = train(kernel, batch, step=1)
    expected = torch.zeros((3, 20))
    expected[1, 12:] = rows[6] + rows[7]
    assert torch.equal(output, expected)
    before[2][6:8] -= 1.0
    assert equal(everything(kernel), before)


@pair
def test_a_gradient_that_is_not_contiguous(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8, 4))
    first, second = make_kernel(kernel_name, spec), make_kernel(kernel_name, spec)
    batch = random_batch(spec, seed=1)
    wide = torch.cat([batch.grad, batch.grad], 1)
    train(first, batch, step=1)
    train(second, Batch(batch.slots, batch.offsets, None, wide[:, 12:]), step=1)
    assert equal(everything(first), everything(second))


@each_kernel
def test_output_has_no_graph_and_inputs_stay_as_they_are(kernel_name: str) -> None:
    spec = make_spec("sgd", (8,), is_weighted=True)
    kernel = make_kernel(kernel_name, spec)
    batch = random_batch(spec, seed=1)
    assert batch.weights is not None
    copies = [x.clone() for x in (batch.slots, batch.offsets, batch.weights, batch.grad)]
    weights = batch.weights.requires_grad_()
    output = train(kernel, batch, step=1)
    assert not output.requires_grad
    assert weights.grad is None
    assert equal([batch.slots, batch.offsets, weights.detach(), batch.grad], copies)


@pair
def test_two_forwards_then_two_backwards_with_a_row_written_in_between(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8,))
    kernel, expected = make_kernel(kernel_name, spec), make_kernel(kernel_name, spec)
    first, second = random_batch(spec, seed=1, num_used_slots=20), random_batch(spec, seed=2, num_used_slots=20)
    _, saved_first = kernel.forward(first.slots, first.offsets, None)
    _, saved_second = kernel.forward(second.slots, second.offsets, None)
    kernel.slot_arrays(0).weights[30] = 3.0  # a swap while both are in flight
    kernel.backward(saved_first, first.grad, step=1)
    kernel.backward(saved_second, second.grad, step=2)
    expected.slot_arrays(0).weights[30] = 3.0
    train(expected, first, step=1)
    train(expected, second, step=2)
    assert equal(everything(kernel), everything(expected))


@each_kernel
def test_a_second_backward_is_refused_and_changes_nothing(kernel_name: str) -> None:
    spec = make_spec("adagrad", (8,))
    kernel = make_kernel(kernel_name, spec)
    batch = random_batch(spec, seed=1)
    _, saved = kernel.forward(batch.slots, batch.offsets, None)
    kernel.backward(saved, batch.grad, step=1)
    before = everything(kernel)
    with pytest.raises(StateError, match="second backward through one lookup"):
        kernel.backward(saved, batch.grad, step=2)
    assert equal(everything(kernel), before)


@pair
def test_resize_keeps_rows_states_and_learning_rate(kernel_name: str, kind: OptimizerKind) -> None:
    spec = make_spec(kind, (8, 4, 8), num_slots=20)
    kernel, expected = make_kernel(kernel_name, spec), make_kernel(kernel_name, spec)
    for k in (kernel, expected):
        train(k, random_batch(spec, seed=1), step=1)
        k.learning_rate = 0.25
    kernel.resize([20, 50, 31])
    assert [table.num_slots for table in kernel.spec.tables] == [20, 50, 31]
    assert [kernel.slot_arrays(t).weights.shape[0] for t in range(3)] == [20, 50, 31]
    assert kernel.learning_rate == 0.25
    assert all(torch.equal(a[:20], b) for a, b in zip(everything(kernel), everything(expected), strict=True))
    batch = random_batch(spec, seed=2)
    train(kernel, batch, step=2)
    train(expected, batch, step=2)
    assert all(torch.equal(a[:20], b) for a, b in zip(everything(kernel), everything(expected), strict=True))


@weighted
@pair
def test_reader_looks_up_the_same_bits_and_has_no_state(
    kernel_name: str, kind: OptimizerKind, is_weighted: bool
) -> None:
    spec = make_spec(kind, (8, 4), num_slots=40, is_weighted=is_weighted)
    kernel = make_kernel(kernel_name, spec)
    reader = kernel.reader([10, 10])
    for t in range(2):
        reader.slot_arrays(t).weights.copy_(kernel.slot_arrays(t).weights[:10])
        assert all_states(reader.slot_arrays(t)) == ()
    batch = random_batch(spec, seed=1, num_used_slots=10)
    output, saved = reader.forward(batch.slots, batch.offsets, batch.weights)
    assert type(reader) is type(kernel)
    assert saved is None
    assert torch.equal(output, kernel.forward(batch.slots, batch.offsets, batch.weights)[0])


@each_kernel
def test_tables_without_slots_may_grow_later(kernel_name: str) -> None:
    spec = make_spec("adagrad", (8, 8), num_slots=0)
    kernel = make_kernel(kernel_name, spec)
    assert kernel.slot_arrays(0).weights.shape == (0, 8)
    kernel.resize([3, 4])
    kernel.slot_arrays(1).weights[3] = 2.0
    output, _ = kernel.forward(torch.tensor([3]), torch.tensor([0, 0, 1]), None)
    assert torch.equal(output, torch.tensor([[0.0] * 8 + [2.0] * 8]))


@each_kernel
def test_slots_start_as_zeros_on_a_cache_line(kernel_name: str) -> None:
    arrays = KERNELS[kernel_name](make_spec("adagrad", (8,))).slot_arrays(0)
    assert all(not x.any() for x in (arrays.weights, *all_states(arrays)))
    assert arrays.weights.data_ptr() % 64 == 0


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@weighted
def test_the_way_of_devices_gives_the_bits_of_the_host(
    kind: OptimizerKind, is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(kind, (8, 3), feature_table=(0, 0, 1), is_weighted=is_weighted)
    host, device = make_kernel("torch", spec), make_kernel("torch", spec)
    monkeypatch.setattr(device, "_is_on_host", False)
    for step in range(1, 6):
        batch = random_batch(spec, seed=step)
        assert torch.equal(train(host, batch, step=step), train(device, batch, step=step))
    assert equal(everything(host), everything(device))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_the_size_of_a_block_changes_no_bit(kind: OptimizerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(kind, (8,), num_slots=200, is_weighted=True)
    results = []
    for floats in (1, 24, 1 << 20):
        monkeypatch.setattr(torch_kernel, "_BLOCK_FLOATS", floats)
        kernel = make_kernel("torch", spec)
        for step in (1, 2):
            train(kernel, random_batch(spec, seed=step, num_bags=50), step=step)
        results.append(everything(kernel))
    assert equal(results[0], results[1])
    assert equal(results[1], results[2])


@each_kernel
def test_slots_take_no_memory_before_they_are_used(kernel_name: str) -> None:
    if kernel_name == "tbe" and not HAS_PREALLOCATED_HOST_BUFFERS:
        pytest.skip("this FBGEMM writes all slots when it makes them; memory of ours it takes from 1.8 on")
    mib = 1 << 20
    before = _resident_bytes()
    kernel = KERNELS[kernel_name](make_spec("adagrad", (64, 64), num_slots=512 * 1024))
    assert kernel.slot_arrays(1).weights.nbytes == 128 * mib
    assert _resident_bytes() - before < 16 * mib
    kernel.slot_arrays(1).weights.fill_(1.0)
    assert _resident_bytes() - before > 96 * mib


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@each_kernel
def test_a_table_without_slots_does_not_disturb_its_neighbour(kernel_name: str) -> None:
    spec = make_spec("adagrad", (8, 4, 4), num_slots=5)
    empty = replace(spec, tables=(replace(spec.tables[0], num_slots=0), *spec.tables[1:]))
    kernel, expected = make_kernel(kernel_name, empty), make_kernel(kernel_name, spec)
    for t in (1, 2):
        kernel.slot_arrays(t).weights.copy_(expected.slot_arrays(t).weights)
    grad = torch.randn((1, 16), generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.tensor([4, 2, 4]), torch.tensor([0, 0, 2, 3]), None, grad)
    assert torch.equal(train(kernel, batch, step=1), train(expected, batch, step=1))
    for t in (1, 2):
        assert torch.equal(kernel.slot_arrays(t).weights, expected.slot_arrays(t).weights)
