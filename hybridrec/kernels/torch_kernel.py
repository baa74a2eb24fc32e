"""`TorchKernel`: lookup and row update with plain PyTorch operators, on any device, for any dim and optimizer.

Tables of one dim lie one after another in one flat buffer, so that a lookup of all of them is one operation:

    row in the buffer = first row of the table + slot

A kernel whose tables have different dims runs once for every dim; `hybridrec.kernels.factory.group_tables` avoids it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.kernels.base import KernelSpec, LookupKernel, PendingUpdate, SlotArrays
from hybridrec.kernels.optimizer_rules import updated_rows
from hybridrec.kernels.row_gradients import group_by_row, sum_bags
from hybridrec.kernels.slot_memory import zeros
from hybridrec.row_type import RowType

_BLOCK_FLOATS = 1 << 17
"""Floats of rows that are stepped at once on the host: with its temporaries, a block fits a core's cache."""


class _Occurrences(NamedTuple):
    """What one flat buffer is looked up with."""

    rows: Tensor
    """int64 [N], rows of the buffer."""
    offsets: Tensor
    """int64 [F * B + 1], of the buffer's features."""
    weights: Tensor | None
    """float32 [N]"""


class _Saved(NamedTuple):
    num_bags: int
    """B."""
    learning_rate: float
    of_buffer: tuple[_Occurrences, ...]


class _Buffer:
    """The slots of all tables of one dim, and one spare row behind them that no table owns."""

    def __init__(self, spec: KernelSpec, dim: int) -> None:
        self.dim = dim
        self.tables = [t for t, table in enumerate(spec.tables) if table.dim == dim]
        self.features = [f for f, t in enumerate(spec.feature_table) if t in set(self.tables)]
        sizes = [spec.tables[t].num_slots for t in self.tables]
        ends = list(itertools.accumulate(sizes, initial=0))
        self.rows_of_table = {t: slice(ends[i], ends[i + 1]) for i, t in enumerate(self.tables)}
        self.spare_row = ends[-1]
        first_row_F = [self.rows_of_table[spec.feature_table[f]].start for f in self.features]
        self.needs_first_row = any(first_row_F)
        self.first_row_F = torch.tensor(first_row_F, dtype=torch.int64, device=spec.device)
        num_rows = self.spare_row + 1
        self.is_float32 = spec.row_type is RowType.FLOAT32
        self.words = zeros((num_rows, spec.row_type.num_words(dim)), spec.device)
        self.weights = spec.row_type.values(self.words, dim)
        self.states = [
            zeros((num_rows,) if state.is_row_wise else (num_rows, dim), spec.device)
            for state in spec.optimizer.row_states()
        ]

    def slot_arrays(self, table: int) -> SlotArrays:
        rows = self.rows_of_table[table]
        return SlotArrays(
            weights=self.words.data[rows],
            row_states=tuple(s.data[rows] for s in self.states if s.dim() == 2),
            row_wise_states=tuple(s.data[rows] for s in self.states if s.dim() == 1),
        )

    def rows(self, slots_N: Tensor, offsets: Tensor, num_bags: int) -> Tensor:
        """Rows of the buffer from slots of its tables."""
        if not self.needs_first_row:
            return slots_N
        counts_F = offsets[::num_bags].diff()
        return slots_N + self.first_row_F.repeat_interleave(counts_F, output_size=slots_N.shape[0])


