"""The oracle: the same kernel class on plain unlimited tables, without routing, cache, swap or transaction.

Everything else is written anew here from docs/design/initial_rows.md, in plain Python integers and numpy: who owns an
id, what its first row is, which ids of which rank's batch meet in which order. Partial pools and gradients travel as
pickled arrays and are added in rank order by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.factory import make_kernel
from hybridrec.kernels.optimizer import OptimizerSpec

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a scenario; initial rows uniform in [-0.1, 0.1)."""

    name: str
    dim: int
    features: tuple[str, ...]
    is_mean: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's batch: for each feature the bags, each bag a list of (id, weight)."""

    bags: dict[str, list[list[tuple[int, float]]]]
    labels: Tensor
    num_bags: int = field(default=0)


def mix64(x: int) -> int:
    x &= MASK
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ (x >> 33)


def table_seed(seed: int, name: str) -> int:
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return mix64(h ^ mix64(seed + GOLDEN))


def initial_row(table: Table, id_: int) -> np.ndarray:
    """float32 [D], uniform in [-0.1, 0.1)."""
    base = mix64(mix64(id_) + table_seed(table.seed, table.name))
    low, high = np.float32(-0.1), np.float32(0.1)
    row = np.empty(table.dim, np.float32)
    for column in range(table.dim):
        word = mix64(base + (column // 2 + 1) * GOLDEN)
        bits = word >> 40 if column % 2 == 0 else (word >> 8) & 0xFFFFFF
        row[column] = low + (high - low) * np.float32(bits * 2.0**-24)
    return row


def owner(id_: int, world_size: int) -> int:
    return mix64(id_) % world_size


class Oracle:
    """One rank of the oracle: plain tables of the ids it owns, a row for every id that will ever occur."""

    def __init__(
        self,
        tables: Sequence[Table],
        universe: dict[str, Sequence[int]],
        optimizer: OptimizerSpec,
        dense: nn.Module,
        *,
        is_weighted: bool,
        rank: int,
        world_size: int,
        make: Callable[[KernelSpec], LookupKernel] = make_kernel,
    ) -> None:
        """``make``: the kernel class, on the host, that the tables under test have on their device."""
        self.tables, self.rank, self.world_size, self.is_weighted = list(tables), rank, world_size, is_weighted
        self.dense = dense
        self.rows = {
            t.name: {i: n for n, i in enumerate(u for u in universe[t.name] if owner(u, world_size) == rank)}
            for t in tables
        }
        self.kernels = []
        device = torch.device("cpu")
        for table in self.tables:
            kernel = make(
                KernelSpec(
                    tables=(KernelTable(name=table.name, dim=table.dim, num_slots=max(1, len(self.rows[table.name]))),),
                    feature_table=(0,) * len(table.features),
                    optimizer=optimizer,
                    is_weighted=is_weighted,
                    device=device,
                )
            )
            arrays = kernel.slot_arrays(0)
            for id_, row in self.rows[table.name].items():
                arrays.weights[row] = torch.from_numpy(initial_row(table, id_))
            states = optimizer.row_states()
            for array, state in zip(arrays.row_states, [s for s in states if not s.is_row_wise], strict=True):
                array.fill_(state.initial_value)
            for array, state in zip(arrays.row_wise_states, [s for s in states if s.is_row_wise], strict=True):
                array.fill_(state.initial_value)
            self.kernels.append(kernel)
        self.step_number = 0

    def step(self, batches: Sequence[Batch], dense_optimizer: torch.optim.Optimizer, *, train: bool = True) -> Tensor:
        """One step over all ranks' batches; returns this rank's loss."""
        mine = batches[self.rank]
        partial, saved = self._partial_pools(batches)
        pooled = self._exchange_pools(partial, batches)
        leaf = pooled.clone().requires_grad_(train)
        dense_optimizer.zero_grad()
        loss = scenario_loss(self.dense(self._mean(leaf, mine)), mine.labels)
        if train:
            loss.backward()
            self.step_number += 1
            grads: list[Tensor] = [torch.empty(0)] * self.world_size
            dist.all_gather_object(grads, leaf.grad / self.world_size)
            grad = torch.cat(grads, 0)
            column = 0
            for kernel, kept in zip(self.kernels, saved, strict=True):
                width = kernel.spec.total_dim
                kernel.backward(kept, grad[:, column : column + width], step=self.step_number)
                column += width
            dense_optimizer.step()
        return loss.detach()

    def state_of(self, table: int) -> dict[int, np.ndarray]:
        """id -> float32 [weights, row states, row-wise states], for every owned id."""
        arrays = self.kernels[table].slot_arrays(0)
        columns = [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]
        records = torch.cat(columns, 1).numpy()
        return {id_: records[row] for id_, row in self.rows[self.tables[table].name].items()}

    def _partial_pools(self, batches: Sequence[Batch]) -> tuple[Tensor, list[object]]:
        parts, saved = [], []
        for table, kernel in zip(self.tables, self.kernels, strict=True):
            slots, offsets, weights = [], [0], []
            known = self.rows[table.name]
            for feature in table.features:
                for batch in batches:
                    for bag in batch.bags[feature]:
                        for id_, weight in bag:
                            if owner(id_, self.world_size) == self.rank:
                                slots.append(known[id_])
                                weights.append(weight)
                        offsets.append(len(slots))
            pooled, kept = kernel.forward(
                torch.tensor(slots, dtype=torch.int64),
                torch.tensor(offsets, dtype=torch.int64),
                torch.tensor(weights, dtype=torch.float32) if self.is_weighted else None,
            )
            parts.append(pooled)
            saved.append(kept)
        return torch.cat(parts, 1), saved

    def _exchange_pools(self, partial: Tensor, batches: Sequence[Batch]) -> Tensor:
        everyone: list[Tensor] = [torch.empty(0)] * self.world_size
        dist.all_gather_object(everyone, partial)
        start = sum(b.num_bags for b in batches[: self.rank])
        own = slice(start, start + batches[self.rank].num_bags)
        total = everyone[0][own].clone()
        for part in everyone[1:]:
            total += part[own]
        return total

    def _mean(self, pooled: Tensor, batch: Batch) -> Tensor:
        column, parts = 0, []
        for table in self.tables:
            for feature in table.features:
                part = pooled[:, column : column + table.dim]
                if table.is_mean:
                    lengths = torch.tensor([max(1, len(bag)) for bag in batch.bags[feature]], dtype=torch.float32)
                    part = part / lengths.unsqueeze(1)
                parts.append(part)
                column += table.dim
        return torch.cat(parts, 1)


def scenario_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    """A mean over a fixed number of bags, so that an empty batch has loss 0 and not NaN."""
    return nn.functional.binary_cross_entropy_with_logits(prediction.squeeze(1), labels, reduction="sum") / 8
