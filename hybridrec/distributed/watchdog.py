"""Finds out that a rank is dead or stopped, says which, and lets those that wait for it go on with an error.

Every rank of a host group counts a heartbeat up in the group's store. Nobody reads them while stages are short. A rank
whose stage takes long, or whose connection broke, reads the others' until one has been silent for too long; then it
breaks its connections to all ranks, because a thread inside gloo can be ended in no other way.

Two threads a host group: one talks to the store, which may itself hang with the process that it lives in; the other
judges, and never waits for anybody.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from hybridrec._compat.torch_distributed import private_store, store_address
from hybridrec.distributed.connections import Link, break_links, own_links
from hybridrec.errors import BackendError, HybridRecError

logger = logging.getLogger("hybridrec")

BEAT_SECONDS = 2.0
"""How often a rank counts up."""
SUSPICION_SECONDS = 3.0
"""How long a stage takes before the others' heartbeats are read."""
DEAD_SECONDS = 20.0
"""Silence after which a rank is given up."""
BROKEN_SECONDS = 6.0
"""The same where a connection broke, which is a sign by itself."""
STALL_SECONDS = 600.0
"""How long a stage takes before the log says once where every rank is."""
MAX_RANKS_LINKED = 64
"""Of groups beyond, connections are not listed: the store would carry W * W of them."""
_EXIT_SECONDS = 2.0
_BELOW = re.compile(r"gloo|\b[A-Z]CCL\b")
"""What the errors of collective libraries say of themselves: those of devices are called something-CCL."""


class GroupBroken(BackendError):
    """A collective of hybridrec's own failed below: the ranks are not in step any more."""


@dataclass(frozen=True)
class Place:
    """Where a thread of a rank is."""

    stage: str
    batch: int | None
    since: float
    """By `time.monotonic`."""

    def __str__(self) -> str:
        return self.stage.upper() + ("" if self.batch is None else f" of batch {self.batch}")


@dataclass(eq=False)
class _Heard:
    """What is known of another rank."""

    beats: int
    since: float = field(default_factory=time.monotonic)
    """When the count was last seen to change, or first read."""
    silence: float = 0.0
    """Seconds from then to the last time that it was read."""


_innermost = threading.local()


def current_place() -> Place | None:
    """The stage that the calling thread is in."""
    return getattr(_innermost, "place", None)


