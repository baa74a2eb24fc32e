"""The oracle: the same kernel class on plain unlimited tables, without routing, cache, swap or transaction.

Everything else is written anew here from docs/design/initial_rows.md, in plain Python integers and numpy: who owns an
id, what its first row is, which ids of which rank's batch meet in which order. Partial pools and gradients travel as
pickled arrays and are added in rank order by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.factory import make_kernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.row_type import RowType

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
    row_type: str = "float32"
    """Of the weights: or "bfloat16", "float16"."""
    owners: tuple[tuple[int, int], ...] = ()
    """(columns, rank) of each part that one rank has, in the order of the columns; none: row-wise. Ranks count modulo
    the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Columns of a table that ranks have rows of."""

    table: Table
    first: int
    dim: int
    owner: int | None
    """None: every rank has the rows of its ids."""

    def has(self, id_: int, rank: int, world_size: int) -> bool:
        return (owner(id_, world_size) if self.owner is None else self.owner) == rank


def parts_of(table: Table, world_size: int) -> list[Part]:
    if not table.owners:
        return [Part(table=table, first=0, dim=table.dim, owner=None)]
    firsts = [sum(dim for dim, _ in table.owners[:i]) for i in range(len(table.owners))]
    return [
        Part(table=table, first=first, dim=dim, owner=rank % world_size)
        for first, (dim, rank) in zip(firsts, table.owners, strict=True)
    ]


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


def words_of(row: np.ndarray, row_type: str) -> np.ndarray:
    """float32: the bytes of a row of that type, filled up with zeros to whole words."""
    values = torch.from_numpy(row).to(getattr(torch, row_type)).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(values + bytes(-len(values) % 4), np.float32).copy()


def owner(id_: int, world_size: int) -> int:
    return mix64(id_) % world_size


class Oracle:
    """One rank of the oracle: plain tables of the ids it owns, a row for every id that will ever occur."""

    is_pooled = True

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
        self.parts = [part for t in tables for part in parts_of(t, world_size)]
        self.mine = [part for part in self.parts if part.owner in (None, rank)]
        self.rows = [
            {i: n for n, i in enumerate(u for u in universe[p.table.name] if p.has(u, rank, world_size))}
            for p in self.mine
        ]
        self.kernels = []
        device = torch.device("cpu")
        for part, rows in zip(self.mine, self.rows, strict=True):
            table = part.table
            kernel = make(
                KernelSpec(
                    tables=(KernelTable(name=table.name, dim=part.dim, num_slots=max(1, len(rows))),),
                    feature_table=(0,) * (len(table.features) if self.is_pooled else 1),
                    optimizer=optimizer,
                    is_weighted=is_weighted,
                    device=device,
                    row_type=RowType[table.row_type.upper()],
                )
            )
            arrays = kernel.slot_arrays(0)
            for id_, row in rows.items():
                columns = slice(part.first, part.first + part.dim)
                arrays.weights[row] = torch.from_numpy(words_of(initial_row(table, id_)[columns], table.row_type))
            states = optimizer.row_states()
            for array, state in zip(arrays.row_states, [s for s in states if not s.is_row_wise], strict=True):
                array.fill_(state.initial_value)
            for array, state in zip(arrays.row_wise_states, [s for s in states if s.is_row_wise], strict=True):
                array.fill_(state.initial_value)
            self.kernels.append(kernel)
        self.step_number = 0

    def step(
        self,
        batches: Sequence[Batch],
        dense_optimizer: torch.optim.Optimizer,
        *,
        train: bool = True,
        frozen: Collection[str] = (),
    ) -> Tensor:
        """One step over all ranks' batches; returns this rank's loss. Rows of frozen tables are not stepped."""
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
            for part, kernel, kept in zip(self.mine, self.kernels, saved, strict=True):
                columns = self._columns_of(part)
                if part.table.name not in frozen:
                    kernel.backward(kept, grad[:, columns].contiguous(), step=self.step_number)
            dense_optimizer.step()
        return loss.detach()

    def state_of(self, table: int) -> dict[int, np.ndarray]:
        """id -> float32 [weights, row states, row-wise states], for every id of a table, or part, that is here."""
        arrays = self.kernels[table].slot_arrays(0)
        columns = [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]
        records = torch.cat(columns, 1).numpy()
        return {id_: records[row] for id_, row in self.rows[table].items()}

    def _partial_pools(self, batches: Sequence[Batch]) -> tuple[list[Tensor], list[object]]:
        pools, saved = [], []
        for part, kernel, known in zip(self.mine, self.kernels, self.rows, strict=True):
            slots, offsets, weights = [], [0], []
            for feature in part.table.features:
                for batch in batches:
                    for bag in batch.bags[feature]:
                        for id_, weight in bag:
                            if part.has(id_, self.rank, self.world_size):
                                slots.append(known[id_])
                                weights.append(weight)
                        offsets.append(len(slots))
            pooled, kept = kernel.forward(
                torch.tensor(slots, dtype=torch.int64),
                torch.tensor(offsets, dtype=torch.int64),
                torch.tensor(weights, dtype=torch.float32) if self.is_weighted else None,
            )
            pools.append(pooled)
            saved.append(kept)
        return pools, saved

    def _exchange_pools(self, pools: list[Tensor], batches: Sequence[Batch]) -> Tensor:
        """Every part's pools in its place: of one rank, or added up in rank order."""
        everyone: list[list[Tensor]] = [[]] * self.world_size
        dist.all_gather_object(everyone, pools)
        start = sum(b.num_bags for b in batches[: self.rank])
        own = slice(start, start + batches[self.rank].num_bags)
        whole = torch.empty(batches[self.rank].num_bags, sum(t.dim * len(t.features) for t in self.tables))
        left = [iter(theirs) for theirs in everyone]
        for part in self.parts:
            ranks = range(self.world_size) if part.owner is None else [part.owner]
            first, *others = [next(left[rank])[own] for rank in ranks]
            total = first.clone()
            for other in others:
                total += other
            whole[:, self._columns_of(part)] = total
        return whole

    def _columns_of(self, part: Part) -> list[int]:
        """Of the output, feature after feature."""
        start, columns = 0, []
        for table in self.tables:
            for _ in table.features:
                if table is part.table:
                    columns += range(start + part.first, start + part.first + part.dim)
                start += table.dim
        return columns

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
