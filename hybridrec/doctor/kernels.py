"""Which kernel serves which table on a device, why not the other one, and whether it computes what it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from hybridrec.doctor.report import Finding, Status
from hybridrec.errors import BackendError
from hybridrec.kernels.base import KernelSpec, KernelTable
from hybridrec.kernels.factory import KernelChoice, kernel_choice, make_kernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec

SECTION = "Kernels"
DIMS = (64, 6)
"""A multiple of 4, and none: what kernels differ in."""
_STEPS = 2
_LEARNING_RATE = 0.25


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a kernel is given, every step the same."""

    name: str
    rows_ND: Tensor
    """float64: before the first step."""
    slots_L: Tensor
    """int64: every row is in some bag, so that each is stepped each time."""
    offsets: Tensor
    """int64 [B + 1]."""
    weights_L: Tensor
    """float64."""
    grads_BD: Tensor
    """float64: of the output."""
    tolerance: float = 1e-6
    """Of the largest element."""


def small_case(dim: int, *, is_weighted: bool) -> Case:
    """Two bags: rows 0 and 1, rows 1 and 2, so that row 1 gets two gradients."""
    columns_D = torch.arange(dim, dtype=torch.float64) % 2 + 1
    weights = (1.0, 2.0, 0.5, 1.0) if is_weighted else (1.0,) * 4
    return Case(
        name=f"dim {dim}",
        rows_ND=torch.tensor([[0.5], [1.0], [1.5]], dtype=torch.float64) * columns_D,
        slots_L=torch.tensor([0, 1, 1, 2]),
        offsets=torch.tensor([0, 2, 4]),
        weights_L=torch.tensor(weights, dtype=torch.float64),
        grads_BD=torch.tensor([[1.0], [2.0]], dtype=torch.float64) * columns_D,
    )


