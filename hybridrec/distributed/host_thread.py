"""The one thread that issues collectives over a host group ahead of training, in the order in which jobs are submitted.

All ranks submit the same jobs in the same order, so their collectives meet. A caller that uses the group on its own
thread calls `settle_host_thread` first, which all ranks do at the same place of the program.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch.distributed as dist

from hybridrec.errors import ConfigError, StateError

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for jobs under way, which may wait for ranks that are gone."""


class Waiter(Protocol):
    """Where jobs may wait for the training thread."""

    def wake(self) -> None:
        """Let them ask again whether they may."""


class Job:
    """Work of the thread. Its exception is kept for whoever waits."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._done = threading.Event()
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it ran, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when it ran.

        Raises:
            BaseException: What it raised, with its traceback.
        """
        self._done.wait()
        if self.error is not None:
            raise self.error

    def is_done_within(self, seconds: float) -> bool:
        """Wait for it, but not longer: whether it ran."""
        return self._done.wait(seconds)

    def run(self) -> None:
        """For the thread."""
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except BaseException as e:  # noqa: B036 - raised by whoever waits
            self.error = e
        finally:
            self._done.set()


class HostThread:
    """Runs jobs in order. It ends with this object, and does not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._user: weakref.ref[object] | None = None
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self.is_settling = False
        """Jobs must not wait for the training thread now: it waits for them."""
        self._process = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name="hybridrec-host", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _alive.add(self)

    def submit(self, work: Callable[[], None]) -> Job:
        """Run ``work`` after all jobs so far.

        Raises:
            StateError: This process was forked from the one that has the thread.
        """
        self._require_process()
        self._last = job = Job(work)
        self._jobs.put(job)
        return job

    def settle(self) -> None:
        """Return when all jobs ran. Those that wait for the training thread give up."""
        if self._last is None or self._last.is_done or threading.current_thread() is self._thread:
            return
        self._require_process()
        self._settle(None)

    def end(self) -> None:
        """The process ends: let the thread finish, for a while. One that still runs then may abort the process."""
        if self._process == os.getpid() and self._thread.is_alive():
            if self._last is not None and not self._last.is_done:
                self._settle(_EXIT_SECONDS)
            self._jobs.put(None)
            self._thread.join(_EXIT_SECONDS)

    def _settle(self, seconds: float | None) -> None:
        assert self._last is not None
        self.is_settling = True
        try:
            for waiter in list(self._waiters):
                waiter.wake()
            self._last._done.wait(seconds)
        finally:
            self.is_settling = False

    def _require_process(self) -> None:
        if self._process != os.getpid():
            raise StateError(
                "hashed collections under a pipeline were used in a forked process, which lacks the thread that sends "
                "their ids. Start the process by spawn, or use the collections in the process that made them."
            )

    def claim(self, user: object) -> bool:
        """Tell who submits from now on; if that was somebody else, settle first.

        Returns:
            Whether it was somebody else, or nobody.
        """
        if self._user is not None and self._user() is user:
            return False
        self.settle()
        self._user = weakref.ref(user)
        return True

    def add_waiter(self, waiter: Waiter) -> None:
        """Wake it whenever `is_settling` became True."""
        self._waiters.add(waiter)


_alive: weakref.WeakSet[HostThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Python unwinds a thread that comes back while it takes itself apart, and C++ frames do not survive that."""
    for thread in list(_alive):
        thread.end()


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # a job holds a batch


_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, HostThread] = weakref.WeakKeyDictionary()


def host_thread_of(groups: Iterable[dist.ProcessGroup]) -> HostThread:
    """The thread of some host groups; made when it is first asked for.

    Raises:
        ConfigError: They have different ones already.
    """
    groups = list(groups)
    known = {id(thread): thread for group in groups if (thread := _threads.get(group)) is not None}
    if len(known) > 1:
        raise ConfigError(
            "the hashed collections of one model use host groups that other pipelines use separately: their "
            "collectives would have no common order. Make one host_env and pass it to every sharder."
        )
    thread = next(iter(known.values()), None) or HostThread()
    for group in groups:
        _threads[group] = thread
    return thread


def settle_host_thread(group: dist.ProcessGroup) -> None:
    """Wait until nobody uses a host group ahead of training; nothing to wait for on the thread that does."""
    thread = _threads.get(group)
    if thread is not None:
        thread.settle()
