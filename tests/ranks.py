"""A pool of ranks: processes that stay, joined in one gloo process group, for tests that need several ranks.

Starting a rank costs seconds (torch and torchrec are imported), a job on a running pool costs milliseconds. A job is
a function that can be imported by name; it runs on every rank at once, inside the default process group.

Example:
    def sum_of_ranks(offset: int) -> int:
        total = torch.tensor(dist.get_rank() + offset)
        dist.all_reduce(total)
        return int(total)

    def test_sum(pool_2: RankPool) -> None:
        assert pool_2.run(sum_of_ranks, 10) == [21, 21]

What a test may rely on:

- A result or an exception comes back from every rank, or the job is stopped by the watchdog: `run` never hangs.
- After a job that failed, the ranks are replaced, so that no half-finished collective reaches the next job.
- After a job that succeeded, the same processes serve the next one of the same test. Between tests those that served
  many jobs are replaced (`end_old_pools`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not listed where mypy looks

from tests.jitter import delays

WATCHDOG_SECONDS = 240.0
"""How long a job may take unless `run` is told otherwise: many times what one takes, as machines can be loaded."""
START_SECONDS = 240.0
"""How long a rank may take to start and to join the process group."""
STOP_SECONDS = 10.0
"""How long a rank may take to end when asked."""
ORPHAN_SECONDS = 900.0
"""When a collective gives up by itself: what ends a rank that waits in one while its parent is killed."""
GRACE_SECONDS = 5.0
"""How long the other ranks may go on once one has failed: long enough to fail by themselves, where they do."""
DYING_SECONDS = 60.0
"""How long the system may take until a rank that closed its pipe has an exit code."""
MAX_JOBS = 50
"""After how many jobs ranks are replaced. torch keeps the groups of all jobs, and each has a thread of gloo that looks
around a hundred times a second: after some hundreds of jobs they take more of the processor than the tests do."""
STACKS_SECONDS = 10.0
"""How long a rank that hangs may take to write where."""


class RankFailure(Exception):
    """A job raised on at least one rank. The message holds each failed rank's traceback.

    Attributes:
        errors: Rank -> the exception that it raised.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        """Keep the exceptions beside the message, for tests that look at them."""
        super().__init__(message)
        self.errors = errors


class RankTimeout(Exception):
    """A job did not end in time, or a rank died. The message says where each rank was."""


@dataclass(frozen=True)
class _Outcome:
    """What a rank sends back for a job."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True)
class _Rank:
    """The parent's side of one rank."""

    process: SpawnProcess
    connection: Connection
    stacks: Path
    """Where the rank writes its threads' stacks on SIGUSR1."""


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """What the ranks of a pool are. Functions are given as "module:name": they need not be there in the parent."""

    backend: str = "gloo"
    """Of the default process group."""
    prepare: str = ""
    """A function that a rank calls before it joins the group, and before any job imports anything."""
    check: str = ""
    """A function that a rank calls after every job that succeeded; what it raises fails the job."""