def large_case(dim: int, *, is_weighted: bool, num_rows: int, num_bags: int, seed: int = 0) -> Case:
    """Bags of 0 to 40 rows, some rows often; values that do not cancel out, so that float32 is exact to 5e-6.

    Args:
        dim: D.
        is_weighted: Whether ids have weights.
        num_rows: N, at most 15 a bag: there is room for every row.
        num_bags: B.
        seed: Same seed, same case.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(0, 41, (num_bags,), generator=generator)
    num_drawn = int(lengths_B.sum()) - num_rows
    drawn = torch.rand(num_drawn, generator=generator, dtype=torch.float64) ** 2 * num_rows
    slots_L = torch.cat([torch.arange(num_rows), drawn.long()])
    slots_L = slots_L[torch.randperm(len(slots_L), generator=generator)]

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).double() + 0.5

    weights_L = positive(len(slots_L)) if is_weighted else torch.ones(len(slots_L), dtype=torch.float64)
    return Case(
        name=f"dim {dim}{' weighted' if is_weighted else ''}, {num_rows} rows, {len(slots_L)} lookups",
        rows_ND=positive(num_rows, dim),
        slots_L=slots_L,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)]),
        weights_L=weights_L,
        grads_BD=positive(num_bags, dim),
        tolerance=5e-6,
    )


def findings(device: torch.device) -> Iterator[Finding]:
    """One line an optimizer, after two training steps with a known result on every kernel that serves it."""
    for kind in get_args(OptimizerKind):
        if kind == "none":
            continue
        cases = [(dim, is_weighted) for dim in DIMS for is_weighted in (False, True)]
        try:
            choices = {
                case: kernel_choice(OptimizerSpec(kind=kind), dim=case[0], is_weighted=case[1], device=device)
                for case in cases
            }
            for dim, is_weighted in cases:
                check_kernel(kind, small_case(dim, is_weighted=is_weighted), is_weighted=is_weighted, device=device)
        except Exception as error:  # a kernel whose library was replaced may raise anything
            remedy = (
                "Reinstall the stack in a fresh environment; if operators were registered again (below), do not import "
                "who did that."
            )
            value = f"does not work: {type(error).__name__}: {error}"
            yield Finding(section=SECTION, what=kind, value=value, status=Status.FAIL, remedy=remedy)
            continue
        yield Finding(section=SECTION, what=kind, value=_describe(choices))


def _describe(choices: dict[tuple[int, bool], KernelChoice]) -> str:
    names = {case: choice.name for case, choice in choices.items()}
    used = dict.fromkeys(names.values())
    if len(used) == 1:
        text = f"{next(iter(used))} for all tables"
    else:
        text = "; ".join(f"{name} for {_cases([c for c in names if names[c] == name])}" for name in used)
    reasons = {choice.reason for choice in choices.values() if choice.reason}
    return f"{text}. Checked." + "".join(f" Not tbe: {reason}." for reason in sorted(reasons))


def _cases(cases: list[tuple[int, bool]]) -> str:
    """``dim 64, dim 6 weighted``; a dim whose tables are served alike, weighted or not, without more words."""
    both = {dim for dim, _ in cases if {(dim, True), (dim, False)} <= set(cases)}
    words = [f"dim {dim}" + ("" if dim in both else " weighted" if w else " unweighted") for dim, w in cases]
    return ", ".join(dict.fromkeys(words))


def _spec(kind: OptimizerKind, dim: int, num_slots: int, is_weighted: bool, device: torch.device) -> KernelSpec:
    return KernelSpec(
        tables=(KernelTable(name="doctor", dim=dim, num_slots=num_slots),),
        feature_table=(0,),
        optimizer=OptimizerSpec(kind=kind, learning_rate=_LEARNING_RATE),
        is_weighted=is_weighted,
        device=device,
    )


def check_kernel(kind: OptimizerKind, case: Case, *, is_weighted: bool, device: torch.device) -> None:
    """Two training steps, compared with the optimizer's formula in float64.

    Raises:
        BackendError: An output or a row is wrong.
    """
    num_rows, dim = case.rows_ND.shape
    spec = _spec(kind, dim, num_rows, is_weighted, device)
    kernel = make_kernel(spec)
    rows_ND, slots_L = case.rows_ND, case.slots_L
    kernel.slot_arrays(0).weights.copy_(rows_ND)
    bags_L = torch.repeat_interleave(torch.arange(len(case.offsets) - 1), case.offsets.diff())
    row_grads_ND = torch.zeros_like(rows_ND).index_add_(0, slots_L, case.grads_BD[bags_L] * case.weights_L[:, None])
    states = [torch.zeros_like(rows_ND) for _ in range(2)]
    for step in range(1, _STEPS + 1):
        expected_BD = torch.zeros_like(case.grads_BD).index_add_(0, bags_L, rows_ND[slots_L] * case.weights_L[:, None])
        output, saved = kernel.forward(
            slots_L.to(device), case.offsets.to(device), case.weights_L.float().to(device) if is_weighted else None
        )
        _compare(f"{kind}, {case.name}, output of step {step}", output, expected_BD, case.tolerance)
        kernel.backward(saved, case.grads_BD.float().to(device), step=step)
        rows_ND = _step(spec.optimizer, rows_ND, row_grads_ND, states, step)
        rows_now = kernel.slot_arrays(0).weights
        _compare(f"{kind}, {case.name}, rows after step {step}", rows_now, rows_ND, case.tolerance)


def _step(optimizer: OptimizerSpec, rows: Tensor, grads: Tensor, states: list[Tensor], step: int) -> Tensor:
    """One step by the book: Robbins and Monro; Duchi et al. 2011; Kingma and Ba 2015."""
    rate, eps = optimizer.learning_rate, optimizer.eps
    if optimizer.kind == "sgd":
        return rows - rate * grads
    if optimizer.kind == "adam":
        states[0] = optimizer.beta1 * states[0] + (1 - optimizer.beta1) * grads
        states[1] = optimizer.beta2 * states[1] + (1 - optimizer.beta2) * grads**2
        mean, square = states[0] / (1 - optimizer.beta1**step), states[1] / (1 - optimizer.beta2**step)
        return rows - rate * mean / (square.sqrt() + eps)
    squares = grads**2
    states[0] = states[0] + (squares if optimizer.kind == "adagrad" else squares.mean(1, keepdim=True))
    return rows - rate * grads / (states[0].sqrt() + eps)


def _compare(what: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = (value.detach().cpu().double() - expected).abs().max().item()
    if not difference <= tolerance * expected.abs().max().item():
        raise BackendError(f"{what}: off by {difference:g}, where {tolerance:g} relative is allowed.")
