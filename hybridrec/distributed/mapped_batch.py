"""`MappedBatch`: a batch of one collection on one rank, from MAP to the update of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hybridrec.backend import HOST
from hybridrec.cache import BatchTransaction, Lease
from hybridrec.distributed.frozen_tables import FrozenPart


class KernelInput(NamedTuple):
    """What one kernel looks up, where its slots are."""

    slots_N: Tensor
    """int64 [N]"""
    offsets: Tensor
    """int64 [F * bags + 1]"""
    weights_N: Tensor | None
    """float32 [N]"""


@dataclass(kw_only=True)
class MappedBatch:
    """A batch after MAP. Training batches have a transaction; a batch that only reads has none."""

    transaction: BatchTransaction | None
    lease: Lease | None
    """Of the transaction: when this value and the autograd node are gone without a commit, the batch is abandoned."""
    keys: KeyedJaggedTensor
    feature_offsets: Tensor
    """int64 [F + 1], host memory: where each feature starts among the ids."""
    inputs: list[KernelInput] | None = None
    """One a kernel; from SWAP on."""
    ready: Any = None
    """Event behind the rows' and the inputs' arrival; None: they are there."""
    is_swapped: bool = False
    oversized_table: int = -1
    """Whose slots do not hold the batch's rows, so that it goes in passes; -1: it has slots."""
    waits_for_step: bool = False
    """Its backward is over, and the step of its rows is still to come; see `GradientGroup`."""
    frozen: FrozenPart | None = None
    """Of a training batch: the ids of tables that do not train, which ``keys`` lacks then; None: there are none."""


def offsets_of_features(keys: KeyedJaggedTensor) -> Tensor:
    """int64 [F + 1]: where each feature starts among the ids."""
    offsets = keys.offsets()
    if keys.stride() == 0:
        return torch.zeros(len(keys.keys()) + 1, dtype=torch.int64)
    feature_offsets: Tensor = offsets[:: keys.stride()].to(dtype=torch.int64, device=HOST)
    return feature_offsets.contiguous()
