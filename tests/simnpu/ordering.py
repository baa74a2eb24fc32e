"""Which work of the simulated device is ordered after which: vector clocks, as data-race detectors keep them.

Every piece of work has a stream and a tick. A clock maps streams to the latest tick that something is ordered after:

    clocks[s]   what the next work of stream s is ordered after (its own earlier work included)
    host        what any thread of the host has waited for

A thread's wait orders the work that this thread launches later, whatever the stream. It does not order what other
threads launch: they may have been told by a queue or a lock, which nobody sees here, or just be late by luck. So
streams of different threads need events between them. A wait for the whole device counts for everybody.

Work runs when it is launched, so that a wait needs no waiting: it joins clocks. Two kinds of work run later, since a
program must not rely on their being early: `defer_until_used`, until work that is ordered after it is launched, and
`defer_until_host`, until the host has waited for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

Clock = dict[int, int]
DEFAULT_STREAM = 0


class SyncHazard(RuntimeError):
    """Two streams, or the host and a stream, may touch the same memory at the same time."""


def join(clock: Clock, other: Clock) -> None:
    """Order ``clock`` after ``other`` too."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class Timeline:
    """The clocks of one device. Everything about the device is done under its lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[int, Clock] = {DEFAULT_STREAM: {DEFAULT_STREAM: 0}}
        self.host: Clock = {}
        self._by_thread = threading.local()
        self.before_wait: list[Callable[[], None]] = []
        """Called before clocks are joined: what happened until now is not ordered after what is waited for."""
        self._until_used: list[tuple[int, int, Callable[[], None]]] = []
        self._until_host: list[tuple[int, int, Callable[[], None]]] = []
        self._hazards: list[str] = []

    # ---- streams and waits ---------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A stream that is ordered after nothing."""
        with self.lock:
            stream = len(self.clocks)
            self.clocks[stream] = {stream: 0}
            return stream

    def launch(self, stream: int) -> int:
        """Begin a piece of work: its tick. It runs after what this thread has waited for."""
        clock = self.clocks[stream]
        join(clock, getattr(self._by_thread, "waited", {}))
        clock[stream] += 1
        self._run_late_work(clock)
        return clock[stream]

    def wait(self, stream: int, clock: Clock) -> None:
        """Later work of a stream runs after what ``clock`` covers."""
        with self.lock:
            self._prepare_wait()
            join(self.clocks[stream], clock)

    def host_wait(self, clock: Clock) -> None:
        """The host waits for what ``clock`` covers."""
        with self.lock:
            self._prepare_wait()
            self._run_late_work(clock)
            join(self.host, clock)
            self._by_thread.waited = waited = getattr(self._by_thread, "waited", {})
            join(waited, clock)
            arrived = [e for e in self._until_host if self.host.get(e[0], 0) >= e[1]]
            self._until_host = [e for e in self._until_host if self.host.get(e[0], 0) < e[1]]
            for _, _, work in arrived:
                work()

    def synchronize(self) -> None:
        """The host waits for everything, and all its threads know."""
        with self.lock:
            everything = {stream: clock[stream] for stream, clock in self.clocks.items()}
            self.host_wait(everything)
            for clock in self.clocks.values():
                join(clock, everything)

    def is_over(self, clock: Clock) -> bool:
        """Whether the host has waited for all that ``clock`` covers."""
        return all(self.host.get(stream, 0) >= tick for stream, tick in clock.items())

    def is_ordered(self, stream: int, other: int, tick: int) -> bool:
        """Whether the work of ``stream`` that was launched last runs after work ``tick`` of ``other``."""
        return stream == other or self.clocks[stream].get(other, 0) >= tick

    def snapshot(self, stream: int) -> Clock:
        """What an event that is recorded now stands for."""
        with self.lock:
            return dict(self.clocks[stream])

    # ---- work that runs late -------------------------------------------------------------------------------------

    def defer_until_used(self, stream: int, tick: int, work: Callable[[], None]) -> None:
        """Run ``work`` before the first work that is ordered after it."""
        self._until_used.append((stream, tick, work))

    def defer_until_host(self, stream: int, tick: int, work: Callable[[], None]) -> None:
        """Run ``work`` when the host has waited for it."""
        self._until_host.append((stream, tick, work))

    def _run_late_work(self, clock: Clock) -> None:
        if not self._until_used:
            return
        due = [e for e in self._until_used if clock.get(e[0], 0) >= e[1]]
        self._until_used = [e for e in self._until_used if clock.get(e[0], 0) < e[1]]
        for _, _, work in due:
            work()

    def _prepare_wait(self) -> None:
        for prepare in self.before_wait:
            prepare()

    # ---- hazards -------------------------------------------------------------------------------------------------

    def report(self, hazard: str) -> None:
        """Note a hazard that was found where raising would hit the wrong caller."""
        self._hazards.append(hazard)

    def fail(self, hazard: str) -> None:
        """Note a hazard and raise it."""
        self.report(hazard)
        raise SyncHazard(hazard)

    def take_hazards(self) -> list[str]:
        """All hazards since the last call, raised and reported ones."""
        with self.lock:
            self._prepare_wait()
            taken, self._hazards = self._hazards, []
            return taken


timeline = Timeline()

# ---- the current stream of a thread ----------------------------------------------------------------------------------

_local = threading.local()
_BACKWARD_KEY = "simnpu.stream"


def current_stream() -> int:
    """The stream of this thread; on a thread of autograd's, the one that was current where backward was called."""
    stream = getattr(_local, "stream", None)
    if stream is None and torch._C._is_key_in_tls(_BACKWARD_KEY):
        stream = torch._C._get_obj_in_tls(_BACKWARD_KEY)
    return DEFAULT_STREAM if stream is None else int(stream)


def set_current_stream(stream: int | None) -> int | None:
    """Set that of this thread; returns what is to be set again afterwards."""
    previous = getattr(_local, "stream", None)
    _local.stream = stream
    return previous


@contextlib.contextmanager
def on_stream(stream: int) -> Iterator[None]:
    """Work of the block goes to ``stream``."""
    previous = set_current_stream(stream)
    try:
        yield
    finally:
        set_current_stream(previous)


def carry_stream_into_backward() -> None:
    """Make autograd's threads see the stream of the thread that called backward.

    Autograd takes objects that are stashed in the caller's thread-local state along to its own threads.
    """
    run = torch.autograd.graph._engine_run_backward

    def run_on_stream(*args: Any, **kwargs: Any) -> Any:
        outer = torch._C._get_obj_in_tls(_BACKWARD_KEY) if torch._C._is_key_in_tls(_BACKWARD_KEY) else None
        torch._C._stash_obj_in_tls(_BACKWARD_KEY, current_stream())
        try:
            return run(*args, **kwargs)
        finally:
            if outer is None and hasattr(torch._C, "_remove_obj_from_tls"):
                # An object that is left there can block the end of a thread.
                torch._C._remove_obj_from_tls(_BACKWARD_KEY)
            else:
                torch._C._stash_obj_in_tls(_BACKWARD_KEY, outer)

    torch.autograd.graph._engine_run_backward = run_on_stream
    torch.autograd._engine_run_backward = run_on_stream
