"""The lookup of rows that are not pooled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrec.distributed.lookup import PooledLookup
from hybridrec.distributed.mapped_batch import MappedBatch


class SequenceLookup(PooledLookup):
    """The rows that this rank owns, not pooled: one for every id, in the order of the ids."""

    is_pooled = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What the kernels gave, as one tensor: float32 [N, D]."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, batch: MappedBatch, output: Tensor) -> tuple[Tensor, ...]:
        """The parts of the kernels in something like the output of a batch."""
        parts: tuple[Tensor, ...] = output.split(batch.feature_offsets[self._first_feature].diff().tolist())
        return parts
