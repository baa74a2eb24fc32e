"""Which kernel serves which table on a device, why not the other one, and whether it computes what it should."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from hybridrec.doctor.report import Finding, Status
from hybridrec.errors import BackendError, HybridRecError
from hybridrec.kernels.base import KernelSpec, KernelTable
from hybridrec.kernels.factory import kernel_name, make_kernel
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec

SECTION = "Kernels"
DIMS = (64, 6)
"""A multiple of 4, and none: what kernels differ in."""
_STEPS = 2
_LEARNING_RATE = 0.25
_RELATIVE_TOLERANCE = 1e-6
# two bags: rows 0 and 1, rows 1 and 2, so that row 1 gets two gradients
_SLOTS, _OFFSETS, _WEIGHTS = (0, 1, 1, 2), (0, 2, 4), (1.0, 2.0, 0.5, 1.0)


def findings(device: torch.device) -> Iterator[Finding]:
    """One line an optimizer, after two training steps with a known result on every kernel that serves it."""
    for kind in get_args(OptimizerKind):
        if kind == "none":
            continue
        cases = [(dim, is_weighted) for dim in DIMS for is_weighted in (False, True)]
        try:
            names = {
                case: kernel_name(OptimizerSpec(kind=kind), dim=case[0], is_weighted=case[1], device=device)
                for case in cases
            }
            for dim, is_weighted in cases:
                check_kernel(kind, dim=dim, is_weighted=is_weighted, device=device)
        except Exception as error:  # a kernel whose library was replaced may raise anything
            remedy = (
                "Reinstall the stack in a fresh environment; if operators were registered again (below), do not import "
                "who did that."
            )
            value = f"does not work: {type(error).__name__}: {error}"
            yield Finding(section=SECTION, what=kind, value=value, status=Status.FAIL, remedy=remedy)
            continue
        yield Finding(section=SECTION, what=kind, value=_describe(kind, names, device))


def _describe(kind: OptimizerKind, names: dict[tuple[int, bool], str], device: torch.device) -> str:
    used = dict.fromkeys(names.values())
    if len(used) == 1:
        text = f"{next(iter(used))} for all tables"
    else:
        text = "; ".join(f"{name} for {_cases([c for c in names if names[c] == name])}" for name in used)
    reasons = {reason for c in names if names[c] != "tbe" and (reason := why_not_tbe(kind, c[0], c[1], device))}
    return f"{text}. Checked." + "".join(f" Not tbe: {reason}." for reason in sorted(reasons))


def _cases(cases: list[tuple[int, bool]]) -> str:
    """``dim 64, dim 6 weighted``; a dim whose tables are served alike, weighted or not, without more words."""
    both = {dim for dim, _ in cases if {(dim, True), (dim, False)} <= set(cases)}
    words = [f"dim {dim}" + ("" if dim in both else " weighted" if w else " unweighted") for dim, w in cases]
    return ", ".join(dict.fromkeys(words))


def why_not_tbe(kind: OptimizerKind, dim: int, is_weighted: bool, device: torch.device) -> str:
    """What FBGEMM's kernel answers to such a table; empty if it would take it (the backend does not use it)."""
    try:
        from hybridrec.kernels.tbe_kernel import TbeKernel

        TbeKernel(_spec(kind, dim, is_weighted, device))
    except HybridRecError as error:
        reason = re.sub(r"^tables? 'doctor': ", "", str(error))
        return reason.partition(". ")[0].partition("; ")[0]
    except Exception as error:  # FBGEMM's operators may be anybody's
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _spec(kind: OptimizerKind, dim: int, is_weighted: bool, device: torch.device) -> KernelSpec:
    return KernelSpec(
        tables=(KernelTable(name="doctor", dim=dim, num_slots=3),),
        feature_table=(0,),
        optimizer=OptimizerSpec(kind=kind, learning_rate=_LEARNING_RATE),
        is_weighted=is_weighted,
        device=device,
    )


def check_kernel(kind: OptimizerKind, *, dim: int, is_weighted: bool, device: torch.device) -> None:
    """Two training steps on three rows, compared with the optimizer's formula in float64.

    Raises:
        BackendError: An output or a row is wrong.
    """
    spec = _spec(kind, dim, is_weighted, device)
    kernel = make_kernel(spec)
    columns = torch.arange(dim, dtype=torch.float64) % 2 + 1
    rows = torch.tensor([[0.5], [1.0], [1.5]], dtype=torch.float64) * columns
    kernel.slot_arrays(0).weights.copy_(rows)
    grads_B = torch.tensor([[1.0], [2.0]], dtype=torch.float64) * columns
    weights_N = torch.tensor(_WEIGHTS if is_weighted else (1.0,) * len(_SLOTS), dtype=torch.float64)
    bags_N = torch.tensor([b for b in range(2) for _ in range(_OFFSETS[b], _OFFSETS[b + 1])])
    slots_N = torch.tensor(_SLOTS)
    row_grads = torch.zeros_like(rows).index_add_(0, slots_N, grads_B[bags_N] * weights_N[:, None])
    states = [torch.zeros_like(rows) for _ in range(2)]
    for step in range(1, _STEPS + 1):
        expected = torch.zeros_like(grads_B).index_add_(0, bags_N, rows[slots_N] * weights_N[:, None])
        output, saved = kernel.forward(
            slots_N.to(device),
            torch.tensor(_OFFSETS).to(device),
            weights_N.float().to(device) if is_weighted else None,
        )
        _compare(f"{kind}, dim {dim}, output of step {step}", output, expected)
        kernel.backward(saved, grads_B.float().to(device), step=step)
        rows = _step(spec.optimizer, rows, row_grads, states, step)
        _compare(f"{kind}, dim {dim}, rows after step {step}", kernel.slot_arrays(0).weights, rows)


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


def _compare(what: str, value: Tensor, expected: Tensor) -> None:
    difference = (value.detach().cpu().double() - expected).abs().max().item()
    if not difference <= _RELATIVE_TOLERANCE * expected.abs().max().item():
        raise BackendError(f"{what}: off by {difference:g}, where {_RELATIVE_TOLERANCE:g} relative is allowed.")
