"""What is saved and served: lookups in frozen tables as a graph of torch's own operators.

Neither hybridrec nor TorchRec, FBGEMM or an accelerator package is needed to load and run it: `torch.jit.load` in
Python or C++ is enough.
"""

# No ``from __future__ import annotations``: torch.jit reads the annotations of the classes as they are.
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType

from hybridrec.config import TableConfig, embedding_names
from hybridrec.inference.initial_rows import initial_rows_of
from hybridrec.inference.row_format import RowFormat, decode_rows

LAST_ID = 2**63 - 1


@torch.fx.wrap
def positions_of_features(values: Tensor, lengths_FB: Tensor) -> list[Tensor]:
    """[F] x int64: where each feature's ids are in ``values``. Opaque to `torch.fx`, whose proxies have no length."""
    counts: list[int] = lengths_FB.sum(1).tolist()
    return list(torch.split(torch.arange(values.size(0), device=values.device), counts))


@torch.fx.wrap
def weights_at(weights: Tensor | None, positions_N: Tensor) -> Tensor:
    """float32 [N]: the weights at these positions. Opaque to `torch.fx`, whose proxies are never None."""
    if weights is None:
        raise ValueError("FrozenTables: weights is None, but the tables are weighted. Pass float32 [N].")
    return weights.index_select(0, positions_N)


class FrozenTable(nn.Module):
    """The rows of one table, which never change, by id.

    An id is looked up among the sorted ids; only equality makes it known. Behind the last row stands a row of zeros:
    what unknown ids read with ``unknown_row="zero"``, and what is overwritten by their initial rows otherwise.

    Attributes:
        ids: int64 [R + 1], ascending; the last entry is `LAST_ID` and belongs to no row.
        codes: [R + 1, code columns], rows in the order of the ids; the last one is zero.
        scale_bias: float32 [R + 1, 2], or [R + 1, 0] of formats that have none.
    """

    ids: Tensor
    codes: Tensor
    scale_bias: Tensor
    dim: Final[int]
    num_rows: Final[int]
    is_quantised: Final[bool]
    is_int4: Final[bool]
    has_initial_rows: Final[bool]

    def __init__(
        self,
        config: TableConfig,
        row_format: RowFormat,
        *,
        ids: Tensor,
        codes: Tensor,
        scale_bias: Tensor,
        has_initial_rows: bool,
    ) -> None:
        """
        Args:
            config: The table.
            row_format: Of ``codes``.
            ids: See the class.
            codes: See the class.
            scale_bias: See the class.
            has_initial_rows: Whether unknown ids read their initial row, or zeros.
        """
        super().__init__()
        self.dim, self.num_rows = config.embedding_dim, len(ids) - 1
        self.is_quantised, self.is_int4 = row_format.is_quantised, row_format is RowFormat.INT4
        self.has_initial_rows = has_initial_rows
        for name, tensor in (("ids", ids), ("codes", codes), ("scale_bias", scale_bias)):
            self.register_buffer(name, tensor)
        self.initial_rows = initial_rows_of(config) if has_initial_rows else nn.Identity()

    def forward(self, ids_N: Tensor) -> Tensor:
        """float32 [N, D]: the rows of ids int64 [N], any values."""
        position_N = torch.searchsorted(self.ids, ids_N)  # <= R: no id is greater than the last entry
        is_found = self.ids.index_select(0, position_N) == ids_N
        number_N = torch.where(is_found, position_N, self.num_rows)
        codes, scale_bias = self.codes.index_select(0, number_N), self.scale_bias.index_select(0, number_N)
        rows_ND = decode_rows(codes, scale_bias, self.dim, self.is_quantised, self.is_int4)
        if self.has_initial_rows:
            unknown_n = (number_N == self.num_rows).nonzero().squeeze(1)
            initial_nD = self.initial_rows(ids_N.index_select(0, unknown_n))
            rows_ND = rows_ND.index_copy(0, unknown_n, initial_nD)
        return rows_ND


class _PooledTable(nn.Module):
    """One table, its features and its pooling."""

    is_mean: Final[bool]
    is_weighted: Final[bool]

    def __init__(self, table: FrozenTable, features: list[int], *, is_mean: bool, is_weighted: bool) -> None:
        super().__init__()
        self.table, self.features, self.num_features = table, features, len(features)
        self.is_mean, self.is_weighted = is_mean, is_weighted

    def forward(self, values: Tensor, weights: Tensor | None, positions: list[Tensor], lengths_FB: Tensor) -> Tensor:
        """float32 [B, features of the table * D]; see `FrozenTables`, and ``positions`` of all its features."""
        positions_N = torch.cat([positions[f] for f in self.features])
        rows_ND = self.table(values.index_select(0, positions_N))
        lengths = torch.cat([lengths_FB[f] for f in self.features])
        pooled = F.embedding_bag(
            torch.arange(rows_ND.size(0), device=rows_ND.device),
            rows_ND,
            F.pad(lengths.cumsum(0), (1, 0)),
            norm_type=2.0,  # the default is an int, which a traced and then scripted call does not take
            mode="sum",
            per_sample_weights=weights_at(weights, positions_N) if self.is_weighted else None,
            include_last_offset=True,
        )
        if self.is_mean:
            pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
        return torch.cat(pooled.unflatten(0, [self.num_features, -1]).unbind(0), 1)


