"""Rows of a sharded collection as records: [words of weights | row states | row-wise states], float32, host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrec.backend import HOST, resolve_backend
from hybridrec.distributed.lookup import PooledLookup
from hybridrec.native import initial_rows
from hybridrec.native.protocol import ShardSpec
from hybridrec.types import SlotArrays


def record_columns(arrays: SlotArrays) -> list[Tensor]:
    """The arrays of slots, each two-dimensional, in the order of a record."""
    return [arrays.weights, *arrays.row_states, *(state.unsqueeze(1) for state in arrays.row_wise_states)]


def read_records(arrays: SlotArrays, slots_U: Tensor) -> Tensor:
    """float32 [U, width], host memory: copies of what some slots hold. Waits for the device.

    Args:
        arrays: Of a table.
        slots_U: int64 [U], any device.
    """
    with torch.no_grad():
        slots_U = slots_U.to(arrays.weights.device)
        return torch.cat([column.index_select(0, slots_U) for column in record_columns(arrays)], 1).to(HOST)


def write_records(arrays: SlotArrays, slots_U: Tensor, records: Tensor) -> None:
    """The inverse of `read_records`."""
    with torch.no_grad():
        slots_U, records = slots_U.to(arrays.weights.device), records.to(arrays.weights.device)
        start = 0
        for column in record_columns(arrays):
            column.index_copy_(0, slots_U, records[:, start : start + column.shape[1]])
            start += column.shape[1]


def read_slots(lookup: PooledLookup, table: int, slots_U: Tensor) -> Tensor:
    """float32 [U, width], host memory, of slots whose rows have arrived or are on their way in."""
    lookup.use([], lookup.log.swapper.ready())
    arrays = lookup.table_kernels.slot_arrays(table)
    records = read_records(arrays, slots_U)
    device = arrays.weights.device
    backend = resolve_backend(device.type)
    if not backend.is_host_memory:  # whoever fills these slots next does so on another stream
        lookup.log.read_until(backend.record_event(backend.current_stream(device)))
    return records


def initial_records(spec: ShardSpec, keys_U: Tensor) -> Tensor:
    """float32 [U, width]: what rows that were never trained hold.

    Args:
        spec: Of the table.
        keys_U: int64 [U], host memory.
    """
    values, m = torch.tensor(spec.state_initial_values, dtype=torch.float32), spec.num_row_states
    states = torch.cat([values[:m].repeat_interleave(spec.dim), values[m:]])
    weights = spec.row_type.words(initial_rows(spec, keys_U))
    return torch.cat([weights, states.expand(len(keys_U), -1)], 1)


def record_names(lookup: PooledLookup, table: int) -> dict[str, slice]:
    """Columns of a table's record: ``"weights"`` and the name of every state."""
    return lookup.tables[table].layout.record_slices


def split_record(lookup: PooledLookup, table: int, record: Tensor) -> dict[str, Tensor]:
    """``"weights"`` and every state of one record, by name."""
    parts = {name: record[columns] for name, columns in record_names(lookup, table).items()}
    spec = lookup.tables[table].spec
    return {**parts, "weights": spec.row_type.values(parts["weights"].unsqueeze(0), spec.dim)[0]}
