"""The two threads that meet in a transaction log, as programs: each does, at every turn, one of the things it may do.

The *mapper* plans and moves batches in their order, as far ahead as the depth allows. The *trainer* looks up, steps,
drops graphs, takes batches back, reads, flushes. What is possible now, the dependencies say; which of it happens, the
tape says.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrec.cache import TransactionState
from hybridrec.distributed.mapped_batch import MappedBatch
from hybridrec.distributed.verdict import Withdrawn
from hybridrec.errors import CapacityError
from tests.model_check.case import CheckedBatch
from tests.model_check.scheduler import Tape, WrongSchedule
from tests.model_check.world import World


@dataclass
class Flight:
    """A batch between its plan and its end."""

    batch: CheckedBatch
    mapped: MappedBatch | None
    pooled: Tensor | None = None
    saved: Any = None

    @property
    def state(self) -> TransactionState:
        assert self.mapped is not None and self.mapped.transaction is not None
        return self.mapped.transaction.state


class Actors:
    """Both programs, and what they share."""

    def __init__(self, world: World, tape: Tape) -> None:
        self._world, self._tape, self._threads = world, tape, world.threads
        case = world.case
        self._waiting = collections.deque(case.batches)
        self._planned: collections.deque[Flight] = collections.deque()  # not moved
        self._ready: collections.deque[Flight] = collections.deque()
        self._computing: list[Flight] = []
        self._live: list[set[int]] = [set() for _ in case.tables]  # committed
        self._chances = {self._withdraw: case.withdrawals, self._read: case.reads, self._flush: case.flushes}
        self._demands = case.demands
        self._is_settling = self._is_mapping = False
        self._demanded = -1  # number of the batch that the trainer waits for
        self._is_stopped = False
        self.num_events = collections.Counter[str]()

    def programs(self) -> dict[str, Callable[[], None]]:
        return {"trainer": self._train, "mapper": self._map_ahead}

    @property
    def _num_in_flight(self) -> int:
        return len(self._planned) + len(self._ready) + len(self._computing)

    # ---- the mapper ----------------------------------------------------------------------------------------------

    def _map_ahead(self) -> None:
        with torch.no_grad():
            while True:
                self._threads.wait_until(lambda: bool(self._mapper_may()) or self._is_stopped, "mapper waits")
                calls = self._mapper_may()
                if not calls:
                    if self._is_stopped:
                        return
                    continue
                self._is_mapping = True
                calls[self._tape.choose(len(calls))]()
                self._is_mapping = False

    def _mapper_may(self) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        if self._planned:
            calls.append(self._move)
        may_plan = self._waiting and not self._is_settling and self._num_in_flight < self._world.case.depth
        # A batch without slots looks rows up where they are: nothing may be on its way then.
        if may_plan and len(self._planned) < (1 if self._world.log.is_any_aside else 2):
            calls.append(self._plan)
        return calls

    def _plan(self) -> None:
        batch = self._waiting[0]
        self._threads.point(f"PLAN {batch.number}")
        try:
            result = self._world.lookup.map(
                self._world.keys_of(batch), is_training=True, may_wait=lambda: self._may_wait(batch)
            )
        except Withdrawn:
            return
        if isinstance(result, MappedBatch):
            self._require_room(batch)
            self._waiting.popleft()
            self._planned.append(Flight(batch, result))
            self.num_events["plan"] += 1
            assert result.transaction is not None
            self.num_events["without slots"] += result.transaction.is_aside
        else:
            self._refused(batch, result)

    def _may_wait(self, batch: CheckedBatch) -> bool:
        """As the pipeline answers: a batch that somebody waits for takes what there is, one that is in the way goes."""
        if self._is_settling or self._planned:  # what is planned is pinned until this thread has moved it
            raise Withdrawn
        return batch.number != self._demanded

    def _require_room(self, batch: CheckedBatch) -> None:
        if not self._world.oracle.plan(batch):
            raise WrongSchedule(f"batch {batch.number} was planned though too few rows can be evicted")

    def _refused(self, batch: CheckedBatch, error: Exception) -> None:
        if not isinstance(error, CapacityError):
            raise error
        if "quota" not in str(error) and "max_rows" not in str(error):
            raise WrongSchedule(f"batch {batch.number} was refused: {error}")
        if self._world.oracle.plan(batch):
            raise WrongSchedule(f"batch {batch.number} was refused though rows can be evicted: {error}")
        self._waiting.popleft()
        self.num_events["refused"] += 1

    def _move(self) -> None:
        flight = self._planned[0]
        self._threads.point(f"SWAP {flight.batch.number}")
        assert flight.mapped is not None
        self._world.lookup.swap(flight.mapped)
        self._planned.popleft()
        self._ready.append(flight)
        self.num_events["swap"] += 1

    # ---- the trainer ---------------------------------------------------------------------------------------------

    def _train(self) -> None:
        while True:
            self._threads.wait_until(lambda: bool(self._trainer_may()) or self._is_drained(), "trainer waits")
            calls = self._trainer_may()
            if not calls:
                if self._is_drained():
                    break
                continue
            calls[self._tape.choose(len(calls))]()
        self._settled(self._check)
        self._is_stopped = True
        self._threads.point("the end")

    def _is_drained(self) -> bool:
        return not self._waiting and not self._num_in_flight and not self._is_mapping

    def _trainer_may(self) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        trained = [f for f in self._computing if f.batch.is_trained]
        dropped = [f for f in self._computing if not f.batch.is_trained]
        in_order = bool(self._world.case.quota)  # so that ordinals, and what is evicted, are those of a serial run
        for flight in trained[:1] if in_order else trained:
            calls.append(lambda f=flight: self._backward(f))  # type: ignore[misc]
        if self._ready and not (in_order and dropped):
            calls.append(self._forward)
        for flight in dropped if not in_order or not trained else []:
            calls.append(lambda f=flight: self._drop(f))  # type: ignore[misc]
        if calls or self._ready or self._planned:
            calls += [call for call, left in self._chances.items() if left]
        if self._demands and self._waiting and not self._ready and not self._planned and not (in_order and dropped):
            if self._num_in_flight < self._world.case.depth:
                calls.append(self._demand)
        return calls

    def _forward(self) -> None:
        flight = self._ready.popleft()
        self._computing.append(flight)
        self._threads.point(f"LOOKUP {flight.batch.number}")
        expected, flight.saved = self._world.oracle.forward(flight.batch)
        assert flight.mapped is not None
        flight.pooled = self._world.lookup(flight.mapped)
        self._world.see(f"lookup of batch {flight.batch.number}", flight.pooled, expected)
        self.num_events["lookup"] += 1

    def _demand(self) -> None:
        """Wait for the next batch, whatever pins are held, and look it up at once."""
        self._demands -= 1
        self._demanded = self._waiting[0].number
        self._world.log.wake()

        def is_there() -> bool:
            return bool(self._ready) or not (self._waiting or self._planned or self._is_mapping)

        self._threads.wait_until(is_there, "wait for the next batch")
        self._demanded = -1
        if self._ready:
            self._forward()

    def _backward(self, flight: Flight) -> None:
        self._threads.point(f"UPDATE and COMMIT {flight.batch.number}")
        assert flight.pooled is not None
        generator = torch.Generator().manual_seed(flight.batch.number)
        grad = torch.randn(flight.pooled.shape, generator=generator)
        self._world.oracle.backward(flight.saved, grad)
        flight.pooled.backward(grad.to(self._world.device))
        self._computing.remove(flight)
        for t, live in enumerate(self._live):
            live.update(self._world.oracle.ids_of(flight.batch, t))
        self.num_events["commit"] += 1

    def _drop(self, flight: Flight) -> None:
        """The graph is freed without a backward: undone at the log's next call, on whatever thread."""
        if self._world.case.quota:
            self._settled(lambda: self._drop_alone(flight))
        else:
            self._threads.point(f"DROP {flight.batch.number}")
            self._computing.remove(flight)
            flight.pooled = flight.mapped = None
        self.num_events["drop"] += 1

    def _drop_alone(self, flight: Flight) -> None:
        """Nothing was planned on top of it: its ordinal is given again."""
        self._take_back()
        self._threads.point(f"DROP {flight.batch.number}")
        self._computing.remove(flight)
        flight.pooled = flight.mapped = None
        self._world.log.settle()
        self._world.oracle.undo_newest()

    def _settled(self, call: Callable[[], None]) -> None:
        """Do something while the mapper does nothing, and every batch that is planned has moved."""
        self._is_settling = True
        self._world.log.wake()
        self._threads.wait_until(lambda: not self._is_mapping and not self._planned, "settle")
        call()
        self._is_settling = False

    def _withdraw(self) -> None:
        self._settled(self._take_back)
        self._chances[self._withdraw] -= 1

    def _take_back(self) -> None:
        while self._ready:
            flight = self._ready.pop()
            self._threads.point(f"UNDO {flight.batch.number}")
            assert flight.mapped is not None and flight.mapped.transaction is not None
            flight.mapped.transaction.undo()
            self._world.oracle.undo_newest()
            self._waiting.appendleft(flight.batch)
            self.num_events["undo"] += 1
        self._check()

    def _read(self) -> None:
        self._settled(self._read_now)
        self._chances[self._read] -= 1

    def _read_now(self) -> None:
        batch = self._world.case.batches[self._tape.choose(len(self._world.case.batches))]
        self._threads.point(f"READ as {batch.number}")
        mapped = self._world.lookup.map(self._world.keys_of(batch), is_training=False)
        assert isinstance(mapped, MappedBatch)
        self._world.lookup.swap(mapped)
        expected, _ = self._world.oracle.forward(batch)
        self._world.see(f"read as batch {batch.number}", self._world.lookup(mapped), expected)
        self._check()
        self.num_events["read"] += 1

    def _flush(self) -> None:
        self._settled(self._flush_now)
        self._chances[self._flush] -= 1

    def _flush_now(self) -> None:
        self._threads.point("FLUSH")
        self._world.lookup.flush()
        self._check()
        self.num_events["flush"] += 1

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Rows, wherever they are, and the structure; then free slots get the canary."""
        self._world.log.settle()
        if self._world.case.quota:
            live = [set(self._world.oracle.live(t)) for t in range(len(self._live))]
        else:
            live = [set(ids) for ids in self._live]
            for flight in (*self._ready, *self._computing):
                for t, ids in enumerate(live):
                    ids.update(self._world.oracle.ids_of(flight.batch, t))
        self._world.check_rows(live)
        self._world.poison_free_slots()
        if not self._num_in_flight:
            self._world.check_no_pins()
