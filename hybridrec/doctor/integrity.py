"""Whether the files of a distribution are those that were installed: each has its hash in the distribution's RECORD."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = (".py", ".so")


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """What was found of one distribution."""

    distribution: str
    version: str
    num_files: int
    """How many files have a hash and were compared."""
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    shadowed_by: str = ""
    """Where the package that is imported lies, if it is not this distribution's."""


def check_files(distribution: str, package: str) -> FileCheck:
    """Compare Python files and libraries with the hashes that the installer recorded. Reads every file once.

    Args:
        distribution: Name of an installed distribution.
        package: The package in it, imported or not.

    Raises:
        importlib.metadata.PackageNotFoundError: It is not installed.
    """
    found = importlib.metadata.distribution(distribution)
    changed, missing, num_files, roots = [], [], 0, set()
    for file in found.files or []:
        if file.suffix not in _SUFFIXES or file.parts[0] != package or file.hash is None:
            continue
        path = Path(str(file.locate()))
        roots.add(path.parents[len(file.parts) - 2])
        num_files += 1
        if not path.exists():
            missing.append(str(file))
        elif _digest(path, file.hash.mode) != file.hash.value.rstrip("="):
            changed.append(str(file))
    imported = getattr(sys.modules.get(package), "__file__", None)
    is_elsewhere = (
        imported is not None and roots and Path(imported).resolve().parent not in {r.resolve() for r in roots}
    )
    return FileCheck(
        distribution=distribution,
        version=found.version,
        num_files=num_files,
        changed=tuple(changed),
        missing=tuple(missing),
        shadowed_by=str(Path(imported).parent) if imported is not None and is_elsewhere else "",
    )


def _digest(path: Path, algorithm: str) -> str:
    """As in RECORD: URL-safe base64 without padding. Source: PEP 376, PEP 427."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
