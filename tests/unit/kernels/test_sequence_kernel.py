"""`SequenceKernel` against the kernel inside, table by table."""

from __future__ import annotations

import pytest
import torch

from hybridrec.backend import HOST
from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.factory import make_kernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.sequence_kernel import SequenceKernel

SIZES = (5, 3, 4)
FEATURE_TABLE = (0, 0, 1, 2)


def spec_of(optimizer: OptimizerKind, sizes: tuple[int, ...], features: tuple[int, ...], **changes: bool) -> KernelSpec:
    return KernelSpec(
        tables=tuple(KernelTable(name=f"t{i}", dim=4, num_slots=n) for i, n in enumerate(sizes)),
        feature_table=features,
        optimizer=OptimizerSpec(kind=optimizer, learning_rate=0.1),
        is_weighted=False,
        device=HOST,
        **changes,
    )


def fill(kernel: LookupKernel, table: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    arrays = kernel.slot_arrays(table)
    arrays.weights.copy_(torch.randn(arrays.weights.shape, generator=generator))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_rows_and_updates_are_those_of_one_kernel_a_table(optimizer: OptimizerKind) -> None:
    """Also after slots grew, and with a learning rate that changed before."""
    kernel = make_kernel(spec_of(optimizer, SIZES, FEATURE_TABLE, is_pooled=False))
    assert isinstance(kernel, SequenceKernel)
    singles = [make_kernel(spec_of(optimizer, (n,), (0,))) for n in SIZES]
    for t, single in enumerate(singles):
        fill(kernel, t, seed=t)
        fill(single, 0, seed=t)
    # three samples; lengths of feature after feature
    lengths = torch.tensor([2, 0, 1, 1, 0, 0, 3, 0, 1, 0, 2, 0])
    slots = torch.tensor([4, 4, 0, 4, 2, 2, 1, 2, 3, 3])
    counts = [4, 4, 2]  # ids of each table
    grad = torch.randn(len(slots), 4, generator=torch.Generator().manual_seed(9))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    for step in (1, 2):
        if step == 2:
            for k in (kernel, *singles):
                k.learning_rate = 0.05
            kernel.resize([6, 3, 9])
            assert kernel.learning_rate == 0.05
        rows, saved = kernel.forward(slots, offsets, None)
        kernel.backward(saved, grad, step=step)
        for t, (single, ids, part, gradient) in enumerate(
            zip(singles, slots.split(counts), rows.split(counts), grad.split(counts), strict=True)
        ):
            expected, kept = single.forward(ids, torch.arange(len(ids) + 1), None)
            assert torch.equal(part, expected)
            single.backward(kept, gradient, step=step)
            ours, theirs = kernel.slot_arrays(t), single.slot_arrays(0)
            for mine, its in zip(
                (ours.weights, *ours.row_states, *ours.row_wise_states),
                (theirs.weights, *theirs.row_states, *theirs.row_wise_states),
                strict=True,
            ):
                assert torch.equal(mine[: SIZES[t]], its)
    reader = kernel.reader([6, 3, 9])
    assert type(reader._inner) is type(kernel._inner)


def test_without_ids() -> None:
    kernel = make_kernel(spec_of("adagrad", SIZES, FEATURE_TABLE, is_pooled=False))
    for num_samples in (0, 2):
        offsets = torch.zeros(4 * num_samples + 1, dtype=torch.int64)
        rows, saved = kernel.forward(torch.empty(0, dtype=torch.int64), offsets, None)
        assert rows.shape == (0, 4)
        kernel.backward(saved, rows, step=1)
