"""docs/design/initial_rows.md in plain Python integers, one value at a time; shares nothing with hybridrec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x &= MASK
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def table_seed(seed: int, name: str) -> int:
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = (digest ^ byte) * 0x100000001B3 & MASK
    return mix64(digest ^ mix64(seed + GOLDEN))


def _base(seed: int, key: int) -> int:
    return mix64(key + seed)


def _word(base: int, j: int) -> int:
    return mix64(base + (j + 1) * GOLDEN)


def uniform(seed: int, key: int, column: int, low: float, high: float) -> np.float32:
    word = _word(_base(seed, key), column // 2)
    u = (word >> (8 if column % 2 else 40)) % 2**24
    a, b = np.float32(low), np.float32(high)
    return np.float32(a + np.float32(np.float32(b - a) * np.float32(u / 2**24)))


def normal(seed: int, key: int, column: int, mean: float, std: float) -> np.float32:
    base = _base(seed, key)
    s = sum(_word(base, 3 * column + i) >> shift & 0xFFFF for i in range(3) for shift in (0, 16, 32, 48))
    z = np.float32((s - 393210) / 65536)
    return np.float32(np.float32(mean) + np.float32(np.float32(std) * z))


def bank_row(seed: int, key: int, num_rows: int) -> int:
    return _base(seed, key) % num_rows


def uniform_row(seed: int, key: int, dim: int, low: float, high: float) -> Sequence[np.float32]:
    return [uniform(seed, key, c, low, high) for c in range(dim)]
