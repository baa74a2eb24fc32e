"""How initial rows are made. The values themselves are computed by the core: docs/design/initial_rows.md."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.errors import ConfigError
from hybridrec.native import table_seed
from hybridrec.native.protocol import InitKind, ShardSpec
from hybridrec.row_type import RowType

LARGEST = float(np.finfo(np.float32).max)

SpecFields = dict[str, Any]
"""Keyword arguments of `ShardSpec`: init_kind, init_a, init_b, bank."""


@dataclass(frozen=True)
class Uniform:
    """Every value is uniform in [low, high), in steps of (high - low) / 2^24.

    Raises:
        ConfigError: A bound is not a finite float32, or low > high.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = _float32(self, "low"), _float32(self, "high")
        if low > high:
            raise ConfigError(f"Uniform(low={low!r}, high={high!r}): low is greater than high. Swap them.")
        if high - low > LARGEST:
            raise ConfigError(
                f"Uniform(low={low!r}, high={high!r}): high - low is no finite float32. Choose a narrower range."
            )

    @property
    def largest(self) -> float:
        """No value is larger, signs aside."""
        return max(abs(self.low), abs(self.high))

    def to_spec_fields(self) -> SpecFields:
        """Fields of `ShardSpec`."""
        return {"init_kind": InitKind.UNIFORM, "init_a": self.low, "init_b": self.high, "bank": None}


@dataclass(frozen=True)
class Normal:
    """Every value is normal to good accuracy: a sum of twelve uniforms, never further than 6 std from the mean.

    Raises:
        ConfigError: A parameter is not a finite float32, std < 0, or mean +- 6 std overflows.
    """

    mean: float
    std: float

    def __post_init__(self) -> None:
        mean, std = _float32(self, "mean"), _float32(self, "std")
        if std < 0:
            raise ConfigError(f"Normal(mean={mean!r}, std={std!r}): std is negative. Accepted: 0 and more.")
        if abs(mean) + 6 * std > LARGEST:
            raise ConfigError(
                f"Normal(mean={mean!r}, std={std!r}): values 6 std from the mean are no finite float32. Lower std."
            )

    @property
    def largest(self) -> float:
        """No value is larger, signs aside."""
        return abs(self.mean) + 6 * self.std

    def to_spec_fields(self) -> SpecFields:
        """Fields of `ShardSpec`."""
        return {"init_kind": InitKind.NORMAL, "init_a": self.mean, "init_b": self.std, "bank": None}


@dataclass(frozen=True)
class Constant:
    """Every value is the same.

    Raises:
        ConfigError: It is not a finite float32.
    """

    value: float

    def __post_init__(self) -> None:
        _float32(self, "value")

    @property
    def largest(self) -> float:
        """No value is larger, signs aside."""
        return abs(self.value)

    def to_spec_fields(self) -> SpecFields:
        """Fields of `ShardSpec`."""
        return {"init_kind": InitKind.CONSTANT, "init_a": self.value, "init_b": 0.0, "bank": None}


@dataclass(frozen=True, eq=False)
class Bank:
    """Every initial row is one of n given rows, chosen by a hash of the id: for an ``init_fn`` of any kind.

    Raises:
        ConfigError: rows is not a float32 array [n >= 1, D >= 1] of finite values.
    """

    rows: NDArray[np.float32] = field(repr=False)
    """float32 [n, D], host memory; a copy of what was passed (an array or a tensor)."""

    def __post_init__(self) -> None:
        given: Any = self.rows
        rows = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
        if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.ndim != 2 or 0 in rows.shape:
            what = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type(given).__name__
            raise ConfigError(f"Bank(rows): rows is {what}. Accepted: float32 [n, D], n and D at least 1.")
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
            raise ConfigError(f"Bank(rows): rows[{row}, {column}] is {rows[row, column]}. Accepted: finite values.")
        object.__setattr__(self, "rows", np.array(rows, order="C"))

    def __repr__(self) -> str:
        return f"Bank(sha256={self._sha256!r})"

    @functools.cached_property
    def _sha256(self) -> str:
        """Of the shape and the rows, little-endian: what tells a bank from another one without its rows."""
        rows = self.rows.astype("<f4", copy=False)
        return hashlib.sha256(str(rows.shape).encode() + rows.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bank) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash((self.rows.shape, self.rows[0].tobytes()))

    @property
    def largest(self) -> float:
        """No value is larger, signs aside."""
        return float(np.abs(self.rows).max())

    def to_spec_fields(self) -> SpecFields:
        """Fields of `ShardSpec`."""
        return {"init_kind": InitKind.BANK, "init_a": 0.0, "init_b": 0.0, "bank": self.rows}


def initial_spec(
    name: str,
    dim: int,
    seed: int,
    initializer: Uniform | Normal | Constant | Bank,
    row_type: RowType,
    *,
    first_column: int = 0,
) -> ShardSpec:
    """What initial rows follow from, for `hybridrec.native.initial_rows`; nothing of it is a shard.

    Args:
        name: Of the table.
        dim: D.
        seed: Of the table's config.
        initializer: How rows are made; a bank has the D columns alone.
        row_type: Rows are rounded to it.
        first_column: Of columns of a table, the first.
    """
    return ShardSpec(
        name=name,
        dim=dim,
        num_row_states=0,
        num_row_wise_states=0,
        state_initial_values=(),
        num_slots=0,
        planned_rows=0,
        row_type=row_type,
        table_seed=table_seed(seed, name),
        **initializer.to_spec_fields(),
        first_column=first_column,
    )


def bank_from_init_fn(init_fn: Callable[[Tensor], Any], dim: int, seed: int, num_rows: int = 4096) -> Bank:
    """Let an ``init_fn`` fill a bank of rows, once, under the seed.

    Args:
        init_fn: Gets a float32 [num_rows, D] tensor in host memory; works in place or returns the rows.
        dim: D.
        seed: Of torch's host generator during the call; its state is as before afterwards.
        num_rows: n.

    Raises:
        ConfigError: What ``init_fn`` made is not float32 [num_rows, D], or not finite.
    """
    rows = torch.zeros((num_rows, dim), dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        returned = init_fn(rows)
    if isinstance(returned, Tensor):
        rows = returned
    elif returned is not None:
        raise ConfigError(
            f"init_fn returned a {type(returned).__name__}. Accepted: a float32 [{num_rows}, {dim}] tensor, or None "
            "after filling the one that it got."
        )
    if rows.dtype != torch.float32 or rows.shape != (num_rows, dim):
        raise ConfigError(
            f"init_fn made {rows.dtype} {tuple(rows.shape)} of a float32 ({num_rows}, {dim}). Accepted: the same."
        )
    try:
        return Bank(rows)  # type: ignore[arg-type]  # a tensor will do
    except ConfigError as e:
        raise ConfigError(f"init_fn made rows that cannot be used. {e}") from e


def _float32(owner: object, name: str) -> float:
    """A field's value, if it is a number that float32 holds."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{type(owner).__name__}: {name}={value!r} has type {type(value).__name__}. Pass a float.")
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ConfigError(f"{type(owner).__name__}: {name}={value!r} is no finite float32. Pass one.")
    return float(value)
