"""Batches of one collection whose gradients wait for one step of every row. See docs/design/accumulation.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.distributed.oversized import table_of_occurrence
from hybridrec.distributed.table_kernels import Occurrences
from hybridrec.errors import StateError

if TYPE_CHECKING:
    from hybridrec.distributed.lookup import PooledLookup
    from hybridrec.distributed.mapped_batch import MappedBatch
    from hybridrec.kernels.base import LookupKernel


SECOND_BACKWARD = (
    "second backward through one lookup: its gradient is kept already, for the step to come. Run the forward again, or "
    "add the losses and call backward once."
)


class _Waiting(NamedTuple):
    batch: MappedBatch
    grads: Sequence[Tensor]
    """Of the output of every kernel."""


class GradientGroup:
    """Keeps what backwards gave until the step. One caller at a time."""

    def __init__(self, lookup: PooledLookup) -> None:
        """``lookup``: Whose batches these are."""
        self._lookup = lookup
        self._waiting: list[_Waiting] = []
        self.is_on = False
        """Whether a backward keeps its gradient instead of stepping rows."""

    @property
    def num_waiting(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    def add(self, batch: MappedBatch, grads: Sequence[Tensor]) -> None:
        """A backward is over; its transaction stays open, so that its rows stay where they are."""
        batch.waits_for_step = True
        self._waiting.append(_Waiting(batch, grads))

    def drop(self) -> None:
        """Undo what waits, newest first, as if these batches had never been."""
        waiting, self._waiting = self._waiting, []
        for batch, _ in reversed(waiting):
            batch.waits_for_step = False
            if batch.transaction is not None and not batch.transaction.is_final:
                batch.transaction.undo()

    def step(self) -> None:
        """Step every row of what waits once, with the sum of its gradients, then commit in order.

        Raises:
            StateError: An earlier update failed half-way. What this one raises leaves the collection like that.
        """
        if not self._waiting:
            return
        log = self._lookup.log
        self._lookup.require_whole()
        transactions = [t for batch, _ in self._waiting if (t := batch.transaction) is not None]
        try:
            if any(transaction.is_aside for transaction in transactions):
                self._step_in_passes(log.committed + 1)
            else:
                self._step_in_slots(log.committed + 1)
        except Exception as e:
            log.broken = f"the update of {len(transactions)} batches failed half-way: {type(e).__name__}: {e}"
            raise
        self._waiting = []
        for transaction in transactions:
            self._lookup.mark_use(transaction)
            transaction.ends_step = transaction is transactions[-1]
            transaction.commit()

    def _step_in_slots(self, step: int) -> None:
        for k, kernel in enumerate(self._lookup.kernels):
            inputs = [batch.inputs[k] for batch, _ in self._waiting if batch.inputs is not None]
            together, order_N = one_after_the_other(inputs, len(kernel.spec.feature_table))
            _, saved = kernel.forward(*together)
            kernel.backward(saved, self._grad(k, kernel, order_N), step=step)

    def _grad(self, k: int, kernel: LookupKernel, order_N: Tensor) -> Tensor:
        grad = torch.cat([grads[k] for _, grads in self._waiting])
        return grad if kernel.spec.is_pooled else grad.index_select(0, order_N.to(grad.device))

    def _step_in_passes(self, step: int) -> None:
        """Some of the batches have no slots: all rows are read and written where they are."""
        lookup = self._lookup
        lookup.log.flush()
        for k, kernel in enumerate(lookup.kernels):
            parts, where = [], list[list[tuple[NDArray[np.uint32], NDArray[np.int64]]]]()
            for batch, _ in self._waiting:
                transaction = batch.transaction
                assert transaction is not None
                occurrences = lookup.table_kernels.occurrences(batch, transaction.slots_N)[k]
                of_tables = [
                    lookup.log.group.batch_rows(transaction.ordinal, t)
                    for t in lookup.table_kernels.tables_of_kernel[k]
                ]
                where.append(of_tables)
                parts.append(_by_row_number(kernel, occurrences, of_tables, has_slots=not transaction.is_aside))
            together, order_N = one_after_the_other(parts, len(kernel.spec.feature_table))
            table_N = table_of_occurrence(kernel, together)
            index_N, rows_T = torch.empty_like(together.index_N), []
            for t, of_batches in enumerate(zip(*where, strict=True)):
                rows = np.concatenate([rows for rows, _ in of_batches])
                rows_U, first = np.unique(rows, return_index=True)
                rows_T.append((rows_U, np.concatenate([slots for _, slots in of_batches])[first]))
                of_table = table_N == t
                numbers = torch.from_numpy(rows_U.astype(np.int64))
                index_N[of_table] = torch.searchsorted(numbers, together.index_N[of_table])
            lookup.passes.step_rows(
                k, rows_T, together._replace(index_N=index_N), self._grad(k, kernel, order_N), step=step
            )


def one_after_the_other(parts: Sequence[Any], num_features: int) -> tuple[Any, Tensor]:
    """One batch whose bags are those of the first of ``parts``, then those of the second, ..: of each feature in turn.

    Args:
        parts: Triples (int64 [N], offsets int64 [F * B + 1], weights float32 [N] or None) of one type.
        num_features: F.

    Returns:
        A triple of that type, and where each id was among the ids of all parts: int64 [sum of N].
    """
    ids, bounds, weights = zip(*parts, strict=True)
    bags = [(offsets.shape[0] - 1) // num_features for offsets in bounds]
    firsts = itertools.accumulate((i.shape[0] for i in ids), initial=0)
    starts = torch.cat(
        [(o[:-1] + first).view(num_features, b) for o, b, first in zip(bounds, bags, firsts, strict=False)], 1
    ).flatten()
    lengths = torch.cat([o.diff().view(num_features, b) for o, b in zip(bounds, bags, strict=True)], 1).flatten()
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    num_ids = sum(i.shape[0] for i in ids)
    order_N = (starts - offsets[:-1]).repeat_interleave(lengths, output_size=num_ids)
    order_N += torch.arange(num_ids, device=order_N.device)
    weights_N = None if weights[0] is None else torch.cat(weights).index_select(0, order_N)
    return type(parts[0])(torch.cat(ids).index_select(0, order_N), offsets, weights_N), order_N


def _by_row_number(
    kernel: LookupKernel,
    occurrences: Occurrences,
    where: Sequence[tuple[NDArray[np.uint32], NDArray[np.int64]]],
    *,
    has_slots: bool,
) -> Occurrences:
    """The occurrences of a batch with the row's number in its table in place of its slot, or number in the batch.

    Args:
        kernel: Of the tables.
        occurrences: Of the batch.
        where: (rows, slots) of the batch's unique rows in every table.
        has_slots: Whether ``occurrences`` have slots; else numbers among ``where``.
    """
    table_N = table_of_occurrence(kernel, occurrences)
    row_N = torch.empty_like(occurrences.index_N)
    for t, (rows, slots) in enumerate(where):
        of_table = table_N == t
        number = occurrences.index_N[of_table]
        if has_slots:
            order = torch.from_numpy(np.argsort(slots))
            number = order[torch.searchsorted(torch.from_numpy(slots)[order], number)]
        row_N[of_table] = torch.from_numpy(rows.astype(np.int64))[number]
    return occurrences._replace(index_N=row_N)


def refuse_waiting(groups: Sequence[GradientGroup], what: str) -> None:
    """
    Raises:
        StateError: Gradients wait.
    """
    waiting = sum(group.num_waiting for group in groups)
    if waiting:
        raise StateError(
            f"{what}: the gradients of {waiting} batches wait for a step. Call optimizer.step(), or "
            "optimizer.zero_grad() to drop them."
        )
