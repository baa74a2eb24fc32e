"""The oracle: the same kernel class on tables that hold every id at once, stepped in the order of the commits.

It knows nothing of slots, stores and journals. What ``full_policy="evict"`` drops it works out anew from the contract:
the lowest (score, key) among rows that none of the last 12 batches used.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.factory import group_tables, kernel_choice, make_kernel
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.kernels.torch_kernel import TorchKernel
from tests.distributed.oracle import MASK, Table, initial_row, mix64
from tests.model_check.case import Case, CheckedBatch
from tests.model_check.scheduler import WrongSchedule

EVICTION_DISTANCE = 12


def kernel_groups(case: Case, device: torch.device) -> list[list[int]]:
    """Indices of the tables that share a kernel, as hybridrec groups them."""
    return group_tables(
        range(len(case.tables)),
        dim=lambda t: case.tables[t].dim,
        optimizer=lambda t: case.optimizers[t],
        name=lambda t: kernel_of(case, t, device),
    )


def kernel_of(case: Case, table: int, device: torch.device) -> str:
    """Name of the kernel class of a table."""
    dim, optimizer = case.tables[table].dim, case.optimizers[table]
    return kernel_choice(optimizer, dim=dim, is_weighted=case.is_weighted, device=device).name


@functools.lru_cache(maxsize=4096)
def first_record(table: Table, optimizer: OptimizerSpec, id_: int) -> np.ndarray:
    """float32 [weights, row states, row-wise states] of an id that was never trained."""
    states = sorted(optimizer.row_states(), key=lambda s: s.is_row_wise)
    values = [np.full(1 if s.is_row_wise else table.dim, s.initial_value, np.float32) for s in states]
    return np.concatenate([initial_row(table, id_), *values])


def columns_of(kernel: LookupKernel, table: int) -> list[Tensor]:
    """float32 [C, n] each: weights, row states, row-wise states of one table's slots."""
    arrays = kernel.slot_arrays(table)
    return [arrays.weights, *arrays.row_states, *(a.unsqueeze(1) for a in arrays.row_wise_states)]


