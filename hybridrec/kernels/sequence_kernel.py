"""`SequenceKernel`: a row for every id, by a kernel that sums, whose bags have one id each.

The tables have one dim and lie one after another in the one table of that kernel:

    row of the inner kernel = first row of the table + slot

A sum of one row is the row, and the gradient of a bag is that of its id, so values and updates are the inner kernel's,
bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel, SlotArrays


class SequenceKernel(LookupKernel):
    """Lookup and update of rows that are not pooled. Weights of ids are not looked at."""

    def __init__(self, spec: KernelSpec, kernel_class: type[LookupKernel]) -> None:
        """
        Args:
            spec: Tables of one dim, not weighted, not pooled.
            kernel_class: Of the kernel inside.
        """
        assert not spec.is_pooled and not spec.is_weighted, f"{spec}"
        super().__init__(spec)
        self._kernel_class = kernel_class
        self._learning_rate = spec.optimizer.learning_rate
        self._allocate()

    def _allocate(self) -> None:
        sizes = [table.num_slots for table in self.spec.tables]
        ends = list(itertools.accumulate(sizes, initial=0))
        self._rows_of_table = [slice(first, end) for first, end in itertools.pairwise(ends)]
        first_row_F = [ends[t] for t in self.spec.feature_table]
        self._needs_first_row = any(first_row_F)
        self._first_row_F = torch.tensor(first_row_F, dtype=torch.int64, device=self.spec.device)
        name, dim = self.spec.tables[0].name, self.spec.tables[0].dim
        everything = KernelTable(name=name, dim=dim, num_slots=ends[-1])
        self._inner = self._kernel_class(replace(self.spec, tables=(everything,), feature_table=(0,), is_pooled=True))
        self._inner.learning_rate = self._learning_rate

    def slot_arrays(self, table: int) -> SlotArrays:
        """The memory of one table's slots; valid until ``resize``."""
        rows, arrays = self._rows_of_table[table], self._inner.slot_arrays(0)
        return SlotArrays(
            weights=arrays.weights[rows],
            row_states=tuple(state[rows] for state in arrays.row_states),
            row_wise_states=tuple(state[rows] for state in arrays.row_wise_states),
        )

    @property
    def learning_rate(self) -> float:
        """What lookups from now on will be stepped with."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = float(value)
        self._inner.learning_rate = self._learning_rate

    def forward(self, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> tuple[Tensor, object]:
        """See `LookupKernel.forward`; float32 [N, D]."""
        num_ids = slots_N.shape[0]
        bounds = torch.arange(num_ids + 1, device=self.spec.device)
        return self._inner.forward(self._rows(slots_N, offsets), bounds, None)

    def backward(self, saved: object, grad: Tensor, *, step: int) -> None:
        """See `LookupKernel.backward`; ``grad`` is float32 [N, D]."""
        self._inner.backward(saved, grad, step=step)

    def _rows(self, slots_N: Tensor, offsets: Tensor) -> Tensor:
        """Rows of the inner kernel from slots of the tables."""
        num_ids = slots_N.shape[0]
        if not self._needs_first_row or num_ids == 0:
            return slots_N
        num_bags = (offsets.shape[0] - 1) // len(self.spec.feature_table)
        counts_F = offsets[::num_bags].diff()
        return slots_N + self._first_row_F.repeat_interleave(counts_F, output_size=num_ids)

    def _like(self, spec: KernelSpec) -> Self:
        return type(self)(spec, self._kernel_class)
