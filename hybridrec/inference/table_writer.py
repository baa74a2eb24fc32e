"""One table's rows on their way into frozen arrays, chunk by chunk.

Beyond the arrays themselves a rank holds one chunk, and what an export of rows takes. Of a sharded collection every
rank encodes its own rows and sends them to rank 0 over the host group. Whatever a rank has against a chunk is agreed
on before the chunk is sent, so that all ranks raise the same error.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec.distributed.verdict import agree
from hybridrec.errors import ConfigError
from hybridrec.inference.files import Storage
from hybridrec.inference.frozen_tables import LAST_ID
from hybridrec.inference.report import ErrorSum, TableReport
from hybridrec.inference.row_format import EncodedRows, RowFormat, RowRefused, decode_rows, encode_rows
from hybridrec.inference.row_source import RowSource, export_of, group_of
from hybridrec.store.row_export import RowExport

CHUNK_ROWS = 2**16
"""Rows that are read, encoded and sent at a time."""

Shape = tuple[torch.dtype, tuple[int, int] | tuple[int]]
T = TypeVar("T")


def array_shapes(row_format: RowFormat, dim: int, num_rows: int) -> dict[str, Shape]:
    """Name -> (dtype, shape) of a table's arrays, as `FrozenTable` takes them."""
    return {
        "ids": (torch.int64, (num_rows + 1,)),
        "codes": (row_format.code_dtype, (num_rows + 1, row_format.code_columns(dim))),
        "scale_bias": (torch.float32, (num_rows + 1, 2 * row_format.is_quantised)),
    }


def together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Do something on every rank; where one fails all raise its error. Collective over the group."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as e:  # travels to the other ranks, then is raised below
        error = e
    agreed = agree(error, group, aftermath="nothing was frozen")
    if agreed is not None:
        raise agreed from (None if agreed is error else error)
    return result  # type: ignore[return-value]  # there was no error


