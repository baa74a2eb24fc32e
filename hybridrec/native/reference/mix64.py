"""`mix64`: the bijection from ids to keys, its inverse, and what is derived from it.

Source: the finalizer of MurmurHash3 by Austin Appleby, public domain. GOLDEN as in SplitMix64, G. L. Steele et al.,
"Fast splittable pseudorandom number generators", OOPSLA 2014. FNV-1a: Fowler, Noll, Vo.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd."""

_FIRST, _SECOND = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_SHIFT = np.uint64(33)
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def mix64_uint64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of uint64 values of any shape; a new array."""
    x = x ^ (x >> _SHIFT)
    x *= np.uint64(_FIRST)
    x ^= x >> _SHIFT
    x *= np.uint64(_SECOND)
    x ^= x >> _SHIFT
    return x


def unmix64_uint64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The inverse of `mix64_uint64`; a new array. A shift by more than half the width undoes itself."""
    x = x ^ (x >> _SHIFT)
    x *= np.uint64(pow(_SECOND, -1, 2**64))
    x ^= x >> _SHIFT
    x *= np.uint64(pow(_FIRST, -1, 2**64))
    x ^= x >> _SHIFT
    return x


def mix64(ids: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """The keys of ids.

    Args:
        ids: int64 [N], any values.
        out: int64 [N], written; may be ``ids`` itself.
    """
    out.view(np.uint64)[...] = mix64_uint64(ids.view(np.uint64))


def unmix64(keys: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """The ids of keys.

    Args:
        keys: int64 [N].
        out: int64 [N], written; may be ``keys`` itself.
    """
    out.view(np.uint64)[...] = unmix64_uint64(keys.view(np.uint64))


def table_seed(seed: int, name: str) -> int:
    """What tells the initial rows of one table from those of every other.

    Args:
        seed: Any int; taken modulo 2^64.
        name: Of the table.

    Returns:
        A uint64.
    """
    digest = _FNV_OFFSET
    for byte in name.encode():
        digest = ((digest ^ byte) * _FNV_PRIME) & MASK
    return _mix_int(digest ^ _mix_int((seed + GOLDEN) & MASK))


def _mix_int(x: int) -> int:
    return int(mix64_uint64(np.array([x], dtype=np.uint64))[0])
