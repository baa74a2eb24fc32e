"""The contract of a lookup kernel: pooled lookup and fused update of rows that sit in slots.

A kernel owns the memory of the slots of its tables and the arithmetic on them; it knows nothing of ids, stores or
ranks. Which class serves a table depends on (device, optimizer, dim, dtype, weighted) alone, never on sizes.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hybridrec.errors import StateError
from hybridrec.kernels.optimizer import OptimizerSpec
from hybridrec.row_type import RowType
from hybridrec.types import SlotArrays

__all__ = ["KernelSpec", "KernelTable", "LookupKernel", "PendingUpdate", "SlotArrays"]


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """One table of a kernel."""

    name: str
    dim: int
    """D."""
    num_slots: int
    """C."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What a kernel is built from."""

    tables: tuple[KernelTable, ...]
    feature_table: tuple[int, ...]
    """[F]: index into ``tables`` for every feature, in the order in which features are fed. Ascending."""
    optimizer: OptimizerSpec
    is_weighted: bool
    device: torch.device
    row_type: RowType = RowType.FLOAT32
    """Of the weights of all tables. Sums, gradients and states are float32 whatever it is."""
    is_pooled: bool = True
    """False: a row for every id, of tables of one dim."""

    @property
    def total_dim(self) -> int:
        """Columns of the output: the sum of D over features; D if nothing is pooled."""
        if not self.is_pooled:
            return self.tables[0].dim
        return sum(self.tables[t].dim for t in self.feature_table)


class PendingUpdate:
    """What a forward leaves for its backward. It can be taken once: a second update would step the rows again."""

    __slots__ = ("_taken", "_value")

    def __init__(self, value: object) -> None:
        self._value = value
        self._taken = False

    def take(self) -> Any:
        """The value, which is not kept any longer.

        Raises:
            StateError: It was taken before. No row was changed by this call.
        """
        if self._taken:
            raise StateError(
                "second backward through one lookup: its rows were already stepped, inside the first. Run forward "
                "again, or add the losses and call backward once (retain_graph=True cannot help)."
            )
        value, self._value, self._taken = self._value, None, True
        return value


class LookupKernel(abc.ABC):
    """Pooled (sum or weighted sum) lookup with an update fused into the backward.

    If the spec is not pooled, there is a row of output for each id instead of each bag: [N, D] for [B, total_dim].
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    @abc.abstractmethod
    def slot_arrays(self, table: int) -> SlotArrays:
        """The memory of one table's slots; valid until ``resize``.

        All starts as zeros, the states too: whoever puts a row into a slot writes its states, initial values included.
        """

    @abc.abstractmethod
    def forward(self, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> tuple[Tensor, object]:
        """Sum the rows of every bag.

        Args:
            slots_N: int64 [N] on the kernel's device, feature after feature.
            offsets: int64 [F * B + 1] on the kernel's device.
            weights_N: float32 [N] if ``is_weighted``, else None.

        Returns:
            float32 [B, total_dim] without an autograd graph, and what ``backward`` needs. Not averaged: the caller
            divides for MEAN, after the partial sums of all ranks are added.
        """

    @abc.abstractmethod
    def backward(self, saved: object, grad: Tensor, *, step: int) -> None:
        """Update every row of the batch once, with the sum of the gradients of its occurrences.

        Occurrences are added in the order (feature, bag, position in the bag).

        Args:
            saved: of the ``forward`` that this belongs to.
            grad: float32 [B, total_dim], contiguous or not.
            step: 1 for the collection's first committed batch (Adam's bias correction).

        Raises:
            StateError: This is the second call for that ``forward``. Nothing changed.
        """

    def clipped(self, grad: Tensor) -> Tensor:
        """The gradient that rows are stepped with: within the optimizer's ``max_gradient``, NaN stays NaN."""
        limit = self.spec.optimizer.max_gradient
        return grad if limit is None else grad.clamp(-limit, limit)

    @property
    @abc.abstractmethod
    def learning_rate(self) -> float:
        """What lookups from now on will be stepped with: a batch takes the value in force at its ``forward``.

        Source: FBGEMM 1.8, which reads it there. With TorchRec's fused optimizers it is the same.
        """

    @learning_rate.setter
    @abc.abstractmethod
    def learning_rate(self, value: float) -> None: ...

    @abc.abstractmethod
    def _allocate(self) -> None:
        """Make the memory that `slot_arrays` tells of, as ``spec`` says; what was there before is let go."""

    def resize(self, num_slots: Sequence[int]) -> None:
        """Grow the slots of each table (never shrink); contents and learning rate stay. No forward may be pending."""
        old = [self.slot_arrays(t) for t in range(len(self.spec.tables))]
        self.spec = self._with_slots(num_slots)
        self._allocate()
        for t, before in enumerate(old):
            after = self.slot_arrays(t)
            n = before.weights.shape[0]
            after.weights[:n] = before.weights
            for new, state in zip(
                after.row_states + after.row_wise_states, before.row_states + before.row_wise_states, strict=True
            ):
                new[:n] = state

    def reader(self, num_slots: Sequence[int]) -> Self:
        """A kernel for lookups only, with the same forward arithmetic and its own slots (no optimizer state)."""
        return self._like(replace(self._with_slots(num_slots), optimizer=OptimizerSpec(kind="none")))

    def transient(self, num_slots: Sequence[int]) -> Self:
        """A kernel with the same arithmetic, update included, over slots of its own."""
        return self._like(self._with_slots(num_slots))

    def _like(self, spec: KernelSpec) -> Self:
        """A kernel of the same class."""
        return type(self)(spec)

    def _with_slots(self, num_slots: Sequence[int]) -> KernelSpec:
        tables = tuple(replace(t, num_slots=n) for t, n in zip(self.spec.tables, num_slots, strict=True))
        return replace(self.spec, tables=tables)