class Watch:
    """One rank's watch over the ranks of a host group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Starts two threads, which end with the group or the process."""
        self._group = weakref.ref(group)
        self._rank, self._size = group.rank(), group.size()
        self._process = os.getpid()
        self.dead_seconds: float | None = DEAD_SECONDS
        """Silence after which a rank is given up; None: never."""
        self._is_set = False
        self.verdict: str | None = None
        """Who is gone, once that is known."""
        self._open: dict[object, Place] = {}
        self._failed_in: Place | None = None
        self._is_alarmed = False
        self._heard: dict[int, _Heard] = {}
        self._links: dict[int, list[Link]] = {}
        self._links_version = -1
        self._own_links: list[Link] = []
        self._has_told_of_stall = False
        self._store_works_since = time.monotonic()
        self._to_abort: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._store = private_store(group, "hybridrec/watch")
        self._where_store = store_address(group)
        self._threads = [
            threading.Thread(target=work, name=f"hybridrec-{name}", daemon=True)
            for work, name in ((self._beat_until_over, "heartbeat"), (self._judge_until_over, "watchdog"))
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the threads that work -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, stage: str, batch: int | None = None) -> Iterator[None]:
        """The calling thread is in a stage that may wait for other ranks."""
        token, place = object(), Place(stage, batch, time.monotonic())
        self._open[token] = place
        outer, _innermost.place = current_place(), place
        try:
            yield
        except RuntimeError:
            self._failed_in = place
            raise
        finally:
            _innermost.place = outer
            del self._open[token]

    def give_up_after(self, seconds: float | None) -> None:
        """Set `dead_seconds`. There is one watch for all pipelines over the group."""
        if self._is_set and seconds != self.dead_seconds:
            logger.warning(
                "dead_rank_seconds=%s replaces %s, which another pipeline over the same host group asked for.",
                seconds,
                self.dead_seconds,
            )
        self.dead_seconds, self._is_set = seconds, True

    def abort_also(self, group: dist.ProcessGroup) -> None:
        """A device group that is aborted when a rank is given up, if its backend can be."""
        if group.size() > 1 and dist.get_backend(group) != "gloo":
            self._to_abort.add(group)

    def explain(self, error: BaseException) -> BackendError | None:
        """The error to raise in place of one that a dead rank caused; None if none did. Waits until that is known."""
        is_ours = isinstance(error, HybridRecError) and not isinstance(error, GroupBroken)
        if is_ours or not isinstance(error, RuntimeError) or self._process != os.getpid():
            return None
        if self.verdict is None and self.dead_seconds is not None and self._is_of_connection(error):
            place = self._failed_in
            with self.stage(place.stage if place else "an exchange", place.batch if place else None):
                self._is_alarmed = True
                self._wake.set()
                deadline = time.monotonic() + BROKEN_SECONDS + 3 * BEAT_SECONDS
                while self.verdict is None and time.monotonic() < deadline:
                    time.sleep(0.1)
                self._is_alarmed = False
        return None if self.verdict is None else self.error()

    def error(self) -> BackendError:
        """What the verdict is raised as."""
        return BackendError(f"{self.verdict} All ranks have to start again from the last checkpoint.")

    @staticmethod
    def _is_of_connection(error: BaseException) -> bool:
        while error.__cause__ is not None:
            error = error.__cause__
        return isinstance(error, dist.DistError) or _BELOW.search(str(error)) is not None

    def end(self, seconds: float = _EXIT_SECONDS) -> None:
        """Stop the threads, unless they hang in the store."""
        self._stop.set()
        self._wake.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads if self._process == os.getpid() else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- heartbeats ----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._group() is None or self.verdict is not None

    def _beat_until_over(self) -> None:
        while not self._is_over():
            try:
                self._beat()
                if self._is_suspicious():
                    self._listen()
                self._store_works_since = time.monotonic()
            except Exception as e:  # whatever a store raises; the other thread judges how long that goes on
                logger.debug("heartbeat of rank %d: %s", self._rank, e)
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()

    def _beat(self) -> None:
        if self._size <= MAX_RANKS_LINKED:
            links = own_links()
            if links != self._own_links:
                self._own_links = links
                self._store.set(f"links/{self._rank}", json.dumps(links))
                self._store.add("version", 1)
            version = self._store.add("version", 0)
            if version != self._links_version:
                self._links_version = version
                for rank in self._others():
                    if self._store.check([f"links/{rank}"]):
                        self._links[rank] = [(o, t) for o, t in json.loads(self._store.get(f"links/{rank}"))]
        self._store.set(f"place/{self._rank}", self._places() or "the program outside hybridrec")
        self._store.add(f"beats/{self._rank}", 1)

    def _listen(self) -> None:
        for rank in self._others():
            beats = self._store.add(f"beats/{rank}", 0)
            heard = self._heard.setdefault(rank, _Heard(beats))
            if beats != heard.beats:
                self._heard[rank] = _Heard(beats)  # what is read of a former value is nobody's silence any more
            heard.silence = time.monotonic() - heard.since

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _oldest(self) -> Place | None:
        return min(self._open.copy().values(), key=lambda place: place.since, default=None)

    def _places(self) -> str:
        return " and ".join(str(place) for place in sorted(self._open.copy().values(), key=lambda p: p.since))

    def _is_suspicious(self) -> bool:
        oldest = self._oldest()
        if self._is_alarmed or (oldest is not None and time.monotonic() - oldest.since > SUSPICION_SECONDS):
            return True
        self._heard.clear()  # the next suspicion begins anew: nobody listened meanwhile
        return False

    # ---- judgement -----------------------------------------------------------------------------------------------

    def _judge_until_over(self) -> None:
        last = time.monotonic()
        while not self._is_over():
            now = time.monotonic()
            if now - last > max(2 * BEAT_SECONDS, 2.0):  # this process did not run: nor did it listen
                self._store_works_since = now
                self._heard.clear()
            last = now
            self._judge()
            self._stop.wait(BEAT_SECONDS / 2)

    def _judge(self) -> None:
        oldest = self._oldest()
        if oldest is None or self.dead_seconds is None:
            return
        now = time.monotonic()
        limit = min(self.dead_seconds, BROKEN_SECONDS) if self._is_alarmed else self.dead_seconds
        silent = {rank: heard.silence for rank, heard in self._heard.copy().items() if heard.silence > limit}
        store_silence = now - max(self._store_works_since, oldest.since)
        if store_silence > limit:
            self._declare(
                f"the store of the process group ({self._where_store}), which lives in the process of rank 0 or in its "
                f"launcher, has not answered for {store_silence:.0f} s while rank {self._rank} waited in "
                f"{self._places()}: {'the launcher' if self._rank == 0 else f'rank 0 of {self._size}'} or its machine "
                "is gone."
            )
        elif silent:
            longest = max(silent, key=lambda rank: silent[rank])
            names = "ranks " + ", ".join(map(str, sorted(silent))) if len(silent) > 1 else f"rank {longest}"
            verb = "have" if len(silent) > 1 else "has"
            self._declare(
                f"{names} of {self._size} {verb} not been heard of for {silent[longest]:.0f} s while rank {self._rank} "
                f"waited in {self._places()}: killed or stopped, or the machine cannot be reached."
            )
        elif now - oldest.since > STALL_SECONDS and not self._has_told_of_stall:
            self._has_told_of_stall = True
            logger.warning(
                "rank %d of %d has been in %s for %d s, and all ranks live. %s",
                self._rank,
                self._size,
                oldest,
                now - oldest.since,
                self._where_all_are(),
            )

    def _where_all_are(self) -> str:
        try:
            places = {rank: self._store.get(f"place/{rank}").decode() for rank in self._heard}
        except Exception as e:  # a report that fails is no reason to fail
            return f"Where they are is not known: {e}"
        return " ".join(f"Rank {rank} is in {place}." for rank, place in sorted(places.items()))

    def _declare(self, verdict: str) -> None:
        self.verdict = verdict
        logger.error("%s Connections to all ranks are ended.", verdict)
        port = self._where_store.rpartition(":")[2]
        for links in self._links.values():
            break_links(links, but_ports=[port] if port.isdigit() else [])
        for group in list(self._to_abort):
            try:
                group.abort()
            except Exception as e:  # one that cannot be aborted must not keep the others waiting
                logger.error("a device group could not be aborted, so that threads may wait in it for ever: %s", e)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> Watch | None:
    """The watch over a group's ranks; begun when it is first asked for. None for a single rank."""
    if group.size() == 1:
        return None
    watch = _watches.get(group)
    if watch is None:
        watch = _watches[group] = Watch(group)
    return watch


@contextlib.contextmanager
def watched(group: dist.ProcessGroup, stage: str, batch: int | None = None) -> Iterator[None]:
    """A stage that may wait for the ranks of a group; a failure that a dead rank caused is raised as such.

    Raises:
        BackendError: A rank is gone; names it and the stage.
    """
    watch = watch_of(group)
    if watch is None:
        yield
        return
    try:
        with watch.stage(stage, batch):
            yield
    except RuntimeError as e:
        explained = watch.explain(e)
        if explained is None:
            raise
        raise explained from e


def end_all_watches(seconds: float) -> None:
    """Stop watching over all groups; a group that is used again gets a new watch. Waits so long for each."""
    watches = list(_watches.values())
    _watches.clear()
    for watch in watches:
        watch.end(seconds)


# A thread that comes back from C++ while Python takes itself apart ends the process by abort.
atexit.register(end_all_watches, _EXIT_SECONDS)
