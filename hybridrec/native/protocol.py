"""What the C++ core and the numpy reference both provide: the contract between ``native`` and the layers above.

One ``ShardGroup`` holds, on one rank, the shards of all tables of one collection: for each table an id map
(key -> row number, score), a slot index (row number <-> slot, pins, least recent use) and a chunked row store.
The caller is one ``BatchTransaction`` a batch. Words and letters as in ``hybridrec.types`` and
docs/design/transaction.md. ``W`` here: 32-bit words of a row's weights, D if they are float32 (`RowType`).

Memory: all arrays are host memory, C-contiguous, owned by the caller, not kept after the call returns, except those
given to ``bind_slots``. The C++ core takes them as addresses, the reference as numpy arrays; the facade in
``hybridrec.native`` takes torch tensors, checks dtype, device and contiguity, and calls either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from hybridrec.row_type import RowType


class InitKind(enum.IntEnum):
    """How the initial row of an id is made; a pure function of (table_seed, key, column)."""

    UNIFORM = 0  # a = low, b = high
    NORMAL = 1  # a = mean, b = standard deviation
    CONSTANT = 2  # a = value
    BANK = 3  # bank[mix64(key + table_seed) % len(bank)]


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """One table's shard on this rank."""

    name: str
    dim: int
    """D, floats."""
    num_row_states: int
    """M: row-sized optimizer states, D floats each, stored behind the weights in the row's record."""
    num_row_wise_states: int
    """A: row-wise optimizer states, one float each, stored in a parallel array."""
    state_initial_values: tuple[float, ...]
    """M + A floats: row-sized states first."""
    num_slots: int
    """C."""
    planned_rows: int
    """Rows expected on this rank. Rows beyond are counted as ``grown``; no limit, no memory taken up front."""
    max_rows: int = 0
    """Quota of rows on this rank; 0 = none."""
    row_type: RowType = RowType.FLOAT32
    """Of the weights, which lie in words (see `RowType`); initial rows are rounded to it."""
    full_policy: str = "grow"
    """``"grow"``, ``"evict"`` or ``"error"``: what happens at the quota."""
    first_column: int = 0
    """Of the table's columns, the first that the shard has: what initial rows depend on. A bank has the D alone."""
    table_seed: int = 0
    """uint64, ``table_seed(seed, name)``."""
    init_kind: InitKind = InitKind.UNIFORM
    init_a: float = -0.01
    init_b: float = 0.01
    bank: np.ndarray | None = field(default=None, repr=False)
    """float32 [n, D] for ``InitKind.BANK``; kept by the group."""

    @property
    def weight_words(self) -> int:
        """Floats that a row's weights take: D if they are float32."""
        return self.row_type.num_words(self.dim)

    @property
    def record_floats(self) -> int:
        """Floats of a record: weights, M row-sized states, A row-wise states."""
        return self.weight_words + self.dim * self.num_row_states + self.num_row_wise_states


class PlanStatus(enum.IntEnum):
    """Whether a plan was taken, else why not, and what its figures mean then."""

    OK = 0
    NO_SLOTS = 1  # needed: slots that the batch needs; available: C; pinned: slots pinned by other batches
    QUOTA = 2  # full_policy "error", or "evict" with too few evictable rows; needed: rows, available: quota
    HOST_BUDGET = 3  # needed: bytes that the group would take in all; available: the budget
    TOO_MANY_ROWS = 4  # uint32 row numbers are used up


class Plan(NamedTuple):
    """What MAP decided for one batch. Unless ``status`` is OK nothing changed and no ordinal was used."""

    status: int
    table: int  # of a refusal; -1 if OK
    needed: int
    available: int
    pinned: int
    ordinal: int  # of this batch: the newest one given and not given back by undo, plus 1
    num_unique: int  # U, over all tables
    num_loads: int  # rows that come from the store into slots
    num_inits: int  # new rows, computed into slots
    num_victims: int  # rows that leave their slots
    num_write_backs: int  # dirty ones among them


class Counters(NamedTuple):
    """One table's counters since construction. The first five count committed batches only."""

    accesses: int  # N
    access_hits: int  # of them, ids whose row was in a slot when the batch was planned
    uniques: int
    unique_hits: int
    inserted: int  # new rows
    loads: int  # rows moved store -> slot
    victims: int  # rows that left their slots
    write_backs: int  # dirty ones among them, moved slot -> store
    load_bytes: int
    write_back_bytes: int
    rows: int  # R now, rows of batches in flight included
    resident: int  # rows that are in a slot now
    grown: int  # committed rows inserted beyond planned_rows
    evicted: int  # committed rows dropped from the table by full_policy "evict"
    rejected: int  # batches refused because of this table
    pins: int  # sum of pins now
    host_bytes: int  # id map, row numbers, slot index, row chunks: allocated now; not journals, which batches size


