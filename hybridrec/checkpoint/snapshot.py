"""Where snapshots are: a folder of them, the newest, and how many are kept."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from hybridrec.checkpoint import writer_lock
from hybridrec.checkpoint.files import REMOVED, remove_folder, replace_file
from hybridrec.checkpoint.manifest import MANIFEST
from hybridrec.checkpoint.writer_lock import WriterLock
from hybridrec.errors import StateError

_UNFINISHED = ".unfinished_"
_NAME = re.compile(r"step_(\d+)(?:_(\d+))?")
"""Step, and the number of a snapshot among those of the step: none is ever written over."""
_LATEST = "latest"
DELTAS = "deltas"
"""Folder in a snapshot; see `delta_chain`."""
_TICK_NS = 2 * 10**9
"""What every file system can tell apart."""


def latest(path: str | Path) -> Path | None:
    """The newest complete snapshot in a folder of snapshots; None if there is none.

    Args:
        path: What was given to `save`.
    """
    root = Path(path)
    complete = snapshots(root)
    try:
        name = (root / _LATEST).read_text().strip()
    except (OSError, ValueError):  # the second: it is damaged
        name = ""
    found = [p for p in complete if p.name == name] or complete
    return found[-1] if found else None


def snapshots(root: Path) -> list[Path]:
    """All complete snapshots, in the order in which they were written."""
    if not root.is_dir():
        return []
    found: list[tuple[int, int, int, Path]] = []
    for path in root.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not complete, or just removed
                found.append(((path / MANIFEST).stat().st_mtime_ns, *_numbers(path.name), path))
    return [path for *_, path in sorted(found)]


def _numbers(name: str) -> tuple[int, int]:
    """(step, number among those of the step); (-1, 0) of what is no snapshot's name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found is not None else (-1, 0)


def resolve(path: str | Path) -> Path:
    """A snapshot: ``path`` itself, or the newest one in it.

    Raises:
        StateError: There is none, or it is a delta of one.
    """
    root = Path(path)
    if (root / MANIFEST).is_file():
        if root.parent.name == DELTAS:
            raise StateError(f"{root} is a delta. Pass its snapshot, {root.parent.parent}, or the folder of snapshots.")
        return root
    found = latest(root)
    if found is None:
        what = "has no complete snapshot" if root.is_dir() else "is a file" if root.exists() else "does not exist"
        raise StateError(f"{root} {what}. Pass the folder that was given to save(), or a snapshot.")
    return found


def begin(root: Path, step: int) -> tuple[str, WriterLock]:
    """Make the folder in which a snapshot of a step is written: the name that it will have, and the lock. On one rank.

    What jobs that were killed left behind is removed. Until the lock is released, which is to be done after `publish`
    or `give_up`, no other job writes here.

    Raises:
        StateError: Another job writes here, or something else has the place of what names the newest snapshot.
        OSError: It cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    if (root / _LATEST).is_dir():
        raise StateError(
            f"{root / _LATEST} is a folder; save() keeps the name of the newest snapshot in a file there. Move it away."
        )
    lock = writer_lock.acquire(root)
    try:
        for left_over in (*root.glob(f"{_UNFINISHED}*"), *root.glob(f"{REMOVED}*")):
            if not lock.is_written(left_over.name):
                remove_folder(left_over)
        taken = [_numbers(p.name.removeprefix(_UNFINISHED)) for p in root.iterdir()]
        number = 1 + max((again for other, again in taken if other == step), default=0)
        name = f"step_{step:012d}" + (f"_{number}" if number > 1 else "")
        unfinished(root, name).mkdir()
    except BaseException:
        lock.release()
        raise
    lock.write(unfinished(root, name).name)
    return name, lock


def unfinished(root: Path, name: str) -> Path:
    """Where a snapshot is while it is written."""
    return root / f"{_UNFINISHED}{name}"


def give_up(root: Path, name: str) -> None:
    """Remove what was written of a snapshot. On one rank."""
    remove_folder(unfinished(root, name))


def publish(root: Path, name: str, keep: int | None) -> None:
    """Make a written snapshot visible, by one rename, and the newest; let go of those beyond ``keep``. On one rank."""
    _put_last(unfinished(root, name) / MANIFEST, snapshots(root))
    os.replace(unfinished(root, name), root / name)
    replace_file(root / _LATEST, f"{name}\n".encode())
    if keep is not None:
        others = [p for p in snapshots(root) if p.name != name]
        for old in others[: max(0, len(others) + 1 - keep)]:
            remove_folder(old)


def _put_last(manifest: Path, others: list[Path]) -> None:
    """Date it after all others: their order is that of their times, and the clock may have been put back since."""
    status = manifest.stat()
    newest = (others[-1] / MANIFEST).stat().st_mtime_ns if others else 0
    if status.st_mtime_ns < newest:
        os.utime(manifest, ns=(status.st_atime_ns, newest + _TICK_NS))