class TorchKernel(LookupKernel):
    """Lookup and update with operators that every device of PyTorch has; nothing of ``nn.EmbeddingBag``'s backward.

    Not for speed on the host, where FBGEMM's kernel is faster for what it can do. No operation waits for the device,
    unless the tables have different dims.
    """

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self._learning_rate = spec.optimizer.learning_rate
        self._is_on_host = spec.device.type == HOST.type
        self._allocate()

    def _allocate(self) -> None:
        dims = dict.fromkeys(table.dim for table in self.spec.tables)
        self._buffers = [_Buffer(self.spec, dim) for dim in dims]
        arrays = {t: buffer.slot_arrays(t) for buffer in self._buffers for t in buffer.tables}
        self._slot_arrays = [arrays[t] for t in range(len(self.spec.tables))]
        self._columns = list(
            itertools.accumulate((self.spec.tables[t].dim for t in self.spec.feature_table), initial=0)
        )

    def slot_arrays(self, table: int) -> SlotArrays:
        """The memory of one table's slots; valid until ``resize``."""
        return self._slot_arrays[table]

    @property
    def learning_rate(self) -> float:
        """What lookups from now on will be stepped with."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = float(value)

    @torch.no_grad()
    def forward(self, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> tuple[Tensor, object]:
        """See `LookupKernel.forward`."""
        num_features = len(self.spec.feature_table)
        num_bags = (offsets.shape[0] - 1) // num_features
        if slots_N.shape[0] == 0:  # with B = 0 too
            return torch.zeros((num_bags, self.spec.total_dim), device=self.spec.device), None
        weights_N = weights_N.detach() if weights_N is not None else None
        of_buffer = self._split(slots_N, offsets, weights_N, num_bags)
        pooled = [self._lookup(b, o, num_bags) for b, o in zip(self._buffers, of_buffer, strict=True)]
        is_reader = self.spec.optimizer.kind == "none"
        saved = None if is_reader else PendingUpdate(_Saved(num_bags, self._learning_rate, of_buffer))
        if len(pooled) == 1:
            return pooled[0].view(num_bags, self.spec.total_dim), saved
        output = torch.empty((num_bags, self.spec.total_dim), device=self.spec.device)
        for buffer, part_BFD in zip(self._buffers, pooled, strict=True):
            for i, f in enumerate(buffer.features):
                output[:, self._columns[f] : self._columns[f + 1]] = part_BFD[:, i]
        return output, saved

    @torch.no_grad()
    def backward(self, saved: object, grad: Tensor, *, step: int) -> None:
        """See `LookupKernel.backward`."""
        if saved is None:  # no occurrences
            return
        assert isinstance(saved, PendingUpdate)
        lookup: _Saved = saved.take()
        grad = self.clipped(grad)
        for buffer, occurrences in zip(self._buffers, lookup.of_buffer, strict=True):
            if occurrences.rows.shape[0] > 0:
                self._update(buffer, occurrences, self._bag_grads(buffer, grad), lookup, step)

    # ---- steps of forward and backward ---------------------------------------------------------------------------

    def _split(
        self, slots_N: Tensor, offsets: Tensor, weights_N: Tensor | None, num_bags: int
    ) -> tuple[_Occurrences, ...]:
        """What every buffer is looked up with."""
        if len(self._buffers) == 1:
            rows_N = self._buffers[0].rows(slots_N, offsets, num_bags)
            return (_Occurrences(rows_N, offsets, weights_N),)
        starts = offsets[::num_bags].tolist()
        lengths_FB = offsets.diff().view(-1, num_bags)
        parts = []
        for buffer in self._buffers:
            pieces = [slice(starts[f], starts[f + 1]) for f in buffer.features]
            part_offsets = offsets.new_zeros(len(pieces) * num_bags + 1)
            torch.cumsum(lengths_FB[buffer.features].view(-1), 0, out=part_offsets[1:])
            part_slots = torch.cat([slots_N[p] for p in pieces])
            part_weights = None if weights_N is None else torch.cat([weights_N[p] for p in pieces])
            parts.append(_Occurrences(buffer.rows(part_slots, part_offsets, num_bags), part_offsets, part_weights))
        return tuple(parts)

    def _lookup(self, buffer: _Buffer, occurrences: _Occurrences, num_bags: int) -> Tensor:
        """float32 [B, F, D], contiguous."""
        table, rows_N = buffer.weights, occurrences.rows
        if not buffer.is_float32:  # embedding_bag would round the sums to the type of the rows
            table = table.index_select(0, rows_N).float()
            rows_N = torch.arange(rows_N.shape[0], device=rows_N.device)
        pooled = sum_bags(table, rows_N, occurrences.offsets, occurrences.weights)
        return pooled.view(len(buffer.features), num_bags, buffer.dim).transpose(0, 1).contiguous()

    def _bag_grads(self, buffer: _Buffer, grad: Tensor) -> Tensor:
        """float32 [B * F, D]: the buffer's columns of the gradient, bag after bag, feature after feature."""
        if len(self._buffers) > 1:
            grad = torch.cat([grad[:, self._columns[f] : self._columns[f + 1]] for f in buffer.features], 1)
        return grad.contiguous().view(-1, buffer.dim)

    def _update(self, buffer: _Buffer, occurrences: _Occurrences, grads: Tensor, lookup: _Saved, step: int) -> None:
        """Step every row of a buffer that occurs, once."""
        spare_row = None if self._is_on_host else buffer.spare_row
        rows_U, starts, order_N = group_by_row(occurrences.rows, spare_row=spare_row)
        # Bags are numbered feature after feature, their gradients lie bag after bag.
        num_features = len(buffer.features)
        grad_of_bag = (
            torch.arange(grads.shape[0], device=grads.device).view(lookup.num_bags, num_features).t().reshape(-1)
        )
        grad_N = grad_of_bag.repeat_interleave(occurrences.offsets.diff(), output_size=order_N.shape[0])
        grad_N = grad_N.index_select(0, order_N)
        weights_N = occurrences.weights.index_select(0, order_N) if occurrences.weights is not None else None
        if not self._is_on_host:
            self._step_rows(buffer, rows_U, sum_bags(grads, grad_N, starts, weights_N), lookup, step)
            return
        # In blocks that fit the processor's cache: temporaries of a whole batch are new pages at every step.
        block = max(1, _BLOCK_FLOATS // buffer.dim)
        for first in range(0, rows_U.shape[0], block):
            starts_block = starts[first : first + block + 1]
            of_block = slice(int(starts_block[0]), int(starts_block[-1]))
            weights_block = weights_N[of_block] if weights_N is not None else None
            grads_block = sum_bags(grads, grad_N[of_block], starts_block - starts_block[0], weights_block)
            self._step_rows(buffer, rows_U[first : first + block], grads_block, lookup, step)

    def _step_rows(self, buffer: _Buffer, rows_U: Tensor, grads_UD: Tensor, lookup: _Saved, step: int) -> None:
        """Replace rows and their states. Rows are independent of one another, so blocks of them give the same bits."""
        weights, states = updated_rows(
            self.spec.optimizer,
            buffer.weights.index_select(0, rows_U).float(),
            [state.index_select(0, rows_U) for state in buffer.states],
            grads_UD,
            step=step,
            learning_rate=lookup.learning_rate,
        )
        buffer.weights.index_copy_(0, rows_U, weights.to(buffer.weights.dtype))  # to the nearest, ties to even
        for state, values in zip(buffer.states, states, strict=True):
            state.index_copy_(0, rows_U, values)
