"""`BatchTransaction`: what one training batch does to the shards of one collection. See docs/design/transaction.md.

States and legal transitions::

    PLANNED --swap--> READY --start--> COMPUTING --commit--> COMMITTED
       |                |                  |
       +------undo------+-------undo-------+---------------> UNDONE

`TransactionLog` opens transactions and is the only caller of the native group's plan, commit and undo.
"""

from __future__ import annotations

import collections
import enum
from typing import TYPE_CHECKING

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

    def __init__(self, log: TransactionLog, plan: Plan, slots_N: Tensor) -> None:
        self._log = log
        self._state = TransactionState.PLANNED
        self.plan = plan
        self.slots_N = slots_N
        """int64 [N], host memory: the slot of every id of the batch."""

    @property
    def ordinal(self) -> int:
        """1 for the first batch that was ever planned, then without gaps."""
        return self.plan.ordinal

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
        self._log.swapper.swap(self.plan)
        self._state = TransactionState.READY

    def start(self) -> None:
        """The lookup begins. READY -> COMPUTING."""
        self._require("start")
        self._state = TransactionState.COMPUTING

    def require_computing(self) -> None:
        """Raise unless `commit` is legal: what a backward asks before it touches a row."""
        self._require("commit")

    def commit(self) -> None:
        """The rows were updated: pins go, the journal becomes final in batch order. COMPUTING -> COMMITTED."""
        self._require("commit")
        self._log.group.commit(self.ordinal)
        self._state = TransactionState.COMMITTED
        self._log.committed += 1

    def undo(self) -> None:
        """Take back everything but residency. Any state that is not final -> UNDONE."""
        self._require("undo")
        self._log.group.undo(self.ordinal)
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
    """Opens the transactions of one shard group and settles the abandoned ones."""

    def __init__(self, group: ShardGroup, swapper: Swapper) -> None:
        self.group = group
        self.swapper = swapper
        self.committed = 0
        """Training batches whose rows were updated, since construction."""
        # A deque's append is atomic: the garbage collector may call it on any thread, in the middle of any call.
        self.abandoned: collections.deque[BatchTransaction] = collections.deque()

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
        self.settle()
        plan = self.group.plan(keys_N, feature_offsets, feature_table, slots_N)
        if plan.status != PlanStatus.OK:
            return plan
        return BatchTransaction(self, plan, slots_N)

    def settle(self) -> None:
        """Undo the abandoned batches, newest first."""
        if not self.abandoned:
            return
        batches = [self.abandoned.popleft() for _ in range(len(self.abandoned))]
        for transaction in sorted(batches, key=lambda t: -t.ordinal):
            if not transaction.is_final:
                transaction.undo()