class RankPool:
    """W processes in one process group. They start with the first job and stay until `close`."""

    def __init__(self, world_size: int, kind: RankKind | None = None) -> None:
        """Nothing is started yet. Without a ``kind``: plain processes, joined by gloo."""
        self.world_size = world_size
        self._kind = kind or RankKind()
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._dying: set[int] = set()
        self.num_jobs = 0
        """Of the ranks that there are."""
        _pools.add(self)

    def run(self, fn: Callable[..., Any], *args: Any, watchdog: float = WATCHDOG_SECONDS, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and wait for all of them.

        Args:
            fn: Importable by name in another process: a module's own function. Seeds are set before it runs.
            *args: Pickled once, the same for every rank.
            watchdog: Seconds until the job counts as hung.
            **kwargs: As ``args``.

        Returns:
            What ``fn`` returned, in rank order.

        Raises:
            RankFailure: It raised on some rank.
            RankTimeout: It did not end in time, or a rank died.
        """
        payload = pickle.dumps((fn, args, kwargs))
        if not self._ranks:
            self._start()
        self.num_jobs += 1
        outcomes = self._exchange(payload, watchdog)
        self._check(outcomes, watchdog, fn.__qualname__)
        # A collective that some rank left out then is this job's fault, not the next one's.
        after = self._exchange(pickle.dumps((dist.barrier, (), {})), watchdog)
        self._check(after, watchdog, f"the barrier after {fn.__qualname__}")
        return [outcomes[rank].value for rank in range(self.world_size)]

    def pids(self) -> list[int]:
        """Process ids in rank order; empty while nothing runs."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def close(self) -> None:
        """End the ranks in order: a last barrier, then exit; those that do not follow are killed."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # already dead: nothing to end
                rank.connection.send_bytes(b"")
        deadline = time.monotonic() + STOP_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks at once, by their own process ids. The next `run` starts new ones."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
            rank.process.close()
        self._ranks, self.num_jobs = [], 0
        self._dying.clear()
        self._store = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        # The parent hosts the store and lets the system choose the port, so that no two pools can meet.
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._directory = tempfile.TemporaryDirectory(prefix="ranks_")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stacks = Path(self._directory.name) / f"rank_{rank}.txt"
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, store.port, str(stacks), self._kind),
                name=f"rank {rank} of {self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()  # else its end of the pipe would outlive the rank, and its death would go unseen
            self._ranks.append(_Rank(process, ours, stacks))
        self._check(self._collect(START_SECONDS), START_SECONDS, "starting")

    def _exchange(self, payload: bytes, watchdog: float) -> dict[int, _Outcome]:
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it died between two jobs: _collect reports it
                rank.connection.send_bytes(payload)
        return self._collect(watchdog)

    def _collect(self, seconds: float) -> dict[int, _Outcome]:
        """Outcomes until all are in, the time is over, or, after the first failure, the grace is."""
        outcomes: dict[int, _Outcome] = {}
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                number = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    outcomes[number] = pickle.loads(self._ranks[number].connection.recv_bytes())
                    has_failed = outcomes[number].error is not None
                except (EOFError, OSError):  # dead: it has no outcome
                    has_failed = True
                    self._dying.add(number)
                if has_failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _check(self, outcomes: Mapping[int, _Outcome], watchdog: float, what: str) -> None:
        """Unless all ranks succeeded: say what each of them did, end all, and raise."""
        errors = {rank: o.error for rank, o in sorted(outcomes.items()) if o.error is not None}
        missing = [rank for rank in range(self.world_size) if rank not in outcomes]
        if not errors and not missing:
            return
        lines = [f"{what} on {self.world_size} ranks:"]
        lines += [f"rank {rank} raised:\n{outcomes[rank].trace}" for rank in errors]
        lines += [f"rank {rank} gave no answer: {self._where(rank)}" for rank in missing]
        self.kill()
        if errors:
            raise RankFailure("\n".join(lines), errors)
        raise RankTimeout("\n".join([*lines, f"The watchdog was set to {watchdog:g} s."]))

    def _where(self, number: int) -> str:
        rank = self._ranks[number]
        if number in self._dying:
            rank.process.join(DYING_SECONDS)
        pid = rank.process.pid
        if pid is None or not rank.process.is_alive():
            return f"it died with exit code {rank.process.exitcode}"
        os.kill(pid, signal.SIGUSR1)
        stacks, deadline, is_written = "", time.monotonic() + STACKS_SECONDS, False
        while not is_written and time.monotonic() < deadline:
            time.sleep(0.3)
            before, stacks = stacks, rank.stacks.read_text() if rank.stacks.exists() else ""
            is_written = stacks != "" and stacks == before
        return f"it hangs here\n{stacks}" if stacks else "it hangs, before it could say where"


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


def end_old_pools() -> None:
    """Between two tests: end ranks that served many jobs; the next job starts others."""
    for pool in list(_pools):
        if pool.num_jobs >= MAX_JOBS:
            pool.close()


class RankPools(Mapping[int, RankPool]):
    """World size -> pool, each made when first asked for."""

    def __init__(self, max_world_size: int, kind: RankKind | None = None) -> None:
        """World sizes 1 to ``max_world_size``; nothing is started."""
        self._pools = {world_size: RankPool(world_size, kind) for world_size in range(1, max_world_size + 1)}

    def __getitem__(self, world_size: int) -> RankPool:
        """The pool of that world size."""
        return self._pools[world_size]

    def __iter__(self) -> Iterator[int]:
        """World sizes, ascending."""
        return iter(self._pools)

    def __len__(self) -> int:
        """How many world sizes there are."""
        return len(self._pools)

    def close(self) -> None:
        """End the ranks of all pools."""
        for pool in self._pools.values():
            pool.close()


def _serve(connection: Connection, rank: int, world_size: int, port: int, stacks: str, kind: RankKind) -> None:
    """A rank's whole life. It ends by ``os._exit``: gloo's threads may abort an interpreter that shuts down."""
    stacks_file = open(stacks, "w")  # stays open as long as the process
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of this process; the ranks of a pool are on one machine
    torch.set_num_threads(1)
    try:
        _call(kind.prepare)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
        timeout = timedelta(seconds=ORPHAN_SECONDS)
        dist.init_process_group(kind.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except Exception as error:
        connection.send_bytes(_encode(_Outcome(error=error, trace=traceback.format_exc())))
        os._exit(1)
    connection.send_bytes(_encode(_Outcome()))
    try:
        while payload := connection.recv_bytes():
            connection.send_bytes(_encode(_perform(payload, kind)))
    except EOFError:  # the parent is gone
        os._exit(1)
    dist.barrier()
    os._exit(0)


def _perform(payload: bytes, kind: RankKind) -> _Outcome:
    """One job."""
    random.seed(0)
    torch.manual_seed(0)
    _end_watches()
    try:
        fn, args, kwargs = pickle.loads(payload)
        delays.begin(f"{fn.__qualname__} {[arg for arg in args if isinstance(arg, int)]}", dist.get_rank())
        value = fn(*args, **kwargs)
        _call(kind.check)
        return _Outcome(value=value)
    except BaseException as error:  # includes pytest's own outcomes, which are no Exceptions
        return _Outcome(error=error, trace=traceback.format_exc())


def _end_watches() -> None:
    """torch keeps the groups of earlier jobs, and with them the threads that watch over their ranks."""
    watchdog = sys.modules.get("hybridrec.distributed.watchdog")
    if watchdog is not None:
        watchdog.end_all_watches(0.0)


def _call(path: str) -> None:
    """Call the function "module:name"; an empty path calls nothing."""
    if path:
        module, _, name = path.partition(":")
        getattr(importlib.import_module(module), name)()


def _encode(outcome: _Outcome) -> bytes:
    """Pickle; what cannot be pickled, or not be read back, becomes an error that says so."""
    try:
        encoded = pickle.dumps(outcome)
        pickle.loads(encoded)
        return encoded
    except Exception as error:
        what = outcome.value if outcome.error is None else outcome.error
        text = f"{type(what).__name__} cannot be sent to the parent: {error!r}\n{outcome.trace}"
        return pickle.dumps(_Outcome(error=RuntimeError(text), trace=text))
