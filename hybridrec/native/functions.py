"""The free functions of the core, on torch tensors in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrec.errors import ConfigError, IdError
from hybridrec.native import reference
from hybridrec.native.checks import MAX_ROWS, MAX_SLOTS, check_initial, check_tensor
from hybridrec.native.core import CoreName, require_compiled_core, serving_core
from hybridrec.native.protocol import ShardSpec
from hybridrec.row_type import RowType


def mix64(ids: Tensor, *, core: CoreName | None = None) -> Tensor:
    """The keys of ids: a bijection of int64 onto itself.

    Args:
        ids: int64, contiguous, host memory, any shape.
        core: Which core computes; None: the one that serves.

    Returns:
        int64, a new tensor of the same shape.

    Raises:
        IdError: ids has another dtype or place, or is not contiguous.
    """
    return _map_int64("mix64", "ids", ids, core)


def unmix64(keys: Tensor, *, core: CoreName | None = None) -> Tensor:
    """The ids of keys: the inverse of `mix64`, with the same arguments."""
    return _map_int64("unmix64", "keys", keys, core)


def initial_rows(spec: ShardSpec, keys: Tensor, *, core: CoreName | None = None) -> Tensor:
    """The rows that keys have before they were ever trained.

    Args:
        spec: Of the table; dim, first_column, table_seed, init_kind, init_a, init_b and bank are read.
        keys: int64 [n], `mix64` of the ids, contiguous, host memory.
        core: Which core computes; None: the one that serves.

    Returns:
        [n, D] of the spec's row type, a new tensor.

    Raises:
        IdError: keys has another dtype, shape or place.
        ConfigError: The spec has no such rows.
    """
    check_tensor("initial_rows", "keys", keys, torch.int64, [None], error=IdError)
    check_initial(spec)
    out = torch.empty((keys.numel(), spec.weight_words), dtype=torch.float32, device=keys.device)
    if (core or serving_core()) == "reference":
        reference.initial_rows(spec, keys.detach().numpy(), out.numpy())
    else:
        require_compiled_core().initial_rows(
            **initial_fields(spec), dim=spec.dim, keys_ptr=keys.data_ptr(), n=keys.numel(), out_ptr=out.data_ptr()
        )
    return spec.row_type.values(out, spec.dim)


def table_seed(seed: int, name: str, *, core: CoreName | None = None) -> int:
    """What tells the initial rows of one table from those of every other; a uint64.

    Args:
        seed: The user's, any int in int64 or uint64.
        name: Of the table.
        core: Which core computes; None: the one that serves.
    """
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"table {name!r}: seed={seed} does not fit in 64 bits.")
    if (core or serving_core()) == "reference":
        return reference.table_seed(seed, name)
    return int(require_compiled_core().table_seed(seed % 2**64, name))


def planned_host_bytes(
    *,
    dim: int,
    num_row_states: int,
    num_row_wise_states: int,
    num_rows: int,
    num_slots: int,
    store_rows: int,
    row_type: RowType = RowType.FLOAT32,
    core: CoreName | None = None,
) -> int:
    """What ``ShardGroup.counters(t).host_bytes`` will say of a table's shard. Cheap: microseconds, no allocation.

    Args:
        dim: D.
        num_row_states: M.
        num_row_wise_states: A.
        num_rows: Rows that live, wherever their values are; inserted one by one, none ever dropped.
        num_slots: C.
        store_rows: How many of them were ever written to the store. Chunks are counted as if these were the first that
            were inserted; rows picked at random touch up to all chunks of ``num_rows``.
        row_type: Of the weights.
        core: Whose structures; None: those of the core that serves.

    Returns:
        Bytes of id map, row numbers, slot index and row chunks; exact up to 70,000 rows. Beyond, which keys come
        decides when a segment of the id map (2 MiB) splits: near such a size half a segment or so more or less.

    Raises:
        ConfigError: A number is out of range; names it.
    """
    shape = {
        "dim": (dim, 1, 2**32 - 1),
        "num_row_states": (num_row_states, 0, 2**16),
        "num_row_wise_states": (num_row_wise_states, 0, 2**16),
        "num_rows": (num_rows, 0, MAX_ROWS),
        "num_slots": (num_slots, 0, MAX_SLOTS),
        "store_rows": (store_rows, 0, num_rows),
    }
    for name, (value, lowest, highest) in shape.items():
        if not lowest <= value <= highest:
            raise ConfigError(f"planned_host_bytes: {name}={value:,}. Accepted: {lowest:,} to {highest:,}.")
    functions: Any = reference if (core or serving_core()) == "reference" else require_compiled_core()
    wide_floats = row_type.num_words(dim) + dim * num_row_states
    return int(
        functions.planned_host_bytes(
            wide_floats=wide_floats,
            num_row_wise_states=num_row_wise_states,
            num_rows=num_rows,
            num_slots=num_slots,
            store_rows=store_rows,
        )
    )


def initial_fields(spec: ShardSpec) -> dict[str, int | float]:
    """What the compiled core takes to make initial rows. The bank must outlive the call, or the group."""
    has_bank = isinstance(spec.bank, np.ndarray)
    return {
        "row_type": int(spec.row_type),
        "first_column": spec.first_column,
        "table_seed": spec.table_seed,
        "init_kind": int(spec.init_kind),
        "init_a": spec.init_a,
        "init_b": spec.init_b,
        "bank_ptr": spec.bank.ctypes.data if spec.bank is not None and has_bank else 0,
        "bank_rows": len(spec.bank) if spec.bank is not None and has_bank else 0,
    }


def _map_int64(call: str, name: str, values: Tensor, core: CoreName | None) -> Tensor:
    check_tensor(call, name, values, torch.int64, error=IdError)
    out = torch.empty_like(values)
    if (core or serving_core()) == "reference":
        getattr(reference, call)(values.detach().numpy().reshape(-1), out.numpy().reshape(-1))
    else:
        getattr(require_compiled_core(), call)(values.data_ptr(), out.data_ptr(), values.numel())
    return out
