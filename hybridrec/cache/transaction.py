"""`BatchTransaction`: what one training batch does to the shards of one collection. See docs/design/transaction.md.

States and legal transitions::

    PLANNED --swap--> READY --start--> COMPUTING --commit--> COMMITTED
       |                |                  |
       +------undo------+-------undo-------+---------------> UNDONE

`TransactionLog` opens transactions and is the only caller of the native group's plan, commit and undo.

Two threads meet here: one that maps batches ahead, and the one that trains. The training thread never waits for a plan
or a copy of the other: a commit that comes meanwhile is *posted*, and applied before the group's next call.
"""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridrec.errors import StateError
from hybridrec.native.protocol import Plan, PlanStatus

if TYPE_CHECKING:
    from hybridrec.cache.swap import Swapper
    from hybridrec.native import ShardGroup


class TransactionState(enum.Enum):
    """See the module's drawing."""

    PLANNED = "planned"
    READY = "ready"
    COMPUTING = "computing"
    COMMITTED = "committed"
    UNDONE = "undone"


_LOOK_AGAIN_SECONDS = 0.02
_LEGAL = {
    "swap": {TransactionState.PLANNED},
    "start": {TransactionState.READY},
    "commit": {TransactionState.COMPUTING},
    "undo": {TransactionState.PLANNED, TransactionState.READY, TransactionState.COMPUTING},
}


class BatchTransaction:
    """One batch's claim on slots, and the journal of what it changed. Made by `TransactionLog.plan` only.

    Thread safety: one caller at a time, except `abandon`, which any thread may call at any moment.
    """

    def __init__(self, log: TransactionLog, plan: Plan, slots_N: Tensor, unique_counts: Tensor | None = None) -> None:
        self._log = log
        self._state = TransactionState.PLANNED
        self.last_use: tuple[int, Any] | None = None
        """(its number, the event behind it) of the device's last use of the batch's slots."""
        self.ends_step = True
        """Whether it is the last batch of its step; only where gradients are accumulated are there others."""
        self.plan = plan
        self.slots_N = slots_N
        """int64 [N], host memory: the slot of every id; of a batch that is aside, its row's number within the table."""
        self.unique_counts = unique_counts
        """int64 [T], host memory, of a batch that is aside; else None."""

    @property
    def ordinal(self) -> int:
        """Counts batches; an undo of the newest gives its ordinal back, so that a later batch may have it too."""
        return self.plan.ordinal

    @property
    def is_aside(self) -> bool:
        """Whether the batch has no slots: its rows are read and written where they are, in passes."""
        return self.unique_counts is not None

    @property
    def state(self) -> TransactionState:
        return self._state

    @property
    def is_final(self) -> bool:
        """Whether it is committed or undone."""
        return self._state in (TransactionState.COMMITTED, TransactionState.UNDONE)

    def swap(self) -> None:
        """Move victims out of their slots and the batch's rows in. PLANNED -> READY."""
        self._require("swap")
        self._log.swapper.swap(self.plan, self._log.fence, self._log.lock)
        self._state = TransactionState.READY

    def start(self) -> None:
        """The lookup begins. READY -> COMPUTING."""
        self._require("start")
        self._state = TransactionState.COMPUTING

    def require_computing(self) -> None:
        """Raise unless `commit` is legal: what a backward asks before it touches a row."""
        self._require("commit")

    def used(self, event: Any) -> None:
        """The device has been given work that uses the batch's slots; ``event`` is behind it."""
        self.last_use = self._log.number_of_use(), event

    def commit(self) -> None:
        """The rows were updated: pins go, the journal becomes final in batch order. COMPUTING -> COMMITTED.

        Never waits: if another thread is busy with the group, the commit is applied before its next call.
        """
        self._require("commit")
        self._state = TransactionState.COMMITTED
        self._log.post_commit(self)

    def undo(self) -> None:
        """Take back everything but residency. Any state that is not final -> UNDONE. Nothing if the log is broken."""
        self._require("undo")
        if self._log.broken:
            return
        self._log.undo(self)
        self._state = TransactionState.UNDONE

    def abandon(self) -> None:
        """Ask for an undo at the log's next call: the graph was freed without a backward. Never blocks or raises."""
        if not self.is_final:
            self._log.abandoned.append(self)

    def _require(self, call: str) -> None:
        if self._state not in _LEGAL[call]:
            allowed = ", ".join(sorted(s.value for s in _LEGAL[call]))
            hint = ""
            if call in ("start", "commit") and self.is_final:
                hint = (
                    " A second backward through one forward would update its rows twice: run the forward again, "
                    "or sum the losses before one backward."
                )
            raise StateError(
                f"batch transaction {self.ordinal}: {call}() is not legal when it is {self._state.value} "
                f"(legal when {allowed}). Nothing changed.{hint}"
            )