class UnlimitedTables:
    """What every lookup, row and state must be, bit for bit."""

    def __init__(self, case: Case, device: torch.device) -> None:
        """``device``: of what is checked, which decides how tables are grouped. The oracle itself is on the host."""
        self._case = case
        self.groups = kernel_groups(case, device)
        host = torch.device("cpu")
        make = make_kernel if device.type == host.type else TorchKernel
        self._row = {id_: row for row, id_ in enumerate(case.universe)}
        first = np.cumsum([0, *(len(t.features) for t in case.tables)])
        self.features = [[f for t in group for f in range(first[t], first[t + 1])] for group in self.groups]
        self._kernels = []
        for group in self.groups:
            kernel = make(
                KernelSpec(
                    tables=tuple(
                        KernelTable(name=case.tables[t].name, dim=case.tables[t].dim, num_slots=len(case.universe))
                        for t in group
                    ),
                    feature_table=tuple(i for i, t in enumerate(group) for _ in case.tables[t].features),
                    optimizer=case.optimizers[group[0]],
                    is_weighted=case.is_weighted,
                    device=host,
                )
            )
            self._kernels.append(kernel)
        self._place = {t: (self._kernels[k], i) for k, group in enumerate(self.groups) for i, t in enumerate(group)}
        for t in range(len(case.tables)):
            for id_ in case.universe:
                self._write(t, id_, self._first(t, id_))
        self._num_commits = 0
        self._scores: list[dict[int, int]] = [{} for _ in case.tables]
        self._journals: list[list[tuple[dict[int, int], dict[int, np.ndarray]]]] = []
        self._undone: set[int] = set()

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _first(self, table: int, id_: int) -> np.ndarray:
        return first_record(self._case.tables[table], self._case.optimizers[table], id_)

    def record(self, table: int, id_: int) -> np.ndarray:
        """float32 [weights, row states, row-wise states]."""
        return np.concatenate([c[self._row[id_]].numpy() for c in columns_of(*self._place[table])])

    def records(self, table: int) -> np.ndarray:
        """float32 [ids of the universe, record]."""
        return torch.cat(columns_of(*self._place[table]), 1).numpy()

    def _write(self, table: int, id_: int, record: np.ndarray) -> None:
        start = 0
        for column in columns_of(*self._place[table]):
            width = column.shape[1]
            column[self._row[id_]] = torch.from_numpy(record[start : start + width])
            start += width

    # ---- lookups and steps ---------------------------------------------------------------------------------------

    def forward(self, batch: CheckedBatch) -> tuple[Tensor, list[object]]:
        """float32 [B, columns of all kernels], and what `backward` needs."""
        parts, saved = [], []
        for kernel, features in zip(self._kernels, self.features, strict=True):
            bags = [bag for f in features for bag in batch.bags[f]]
            entries = [entry for bag in bags for entry in bag]
            lengths = torch.tensor([0, *(len(bag) for bag in bags)], dtype=torch.int64)
            pooled, kept = kernel.forward(
                torch.tensor([self._row[i] for i, _ in entries], dtype=torch.int64),
                lengths.cumsum(0),
                torch.tensor([w for _, w in entries], dtype=torch.float32) if self._case.is_weighted else None,
            )
            parts.append(pooled)
            saved.append(kept)
        return torch.cat(parts, 1), saved

    def backward(self, saved: list[object], grad: Tensor) -> None:
        """The next commit."""
        self._num_commits += 1
        widths = [kernel.spec.total_dim for kernel in self._kernels]
        for kernel, kept, part in zip(self._kernels, saved, grad.split(widths, 1), strict=True):
            kernel.backward(kept, part, step=self._num_commits)

    # ---- what "evict" drops --------------------------------------------------------------------------------------

    def ids_of(self, batch: CheckedBatch, table: int) -> list[int]:
        """Unique, in order of first occurrence."""
        first = sum(len(t.features) for t in self._case.tables[:table])
        features = range(first, first + len(self._case.tables[table].features))
        return list(dict.fromkeys(i for f in features for bag in batch.bags[f] for i, _ in bag))

    def plan(self, batch: CheckedBatch) -> bool:
        """A batch joins those in flight; with a quota, old rows go. Returns whether there is room for it."""
        ordinal = len(self._journals) + 1
        drops = []
        for t, scores in enumerate(self._scores):
            ids = self.ids_of(batch, t)
            num_new = sum(i not in scores for i in ids)
            excess = len(scores) + num_new - self._case.quota if self._case.quota and num_new else 0
            old = [i for i, s in scores.items() if s < ordinal - EVICTION_DISTANCE and i not in ids]
            if excess > len(old):
                return False
            drops.append(sorted(old, key=lambda i: (scores[i], mix64(i) & MASK))[: max(0, excess)])
        journal = []
        for t, (scores, gone) in enumerate(zip(self._scores, drops, strict=True)):
            journal.append((dict(scores), {i: self.record(t, i) for i in gone}))
            for i in gone:
                del scores[i]
                self._write(t, i, self._first(t, i))
            scores.update(dict.fromkeys(self.ids_of(batch, t), ordinal))
        self._journals.append(journal)
        return True

    def undo_newest(self) -> None:
        """The batch that was planned last is taken back."""
        for t, (scores, gone) in enumerate(self._journals.pop()):
            self._scores[t] = scores
            for i, record in gone.items():
                self._write(t, i, record)

    def live(self, table: int) -> dict[int, int]:
        """id -> score, with a quota; only then are ordinals what is counted here."""
        return self._scores[table]


def require_equal(what: str, got: np.ndarray, expected: np.ndarray, detail: Any = "") -> None:
    """Bit for bit."""
    if got.shape != expected.shape or got.tobytes() != expected.tobytes():
        raise WrongSchedule(f"{what}: {got} is not {expected} {detail}")
