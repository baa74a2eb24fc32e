"""`FollowedTables`: what a follower has at one moment. It stays as it is, whatever is applied afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.checkpoint.arguments import Ids, as_tensor
from hybridrec.checkpoint.followed_rows import FollowedRows
from hybridrec.checkpoint.manifest import TableEntry
from hybridrec.checkpoint.saved_initializers import Banks, initializer_of
from hybridrec.checkpoint.saved_tables import columns_of, layout_of
from hybridrec.errors import ConfigError
from hybridrec.native import initial_rows, mix64
from hybridrec.native.protocol import ShardSpec
from hybridrec.row_type import RowType
from hybridrec.store.initializer import initial_spec
from hybridrec.store.row_export import RowChunk

Key = tuple[str, str]
"""Collection, table."""
Unknown = Literal["initial", "zeros"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FollowedTables:
    """The tables of a run after a training batch: a snapshot with some of its deltas."""

    snapshot: Path
    """Where the chain begins."""
    number: int
    """Deltas that were applied to it."""
    step: int
    """Training batches whose updates it has."""
    digest: str
    """Of the last manifest."""
    dense: Mapping[str, Tensor]
    """Parameters and buffers that are not hashed tables, by name; tables that TorchRec shards whole."""
    entries: Mapping[Key, TableEntry]
    """Tables, and columns of tables that were sharded column-wise."""
    versions: Mapping[Key, FollowedRows]
    banks: Banks

    @property
    def table_names(self) -> list[str]:
        """Of all collections; columns of a table by themselves: ``"t[0:8]"``."""
        return [table for _, table in self.entries]

    def rows(self, table: str, *, collection: str | None = None) -> RowChunk:
        """A copy of all rows of a table, ascending by id.

        Args:
            table: Its name, or that of columns: ``"t[0:8]"``.
            collection: Needed where two have a table of this name.

        Raises:
            ConfigError: There is no such table, or there are two.
        """
        found = [key for key in self.entries if key[1] == table and collection in (None, key[0])]
        key = self._one(table, found)
        return self.versions[key].chunk(slice(None), layout_of(self.entries[key]))

    def embeddings(
        self, table: str, ids_N: Ids, *, collection: str | None = None, unknown: Unknown = "initial"
    ) -> tuple[Tensor, Tensor]:
        """([N, D] of the table's type, bool [N]): the embeddings of ids, and which of them have a row.

        Args:
            table: See `rows`; of one that was sharded column-wise its own name gives all columns.
            ids_N: int64 [N], any values, in host memory: a tensor, a numpy array or a list.
            collection: See `rows`.
            unknown: What an id without a row reads. ``"initial"``: the initial row that the model reads for it in eval,
                bit for bit. ``"zeros"``: zeros.

        Raises:
            ConfigError: There is no such table, or there are two; or another argument is not as it should be.
        """
        ids_N = as_tensor(ids_N, "embeddings: ids")
        if ids_N.dtype != torch.int64 or ids_N.dim() != 1 or ids_N.device != HOST:
            raise ConfigError(
                f"embeddings: ids are {ids_N.dtype} {list(ids_N.shape)} on {ids_N.device}. Accepted: int64 [N] in host "
                "memory."
            )
        if unknown not in ("initial", "zeros"):
            raise ConfigError(f"embeddings: unknown={unknown!r}. Accepted: 'initial', 'zeros'.")
        parts = [self._part(key, ids_N, unknown) for key in self._parts(table, collection)]
        return torch.cat([part for part, _ in parts], 1), torch.stack([is_known for _, is_known in parts]).all(0)

    def _part(self, key: Key, ids_N: Tensor, unknown: Unknown) -> tuple[Tensor, Tensor]:
        version, layout = self.versions[key], layout_of(self.entries[key])
        index, found = version.where(ids_N.numpy())
        is_known = torch.from_numpy(found)
        weights = version.chunk(index[found], layout).weights_ND
        if len(weights) == len(ids_N):
            return weights.contiguous(), is_known
        out = torch.zeros((len(ids_N), layout.dim), dtype=weights.dtype)
        out[is_known] = weights
        if unknown == "initial":
            out[~is_known] = initial_rows(self._spec(key), mix64(ids_N[~is_known].contiguous()))
        return out, is_known

    def _spec(self, key: Key) -> ShardSpec:
        """What initial rows of a table, or of columns of one, follow from."""
        entry = self.entries[key]
        table, first = columns_of(entry) or (entry.name, 0)
        bank = self.banks.get(key[0], {}).get(table)
        bank = None if bank is None else bank[:, first : first + entry.dim]
        remedy = "Pass unknown='zeros', or follow a newer snapshot."
        initializer = initializer_of(entry.initializer, bank, table, remedy)
        return initial_spec(table, entry.dim, entry.seed, initializer, RowType[entry.row_type], first_column=first)

    def _parts(self, table: str, collection: str | None) -> list[Key]:
        """The table; or its columns from left to right."""
        mine = [key for key in self.entries if collection in (None, key[0])]
        found = [key for key in mine if key[1] == table]
        columns: dict[str, dict[int, Key]] = {}
        for key in mine:
            of = columns_of(self.entries[key])
            if of is not None and of[0] == table:
                columns.setdefault(key[0], {})[of[1]] = key
        if found or len(columns) != 1:
            return [self._one(table, [*found, *(parts[0] for parts in columns.values())])]
        (parts,) = columns.values()
        return [parts[first] for first in sorted(parts)]

    def _one(self, table: str, found: list[Key]) -> Key:
        if len(found) != 1:
            raise ConfigError(
                f"{'no' if not found else 'more than one'} table {table!r} is in {self.snapshot}. (collection, "
                f"table): {list(self.entries)}."
            )
        return found[0]
