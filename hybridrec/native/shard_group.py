"""`ShardGroup`: what the layers above call. It checks tensors once, then calls the core that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrec.errors import ConfigError, StateError
from hybridrec.native import reference
from hybridrec.native.checks import check_batch, check_num_slots, check_spec, check_table, check_tensor
from hybridrec.native.compiled import CompiledShardGroup
from hybridrec.native.core import CoreName, serving_core
from hybridrec.native.protocol import Counters, Plan, ShardSpec

Int64s = NDArray[np.int64]
UInt32s = NDArray[np.uint32]


class ShardGroup:
    """The shards of all tables of one collection on one rank; see `hybridrec.native.protocol.ShardGroup`.

    Tensors are dense, contiguous host memory. A wrong argument raises `ConfigError` (of a batch: `IdError`), a call at
    the wrong time `StateError`; nothing changed then.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        *,
        host_budget_bytes: int = 0,
        num_threads: int = 1,
        core: CoreName | None = None,
    ) -> None:
        """
        Args:
            specs: One a table; none on a rank that owns no table.
            host_budget_bytes: Most host memory for the shards; 0 = no limit.
            num_threads: Threads of the compiled core. Results never depend on it.
            core: Which core serves; None: the compiled one where it was built.

        Raises:
            ConfigError: A spec or a number cannot be honoured; names it.
            BackendError: The compiled core was asked for and is missing.
        """
        for spec in specs:
            check_spec(spec)
        if host_budget_bytes < 0 or num_threads < 1:
            raise ConfigError(
                f"ShardGroup of {len(specs)} tables, host_budget_bytes={host_budget_bytes}, num_threads={num_threads}. "
                "Accepted: 0 bytes (no limit) and more, 1 thread and more."
            )
        self._specs = tuple(specs)
        self._num_slots = [spec.num_slots for spec in specs]
        self._moving: dict[int, tuple[int, int]] = {}  # ordinal -> (sum L, sum V)
        self._bound: dict[int, tuple[Tensor, ...]] = {}  # the core has their addresses
        self._flushing = [0] * len(self._specs)  # rows of every table at the last flush_slots
        self._read_counts: dict[int, list[int]] = {}  # handle -> U of every table
        self._exported: dict[int, int] = {}  # handle -> table
        is_compiled = (core or serving_core()) == "compiled"
        self._core: Any = (CompiledShardGroup if is_compiled else reference.ShardGroup)(
            self._specs, host_budget_bytes=host_budget_bytes, num_threads=num_threads
        )
        self._give: Any = _as_it_is if is_compiled else _as_numpy

    @property
    def num_tables(self) -> int:
        return len(self._specs)

    def bind_slots(
        self, table: int, weights: Tensor, row_states: Sequence[Tensor], row_wise_states: Sequence[Tensor]
    ) -> None:
        """Tell where the slots of a table are. The tensors are kept until the next bind or resize.

        Args:
            table: Index.
            weights: float32 [C, W]: words of the weights (`RowType`).
            row_states: M x float32 [C, D].
            row_wise_states: A x float32 [C].
        """
        spec, slots = self._specs[check_table("bind_slots", table, len(self._specs))], self._num_slots[table]
        expected = (spec.num_row_states, spec.num_row_wise_states)
        if (len(row_states), len(row_wise_states)) != expected:
            raise ConfigError(
                f"bind_slots: table {spec.name!r} has {expected[0]} row-sized and {expected[1]} row-wise states; "
                f"{len(row_states)} and {len(row_wise_states)} tensors came."
            )
        for name, tensor, shape in (
            ("weights", weights, [slots, spec.weight_words]),
            *((f"row_states[{i}]", s, [slots, spec.dim]) for i, s in enumerate(row_states)),
            *((f"row_wise_states[{i}]", s, [slots]) for i, s in enumerate(row_wise_states)),
        ):
            check_tensor("bind_slots", name, tensor, torch.float32, shape)
        give = self._give
        self._core.bind_slots(table, give(weights), [give(s) for s in row_states], [give(s) for s in row_wise_states])
        self._bound[table] = (weights, *row_states, *row_wise_states)

    def resize_slots(self, table: int, num_slots: int) -> None:
        """Grow C; `bind_slots` again before the next move. Legal only while the table has no pins."""
        check_table("resize_slots", table, len(self._specs))
        check_num_slots(f"resize_slots of table {self._specs[table].name!r}", num_slots)
        self._core.resize_slots(table, num_slots)
        self._bound.pop(table, None)
        self._num_slots[table] = num_slots

    # ---- training ------------------------------------------------------------------------------------------------

    def plan(self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, slots: Tensor) -> Plan:
        """MAP one batch.

        Args:
            keys: int64 [N].
            feature_offsets: int64 [F + 1].
            feature_table: int64 [F].
            slots: int64 [N], written: the slot of every key; anything if the batch is refused.

        Raises:
            IdError: The offsets or tables cannot be followed. Nothing changed.
        """
        num_keys, _ = check_batch("plan", keys, feature_offsets, feature_table, len(self._specs))
        check_tensor("plan", "slots", slots, torch.int64, [num_keys])
        give = self._give
        plan: Plan = self._core.plan(give(keys), give(feature_offsets), give(feature_table), give(slots))
        if plan.num_loads or plan.num_inits:
            self._moving[plan.ordinal] = (plan.num_loads + plan.num_inits, plan.num_write_backs)
        return plan

    def plan_aside(
        self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, index: Tensor, unique_counts: Tensor
    ) -> Plan:
        """MAP a batch that gets no slots: ids as in `plan`, rows stay where they are, new ones begin in the store.

        It needs no move. Read and write its rows by `batch_rows`, `read_records` and `write_records`.

        Args:
            keys: int64 [N].
            feature_offsets: int64 [F + 1].
            feature_table: int64 [F].
            index: int64 [N], written: 0 .. U_t - 1 within its table, in order of first occurrence; anything if refused.
            unique_counts: int64 [T], written, unless the batch is refused.
        """
        num_keys, _ = check_batch("plan_aside", keys, feature_offsets, feature_table, len(self._specs))
        check_tensor("plan_aside", "index", index, torch.int64, [num_keys])
        check_tensor("plan_aside", "unique_counts", unique_counts, torch.int64, [len(self._specs)])
        give = self._give
        plan: Plan = self._core.plan_aside(
            give(keys), give(feature_offsets), give(feature_table), give(index), give(unique_counts)
        )
        return plan

    def batch_rows(self, ordinal: int, table: int) -> tuple[UInt32s, Int64s]:
        """Rows uint32 [U] of a batch in flight in order of first occurrence, and where they are: int64 slots or -1."""
        check_table("batch_rows", table, len(self._specs))
        result: tuple[UInt32s, Int64s] = self._core.batch_rows(ordinal, table)
        return result

    def swap(self, ordinal: int) -> None:
        """SWAP: dirty victims slot -> store, then loads and new rows -> slots. Needs `bind_slots`."""
        self._core.swap(ordinal)

    def swap_counts(self, ordinal: int, counts: Tensor) -> None:
        """int64 [T, 2], written: per table L (loads + inits) and V (dirty victims)."""
        check_tensor("swap_counts", "counts", counts, torch.int64, [len(self._specs), 2])
        self._core.swap_counts(ordinal, self._give(counts))

    def swap_slots(self, ordinal: int, load_slots: Tensor, victim_slots: Tensor) -> None:
        """int64 [sum L] and int64 [sum V], written: slots, table after table."""
        num_loads, num_victims = self._moving.get(ordinal, (0, 0))
        check_tensor("swap_slots", "load_slots", load_slots, torch.int64, [num_loads])
        check_tensor("swap_slots", "victim_slots", victim_slots, torch.int64, [num_victims])
        self._core.swap_slots(ordinal, self._give(load_slots), self._give(victim_slots))

    def scatter_victims(self, ordinal: int, staging: Tensor) -> None:
        """Staging -> store. float32, table after table, V records of W + D * M + A floats."""
        self._check_staging("scatter_victims", ordinal, staging, column=1)
        self._core.scatter_victims(ordinal, self._give(staging))

    def gather_loads(self, ordinal: int, staging: Tensor) -> None:
        """Store or initial rows -> staging, written. float32, table after table, L records."""
        self._check_staging("gather_loads", ordinal, staging, column=0)
        self._core.gather_loads(ordinal, self._give(staging))

    def _check_staging(self, call: str, ordinal: int, staging: Tensor, *, column: int) -> None:
        counts = torch.empty((len(self._specs), 2), dtype=torch.int64)
        self._core.swap_counts(ordinal, self._give(counts))
        self._check_floats(call, staging, counts[:, column].tolist())

    def _check_floats(self, call: str, staging: Tensor, num_records: Sequence[int]) -> None:
        widths = [s.record_floats for s in self._specs]
        floats = sum(n * w for n, w in zip(num_records, widths, strict=True))
        check_tensor(call, "staging", staging, torch.float32, [None])
        if staging.numel() < floats:
            raise ConfigError(f"{call}: staging has {staging.numel():,} floats. Accepted: {floats:,} and more.")

    def commit(self, ordinal: int) -> None:
        """The rows were updated: slots become dirty, pins are released."""
        self._core.commit(ordinal)
        self._moving.pop(ordinal, None)

    def undo(self, ordinal: int) -> None:
        """Drop a batch in flight: what it inserted, stamped, evicted and pinned."""
        self._core.undo(ordinal)
        self._moving.pop(ordinal, None)

    def flush(self) -> None:
        """Write every dirty resident row back to the store; rows stay in their slots, now clean."""
        self._core.flush()

    def flush_counts(self, counts: Tensor) -> None:
        """int64 [T], written: per table, rows that are newer in their slot than in the store."""
        check_tensor("flush_counts", "counts", counts, torch.int64, [len(self._specs)])
        self._core.flush_counts(self._give(counts))

    def flush_slots(self, slots: Tensor) -> None:
        """int64 [sum of the counts], written: these rows' slots, table after table, ascending.

        Then read the slots' records out of the device and call `flush_records` before anything else happens.
        """
        counts = torch.empty(len(self._specs), dtype=torch.int64)
        self._core.flush_counts(self._give(counts))
        check_tensor("flush_slots", "slots", slots, torch.int64, [int(counts.sum())])
        self._core.flush_slots(self._give(slots))
        self._flushing = counts.tolist()

    def flush_records(self, staging: Tensor) -> None:
        """Staging -> store; the slots are clean then. float32, the records of `flush_slots` in its order.

        Raises:
            StateError: `flush_slots` was not called, or what it told has changed since: call it again. Nothing changed.
            CapacityError: Or `StateError`: the host budget has no room for the rows. Nothing changed.
        """
        self._check_floats("flush_records", staging, self._flushing)
        self._core.flush_records(self._give(staging))

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_plan(
        self, keys: Tensor, feature_offsets: Tensor, feature_table: Tensor, index: Tensor, unique_counts: Tensor
    ) -> int:
        """Number the unique keys of each table in order of first occurrence; returns a handle. Changes nothing.

        Args:
            keys: int64 [N].
            feature_offsets: int64 [F + 1].
            feature_table: int64 [F].
            index: int64 [N], written: 0 .. U_t - 1 within its table.
            unique_counts: int64 [T], written.
        """
        num_keys, _ = check_batch("read_plan", keys, feature_offsets, feature_table, len(self._specs))
        check_tensor("read_plan", "index", index, torch.int64, [num_keys])
        check_tensor("read_plan", "unique_counts", unique_counts, torch.int64, [len(self._specs)])
        give = self._give
        handle = self._core.read_plan(
            give(keys), give(feature_offsets), give(feature_table), give(index), give(unique_counts)
        )
        self._read_counts[handle] = unique_counts.tolist()
        return int(handle)

    def read_rows(self, handle: int, buffers: Sequence[Tensor], host_only: bool) -> None:
        """Weights of a read plan's unique keys: table t into ``buffers[t]``, float32 [>= U_t, W].

        ``host_only``: rows in slots are left out. Ends the handle unless ``host_only``.
        """
        counts = self._counts_of("read_rows", handle)
        if len(buffers) != len(self._specs):
            raise ConfigError(f"read_rows: {len(buffers)} buffers for {len(self._specs)} tables. Give one a table.")
        for t, (buffer, count, spec) in enumerate(zip(buffers, counts, self._specs, strict=True)):
            check_tensor("read_rows", f"buffers[{t}]", buffer, torch.float32, [None, spec.weight_words])
            if len(buffer) < count:
                raise ConfigError(f"read_rows: buffers[{t}] has {len(buffer):,} rows. Accepted: {count:,} and more.")
        self._core.read_rows(handle, [self._give(b) for b in buffers], host_only)
        if not host_only:
            self._read_counts.pop(handle, None)

    def read_resident(self, handle: int, table: int) -> tuple[Tensor, Tensor]:
        """(positions in the buffer, slots), int64, of the unique keys of one table that are in slots."""
        check_table("read_resident", table, len(self._specs))
        self._counts_of("read_resident", handle)
        positions, slots = self._core.read_resident(handle, table)
        return torch.from_numpy(positions), torch.from_numpy(slots)

    def _counts_of(self, call: str, handle: int) -> list[int]:
        counts = self._read_counts.get(handle)
        if counts is None:
            raise StateError(f"{call}: the read plan {handle} has ended or never was. Make one with read_plan().")
        return counts

    def end_read(self, handle: int) -> None:
        """Forget a read plan; legal at any time, also a second time."""
        if self._read_counts.pop(handle, None) is not None:
            self._core.end_read(handle)

    # ---- snapshots -----------------------------------------------------------------------------------------------

    def export_begin(self, table: int, *, above_score: int = 0) -> tuple[int, int]:
        """Begin to read the committed rows of a table as they are now: (handle, R).

        Args:
            table: Index.
            above_score: Only rows whose score is above that: those that batches after this ordinal trained.

        Raises:
            StateError: A batch is planned and not moved, or slots are dirty: call `flush`. Nothing changed.
        """
        check_table("export_begin", table, len(self._specs))
        if not 0 <= above_score < 2**32:
            raise ConfigError(f"export_begin: above_score={above_score}. Accepted: 0 to 2^32 - 1.")
        handle, num_rows = self._core.export_begin(table, above_score)
        self._exported[handle] = table
        return handle, num_rows

    def export_next(self, handle: int, ids: Tensor, scores: Tensor, records: Tensor) -> None:
        """The next n rows of an export, ascending by id.

        Args:
            handle: Of `export_begin`.
            ids: int64 [n], written.
            scores: int64 [n], written: ordinal of the last committed batch that used the row.
            records: float32 [n, W + D * M + A], written.
        """
        table = self._exported.get(handle)
        if table is None:
            raise StateError(f"export_next: export {handle} has ended or never was. Make one with export_begin().")
        self._check_rows_of("export_next", table, ids, scores, records)
        self._core.export_next(handle, self._give(ids), self._give(scores), self._give(records))

    def export_end(self, handle: int) -> None:
        """Let go of an export; legal at any time, also a second time."""
        self._exported.pop(handle, None)
        self._core.export_end(handle)

    def import_rows(self, table: int, ids: Tensor, scores: Tensor, records: Tensor) -> None:
        """Insert rows, or replace those that live; all or nothing. No batch may be open.

        Args:
            table: Index.
            ids: int64 [n].
            scores: int64 [n], each from 1 to the newest ordinal; see `set_ordinal`.
            records: float32 [n, W + D * M + A].

        Raises:
            StateError: A batch is in flight, or the host budget has no room. Nothing changed.
        """
        check_table("import_rows", table, len(self._specs))
        self._check_rows_of("import_rows", table, ids, scores, records)
        self._core.import_rows(table, self._give(ids), self._give(scores), self._give(records))

    def _check_rows_of(self, call: str, table: int, ids: Tensor, scores: Tensor, records: Tensor) -> None:
        spec = self._specs[table]
        check_tensor(call, "ids", ids, torch.int64, [None])
        check_tensor(call, "scores", scores, torch.int64, [len(ids)])
        width = spec.record_floats
        check_tensor(call, "records", records, torch.float32, [len(ids), width])

    def clear_rows(self, table: int) -> None:
        """Drop all rows of a table, as if it had been made anew, but for its counters. No batch may be open."""
        self._core.clear_rows(check_table("clear_rows", table, len(self._specs)))

    def track_removals(self, table: int, max_ids: int | None) -> None:
        """Begin an empty log of the ids that leave a table for good; see `removed_ids`.

        Args:
            table: Index.
            max_ids: Room, 8 bytes each of host memory; None: keep no log any more.

        Raises:
            StateError: The host budget, or the system, has no room. Nothing changed.
        """
        check_table("track_removals", table, len(self._specs))
        if max_ids is not None and not 0 <= max_ids < 2**32:
            raise ConfigError(f"track_removals: max_ids={max_ids}. Accepted: 0 to 2^32 - 1, or None.")
        self._core.track_removals(table, -1 if max_ids is None else max_ids)

    def removed_ids(self, table: int) -> Tensor:
        """int64 [n], ascending: ids that left the table since `track_removals` or the last call, and are not there now.

        Without the batches in flight. Together with the rows whose score is above the `final_ordinal` of then it is all
        that changed. Ids that came and went meanwhile are told too.

        Raises:
            StateError: The log has had no room, rows were imported or dropped, or a batch is planned and not moved.
        """
        return torch.from_numpy(self._core.removed_ids(check_table("removed_ids", table, len(self._specs))))

    @property
    def final_ordinal(self) -> int:
        """Batches up to this ordinal are committed or undone: what changes from now on has a score above it."""
        return int(self._core.final_ordinal())

    @property
    def ordinal(self) -> int:
        """The newest ordinal that was given and not given back; 0 before the first plan."""
        return int(self._core.ordinal())

    def set_ordinal(self, ordinal: int) -> None:
        """Let the next plan get ``ordinal + 1``. No batch may be open; to lower it, all tables must be empty."""
        if ordinal < 0:
            raise ConfigError(f"set_ordinal: {ordinal}. Accepted: 0 and more.")
        self._core.set_ordinal(ordinal)

    # ---- for statistics, tests and export ------------------------------------------------------------------------

    def entries(self, table: int) -> tuple[Int64s, UInt32s, UInt32s, Int64s, UInt32s]:
        """(keys int64, row numbers uint32, scores uint32, slots int64 or -1, pins uint32), all [R], by row number."""
        check_table("entries", table, len(self._specs))
        result: tuple[Int64s, UInt32s, UInt32s, Int64s, UInt32s] = self._core.entries(table)
        return result

    def read_records(self, table: int, rows: UInt32s) -> NDArray[np.float32]:
        """float32 [n, W + D * M + A] from the store, of live rows that are not newer in a slot."""
        check_table("read_records", table, len(self._specs))
        _check_rows("read_records", rows)
        records: NDArray[np.float32] = self._core.read_records(table, np.ascontiguousarray(rows))
        return records

    def write_records(self, table: int, rows: UInt32s, records: NDArray[np.float32]) -> None:
        """Replace records in the store, of live rows that are not newer in a slot; what slots hold stays as it is.

        Args:
            table: Index.
            rows: uint32 [n], without repeats.
            records: float32 [n, W + D * M + A].
        """
        spec = self._specs[check_table("write_records", table, len(self._specs))]
        _check_rows("write_records", rows)
        width = spec.record_floats
        if records.dtype != np.float32 or records.shape != (len(rows), width):
            raise ConfigError(
                f"write_records: records are {records.dtype} {list(records.shape)}. Accepted: float32 "
                f"[{len(rows):,}, {width}]."
            )
        self._core.write_records(table, np.ascontiguousarray(rows), np.ascontiguousarray(records))

    def counters(self, table: int) -> Counters:
        """One table's counters since construction."""
        counters: Counters = self._core.counters(check_table("counters", table, len(self._specs)))
        return counters


def _check_rows(call: str, rows: UInt32s) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint32 or rows.ndim != 1:
        raise ConfigError(f"{call}: rows is no uint32 numpy array [n]. Take row numbers from entries().")


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _as_numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().numpy()
    return array