class _SequenceTable(nn.Module):
    """One table and its features."""

    def __init__(self, table: FrozenTable, features: list[int]) -> None:
        super().__init__()
        self.table, self.features = table, features

    def forward(self, values: Tensor, positions: list[Tensor]) -> Tensor:
        """float32 [ids of the table's features, D]."""
        rows_ND: Tensor = self.table(values.index_select(0, torch.cat([positions[f] for f in self.features])))
        return rows_ND


class FrozenTables(nn.Module):
    """Pooled lookups in several frozen tables, from tensors to one tensor.

    The layout of the input is that of a `KeyedJaggedTensor` whose keys are `feature_names`, in that order.

    Attributes:
        feature_names: F names of inputs, each once.
        output_names: ``feature``, or ``feature@table`` if several tables use the feature; in the order of the columns.
        output_dims: Columns of each.
    """

    num_features: Final[int]

    def __init__(self, configs: Sequence[TableConfig], tables: Sequence[FrozenTable], *, is_weighted: bool) -> None:
        """
        Args:
            configs: Of the tables.
            tables: In the same order, which is that of the output.
            is_weighted: Whether ids carry weights.
        """
        super().__init__()
        self.feature_names, features = _features_of(configs)
        self.output_names, self.output_dims = _outputs_of(configs)
        self.num_features = len(self.feature_names)
        self.tables = nn.ModuleList(
            _PooledTable(table, used, is_mean=config.pooling == PoolingType.MEAN, is_weighted=is_weighted)
            for config, table, used in zip(configs, tables, features, strict=True)
        )

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Look up and pool.

        Args:
            values: int64 [N], the ids of all bags, feature after feature.
            lengths: int64 [F * B], ids in each bag, feature after feature. Their sum is N.
            weights: float32 [N] of weighted tables, else not read.

        Returns:
            float32 [B, sum of `output_dims`].
        """
        lengths_FB = lengths.view(self.num_features, -1)
        positions = positions_of_features(values, lengths_FB)
        pooled: list[Tensor] = []
        for table in self.tables:
            pooled.append(table(values, weights, positions, lengths_FB))
        return torch.cat(pooled, 1)


class FrozenSequences(nn.Module):
    """Rows of the ids of several frozen tables, not pooled, from tensors to one tensor.

    Attributes:
        feature_names: As in `FrozenTables`, and the layout of the input too.
        output_names: As there; the rows of the outputs follow each other in this order.
        output_dims: D, for each.
    """

    num_features: Final[int]

    def __init__(self, configs: Sequence[TableConfig], tables: Sequence[FrozenTable]) -> None:
        """
        Args:
            configs: Of the tables, all of one dim.
            tables: In the same order.
        """
        super().__init__()
        self.feature_names, features = _features_of(configs)
        self.output_names, self.output_dims = _outputs_of(configs)
        self.output_features = [feature for used in features for feature in used]
        self.num_features = len(self.feature_names)
        self.tables = nn.ModuleList(_SequenceTable(table, used) for table, used in zip(tables, features, strict=True))

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Look up.

        Args:
            values: int64 [N], feature after feature.
            lengths: int64 [F * B], feature after feature. Their sum is N.

        Returns:
            float32 [sum of N over outputs, D]: a feature that several tables use stands there once for each.
        """
        positions = positions_of_features(values, lengths.view(self.num_features, -1))
        rows: list[Tensor] = []
        for table in self.tables:
            rows.append(table(values, positions))
        return torch.cat(rows, 0)


def _features_of(configs: Sequence[TableConfig]) -> tuple[list[str], list[list[int]]]:
    """The names of the inputs, and for each table the numbers of its features among them."""
    names = list(dict.fromkeys(name for config in configs for name in config.feature_names))
    return names, [[names.index(name) for name in config.feature_names] for config in configs]


def _outputs_of(configs: Sequence[TableConfig]) -> tuple[list[str], list[int]]:
    names = [name for names in embedding_names(configs) for name in names]
    return names, [config.embedding_dim for config in configs for _ in config.feature_names]
