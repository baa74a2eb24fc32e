"""`CompiledShardGroup`: the C++ core behind the interface of the reference. Takes tensors, and passes addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.errors import CapacityError, ConfigError, StateError
from hybridrec.native.core import require_compiled_core
from hybridrec.native.functions import initial_fields
from hybridrec.native.protocol import Counters, Plan, ShardSpec

Int64s = NDArray[np.int64]
Floats = NDArray[np.float32]
UInt32s = NDArray[np.uint32]


class CompiledShardGroup:
    """Tensors are contiguous host memory of the right dtype and shape: the facade has checked."""

    def __init__(self, specs: Sequence[ShardSpec], *, host_budget_bytes: int = 0, num_threads: int = 1) -> None:
        """
        Args:
            specs: One a table; their banks are kept.
            host_budget_bytes: Most host memory; 0 = no limit.
            num_threads: Results never depend on it.
        """
        self._specs = list(specs)
        self._group = require_compiled_core().ShardGroup(host_budget_bytes=host_budget_bytes, num_threads=num_threads)
        for spec in specs:
            with _errors():
                self._group.add_table(
                    name=spec.name,
                    dim=spec.dim,
                    num_row_states=spec.num_row_states,
                    num_row_wise_states=spec.num_row_wise_states,
                    state_initial_values=list(spec.state_initial_values),
                    num_slots=spec.num_slots,
                    planned_rows=spec.planned_rows,
                    max_rows=spec.max_rows,
                    full_policy=str(spec.full_policy),
                    **initial_fields(spec),
                )

    def bind_slots(
        self, table: int, weights: Tensor, row_states: Sequence[Tensor], row_wise_states: Sequence[Tensor]
    ) -> None:
        with _errors():
            self._group.bind_slots(
                table, weights.data_ptr(), [a.data_ptr() for a in row_states], [a.data_ptr() for a in row_wise_states]
            )

    def resize_slots(self, table: int, num_slots: int) -> None:
        with _errors():
            self._group.resize_slots(table, num_slots)

    def plan(self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, slots: Tensor) -> Plan:
        with _errors():
            return Plan(*self._group.plan(*_batch(keys, feature_offsets, feature_table), slots.data_ptr()))

    def plan_aside(
        self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, index: Tensor, unique_counts: Tensor
    ) -> Plan:
        with _errors():
            batch = _batch(keys, feature_offsets, feature_table)
            return Plan(*self._group.plan_aside(*batch, index.data_ptr(), unique_counts.data_ptr()))

    def batch_rows(self, ordinal: int, table: int) -> tuple[UInt32s, Int64s]:
        with _errors():
            n = self._group.num_batch_rows(ordinal, table)
            rows, slots = np.empty(n, dtype=np.uint32), np.empty(n, dtype=np.int64)
            self._group.batch_rows(ordinal, table, _address(rows), _address(slots))
        return rows, slots

    def swap(self, ordinal: int) -> None:
        with _errors():
            self._group.swap(ordinal)

    def swap_counts(self, ordinal: int, counts: Tensor) -> None:
        with _errors():
            self._group.swap_counts(ordinal, counts.data_ptr())

    def swap_slots(self, ordinal: int, load_slots: Tensor, victim_slots: Tensor) -> None:
        with _errors():
            self._group.swap_slots(ordinal, load_slots.data_ptr(), victim_slots.data_ptr())

    def scatter_victims(self, ordinal: int, staging: Tensor) -> None:
        with _errors():
            self._group.scatter_victims(ordinal, staging.data_ptr())

    def gather_loads(self, ordinal: int, staging: Tensor) -> None:
        with _errors():
            self._group.gather_loads(ordinal, staging.data_ptr())

    def commit(self, ordinal: int) -> None:
        with _errors():
            self._group.commit(ordinal)

    def undo(self, ordinal: int) -> None:
        with _errors():
            self._group.undo(ordinal)

    def read_plan(
        self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, index: Tensor, unique_counts: Tensor
    ) -> int:
        with _errors():
            batch = _batch(keys, feature_offsets, feature_table)
            return int(self._group.read_plan(*batch, index.data_ptr(), unique_counts.data_ptr()))

    def read_rows(self, handle: int, buffers: Sequence[Tensor], host_only: bool) -> None:
        with _errors():
            self._group.read_rows(handle, [b.data_ptr() for b in buffers], host_only)

    def read_resident(self, handle: int, table: int) -> tuple[Int64s, Int64s]:
        with _errors():
            n = self._group.num_read_resident(handle, table)
            positions, slots = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
            self._group.read_resident(handle, table, _address(positions), _address(slots))
        return positions, slots

    def end_read(self, handle: int) -> None:
        with _errors():
            self._group.end_read(handle)

    def flush(self) -> None:
        with _errors():
            self._group.flush()

    def flush_counts(self, counts: Tensor) -> None:
        with _errors():
            self._group.flush_counts(counts.data_ptr())

    def flush_slots(self, slots: Tensor) -> None:
        with _errors():
            self._group.flush_slots(slots.data_ptr())

    def flush_records(self, staging: Tensor) -> None:
        with _errors():
            self._group.flush_records(staging.data_ptr())

    def entries(self, table: int) -> tuple[Int64s, UInt32s, UInt32s, Int64s, UInt32s]:
        with _errors():
            n = self._group.num_entries(table)
            keys, slots = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
            rows, scores, pins = (np.empty(n, dtype=np.uint32) for _ in range(3))
            self._group.entries(table, *(_address(a) for a in (keys, rows, scores, slots, pins)))
        return keys, rows, scores, slots, pins

    def read_records(self, table: int, rows: UInt32s) -> Floats:
        spec = self._specs[table]
        width = spec.record_floats
        records = np.empty((len(rows), width), dtype=np.float32)
        with _errors():
            self._group.read_records(table, _address(rows), len(rows), _address(records))
        return records

    def write_records(self, table: int, rows: UInt32s, records: Floats) -> None:
        with _errors():
            self._group.write_records(table, _address(rows), len(rows), _address(records))

    def export_begin(self, table: int, above_score: int) -> tuple[int, int]:
        with _errors():
            handle, num_rows = self._group.export_begin(table, above_score)
        return int(handle), int(num_rows)

    def export_next(self, handle: int, ids: Tensor, scores: Tensor, records: Tensor) -> None:
        with _errors():
            self._group.export_next(handle, len(ids), ids.data_ptr(), scores.data_ptr(), records.data_ptr())

    def export_end(self, handle: int) -> None:
        with _errors():
            self._group.export_end(handle)

    def import_rows(self, table: int, ids: Tensor, scores: Tensor, records: Tensor) -> None:
        with _errors():
            self._group.import_rows(table, len(ids), ids.data_ptr(), scores.data_ptr(), records.data_ptr())

    def clear_rows(self, table: int) -> None:
        with _errors():
            self._group.clear_rows(table)

    def track_removals(self, table: int, max_ids: int) -> None:
        with _errors():
            self._group.track_removals(table, max_ids)

    def removed_ids(self, table: int) -> Int64s:
        with _errors():
            ids = np.empty(self._group.collect_removed(table), dtype=np.int64)
            self._group.removed_ids(table, _address(ids))
        return ids

    def final_ordinal(self) -> int:
        with _errors():
            return int(self._group.final_ordinal())

    def ordinal(self) -> int:
        with _errors():
            return int(self._group.ordinal())

    def set_ordinal(self, ordinal: int) -> None:
        with _errors():
            self._group.set_ordinal(ordinal)

    def counters(self, table: int) -> Counters:
        with _errors():
            return Counters(*self._group.counters(table))


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def _batch(keys: Tensor, feature_offsets: Tensor, feature_table: Tensor) -> tuple[int, int, int, int, int]:
    """The first five arguments of plan and read_plan."""
    return keys.data_ptr(), len(keys), feature_offsets.data_ptr(), feature_table.data_ptr(), len(feature_table)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """The core's errors, as ours."""
    try:
        yield
    except ValueError as e:
        raise ConfigError(str(e)) from e
    except RuntimeError as e:
        raise StateError(str(e)) from e
    except MemoryError as e:
        raise CapacityError(str(e)) from e