class TableWriter:
    """Freezes one table. Where `storage` is None the rows go to rank 0."""

    def __init__(
        self, source: RowSource, table: int, row_format: RowFormat, chunk_rows: int, storage: Storage | None
    ) -> None:
        """
        Args:
            source: Of the rows.
            table: Which table of it.
            row_format: What to make of them.
            chunk_rows: Rows that are read, encoded and sent at a time.
            storage: Makes the arrays; None on ranks other than 0.
        """
        self.row_format = row_format
        self.num_rows = 0
        """R, of all ranks."""
        self.arrays: dict[str, Tensor] = {}
        """What `FrozenTable` takes; empty on ranks other than 0."""
        self._source, self._table, self._config = source, table, source.table_configs[table]
        self._chunk_rows, self._storage, self._group = chunk_rows, storage, group_of(source)
        self._is_writer = storage is not None
        self._errors = ErrorSum()

    def write(self) -> None:
        """All rows. Collective.

        Raises:
            ConfigError: A row cannot be held by the format; the ranks do not want the same.
            OSError: The arrays cannot be made.
        """
        export = self._export()
        try:
            counts = self._gather(export.num_rows)
            self.num_rows = sum(counts)
            together(self._group, self._make_arrays)
            if len(counts) > 1:  # where a row belongs is known when the ids of all ranks are
                self._gather_ids(export, counts)
                export = self._export()
            for start in range(0, max(counts), self._chunk_rows):
                ids_n, encoded = together(self._group, functools.partial(self._next, export))
                if not self._is_writer:
                    self._send(ids_n, *encoded)
                    continue
                self._put(ids_n, encoded, start if len(counts) == 1 else None)
                for rank, count in enumerate(counts[1:], start=1):
                    self._receive(rank, min(self._chunk_rows, count - start))
        finally:
            export.close()
        self._gather_errors()

    def _export(self) -> RowExport:
        return together(self._group, lambda: export_of(self._source, self._config, self._chunk_rows))

    def report(self) -> TableReport:
        """What became of the table; on rank 0."""
        return TableReport(
            table=self._config.name,
            dtype=self.row_format.value,
            dim=self._config.embedding_dim,
            rows=self.num_rows,
            bytes=sum(array.numel() * array.itemsize for array in self.arrays.values()),
            max_abs_error=self._errors.largest,
            mean_abs_error=self._errors.mean,
        )

    def _gather(self, num_ids: int) -> list[int]:
        """How many rows each rank has. That all want the same is checked with it."""
        if self._group is None:
            return [num_ids]
        wish = zlib.crc32(f"{self.row_format.value} {self._chunk_rows}".encode())
        counts, wishes = self._all_gather(torch.tensor([num_ids, wish])).T.tolist()
        if len(set(wishes)) > 1:
            raise ConfigError(
                f"freeze: the ranks do not agree on dtype and chunk_rows of table {self._config.name!r}. Call freeze "
                "with the same arguments on all ranks."
            )
        return list(counts)

    def _make_arrays(self) -> None:
        if self._storage is None:
            return
        for name, (dtype, shape) in array_shapes(self.row_format, self._config.embedding_dim, self.num_rows).items():
            self.arrays[name] = self._storage.empty(f"{self._table}.{name}", dtype, shape)
        self.arrays["ids"][-1] = LAST_ID
        self.arrays["codes"][-1] = 0
        self.arrays["scale_bias"][-1] = 0

    def _gather_ids(self, export: RowExport, counts: list[int]) -> None:
        """All ranks' ids, ascending, on rank 0."""
        if not self._is_writer:
            for chunk in export:
                self._send(chunk.ids_N)
            return
        parts = self.arrays["ids"][:-1].split(counts)
        for part, chunk in zip(parts[0].split(self._chunk_rows), export, strict=False):  # no rows: one empty part
            part.copy_(chunk.ids_N)
        for rank, received in enumerate(parts[1:], start=1):
            for part in received.split(self._chunk_rows):
                self._receive_into(rank, part)
        self.arrays["ids"][:-1].numpy().sort()  # in place, where torch would make a copy and an index

    def _next(self, export: RowExport) -> tuple[Tensor, EncodedRows]:
        """The ids int64 [n] of the next chunk and its rows; none of either if there is none."""
        chunk = next(export, None)
        dim = self._config.embedding_dim
        ids_n = torch.empty(0, dtype=torch.int64) if chunk is None else chunk.ids_N
        rows_nD = torch.empty((0, dim)) if chunk is None else chunk.weights_ND.to(torch.float32)
        try:
            encoded = encode_rows(rows_nD, self.row_format)
        except RowRefused as e:
            raise ConfigError(
                f"freeze: table {self._config.name!r}: the row of id {int(ids_n[e.row])} cannot be stored as "
                f"{self.row_format.value}: {e}. Freeze the table as 'fp32', or find out why training made it."
            ) from e
        is_int4 = self.row_format is RowFormat.INT4
        self._errors.add(rows_nD, decode_rows(*encoded, dim, self.row_format.is_quantised, is_int4))
        return ids_n, encoded

    def _put(self, ids_n: Tensor, encoded: EncodedRows, start: int | None) -> None:
        """Rows to their places; ``start``: of the first, if they follow each other and their ids are not there yet."""
        if start is None:
            places: slice | Tensor = torch.searchsorted(self.arrays["ids"][:-1], ids_n)
        else:
            places = slice(start, start + len(ids_n))
            self.arrays["ids"][places] = ids_n
        self.arrays["codes"][places] = encoded.codes
        self.arrays["scale_bias"][places] = encoded.scale_bias

    def _receive(self, rank: int, count: int) -> None:
        """One chunk of another rank."""
        if count <= 0:
            return
        ids_n = torch.empty(count, dtype=torch.int64)
        names = EncodedRows._fields
        encoded = EncodedRows(*(self.arrays[n].new_empty((count, self.arrays[n].shape[1])) for n in names))
        for part in (ids_n, *encoded):
            self._receive_into(rank, part)
        self._put(ids_n, encoded, None)

    def _send(self, *parts: Tensor) -> None:
        for part in parts:
            if part.numel():
                dist.send(part.contiguous(), group_dst=0, group=self._group)

    def _receive_into(self, rank: int, part: Tensor) -> None:
        if part.numel():
            dist.recv(part, group_src=rank, group=self._group)

    def _gather_errors(self) -> None:
        """To rank 0, of all ranks."""
        if self._group is None:
            return
        everyone = self._all_gather(self._errors.figures())
        if self._is_writer:
            for others in everyone[1:]:
                self._errors.merge(others)

    def _all_gather(self, mine: Tensor) -> Tensor:
        """[W, ..]: of every rank."""
        assert self._group is not None
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        return torch.stack(everyone)
