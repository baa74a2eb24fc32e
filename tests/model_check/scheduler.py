"""A deterministic scheduler: threads that run one at a time, and a tape that says who goes on at every point.

Code under test is stopped at *points*: before every call of the shard group, where locks are taken and given back,
where staging buffers come and go. What a tape decides is a schedule; the same tape replays it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

MAX_POINTS = 50_000
MAX_VAIN_WAITS = 20


class WrongSchedule(AssertionError):
    """A schedule did what none may do; says which, and how to replay it."""


class _Stopped(BaseException):
    """Raised in a thread whose schedule is over."""


class Tape:
    """Choices, from bytes or from a seed. When bytes end every choice is 0."""

    def __init__(self, source: bytes | int) -> None:
        self._bytes = iter(source) if isinstance(source, bytes) else None
        self._random = random.Random(source)

    def choose(self, n: int) -> int:
        """One of 0 .. n - 1."""
        if n == 1:
            return 0
        return next(self._bytes, 0) % n if self._bytes is not None else self._random.randrange(n)


class Scheduler(Protocol):
    """What the world and its threads need of one."""

    def point(self, name: str) -> None:
        """Another thread may go on here."""

    def wait_until(self, is_due: Callable[[], bool], name: str) -> None:
        """The calling thread goes on when it is due."""

    def run(self, programs: dict[str, Callable[[], None]]) -> None:
        """Run all programs to their end, the first one on the calling thread; raises what one of them raised."""

    def lock(self) -> Any:
        """A reentrant lock for the threads of this scheduler."""

    def condition(self) -> Any:
        """A condition variable for them; its waits may end without news, as ones with a timeout do."""


class _Actor:
    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.is_due: Callable[[], bool] | None = None  # None: it can go on
        self.is_over = False


class ReplayedThreads:
    """Threads that take turns as a tape says.

    Whoever holds the baton is the running thread, whatever thread of autograd's it uses. A thread is preempted at one
    point in `period`: a small period mixes everything, a large one finds what needs few switches at odd places.
    """

    def __init__(self, tape: Tape, workers: ThreadPoolExecutor) -> None:
        self._tape, self._workers = tape, workers
        self._period = (2, 3, 6, 16)[tape.choose(4)]
        self._actors: list[_Actor] = []
        self._running: _Actor | None = None
        self._error: BaseException | None = None
        self.trace: list[str] = []
        """What happened, for whoever reads a failure."""

    # ---- what runs -----------------------------------------------------------------------------------------------

    def run(self, programs: dict[str, Callable[[], None]]) -> None:
        self._actors = [_Actor(name) for name in programs]
        (first, program), *others = zip(self._actors, programs.values(), strict=True)
        self._running = first
        jobs = [self._workers.submit(self._others, actor, job) for actor, job in others]
        self._play(first, program)
        for job in jobs:
            job.result()
        self._running = None
        if self._error is not None:
            raise self._error

    def _others(self, actor: _Actor, program: Callable[[], None]) -> None:
        actor.baton.acquire()
        self._play(actor, program)

    def _play(self, actor: _Actor, program: Callable[[], None]) -> None:
        try:
            if self._error is None:
                program()
        except _Stopped:
            pass
        except BaseException as e:
            self._error = self._error or e
        actor.is_over = True
        alive = [a for a in self._actors if not a.is_over]
        if not alive:
            return
        try:
            chosen = alive[0] if self._error is not None else self._choose()
        except WrongSchedule as e:
            self._error, chosen = e, alive[0]
        self._running = chosen
        chosen.baton.release()

    # ---- turns ---------------------------------------------------------------------------------------------------

    def point(self, name: str) -> None:
        me = self._running
        if me is None:  # while the world is built or looked at
            return
        self._note(me, name)
        if self._tape.choose(self._period) == self._period - 1:
            self._pass_on(me)

    def wait_until(self, is_due: Callable[[], bool], name: str) -> None:
        me = self._running
        assert me is not None
        self._note(me, name)
        if is_due() and self._tape.choose(2) == 0:
            return
        me.is_due = is_due
        self._pass_on(me)
        me.is_due = None

    def _note(self, me: _Actor, name: str) -> None:
        if self._error is not None:
            raise _Stopped
        self.trace.append(f"{me.name}: {name}")
        if len(self.trace) > MAX_POINTS:
            raise WrongSchedule(f"no end after {MAX_POINTS:,} points")

    def _choose(self) -> _Actor:
        due = [a for a in self._actors if not a.is_over and (a.is_due is None or a.is_due())]
        if not due:
            waiting = {a.name: self._last_of(a.name) for a in self._actors if not a.is_over}
            raise WrongSchedule(f"everybody waits: {waiting}")
        return due[self._tape.choose(len(due))]

    def _last_of(self, name: str) -> str:
        return next((line for line in reversed(self.trace) if line.startswith(name + ":")), "nothing")

    def _pass_on(self, me: _Actor) -> None:
        other = self._choose()
        if other is not me:
            self._running = other
            other.baton.release()
            me.baton.acquire()
        if self._error is not None:
            raise _Stopped

    # ---- locks ---------------------------------------------------------------------------------------------------

    def lock(self) -> Any:
        return _ReplayedLock(self)

    def condition(self) -> Any:
        return _ReplayedCondition(self)


class _ReplayedLock:
    """As `threading.RLock`, but whoever cannot have it passes the baton on."""

    def __init__(self, threads: ReplayedThreads) -> None:
        self._threads = threads
        self._owner: _Actor | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        threads = self._threads
        if threads._running is None:
            return True
        threads.point("lock" if blocking else "try lock")
        me = threads._running
        if self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            threads.wait_until(lambda: self._owner is None, "wait for the lock")
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._threads._running is None:
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._threads._error is None:
                self._threads.point("unlocked")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()


class _ReplayedCondition:
    """As `threading.Condition`. A wait may end at any time: who waits with a timeout must look again anyway."""

    def __init__(self, threads: ReplayedThreads) -> None:
        self._threads = threads
        self._vain = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None

    def wait(self, timeout: float) -> None:
        threads = self._threads
        others = [a for a in threads._actors if a is not threads._running]
        seen = len(threads.trace) + 1

        def can_anybody() -> bool:
            return any(not a.is_over and (a.is_due is None or a.is_due()) for a in others)

        self._vain = 0 if can_anybody() else self._vain + 1
        if self._vain > MAX_VAIN_WAITS:
            raise WrongSchedule("a thread waits for news, and nobody is left to bring any")
        threads.wait_until(lambda: len(threads.trace) > seen or not can_anybody(), "wait for news")

    def notify_all(self) -> None:
        self._threads.point("news")


class FreeThreads:
    """Real threads that sleep at points, at random: what a tape cannot order (native calls) meets here."""

    def __init__(self, seed: int, workers: ThreadPoolExecutor, seconds: float = 0.0005) -> None:
        self._random, self._workers, self._seconds = random.Random(seed), workers, seconds
        self._is_over = False
        self.trace = ["free threads leave no trace"]

    def run(self, programs: dict[str, Callable[[], None]]) -> None:
        first, *others = programs.values()
        jobs = [self._workers.submit(self._guard, job) for job in others]
        errors = [self._guard(first)]
        errors += [job.result() for job in jobs]
        for error in errors:
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _guard(self, program: Callable[[], None]) -> BaseException | None:
        try:
            program()
        except BaseException as e:
            self._is_over = True
            return e
        return None

    def point(self, name: str) -> None:
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * self._seconds)

    def wait_until(self, is_due: Callable[[], bool], name: str) -> None:
        give_up = time.monotonic() + 120
        while not is_due():
            if self._is_over:
                raise _Stopped
            if time.monotonic() > give_up:
                raise WrongSchedule(f"nobody came: {name}")
            time.sleep(0.0002)

    def lock(self) -> Any:
        return threading.RLock()

    def condition(self) -> Any:
        return threading.Condition()
