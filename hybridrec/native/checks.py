"""Checks of what comes in through the facade: a wrong address would be read without mercy below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrec.backend import HOST
from hybridrec.errors import ConfigError, IdError
from hybridrec.native.protocol import InitKind, ShardSpec

FULL_POLICIES = ("grow", "evict", "error")
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
MAX_SLOTS = 2**31 - 3
"""Of one table on one rank."""
MAX_COLUMNS = 2**31
"""Of a table."""
MAX_ROWS = 2**32 - 1
"""Of one table on one rank: row numbers are uint32."""


def check_tensor(
    call: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None] | None = None,
    *,
    error: type[ConfigError] | type[IdError] = ConfigError,
) -> Tensor:
    """The tensor itself, if it is dense, contiguous host memory of a dtype and a shape (None: any length).

    Raises:
        ConfigError: Or ``error``: it is not. Names the call and the argument.
    """
    if not isinstance(tensor, Tensor):
        raise error(f"{call}: {name} has type {type(tensor).__name__}. Pass a torch.Tensor.")
    if tensor.dtype != dtype:
        raise error(f"{call}: {name} has dtype {tensor.dtype}. Accepted: {dtype}. Convert it with .to({dtype}).")
    if tensor.layout != torch.strided or tensor.device.type != HOST.type:
        raise error(f"{call}: {name} is on {tensor.device} ({tensor.layout}). Accepted: dense host memory.")
    if not tensor.is_contiguous():
        raise error(f"{call}: {name} is not contiguous (strides {tensor.stride()}). Pass {name}.contiguous().")
    if shape is not None and not _has_shape(tensor, shape):
        wanted = ", ".join("any" if n is None else f"{n:,}" for n in shape)
        raise error(f"{call}: {name} has shape {tuple(tensor.shape)}. Accepted: [{wanted}].")
    return tensor


def _has_shape(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    return tensor.dim() == len(shape) and all(w is None or n == w for n, w in zip(tensor.shape, shape, strict=True))


def check_batch(
    call: str, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, num_tables: int
) -> tuple[int, int]:
    """(N, F) of a batch whose offsets and tables can be followed.

    Raises:
        IdError: They cannot. Nothing changed.
    """
    check_tensor(call, "keys", keys, torch.int64, [None], error=IdError)
    check_tensor(call, "feature_table", feature_table, torch.int64, [None], error=IdError)
    num_keys, num_features = keys.numel(), feature_table.numel()
    check_tensor(call, "feature_offsets", feature_offsets, torch.int64, [num_features + 1], error=IdError)
    offsets, tables = feature_offsets.tolist(), feature_table.tolist()
    is_ascending = all(a <= b for a, b in zip(offsets, offsets[1:], strict=False))
    if offsets[0] != 0 or offsets[-1] != num_keys or not is_ascending:
        raise IdError(
            f"{call}: feature_offsets={offsets} do not cut {num_keys:,} keys into features. Accepted: ascending, from "
            f"0 to {num_keys:,}."
        )
    for table in tables:
        if not 0 <= table < num_tables:
            raise IdError(f"{call}: feature_table={tables} names table {table}. Accepted: 0 to {num_tables - 1}.")
    return num_keys, num_features


def check_table(call: str, table: int, num_tables: int) -> int:
    """The index itself, if there is such a table.

    Raises:
        ConfigError: There is none.
    """
    if not 0 <= table < num_tables:
        raise ConfigError(f"{call}: table={table}. Accepted: 0 to {num_tables - 1}.")
    return table


def check_initial(spec: ShardSpec) -> None:
    """Refuse a spec whose initial rows cannot be made.

    Raises:
        ConfigError: Names table, field and value.
    """
    where = f"table {spec.name!r}"
    if spec.dim < 1:
        raise ConfigError(f"{where}: dim={spec.dim}. Accepted: 1 and more.")
    if not 0 <= spec.first_column <= MAX_COLUMNS - spec.dim:
        raise ConfigError(
            f"{where}: first_column={spec.first_column}, dim={spec.dim}. Accepted: up to column {MAX_COLUMNS:,}."
        )
    if not 0 <= spec.table_seed < 2**64:
        raise ConfigError(f"{where}: table_seed={spec.table_seed} is no uint64. Take it from table_seed(seed, name).")
    if spec.init_kind not in tuple(InitKind):
        raise ConfigError(f"{where}: init_kind={spec.init_kind!r}. Accepted: {[k.name for k in InitKind]}.")
    if not (abs(spec.init_a) <= LARGEST_FLOAT32 and abs(spec.init_b) <= LARGEST_FLOAT32):  # false for NaN too
        raise ConfigError(f"{where}: init_a={spec.init_a}, init_b={spec.init_b}. Accepted: finite float32 values.")
    if spec.init_kind == InitKind.BANK:
        bank = spec.bank
        if (
            not isinstance(bank, np.ndarray)
            or bank.dtype != np.float32
            or bank.ndim != 2
            or not bank.flags.c_contiguous
        ):
            raise ConfigError(f"{where}: bank is no C-contiguous float32 numpy array [n, D]. Take it from Bank(rows).")
        if not len(bank) or bank.shape[1] != spec.dim:
            raise ConfigError(f"{where}: bank has shape {bank.shape}. Accepted: [at least 1, {spec.dim}].")


def check_num_slots(where: str, num_slots: int) -> None:
    """Refuse more slots than can be numbered.

    Raises:
        ConfigError: Names the number.
    """
    if num_slots > MAX_SLOTS:
        raise ConfigError(f"{where}: num_slots={num_slots:,} cannot be numbered. Accepted: up to {MAX_SLOTS:,}.")


def check_spec(spec: ShardSpec) -> None:
    """Refuse a spec that cannot be honoured.

    Raises:
        ConfigError: Names table, field and value.
    """
    check_initial(spec)
    where = f"table {spec.name!r}"
    for name, lowest in (("num_row_states", 0), ("num_row_wise_states", 0), ("num_slots", 1), ("max_rows", 0)):
        value = getattr(spec, name)
        if value < lowest:
            raise ConfigError(f"{where}: {name}={value}. Accepted: {lowest} and more.")
    check_num_slots(where, spec.num_slots)
    num_states = spec.num_row_states + spec.num_row_wise_states
    if len(spec.state_initial_values) != num_states:
        raise ConfigError(
            f"{where}: state_initial_values has {len(spec.state_initial_values)} values for {num_states} states. Give "
            "one a state, row-sized states first."
        )
    if spec.full_policy not in FULL_POLICIES:
        raise ConfigError(
            f"{where}: full_policy={spec.full_policy!r}. Accepted: {', '.join(map(repr, FULL_POLICIES))}."
        )
    if spec.full_policy != "grow" and not spec.max_rows:
        raise ConfigError(
            f"{where}: full_policy={spec.full_policy!r} without max_rows never takes effect. Give max_rows."
        )
