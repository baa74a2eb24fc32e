"""One job at a time writes into a folder of snapshots: a lock that ends with the process that holds it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
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


@dataclass
class _Held:
    descriptor: int
    count: int = 1


_held: dict[Path, _Held] = {}
"""By this process; record locks do not tell its own parts from each other."""


def acquire(root: Path) -> None:
    """Become the job that writes into a folder, which exists; as often as `release` is called. On one rank.

    Where the file system has no locks nothing happens.

    Raises:
        StateError: Another job writes there, and goes on; names it.
        OSError: The lock's file cannot be made.
    """
    path = root.resolve() / _NAME
    held = _held.get(path)
    if held is not None:
        held.count += 1
        return
    if fcntl is None:
        return
    start, is_told = time.monotonic(), False
    while (descriptor := _try(path)) is None:
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
    _held[path] = _Held(descriptor)


def release(root: Path) -> None:
    """Undo one `acquire`."""
    path = root.resolve() / _NAME
    held = _held.get(path)
    if held is None:
        return
    held.count -= 1
    if not held.count:
        del _held[path]
        path.unlink(missing_ok=True)  # before the lock ends: whoever has it open sees that its name is gone
        os.close(held.descriptor)


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
