"""Kernels, batches and a slow reference for the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.optim import RowWiseAdagrad

from hybridrec.backend import HOST
from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel, SlotArrays
from hybridrec.kernels.optimizer import OptimizerKind, OptimizerSpec
from hybridrec.kernels.tbe_kernel import TbeKernel
from hybridrec.kernels.torch_kernel import TorchKernel

KERNELS: dict[str, type[TorchKernel] | type[TbeKernel]] = {"torch": TorchKernel, "tbe": TbeKernel}

# (kernel, optimizer) of every pair that exists
PAIRS: list[tuple[str, OptimizerKind]] = [
    ("torch", "sgd"),
    ("torch", "adagrad"),
    ("torch", "rowwise_adagrad"),
    ("torch", "adam"),
    ("tbe", "sgd"),
    ("tbe", "adagrad"),
    ("tbe", "rowwise_adagrad"),
]


@dataclass
class Batch:
    slots: Tensor
    offsets: Tensor
    weights: Tensor | None
    grad: Tensor


def make_spec(
    kind: OptimizerKind,
    dims: Sequence[int],
    *,
    num_slots: int = 40,
    feature_table: Sequence[int] | None = None,
    is_weighted: bool = False,
    learning_rate: float = 0.05,
    more: Mapping[str, float] | None = None,
) -> KernelSpec:
    return KernelSpec(
        tables=tuple(KernelTable(name=f"t{i}", dim=d, num_slots=num_slots) for i, d in enumerate(dims)),
        feature_table=tuple(range(len(dims)) if feature_table is None else feature_table),
        optimizer=OptimizerSpec(kind=kind, learning_rate=learning_rate, **(more or {})),
        is_weighted=is_weighted,
        device=HOST,
    )


def make_kernel(name: str, spec: KernelSpec, *, seed: int = 0) -> LookupKernel:
    """A kernel whose rows are random and whose states hold their initial value, as after a swap."""
    kernel = KERNELS[name](spec)
    generator = torch.Generator().manual_seed(seed)
    for t in range(len(spec.tables)):
        arrays = kernel.slot_arrays(t)
        arrays.weights.copy_(torch.randn(arrays.weights.shape, generator=generator))
        for state, memory in zip(spec.optimizer.row_states(), all_states(arrays), strict=True):
            memory.fill_(state.initial_value)
    return kernel


def all_states(arrays: SlotArrays) -> tuple[Tensor, ...]:
    return (*arrays.row_states, *arrays.row_wise_states)


def everything(kernel: LookupKernel) -> list[Tensor]:
    """A copy of all rows and states."""
    arrays = [kernel.slot_arrays(t) for t in range(len(kernel.spec.tables))]
    return [x.clone() for a in arrays for x in (a.weights, *all_states(a))]


def random_batch(
    spec: KernelSpec, *, seed: int, num_bags: int = 7, max_length: int = 5, num_used_slots: int | None = None
) -> Batch:
    """Bags of 0 to ``max_length`` slots with many repetitions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, max_length + 1, (len(spec.feature_table) * num_bags,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    n = int(offsets[-1])
    used = num_used_slots or min(table.num_slots for table in spec.tables)
    slots = torch.randint(0, used, (n,), generator=generator)
    weights = torch.rand(n, generator=generator) + 0.5 if spec.is_weighted else None
    return Batch(slots, offsets, weights, torch.randn((num_bags, spec.total_dim), generator=generator))


def train(kernel: LookupKernel, batch: Batch, *, step: int) -> Tensor:
    output, saved = kernel.forward(batch.slots, batch.offsets, batch.weights)
    kernel.backward(saved, batch.grad, step=step)
    return output


class Reference:
    """embedding_bag, autograd and torch.optim in float64 on whole tables; rows outside a batch are put back."""

    def __init__(self, kernel: LookupKernel) -> None:
        self.spec = kernel.spec
        tables = range(len(self.spec.tables))
        self.rows = [kernel.slot_arrays(t).weights.double().clone().requires_grad_() for t in tables]
        self.optimizers = [self._optimizer(rows) for rows in self.rows]

    def _optimizer(self, rows: Tensor) -> torch.optim.Optimizer:
        o = self.spec.optimizer
        common: dict[str, Any] = {"lr": o.learning_rate, "weight_decay": o.weight_decay}
        accumulator = o.initial_accumulator_value
        if o.kind == "sgd":
            return torch.optim.SGD([rows], **common)
        if o.kind == "adagrad":
            return torch.optim.Adagrad([rows], eps=o.eps, initial_accumulator_value=accumulator, **common)
        if o.kind == "rowwise_adagrad":
            optimizer: torch.optim.Optimizer = RowWiseAdagrad(
                [rows], eps=o.eps, initial_accumulator_value=accumulator, **common
            )
            return optimizer
        adam = torch.optim.AdamW if o.decoupled_weight_decay else torch.optim.Adam
        return adam([rows], eps=o.eps, betas=(o.beta1, o.beta2), **common)

    def set_learning_rate(self, value: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = value

    def train(self, batch: Batch) -> Tensor:
        num_features = len(self.spec.feature_table)
        num_bags = (batch.offsets.shape[0] - 1) // num_features
        bounds = batch.offsets[::num_bags].tolist()
        pooled, used = [], [set[int]() for _ in self.rows]
        for f, t in enumerate(self.spec.feature_table):
            part = slice(bounds[f], bounds[f + 1])
            used[t] |= set(batch.slots[part].tolist())
            offsets = batch.offsets[f * num_bags : (f + 1) * num_bags + 1] - bounds[f]
            weights = batch.weights[part].double() if batch.weights is not None else None
            pooled.append(
                F.embedding_bag(
                    batch.slots[part],
                    self.rows[t],
                    offsets,
                    mode="sum",
                    include_last_offset=True,
                    per_sample_weights=weights,
                )
            )
        output = torch.cat(pooled, 1)
        for rows in self.rows:
            rows.grad = None
        limit = self.spec.optimizer.max_gradient or float("inf")
        output.backward(batch.grad.double().clamp(-limit, limit))
        for rows, optimizer, slots in zip(self.rows, self.optimizers, used, strict=True):
            self._step(rows, optimizer, slots)
        return output.detach()

    def _step(self, rows: Tensor, optimizer: torch.optim.Optimizer, slots: set[int]) -> None:
        others = torch.tensor(sorted(set(range(rows.shape[0])) - slots), dtype=torch.int64)
        states = optimizer.state[rows]
        before = rows.detach().clone()
        states_before = copy.deepcopy(dict(states))
        optimizer.step()
        with torch.no_grad():
            rows[others] = before[others]
            for name, value in states.items():
                if torch.is_tensor(value) and value.dim() > 0:
                    old = states_before.get(name)
                    value[others] = old[others] if old is not None else 0.0
