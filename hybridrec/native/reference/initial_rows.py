"""Initial rows: a pure function of (table_seed, key, column). See docs/design/initial_rows.md.

Every float32 operation is rounded on its own: float32 scalars meet float32 arrays, one operator at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrec.native.protocol import InitKind, ShardSpec
from hybridrec.native.reference.mix64 import GOLDEN, mix64_uint64
from hybridrec.row_type import RowType

_LOW_24_BITS = np.uint64(2**24 - 1)
_LOW_16_BITS = np.uint64(2**16 - 1)
_IRWIN_HALL_MEAN = 12 * (2**16 - 1) // 2


def initial_rows(spec: ShardSpec, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """The rows that keys have before they were ever trained, as words (`RowType`).

    Args:
        spec: Of the table; see `initial_floats`.
        keys: int64 [n].
        out: float32 [n, words], written. The words of a row lie next to each other.
    """
    if spec.row_type is RowType.FLOAT32:
        initial_floats(spec, keys, out)
        return
    floats = np.empty((len(keys), spec.dim), dtype=np.float32)
    initial_floats(spec, keys, floats)
    halves = np.zeros((len(keys), 2 * spec.weight_words), dtype="<u2")
    halves[:, : spec.dim] = _bfloat16(floats) if spec.row_type is RowType.BFLOAT16 else _float16(floats)
    out[...] = halves.view("<f4")


def _bfloat16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits, rounded to the nearest and ties to even."""
    bits = floats.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _float16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """As above; numpy rounds so."""
    with np.errstate(over="ignore", under="ignore"):
        return floats.astype(np.float16).view(np.uint16)


def initial_floats(spec: ShardSpec, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """The same before they are rounded to the row type.

    Args:
        spec: dim, first_column, table_seed, init_kind, init_a, init_b and bank are read.
        keys: int64 [n].
        out: float32 [n, D], written.

    Source: the normal is an Irwin-Hall sum of twelve uniforms (Irwin 1927, Hall 1927): standard deviation 1, within
        6, additions only.
    """
    a, b = np.float32(spec.init_a), np.float32(spec.init_b)
    base = mix64_uint64(keys.view(np.uint64) + np.uint64(spec.table_seed))
    columns = np.arange(spec.first_column, spec.first_column + spec.dim)
    match spec.init_kind:
        case InitKind.UNIFORM:
            words = _words(base, columns // 2)
            shifts = np.where(columns % 2 == 0, 40, 8).astype(np.uint64)
            fraction = ((words >> shifts) & _LOW_24_BITS).astype(np.float32) * np.float32(2**-24)
            out[...] = a + (b - a) * fraction
        case InitKind.NORMAL:
            total = np.zeros((len(keys), spec.dim), dtype=np.int64)
            for i in range(3):
                words = _words(base, 3 * columns + i)
                for shift in (0, 16, 32, 48):
                    total += ((words >> np.uint64(shift)) & _LOW_16_BITS).astype(np.int64)
            out[...] = a + b * ((total - _IRWIN_HALL_MEAN).astype(np.float32) * np.float32(2**-16))
        case InitKind.CONSTANT:
            out[...] = a
        case InitKind.BANK:
            assert spec.bank is not None  # the facade refuses it
            out[...] = spec.bank[base % np.uint64(len(spec.bank))]


def _words(base: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 [n, D]: word(index) of every key and column."""
    steps = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return mix64_uint64(base[:, np.newaxis] + steps)
