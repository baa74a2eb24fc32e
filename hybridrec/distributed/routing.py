"""Which rank looks up which rows and columns of a collection's tables: the same value on every rank.

*Row-wise*: every rank has the rows of the ids that hash to it. *Table-wise*: one rank has them all. *Column-wise*: a
table is cut into columns, each part on one rank, like a table of its own that sees the same ids.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType

from hybridrec.config import TableConfig
from hybridrec.errors import ConfigError
from hybridrec.kernels.optimizer import OptimizerSpec

ROW_WISE = ShardingType.ROW_WISE.value
TABLE_WISE = ShardingType.TABLE_WISE.value
COLUMN_WISE = ShardingType.COLUMN_WISE.value
SHARDING_TYPES = (ROW_WISE, TABLE_WISE, COLUMN_WISE)
"""Of hashed tables, in order of preference."""
_REASONS = {
    ShardingType.DATA_PARALLEL.value: "every rank would hold all rows, and its batches would insert rows that the "
    "other ranks' copies do not have",
    ShardingType.TABLE_ROW_WISE.value: "the ranks of one machine would share the table's rows; here all ranks do",
    ShardingType.GRID_SHARD.value: "the ranks of one machine would share the rows of a column shard",
    ShardingType.TABLE_COLUMN_WISE.value: "which ranks hold a table's columns is not bound to one machine here",
}


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """Columns of a table, and who has their rows."""

    table: TableConfig
    first_column: int
    dim: int
    """Columns."""
    owner: int | None
    """The rank that has all rows; None: each rank has those of the ids that hash to it."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all columns."""
        return self.dim == self.table.embedding_dim

    @property
    def name(self) -> str:
        """Of the shard, in messages: the table's, with the columns unless it has all."""
        last = self.first_column + self.dim
        return self.table.name if self.is_whole else f"{self.table.name}[{self.first_column}:{last}]"

    @property
    def num_features(self) -> int:
        """Features that look it up."""
        return len(self.table.feature_names)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The parts of a collection in the order in which features are fed and pools come back.

    Row-wise parts first, then those of rank 0, of rank 1, and so on; a rank's lookup has the first and its own.
    """

    parts: tuple[TablePart, ...]
    world_size: int

    def of_rank(self, rank: int) -> tuple[TablePart, ...]:
        """What a rank looks up, in the order of its lookup."""
        return tuple(part for part in self.parts if part.owner is None or part.owner == rank)

    @functools.cached_property
    def owners(self) -> dict[str, int | None]:
        """Name of a part -> the rank that has all its rows; None: all ranks have some."""
        return {part.name: part.owner for part in self.parts}

    @functools.cached_property
    def feature_names(self) -> list[str]:
        """[F]: of all parts; a feature that several parts look up occurs as often."""
        return [name for part in self.parts for name in part.table.feature_names]

    @functools.cached_property
    def shared_features(self) -> int:
        """Features of row-wise parts, which are the first."""
        return sum(part.num_features for part in self.parts if part.owner is None)

    @functools.cached_property
    def owned_features(self) -> list[int]:
        """[W]: features that go to one rank as a whole."""
        return self._by_owner([part.num_features for part in self.parts])

    @functools.cached_property
    def owned_dims(self) -> list[int]:
        """[W]: columns of pools that come from one rank alone."""
        return self._by_owner([part.num_features * part.dim for part in self.parts])

    @functools.cached_property
    def feature_dims(self) -> list[int]:
        """[F]: columns that are looked up for each of `feature_names`."""
        return [part.dim for part in self.parts for _ in range(part.num_features)]

    @functools.cached_property
    def cell_dim(self) -> int:
        """The largest number of columns of which every part has a multiple."""
        return math.gcd(*self.feature_dims)

    @functools.cached_property
    def first_features(self) -> dict[str, list[int]]:
        """Table -> of its parts, in the order of their columns, the place of the first feature."""
        starts = itertools.accumulate((part.num_features for part in self.parts), initial=0)
        placed: dict[str, list[tuple[int, int]]] = {}
        for part, start in zip(self.parts, starts, strict=False):
            placed.setdefault(part.table.name, []).append((part.first_column, start))
        return {name: [start for _, start in sorted(parts)] for name, parts in placed.items()}

    @property
    def largest_dim(self) -> int:
        """Columns of the pools of the rank that has most."""
        shared = sum(part.num_features * part.dim for part in self.parts if part.owner is None)
        return shared + max(self.owned_dims)

    def _by_owner(self, counts: Sequence[int]) -> list[int]:
        total = [0] * self.world_size
        for part, count in zip(self.parts, counts, strict=True):
            if part.owner is not None:
                total[part.owner] += count
        return total


def check_sharding_type(table: str, sharding_type: str, where: str) -> None:
    """
    Raises:
        ConfigError: Hashed tables are not sharded that way; says why.
    """
    if sharding_type in SHARDING_TYPES:
        return
    reason = f" ({_REASONS[sharding_type]})" if sharding_type in _REASONS else ""
    raise ConfigError(
        f"table {table!r}: {where} {sharding_type!r}, which is not available for hashed tables{reason}. Use "
        f"ParameterConstraints(sharding_types=[...]) with {', '.join(map(repr, SHARDING_TYPES))}."
    )


def check_columns(part: TablePart, optimizer: OptimizerSpec) -> None:
    """
    Raises:
        ConfigError: The optimizer needs all columns of a row, and the part does not have them.
    """
    if part.is_whole or not any(state.is_row_wise for state in optimizer.row_states()):
        return
    raise no_columns(part.table.name, [state.name for state in optimizer.row_states() if state.is_row_wise])


def no_columns(table: str, row_wise_states: Sequence[str]) -> ConfigError:
    """The refusal of column-wise for an optimizer that needs all columns of a row."""
    return ConfigError(
        f"table {table!r}: it cannot be sharded 'column_wise': its optimizer keeps one value a row "
        f"({', '.join(map(repr, row_wise_states))}), made of the gradients of all columns, which no rank has then. "
        "Shard it 'row_wise' or 'table_wise', or choose an optimizer with a value a column, for example Adagrad."
    )


def parts_of(table: TableConfig, planned: ParameterSharding, world_size: int) -> list[TablePart]:
    """The parts of one table, in the order of their columns.

    Raises:
        ConfigError: The plan asks for what does not exist, or does not place all columns.
    """
    check_sharding_type(table.name, planned.sharding_type, "the plan shards it")
    if planned.sharding_type == ROW_WISE:
        return [TablePart(table=table, first_column=0, dim=table.embedding_dim, owner=None)]
    ranks = list(planned.ranks or [])
    columns = [(0, table.embedding_dim)]
    if planned.sharding_type == COLUMN_WISE:
        spec = planned.sharding_spec
        shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else []
        columns = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]
    if len(ranks) != len(columns) or any(not 0 <= rank < world_size for rank in ranks):
        raise ConfigError(
            f"table {table.name!r}: the plan places {len(columns)} {planned.sharding_type!r} shards on ranks {ranks} "
            f"of {world_size}. Give one rank a shard, below the number of ranks."
        )
    placed = sorted(zip(columns, ranks, strict=True))
    ends = [0, *(first + dim for (first, dim), _ in placed)]
    if [first for (first, _), _ in placed] != ends[:-1] or ends[-1] != table.embedding_dim:
        raise ConfigError(
            f"table {table.name!r}: the plan's column shards (first, number) {[c for c, _ in placed]} do not cover its "
            f"{table.embedding_dim} columns once. Plan it with EmbeddingShardingPlanner, or correct the sharding spec."
        )
    return [TablePart(table=table, first_column=c, dim=dim, owner=rank) for (c, dim), rank in placed]
