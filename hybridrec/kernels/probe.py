"""Does FBGEMM's kernel compute on a device what it should? Tried with known values before rows are trained with it.

A device's library may lack an operator, register one that raises, or one that is wrong. Training would end in the
middle, or go on silently wrong. So a kernel that is on offer does a few small steps, with rows that occur more than
once, empty bags, tables that share features or differ in dims, and must give

- the numbers of `TorchKernel` in host memory, to 1e-6 of the largest one;
- the same bits twice, and when the rows are in other slots: what a cache may do to them must not show.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.torch_kernel import TorchKernel

TOLERANCE = 1e-6
"""Of the largest value. Sums are exact in float32, so that their order does not count."""
_SLOTS, _BAGS = 48, 5
_REPEATS = 70
"""Of one row in a bag: more than a GPU's warp adds by itself."""
_OTHER_DIM = {8: 16}
"""Dim -> that of a table beside it; else 8."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Two tables; the first has two features. Everything in host memory."""

    rows: Sequence[Tensor]
    """[T] x float32 [slots, D], what rows start from."""
    states: Sequence[Sequence[Tensor]]
    """[T] x the row states, in the kernel's order."""
    slots_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    grad: Tensor


@functools.cache
def why_tbe_fails(kind: OptimizerKind, *, dim: int, is_weighted: bool, device: torch.device) -> str:
    """What is wrong with FBGEMM's kernel for such tables; empty: nothing that was tried. Waits for the device.

    Args:
        kind: Of the optimizer.
        dim: D.
        is_weighted: Whether ids carry weights.
        device: With an index, where devices have one.
    """
    try:
        from hybridrec.kernels.tbe_kernel import TbeKernel

        for other_dim in (dim, _OTHER_DIM.get(dim, 8)):
            spec = _spec(kind, (dim, other_dim), is_weighted, device)
            with torch.inference_mode(False):
                problem = _problem(TbeKernel, spec)
            if problem:
                return f"FBGEMM's {kind!r}, dim {dim}{', weighted' if is_weighted else ''}: {problem}"
    except Exception as e:  # whatever a device's library raises
        lines = str(e).splitlines() or [""]
        return f"FBGEMM's {kind!r}, dim {dim}{', weighted' if is_weighted else ''}: {type(e).__name__}: {lines[0]}"
    return ""


def _problem(tried: type[LookupKernel], spec: KernelSpec) -> str:
    exact = _case(spec, is_exact=True)
    got = _run(tried(spec), exact, steps=1)  # after a step sums are not exact any more
    wanted = _run(TorchKernel(replace(spec, device=HOST)), exact, steps=1)
    for (what, value), (_, expected) in zip(got, wanted, strict=True):
        off = (value - expected).abs().max().item()
        if not off <= TOLERANCE * expected.abs().max().item():
            return f"{what} is off by {off:g}, where the largest value is {expected.abs().max().item():g}"
    case = _case(spec, is_exact=False)
    first = _run(tried(spec), case)
    elsewhere = [torch.arange(_SLOTS - 1, -1, -1) for _ in spec.tables]
    for (what, value), (_, again), (_, moved) in zip(
        first, _run(tried(spec), case), _run(tried(spec), case, elsewhere), strict=True
    ):
        if not torch.equal(value, again):
            return f"{what} has other bits the second time"
        if not torch.equal(value, moved):
            return f"{what} has other bits when its rows are in other slots"
    return ""


def _spec(kind: OptimizerKind, dims: Sequence[int], is_weighted: bool, device: torch.device) -> KernelSpec:
    return KernelSpec(
        tables=tuple(KernelTable(name=f"probe{t}", dim=dim, num_slots=_SLOTS) for t, dim in enumerate(dims)),
        feature_table=(0, 0, 1),
        optimizer=OptimizerSpec(kind=kind, learning_rate=0.25),
        is_weighted=is_weighted,
        device=device,
    )


def _case(spec: KernelSpec, *, is_exact: bool) -> _Case:
    """Positive values, so that nothing cancels out; with ``is_exact`` eighths, whose sums are exact."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        if is_exact:
            return torch.randint(1, 9, shape, generator=generator) / 8
        return torch.rand(shape, generator=generator) + 0.1

    lengths = torch.randint(1, 6, (len(spec.feature_table), _BAGS), generator=generator)
    lengths[:, 2] = 0
    lengths[1, 3] = _REPEATS
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    slots_N = torch.randint(0, _SLOTS, (int(offsets[-1]),), generator=generator)
    repeated = int(offsets[_BAGS + 3])
    slots_N[repeated : repeated + _REPEATS] = slots_N[0]  # of the first feature, whose table it shares
    dims = [table.dim for table in spec.tables]
    return _Case(
        rows=[values(_SLOTS, dim) for dim in dims],
        states=[
            [values(_SLOTS) if state.is_row_wise else values(_SLOTS, dim) for state in spec.optimizer.row_states()]
            for dim in dims
        ],
        slots_N=slots_N,
        offsets=offsets,
        weights_N=values(slots_N.shape[0]) if spec.is_weighted else None,
        grad=values(_BAGS, spec.total_dim),
    )


def _run(
    kernel: LookupKernel, case: _Case, slot_of: Sequence[Tensor] | None = None, *, steps: int = 2
) -> list[tuple[str, Tensor]]:
    """(what, value in host memory) of all that comes out: pools, rows, states, and how a reader's lookup differs.

    Args:
        kernel: Fresh.
        case: What goes in.
        slot_of: [T] x int64 [slots], where each row is put; None: in the slot of its number.
        steps: Of training.
    """
    spec = kernel.spec
    placed = slot_of or [torch.arange(_SLOTS) for _ in spec.tables]
    for t, slots in enumerate(placed):
        arrays = kernel.slot_arrays(t)
        inputs = (case.rows[t], *case.states[t])
        for array, values in zip((arrays.weights, *arrays.row_states, *arrays.row_wise_states), inputs, strict=True):
            array.copy_(values[slots.argsort()])
    counts_F = case.offsets[::_BAGS].diff().tolist()
    parts = case.slots_N.split(counts_F)
    slots_N = torch.cat([placed[t][part] for t, part in zip(spec.feature_table, parts, strict=True)]).to(spec.device)
    offsets = case.offsets.to(spec.device)
    weights_N = None if case.weights_N is None else case.weights_N.to(spec.device)
    found = []
    for step in range(1, steps + 1):
        pooled, saved = kernel.forward(slots_N, offsets, weights_N)
        found.append((f"the lookup of step {step}", pooled))
        kernel.backward(saved, case.grad.to(spec.device), step=step)
    reader = kernel.reader([_SLOTS] * len(spec.tables))
    for t, slots in enumerate(placed):
        arrays = kernel.slot_arrays(t)
        reader.slot_arrays(t).weights.copy_(arrays.weights)
        there = slots.to(spec.device)
        found.append((f"a row of table {t}", arrays.weights.index_select(0, there)))
        found += [
            (f"a state of table {t}", state.index_select(0, there))
            for state in (*arrays.row_states, *arrays.row_wise_states)
        ]
    last, _ = kernel.forward(slots_N, offsets, weights_N)
    found.append(("what a lookup without update adds", reader.forward(slots_N, offsets, weights_N)[0] - last))
    return [(what, value.detach().to(HOST)) for what, value in found]