class ShardGroup(Protocol):
    """The shards of one collection on one rank.

    Thread safety: every call takes the group's lock; the C++ core releases the GIL meanwhile. Results never depend on
    ``num_threads``.
    """

    def __init__(self, specs: Sequence[ShardSpec], *, host_budget_bytes: int = 0, num_threads: int = 1) -> None:
        """``host_budget_bytes`` 0 = no limit."""

    def bind_slots(
        self, table: int, weights: object, row_states: Sequence[object], row_wise_states: Sequence[object]
    ) -> None:
        """Tell where the slots of a table are in host memory: weights [C, W], M x [C, D], A x [C], float32.

        The arrays must outlive the group or the next bind. Only needed for ``swap``, ``flush`` and ``read_rows``.
        """

    def resize_slots(self, table: int, num_slots: int) -> None:
        """Grow C. Resident rows keep their slots. Legal only while the table has no pins; raises otherwise."""

    def plan(self, keys: object, feature_offsets: object, feature_table: object, slots: object) -> Plan:
        """MAP: find or insert every key, pin its slot, choose victims.

        Args:
            keys: int64 [N], ``mix64`` of the ids, feature after feature.
            feature_offsets: int64 [F + 1], positions of the features in ``keys``; features of one table need not be
                adjacent.
            feature_table: int64 [F].
            slots: int64 [N], written: the slot of every key.

        Order of decisions, for each table: features in order, keys in order. A key new to the map gets the lowest
        free row number (freed ones first, last freed first), score = ordinal; a known key's old score is kept in the
        journal and its score becomes ordinal. At the quota: "error" refuses; "evict" drops the rows with the lowest
        (score, key as uint64) among those with score < ordinal - 12, one for each missing row, or refuses. Then, in
        order of first occurrence, unique rows without a slot get one: free slots first (last freed first, then those
        never used, lowest first), then victims: unpinned slots in order of (number of the plan that used them last,
        order of use within that plan); plans that succeeded are counted, undone ones too. Every unique row's slot is
        pinned once.
        """

    def plan_aside(
        self, keys: object, feature_offsets: object, feature_table: object, index: object, unique_counts: object
    ) -> Plan:
        """MAP for a batch whose rows exceed the slots: as ``plan`` for ids, scores, quota and journal, but no slots.

        ``index`` int64 [N], written: each key's number in order of first occurrence within its table;
        ``unique_counts`` int64 [T], written. Rows stay where they are, nothing is pinned, and the initial records of
        new rows are in the store when this returns: the batch counts as moved. While it is in flight its rows are not
        evicted, as if they were pinned.
        """

    def batch_rows(self, ordinal: int, table: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows uint32, slots int64 or -1), [U_t] in order of first occurrence, of a batch in flight."""

    def swap(self, ordinal: int) -> None:
        """SWAP on a device tier that is host memory: dirty victims slot -> store, then loads and new rows -> slots."""

    def swap_counts(self, ordinal: int, counts: object) -> None:
        """int64 [T, 2], written: per table L (loads + inits) and V (dirty victims)."""

    def swap_slots(self, ordinal: int, load_slots: object, victim_slots: object) -> None:
        """int64 [sum L], int64 [sum V], written: the slots, table after table."""

    def scatter_victims(self, ordinal: int, staging: object) -> None:
        """Staging -> store. float32, table after table, V records of W + D * M + A floats.

        Before or after ``gather_loads`` of the same batch: no row that comes is one that leaves. The batch is moved
        when both were called; where V is 0 in all tables, ``gather_loads`` alone is enough and this call, if any, must
        come before it.
        """

    def gather_loads(self, ordinal: int, staging: object) -> None:
        """Store or initial rows -> staging. float32, table after table, L records of W + D * M + A floats.

        From here on the rows count as being in their slots. Called before ``scatter_victims``, the caller has read
        the victims out of those slots, or will before it writes to them.
        """

    def commit(self, ordinal: int) -> None:
        """The rows were updated: slots become dirty, pins are released. Journals become final in batch order."""

    def undo(self, ordinal: int) -> None:
        """Drop the batch: inserted rows go, scores and evicted rows come back, pins are released.

        What a later batch in flight also uses (an inserted row, a score) passes to the journal of the first such batch.
        The newest ordinal ever given is given back: the next plan gets it again. So batches undone newest first and
        planned again get the same ordinals, scores, row numbers and evictions as if that had not happened; only where
        rows are may differ. An older batch that is undone leaves a gap.
        Legal for a batch that was moved, and for the newest one as long as ``gather_loads`` was not called (then its
        rows lose their slots). Between ``gather_loads`` and ``scatter_victims`` the only copy of the victims' rows is
        the caller's: ``undo`` is refused until they were written back.
        """

    def read_plan(
        self, keys: object, feature_offsets: object, feature_table: object, index: object, unique_counts: object
    ) -> int:
        """Read-only MAP: number the unique keys of each table in order of first occurrence; returns a handle.

        ``index`` int64 [N], written: 0 .. U_t - 1 within its table. ``unique_counts`` int64 [T], written. Changes
        nothing.
        """

    def read_rows(self, handle: int, buffers: Sequence[object], host_only: bool) -> None:
        """Weights of the unique keys of a read plan: table t into ``buffers[t]`` float32 [>= U_t, W].

        From the slot (needs ``bind_slots``), the store, or the initial row for an unknown key. ``host_only``: rows that
        are in slots are left out. Ends the handle unless ``host_only``.
        """

    def read_resident(self, handle: int, table: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions in the buffer, slots), int64, of the unique keys of one table that are in slots."""

    def end_read(self, handle: int) -> None: ...

    def flush(self) -> None:
        """Write every dirty resident row back to the store (host-memory device tier); slots stay, now clean."""

    def flush_counts(self, counts: object) -> None:
        """int64 [T], written: per table, resident rows that are newer in their slot than in the store.

        The flush of a device tier that is not host memory: ``flush_counts``, ``flush_slots``, the caller reads the
        slots' records into host memory, ``flush_records``. Each is legal when ``flush`` is.
        """

    def flush_slots(self, slots: object) -> None:
        """int64 [sum of the counts], written: the slots of these rows, table after table, ascending."""

    def flush_records(self, staging: object) -> None:
        """Staging -> store; the slots are clean then. float32, the records of ``flush_slots`` in its order.

        Legal once after ``flush_slots``, and only if no batch was committed, undone, or planned with rows to move, and
        nothing was flushed since: else the staging may hold old values. Asks for the host budget as ``flush`` does,
        before anything is written; refused then, it may be called again.
        """

    def entries(self, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(keys int64, row numbers uint32, scores uint32, slots int64 or -1, pins uint32), all [R], by row number."""

    def read_records(self, table: int, rows: np.ndarray) -> np.ndarray:
        """float32 [n, W + D * M + A] from the store, for rows that are not dirty in a slot; for tests and export."""

    def write_records(self, table: int, rows: np.ndarray, records: np.ndarray) -> None:
        """float32 [n, W + D * M + A] -> store, for live rows that are not dirty in a slot. Clean slots go stale."""

    def export_begin(self, table: int, above_score: int) -> tuple[int, int]:
        """Begin to read the table's committed rows: (handle, R), of those whose score is above ``above_score``.

        What is read is the state now, without the batches in flight, as if they were undone, newest first; whatever
        happens afterwards. Legal when every batch in flight is moved and no slot of the table is dirty (``flush``).
        Memory: 16 bytes a row, 4 bytes a row number, and a copy of each row that is written back before it was read,
        in blocks of 2 MiB; and, once there is one, up to eight that are ready, for all tables. The first
        ``export_next`` sorts, without the group's lock.
        """

    def export_next(self, handle: int, ids: object, scores: object, records: object) -> None:
        """int64 [n], int64 [n], float32 [n, W + D * M + A], written: the next n rows, ascending by id."""

    def export_end(self, handle: int) -> None:
        """Let go of an export; legal at any time, also a second time."""

    def import_rows(self, table: int, ids: object, scores: object, records: object) -> None:
        """int64 [n], int64 [n], float32 [n, W + D * M + A]: insert rows, or replace those that live.

        Ids, not keys. A score is an ordinal from 1 to the newest one given. Of an id that comes twice the last one
        counts. Row numbers are given as by ``plan``; records go to the store, rows lose their slots; ``max_rows`` is
        not asked: the next plan evicts or refuses. Legal when no batch is open. All or nothing.
        """

    def clear_rows(self, table: int) -> None:
        """Drop all rows of a table, as if it had been made anew, but for its counters. Legal when no batch is open."""

    def track_removals(self, table: int, max_ids: int) -> None:
        """Keep a log of up to ``max_ids`` ids that leave the table for good, empty now; negative: keep none.

        8 bytes an id, taken from the host budget at once; refused, nothing changed. A log without room is lost, and so
        is one of a table into which rows are imported or whose rows are dropped, and all if the ordinal is lowered.
        """

    def removed_ids(self, table: int) -> np.ndarray:
        """int64, ascending: ids that left since ``track_removals`` or the last call, of those that are not there now.

        Now: as ``export_begin`` has it, and legal when it is, but slots may be dirty; not if the log is lost. Ids that
        came and went since are told too, and of batches that wait for an older one an id may be told twice.
        """

    def final_ordinal(self) -> int:
        """All batches up to this ordinal are committed or undone, so that no row that one trained will change by it."""

    def ordinal(self) -> int:
        """The newest ordinal that was given and not given back; 0 before the first plan."""

    def set_ordinal(self, ordinal: int) -> None:
        """The next plan gets ``ordinal + 1``. Legal when no batch is open; to lower it, all tables must be empty."""

    def counters(self, table: int) -> Counters: ...


# Free functions of both: mix64(ids, out), unmix64(keys, out) on int64 arrays; initial_rows(spec, keys, out);
# table_seed(seed, name) -> int; planned_host_bytes(*, dim, num_row_states, num_row_wise_states, num_rows, num_slots,
# store_rows) -> int, what Counters.host_bytes will be.
