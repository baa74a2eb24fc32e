"""The lookup of rows that are not pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.mapped_batch import MappedBatch


class SequenceLookup(PooledLookup):
    """The rows that this rank owns, not pooled: one for every id, in the order of the ids.

    Kernels have rows of different widths if columns of tables are on ranks of their own. Their rows are put together in
    cells of the largest width that divides all.
    """

    is_pooled = False

    @property
    def _row_dims(self) -> list[int]:
        """Columns of the rows of each kernel."""
        return [kernel.spec.tables[0].dim for kernel in self.kernels]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What the kernels gave, as one tensor: float32 [cells, columns of a cell]; [N, D] if all have D columns."""
        cell = math.gcd(*self._row_dims)
        return torch.cat([part.view(-1, cell) for part in parts]) if len(parts) > 1 else parts[0]

    def split(self, batch: MappedBatch, output: Tensor) -> tuple[Tensor, ...]:
        """The parts of the kernels in something like the output of a batch."""
        dims, cell = self._row_dims, math.gcd(*self._row_dims)
        counts = batch.feature_offsets[self.table_kernels.first_feature].diff().tolist()
        parts = output.split([count * dim // cell for count, dim in zip(counts, dims, strict=True)])
        return tuple(part.reshape(-1, dim) for part, dim in zip(parts, dims, strict=True))

    def _widths(self, feature_offsets: Tensor) -> Tensor:
        dims_F = super()._widths(feature_offsets)
        return feature_offsets.diff() * (dims_F // max(1, math.gcd(*self._row_dims)))
