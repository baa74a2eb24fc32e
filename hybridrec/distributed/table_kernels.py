"""`TableKernels`: the kernels of one collection on one rank, and which tables and features each of them has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrec.distributed.mapped_batch import KernelInput, MappedBatch
from hybridrec.distributed.shard_table import ShardTable
from hybridrec.kernels.base import KernelSpec, KernelTable, LookupKernel
from hybridrec.kernels.factory import make_kernel
from hybridrec.types import SlotArrays


class Occurrences(NamedTuple):
    """The ids of one kernel's features, in host memory."""

    index_N: Tensor
    """int64 [N]: of every id among the batch's distinct rows of its table, or its slot."""
    offsets: Tensor
    """int64 [F * B + 1]"""
    weights_N: Tensor | None
    """float32 [N]"""


class TableKernels:
    """Owns the kernels, and so the slots. Tables are ordered kernel after kernel, features as their tables."""

    def __init__(
        self, kernels: Sequence[Sequence[ShardTable]], *, is_weighted: bool, is_pooled: bool, device: torch.device
    ) -> None:
        """
        Args:
            kernels: The tables of every kernel.
            is_weighted: Whether ids carry weights.
            is_pooled: Whether the rows of a bag are summed.
            device: Where the slots are.
        """
        self.tables = [table for tables in kernels for table in tables]
        """[T]"""
        self.kernels = [
            _kernel(tables, is_weighted=is_weighted, is_pooled=is_pooled, device=device) for tables in kernels
        ]
        """[K]"""
        self.place_of_table = [(k, t) for k, tables in enumerate(kernels) for t in range(len(tables))]
        """[T] x (kernel, table within it)."""
        ends = list(itertools.accumulate((len(tables) for tables in kernels), initial=0))
        self.tables_of_kernel = [list(range(first, last)) for first, last in itertools.pairwise(ends)]
        """[K] x indices of tables."""
        counts = [sum(table.num_features for table in tables) for tables in kernels]
        self.first_feature = list(itertools.accumulate(counts, initial=0))
        """[K + 1]: where the features of each kernel begin."""
        owners = [t for t, table in enumerate(self.tables) for _ in range(table.num_features)]
        self.feature_table = torch.tensor(owners, dtype=torch.int64)
        """int64 [F], host memory: the table of every feature."""
        self.dims = [kernel.spec.total_dim for kernel in self.kernels]
        """[K]: columns of the output of each kernel."""

    def slot_arrays(self, table: int) -> SlotArrays:
        """The slots of a table; they move when its kernel is resized."""
        kernel, index = self.place_of_table[table]
        return self.kernels[kernel].slot_arrays(index)

    def weights(self, table: int) -> Tensor:
        """[C, D] of the table's type: the weights in its slots."""
        spec = self.tables[table].spec
        return spec.row_type.values(self.slot_arrays(table).weights, spec.dim)

    def occurrences(self, batch: MappedBatch, index_N: Tensor) -> list[Occurrences]:
        """[K]: the part of a batch that each kernel looks up; ``index_N`` int64 [N], host memory, replaces its ids."""
        all_offsets, all_weights = batch.keys.offsets(), batch.keys.weights_or_none()
        bags = batch.keys.stride()
        parts = []
        for first, last in itertools.pairwise(self.first_feature):
            start, end = batch.feature_offsets[first].item(), batch.feature_offsets[last].item()
            offsets = all_offsets[first * bags : last * bags + 1]
            weights_N = None if all_weights is None else all_weights[start:end]
            parts.append(Occurrences(index_N[start:end], offsets - start if start else offsets, weights_N))
        return parts

    def inputs(
        self, batch: MappedBatch, index_N: Tensor, upload: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[KernelInput]:
        """[K]: `occurrences` where the slots are."""
        parts = self.occurrences(batch, index_N)
        placed = iter(upload([tensor for part in parts for tensor in part if tensor is not None]))
        return [
            KernelInput(next(placed), next(placed), next(placed) if part.weights_N is not None else None)
            for part in parts
        ]


def _kernel(tables: Sequence[ShardTable], *, is_weighted: bool, is_pooled: bool, device: torch.device) -> LookupKernel:
    owners = tuple(t for t, table in enumerate(tables) for _ in range(table.num_features))
    return make_kernel(
        KernelSpec(
            tables=tuple(KernelTable(name=t.name, dim=t.layout.dim, num_slots=t.placed.num_slots) for t in tables),
            feature_table=owners,
            optimizer=tables[0].optimizer,
            is_weighted=is_weighted,
            device=device,
            row_type=tables[0].spec.row_type,
            is_pooled=is_pooled,
        ),
        tables[0].kernel,
    )
