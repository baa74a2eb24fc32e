"""One job at a time writes into a folder of snapshots: a lock that ends with the process that holds it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from hybridrec.errors import StateError

try:
    import fcntl
except ImportError:  # a system without record locks: nothing is refused there
    fcntl = None  # type: ignore[assignment]  # not on every system

logger = logging.getLogger("hybridrec")

LOCK_SECONDS = 100.0
"""How long to wait for another job to end: longer than network file systems keep the lock of a machine that is gone."""
_TELL_SECONDS = 2.0
_POLL_SECONDS = 0.1
_NAME = ".writer"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(eq=False)
class _Held:
    """One folder that this process writes into; its parts share the lock, which does not tell them apart."""

    path: Path
    """Of the lock's file."""
    descriptor: int | None
    """None: the system has no locks."""
    count: int = 0
    has_sole: bool = False
    being_written: set[str] = field(default_factory=set)


_held: dict[tuple[int, int], _Held] = {}
"""By device and number of the folder: it may have several paths."""
_guard = threading.Lock()
"""Of the above: what is given up in the background lets go on its thread."""


class WriterLock:
    """The right of one part of this process to write into a folder, until `release`."""

    def __init__(self, folder: tuple[int, int], held: _Held, *, is_sole: bool) -> None:
        """See `acquire`."""
        self._folder, self._held, self._is_sole = folder, held, is_sole
        self._written, self._is_released = "", False

    def is_written(self, name: str) -> bool:
        """Whether a part of this process writes something; else it is left over by a job before."""
        return name in self._held.being_written

    def write(self, name: str) -> None:
        """Tell that this part writes something, until `release`: one path in the folder."""
        self._written = name
        self._held.being_written.add(name)

    def release(self) -> None:
        """Let go; legal more than once, and on any thread."""
        with _guard:
            if self._is_released:
                return
            self._is_released, held = True, self._held
            held.being_written.discard(self._written)
            held.count -= 1
            held.has_sole = held.has_sole and not self._is_sole
            if held.count:
                return
            del _held[self._folder]
            if held.descriptor is not None:
                if _is_named(held.path, held.descriptor):  # the folder may be another one now
                    held.path.unlink(missing_ok=True)  # before the lock ends: whoever has it open sees that it is gone
                os.close(held.descriptor)


def acquire(root: Path, *, sole: str = "") -> WriterLock:
    """Become the job that writes into a folder, which exists. On one rank.

    Where the file system has no locks other jobs are not kept out.

    Args:
        root: The folder, by any of its paths.
        sole: What asks, if this process may have only one of its kind for the folder.

    Raises:
        StateError: Another job writes there, and goes on; or this process has one that asked so. Names it.
        OSError: The lock's file cannot be made.
    """
    status = root.stat()
    folder, path = (status.st_dev, status.st_ino), root.resolve() / _NAME
    start, is_told = time.monotonic(), False
    while (lock := _acquired(root, folder, path, sole)) is None:
        waited = time.monotonic() - start
        if waited >= LOCK_SECONDS:
            raise StateError(
                f"{root}: another job writes its snapshots here ({_holder(path)}). Give each job a folder of its own, "
                "or end that one. A job that only reads calls checkpoint.load()."
            )
        if waited > _TELL_SECONDS and not is_told:
            is_told = True
            logger.warning("%s: waiting for another job, which writes here: %s.", root, _holder(path))
        time.sleep(_POLL_SECONDS)
    return lock


def _acquired(root: Path, folder: tuple[int, int], path: Path, sole: str) -> WriterLock | None:
    """None: another process has it."""
    with _guard:
        held = _held.get(folder)
        if held is None:
            descriptor = None if fcntl is None else _try(path)
            if descriptor is None and fcntl is not None:
                return None
            held = _held[folder] = _Held(path=path, descriptor=descriptor)
        elif sole and held.has_sole:
            raise StateError(
                f"{root}: this process has a {sole} for this folder ({path.parent}) already. Close that one first, or "
                "give this one a folder of its own."
            )
        held.count += 1
        held.has_sole = held.has_sole or bool(sole)
        return WriterLock(folder, held, is_sole=bool(sole))


def _try(path: Path) -> int | None:
    """A descriptor with the lock on what has the name now; None: another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        is_kept = False
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in (errno.EACCES, errno.EAGAIN):
                    return None
                if e.errno not in _NO_LOCKS:
                    raise
            if not _is_named(path, descriptor):  # removed by the holder before
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            is_kept = True
            return descriptor
        finally:
            if not is_kept:
                os.close(descriptor)


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "it does not say which"
    except OSError:
        return "it does not say which"