class Lease:
    """Held by the autograd node of a lookup: when it goes without a commit, the batch is abandoned."""

    def __init__(self, transaction: BatchTransaction) -> None:
        self.transaction = transaction

    def __del__(self) -> None:
        self.transaction.abandon()


class TransactionLog:
    """Opens the transactions of one shard group, applies posted commits and settles abandoned batches."""

    def __init__(self, group: ShardGroup, swapper: Swapper) -> None:
        self.group = group
        self.swapper = swapper
        self.committed = 0
        """Steps of the rows, since construction: one a batch, or one a group of accumulated gradients."""
        self.num_batches = 0
        """Committed batches, since construction: more than steps where gradients are accumulated."""
        self.broken = ""
        """Why rows are neither as before nor as after a batch; nothing may be planned or undone then."""
        self.lock = threading.RLock()
        """Held around every call of the group that decides or moves."""
        # A deque's append is atomic: the garbage collector may call it on any thread, in the middle of any call.
        self.abandoned: collections.deque[BatchTransaction] = collections.deque()
        self._posted: collections.deque[BatchTransaction] = collections.deque()
        self._open: set[BatchTransaction] = set()
        self._news = threading.Condition()
        self._num_releases = 0
        self._num_uses = 0
        self._fence: tuple[int, Any] = (0, None)

    @property
    def fence(self) -> Any:
        """Event behind the last use of any slot by a batch that is final, or by a read; None: there was none."""
        return self._fence[1]

    def number_of_use(self) -> int:
        """Uses of slots are numbered in the order in which the device is given them."""
        self._num_uses += 1
        return self._num_uses

    def read_until(self, event: Any) -> None:
        """A read that belongs to no batch uses slots; ``event`` is behind it."""
        self._move_fence((self.number_of_use(), event))

    def plan(
        self, keys_N: Tensor, feature_offsets: Tensor, feature_table: Tensor, slots_N: Tensor
    ) -> BatchTransaction | Plan:
        """MAP one batch.

        Args:
            keys_N: int64 [N], host memory; `mix64` of the ids, feature after feature.
            feature_offsets: int64 [F + 1], host memory.
            feature_table: int64 [F], host memory: index of the table of every feature.
            slots_N: int64 [N], host memory; written, and kept by the transaction.

        Returns:
            The transaction, or the refused plan (nothing changed then).
        """
        with self.lock:
            self.settle()
            plan = self.group.plan(keys_N, feature_offsets, feature_table, slots_N)
        return self._opened(plan, slots_N)

    def _opened(self, plan: Plan, slots_N: Tensor, unique_counts: Tensor | None = None) -> BatchTransaction | Plan:
        if plan.status != PlanStatus.OK:
            return plan
        transaction = BatchTransaction(self, plan, slots_N, unique_counts)
        self._open.add(transaction)
        return transaction

    def plan_aside(
        self, keys_N: Tensor, feature_offsets: Tensor, feature_table: Tensor, index_N: Tensor
    ) -> BatchTransaction | Plan:
        """As `plan`, for a batch that gets no slots. What is newer in slots is written back, then nothing moves.

        Args:
            keys_N: int64 [N], host memory.
            feature_offsets: int64 [F + 1], host memory.
            feature_table: int64 [F], host memory.
            index_N: int64 [N], host memory; written, and kept by the transaction: each key's number within its table.

        Raises:
            StateError: The host budget has no room for rows that must be written back. Nothing changed.
        """
        counts = torch.empty(self.group.num_tables, dtype=torch.int64)
        with self.lock:
            self.flush()
            plan = self.group.plan_aside(keys_N, feature_offsets, feature_table, index_N, counts)
        return self._opened(plan, index_N, counts)

    def post_commit(self, transaction: BatchTransaction) -> None:
        """For `BatchTransaction.commit`."""
        self.committed += transaction.ends_step
        self.num_batches += 1
        self._posted.append(transaction)
        self._open.discard(transaction)
        if self.lock.acquire(blocking=False):
            try:
                self._apply_posted()
            finally:
                self.lock.release()
        self.released()

    def undo(self, transaction: BatchTransaction) -> None:
        """For `BatchTransaction.undo`."""
        with self.lock:
            self._apply_posted()
            self._move_fence(transaction.last_use)
            self.group.undo(transaction.ordinal)
        self._open.discard(transaction)
        self.released()

    def settle(self) -> None:
        """Apply posted commits, then undo the abandoned batches, newest first."""
        if self.broken or not (self._posted or self.abandoned):
            return
        with self.lock:
            self._apply_posted()
            waiting: list[BatchTransaction] = []
            while self.abandoned or waiting:
                while self.abandoned:  # not iterated: another thread may append meanwhile, or the collector on this one
                    waiting.append(self.abandoned.popleft())
                newest = max(waiting, key=lambda t: t.ordinal)
                waiting.remove(newest)
                if not newest.is_final:
                    newest.undo()

    def flush(self) -> None:
        """Write every row that is newer in its slot back to the store. No batch may be planned and not moved."""
        with self.lock:
            self.settle()
            self.swapper.flush(self.fence, self.lock)

    @property
    def num_open(self) -> int:
        """Batches that are neither committed nor undone."""
        return len(self._open)

    @property
    def committed_ordinal(self) -> int:
        """The newest ordinal, but for those of open batches: what a run has that begins anew with these batches."""
        of_open = {transaction.ordinal for transaction in list(self._open)}
        ordinal = self.group.ordinal
        while ordinal in of_open:
            ordinal -= 1
        return ordinal

    @property
    def is_any_aside(self) -> bool:
        """Whether one of them has no slots: it reads and writes rows wherever they are."""
        return any(transaction.is_aside for transaction in list(self._open))

    @property
    def num_releases(self) -> int:
        """Batches that were committed or undone, since construction: each may have let pins go."""
        return self._num_releases

    def wait_for_release(self, seen: int, may_wait: Callable[[], bool]) -> bool:
        """Wait until pins may have gone.

        Args:
            seen: `num_releases` when the caller last found too many pins.
            may_wait: False ends the wait; whoever changes its answer calls `wake`.

        Returns:
            Whether a batch was released since.
        """
        while self._num_releases == seen and not self.abandoned:
            if not may_wait():
                return False
            with self._news:  # the collector of garbage may abandon a batch here, and takes no lock: look again
                if self._num_releases == seen:
                    self._news.wait(_LOOK_AGAIN_SECONDS)
        return True

    def wake(self) -> None:
        """Let `wait_for_release` ask again whether it may wait."""
        with self._news:
            self._news.notify_all()

    def released(self) -> None:
        """Count a batch that let its pins go, or will at the next call."""
        with self._news:
            self._num_releases += 1
            self._news.notify_all()

    def _apply_posted(self) -> None:
        while self._posted:
            transaction = self._posted.popleft()
            self._move_fence(transaction.last_use)
            self.group.commit(transaction.ordinal)

    def _move_fence(self, use: tuple[int, Any] | None) -> None:
        if use is not None and use[0] > self._fence[0]:
            self._fence = use
