"""Which streams touched which part of a block when, down to the rows of a table.

A table's rows are used by several streams at a time, each by some: those that are looked up, those that come, those
that go. So a block is divided into granules, all of a size. It begins as one; an operator that takes rows by their
numbers divides it further.
"""

from __future__ import annotations

import math

import numpy as np

from tests.simnpu.ordering import Clock

Granules = slice | np.ndarray
"""Some of a block's granules: a range, or their numbers, int64."""


class Accesses:
    """The last accesses to every granule of one block."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._granule_bytes = max(num_bytes, 1)
        # stream -> tick of its last write (read) of each granule that is not known to be over; 0: none
        self._writes: dict[int, np.ndarray] = {}
        self._reads: dict[int, np.ndarray] = {}

    def range_of(self, first_byte: int, end_byte: int) -> Granules:
        """The granules that bytes [first, end) lie in."""
        return slice(first_byte // self._granule_bytes, -(-end_byte // self._granule_bytes))

    def rows_of(self, rows: np.ndarray, *, first_byte: int, row_bytes: int) -> Granules:
        """The granules of some rows of a table; divides the block so that no two rows share one.

        Args:
            rows: int64 [n].
            first_byte: Where row 0 begins.
            row_bytes: From one row to the next.
        """
        self._divide(math.gcd(self._granule_bytes, row_bytes, first_byte))
        per_row = row_bytes // self._granule_bytes
        first = first_byte // self._granule_bytes + rows * per_row
        return (first[:, None] + np.arange(per_row)).reshape(-1)

    def conflict(self, granules: Granules, stream: int, clock: Clock, *, is_write: bool) -> tuple[str, int] | None:
        """An access of another stream that ``clock`` does not cover and that must not run beside this one.

        Returns:
            "wrote" or "read" and the stream.
        """
        for verb, accesses in (("wrote", self._writes), ("read", self._reads if is_write else {})):
            for other, ticks in accesses.items():
                if other != stream and ticks[granules].max(initial=0) > clock.get(other, 0):
                    return verb, other
        return None

    def note(self, granules: Granules, stream: int, tick: int, *, is_write: bool) -> None:
        """Remember an access. A write stands for all that it is ordered after."""
        if is_write:
            for ticks in (*self._writes.values(), *self._reads.values()):
                ticks[granules] = 0
        accesses = self._writes if is_write else self._reads
        if stream not in accesses:
            accesses[stream] = np.zeros(self._num_bytes // self._granule_bytes, np.int64)
        accesses[stream][granules] = tick

    def last_uses(self) -> dict[int, int]:
        """Stream -> tick of its last access."""
        uses: dict[int, int] = {}
        for accesses in (self._writes, self._reads):
            for stream, ticks in accesses.items():
                uses[stream] = max(uses.get(stream, 0), int(ticks.max()))
        return uses

    def _divide(self, granule_bytes: int) -> None:
        if granule_bytes == self._granule_bytes:
            return
        parts = self._granule_bytes // granule_bytes
        self._granule_bytes = granule_bytes
        for accesses in (self._writes, self._reads):
            for stream, ticks in accesses.items():
                accesses[stream] = np.repeat(ticks, parts)
