"""Faults of the transaction that the checker must find. More are in the tests of core, pipeline and device.

Each is a context manager: inside, the code is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from hybridrec.cache.transaction import BatchTransaction, TransactionLog
from hybridrec.native import ShardGroup
from hybridrec.native.reference.open_batches import OpenBatches
from hybridrec.native.reference.shard_group import ShardGroup as ReferenceGroup
from hybridrec.native.reference.table_shard import TableShard
from tests.model_check.world import CANARY


@contextlib.contextmanager
def drop_one_fence() -> Iterator[None]:
    """Every third commit does not tell the swap stream that its slots were used until now."""
    real, calls = TransactionLog._move_fence, [0]

    def move(self: TransactionLog, use: Any) -> None:
        calls[0] += 1
        if calls[0] % 3:
            real(self, use)

    with mock.patch.object(TransactionLog, "_move_fence", move):
        yield


@contextlib.contextmanager
def release_pins_at_the_lookup() -> Iterator[None]:
    """A batch's slots can be taken from when it is looked up, not from when its rows were stepped."""
    real = BatchTransaction.start

    def start(self: BatchTransaction) -> None:
        real(self)
        with self._log.lock:
            self._log.group.commit(self.ordinal)

    with (
        mock.patch.object(BatchTransaction, "start", start),
        mock.patch.object(TransactionLog, "_apply_posted", lambda self: self._posted.clear()),
        mock.patch.object(TransactionLog, "undo", lambda self, transaction: self.released()),
    ):
        yield


@contextlib.contextmanager
def scatter_nothing() -> Iterator[None]:
    """The first victim of a staged swap does not reach the store."""
    real = ShardGroup.scatter_victims

    def scatter(self: ShardGroup, ordinal: int, staging: torch.Tensor) -> None:
        wrong = staging.clone()
        wrong[:1].view(torch.uint8).fill_(CANARY)
        real(self, ordinal, wrong)

    with mock.patch.object(ShardGroup, "scatter_victims", scatter):
        yield


@contextlib.contextmanager
def load_before_the_write_back_landed() -> Iterator[None]:
    """Victims reach the store only when the next batch's rows have been read from it. Of the reference core."""
    scatter, gather = ReferenceGroup.scatter_victims, ReferenceGroup.gather_loads
    late: list[tuple[Any, int, Any]] = []

    def land() -> None:
        for shard, row, record in late:
            shard.store.write(row, record)
        late.clear()

    def scatter_late(self: ReferenceGroup, ordinal: int, staging: Any) -> None:
        batch = next(b for b in self._open if b.ordinal == ordinal)
        before = [
            (shard, move.victim, shard.store.read(move.victim).copy())
            for shard, journal in zip(self._tables, batch.tables, strict=True)
            for move in journal.write_backs
        ]
        scatter(self, ordinal, staging)
        for shard, row, stale in before:
            late.append((shard, row, shard.store.read(row).copy()))
            shard.store.write(row, stale)

    def gather_and_land(self: ReferenceGroup, ordinal: int, staging: Any) -> None:
        gather(self, ordinal, staging)
        land()

    with (
        mock.patch.object(ReferenceGroup, "scatter_victims", scatter_late),
        mock.patch.object(ReferenceGroup, "gather_loads", gather_and_land),
    ):
        yield


@contextlib.contextmanager
def commit_out_of_order() -> Iterator[None]:
    """A journal is final as soon as its batch is committed, though an earlier batch may still be undone."""

    def take_final(self: OpenBatches) -> Iterator[Any]:
        for batch in [b for b in self if b.is_committed]:
            yield batch
            self.remove(batch)

    with mock.patch.object(OpenBatches, "take_final", take_final):
        yield


@contextlib.contextmanager
def undo_the_wrong_journal() -> Iterator[None]:
    """Where two batches are in flight, the other one is undone."""
    real = ReferenceGroup.undo

    def undo(self: ReferenceGroup, ordinal: int) -> None:
        others = [b.ordinal for b in self._open if not b.is_committed and b.is_moved and b.ordinal != ordinal]
        real(self, others[0] if others else ordinal)

    with mock.patch.object(ReferenceGroup, "undo", undo):
        yield


@contextlib.contextmanager
def key_pins_by_the_wrong_context() -> Iterator[None]:
    """A commit releases the pins of the newest batch in flight, not its own."""
    real, unpin = ReferenceGroup.commit, TableShard.unpin

    def commit(self: ReferenceGroup, ordinal: int) -> None:
        others = [b for b in self._open if not b.is_committed and b.ordinal != ordinal and b.is_moved]
        if not others:
            real(self, ordinal)
            return
        with mock.patch.object(TableShard, "unpin", lambda self, journal: None):
            real(self, ordinal)
        for shard, journal in zip(self._tables, others[-1].tables, strict=True):
            unpin(shard, journal)

    with mock.patch.object(ReferenceGroup, "commit", commit):
        yield


@contextlib.contextmanager
def lose_a_commit_that_was_posted() -> Iterator[None]:
    """A commit that comes while the mapper has the lock is forgotten."""
    real = TransactionLog.post_commit

    def post(self: TransactionLog, transaction: BatchTransaction) -> None:
        if self.lock.acquire(blocking=False):
            self.lock.release()
            real(self, transaction)
        else:
            self.committed += 1
            self.released()

    with mock.patch.object(TransactionLog, "post_commit", post):
        yield


@contextlib.contextmanager
def count_a_step_too_many() -> Iterator[None]:
    """A batch that is undone counts as one that was committed."""
    real = TransactionLog.undo

    def undo(self: TransactionLog, transaction: BatchTransaction) -> None:
        real(self, transaction)
        self.committed += 1

    with mock.patch.object(TransactionLog, "undo", undo):
        yield
