"""From whole pools of this rank's bags to what the unsharded collection returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedTensor

from hybridrec._compat.torchrec import LazyGetItemMixin
from hybridrec.config import TableConfig, embedding_names
from hybridrec.distributed.routing import TablePart
from hybridrec.modules.variable_batch import expand


class OutputColumns:
    """From the columns of the lookup to those of the unsharded collection; and what MEAN divides by."""

    def __init__(
        self, tables: Sequence[TableConfig], fed: Sequence[TablePart], device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            tables: In the order of the collection.
            fed: Their parts, in the order in which pools come.
            device: Where the output is.
            dtype: Of the output.
        """
        self._dtype = dtype
        names = embedding_names(tables)
        self.names = [name for table_names in names for name in table_names]
        self.dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._fed_dims = [part.dim for part in fed for _ in part.table.feature_names]
        places: dict[str, list[tuple[int, int]]] = {}  # table -> (first column, where its features begin) of its parts
        position = 0
        for part in fed:
            places.setdefault(part.table.name, []).append((part.first_column, position))
            position += part.num_features
        order = [
            start + i
            for table in tables
            for i in range(len(table.feature_names))
            for _, start in sorted(places[table.name])
        ]
        self._order = None if order == list(range(len(order))) else order
        is_sum = [part.table.pooling != PoolingType.MEAN for part in fed for _ in part.table.feature_names]
        self.has_mean = not all(is_sum)
        self._is_sum_F1 = torch.tensor(is_sum).unsqueeze(1)
        feature_of_column = [f for f, dim in enumerate(self._fed_dims) for _ in range(dim)]
        self._feature_of_column = torch.tensor(feature_of_column, device=device)

    def divisors(self, lengths_FS: Tensor) -> Tensor:
        """float32 [S, F]: 1 where a table sums; empty bags too, which stay 0 and get gradient 0: their sum is 0 / 1."""
        return lengths_FS.clamp(min=1).masked_fill(self._is_sum_F1, 1).to(torch.float32).t().contiguous()

    def finish(self, pooled: Tensor, divisors_SF: Tensor | None, inverse_FB: Tensor | None) -> KeyedTensor:
        """float32 [S, columns of the lookup] -> what the unsharded collection returns."""
        if divisors_SF is not None:
            pooled = pooled / divisors_SF.index_select(1, self._feature_of_column)
        if inverse_FB is not None:
            pooled = expand(pooled, inverse_FB, self._fed_dims)
        if self._order is not None:
            parts = pooled.split(self._fed_dims, 1)
            pooled = torch.cat([parts[i] for i in self._order], 1)
        return KeyedTensor(keys=self.names, length_per_key=self.dims, values=pooled.to(self._dtype))


class PooledAwaitable(LazyGetItemMixin, LazyAwaitable[KeyedTensor]):
    """The output of a forward; whoever touches it waits."""

    def __init__(
        self,
        pooled: Awaitable[Tensor],
        columns: OutputColumns,
        divisors_SF: Tensor | None,
        inverse_FB: Tensor | None,
    ) -> None:
        super().__init__()
        self._pooled, self._columns = pooled, columns
        self._divisors_SF, self._inverse_FB = divisors_SF, inverse_FB

    def _wait_impl(self) -> KeyedTensor:
        return self._columns.finish(self._pooled.wait(), self._divisors_SF, self._inverse_FB)
