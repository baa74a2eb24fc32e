"""How many bytes of host memory a table shard takes once its planned rows live: what plans account.

The figures follow the C++ core: `id_map.h`, `table_shard.h`, `slot_index.h` and `row_store.h` say why it is so. Id map
and row numbers grow in steps, so bytes a row vary by a factor of two with the number of rows; a constant would not do.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrec.native import mix64

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64 + 4  # four entries, and the counter of keys that passed
_ENTRIES_PER_LINE = 4
_FIRST_LINES, _DOUBLING_LINES, _MAX_LINES = 4, 8192, 30720
_GOLDEN = 0x9E3779B97F4A7C15
_KNOWN_DEPTH = 12  # beyond 2^12 segments their limits are as good as evenly spread
SLOT_INDEX_BYTES = 8 + 4 + 2 * 12 + 4
"""Of one slot, in host memory: its state, its row, two uses, its place among the freed ones."""


def planned_host_bytes(
    *, dim: int, num_row_states: int, num_row_wise_states: int, num_rows: int, num_slots: int, store_rows: int
) -> int:
    """Bytes that the core allocates for one table shard.

    Args:
        dim: D.
        num_row_states: M.
        num_row_wise_states: A.
        num_rows: Rows that live, wherever their values are.
        num_slots: C.
        store_rows: Rows that have, or once had, their values in the store; at most ``num_rows``.

    Returns:
        Id map, row numbers, slot index and chunks of the store: `Counters.host_bytes`, but for the chance of which ids
        come (below 2 %).
    """
    row_bytes = (-(-dim * (1 + num_row_states) // 16) * 16 + num_row_wise_states) * 4
    rows_per_chunk = max(1, _HUGE_PAGE_BYTES // row_bytes)
    chunk_bytes = _round_up(rows_per_chunk * row_bytes, _HUGE_PAGE_BYTES)
    store = -(-store_rows // rows_per_chunk) * chunk_bytes
    row_numbers = _array_bytes(num_rows, 8) + _array_bytes(num_rows, 4)
    return _id_map_bytes(num_rows) + row_numbers + num_slots * SLOT_INDEX_BYTES + store


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@functools.lru_cache(maxsize=4096)
def _array_bytes(num_rows: int, element_bytes: int) -> int:
    """Of an array that grew one element at a time, by half at least and in whole pages."""
    capacity = 0
    while capacity < num_rows:
        wanted = max(capacity + 1, capacity + capacity // 2)
        capacity = _round_up(wanted * element_bytes, _PAGE_BYTES) // element_bytes
    return capacity * element_bytes


@functools.lru_cache(maxsize=4096)
def _id_map_bytes(num_rows: int) -> int:
    """A segment doubles up to `_MAX_LINES`; full ones then split in two, each at a load of its own."""
    lines = _FIRST_LINES
    while lines < _MAX_LINES and num_rows > _limits(0, lines)[0]:
        lines = lines * 2 if lines < _DOUBLING_LINES else _MAX_LINES
    if lines < _MAX_LINES:
        return lines * _LINE_BYTES
    depth = 0
    while num_rows / 2**depth > _limits(min(depth, _KNOWN_DEPTH), _MAX_LINES)[-1]:
        depth += 1
    limits = _limits(min(depth, _KNOWN_DEPTH), _MAX_LINES)
    share_split = np.searchsorted(limits, num_rows / 2**depth) / len(limits)
    return int(2**depth * (1 + share_split)) * _MAX_LINES * _LINE_BYTES


@functools.lru_cache(maxsize=64)
def _limits(depth: int, lines: int) -> NDArray[np.int64]:
    """Ascending: keys at which each of the 2^depth segments of ``lines`` lines grows."""
    numbers = np.arange(2**depth, dtype=np.uint64) * np.uint64(64) + np.uint64((depth + _GOLDEN) % 2**64)
    jitter = mix64(torch.from_numpy(numbers.view(np.int64))).numpy().view(np.uint64) >> np.uint64(56)
    limits = lines * _ENTRIES_PER_LINE * (594 + jitter.astype(np.int64) * 123 // 256) // 1024
    return np.sort(limits)
