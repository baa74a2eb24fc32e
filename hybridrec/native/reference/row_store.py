"""`RowStore`: the values of rows that are in no slot, in chunks that are allocated when first written to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 2**21
LINE_BYTES = 64


class RowStore:
    """Records of one table by row number: weights, row-sized states, row-wise states, in this order."""

    def __init__(self, record_floats: int) -> None:
        self._record_floats = record_floats
        self.rows_per_chunk = max(1, CHUNK_BYTES // (-(-record_floats * 4 // LINE_BYTES) * LINE_BYTES))
        self._chunks: dict[int, NDArray[np.float32]] = {}

    def missing_chunks(self, rows: Iterable[int]) -> set[int]:
        """Chunks that must be allocated before these rows can be written."""
        return {row // self.rows_per_chunk for row in rows} - self._chunks.keys()

    def chunk_bytes(self, num_chunks: int) -> int:
        """Bytes of so many chunks."""
        return num_chunks * self.rows_per_chunk * self._record_floats * 4

    @property
    def host_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.chunk_bytes(len(self._chunks))

    def allocate(self, rows: Iterable[int]) -> None:
        """Make the rows writable. What they hold is NaN until they are written: a row read too early must show."""
        for chunk in self.missing_chunks(rows):
            self._chunks[chunk] = np.full((self.rows_per_chunk, self._record_floats), np.nan, dtype=np.float32)

    def write(self, row: int, record: NDArray[np.float32]) -> None:
        """Keep one record."""
        self._chunks[row // self.rows_per_chunk][row % self.rows_per_chunk] = record

    def read(self, row: int) -> NDArray[np.float32]:
        """One record; a view."""
        record: NDArray[np.float32] = self._chunks[row // self.rows_per_chunk][row % self.rows_per_chunk]
        return record
