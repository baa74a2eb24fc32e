"""Where frozen arrays are: in memory, or in the files of a directory that are mapped into memory.

A directory is written beside its place, as ``.<name>.unfinished``, and renamed when it is whole. Space is reserved
before anything is written, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrec.errors import ConfigError

MANIFEST = "frozen.json"
FORMAT, VERSION = "hybridrec.frozen", 1


class Storage(Protocol):
    """Makes the arrays of frozen tables."""

    def empty(self, name: str, dtype: torch.dtype, shape: tuple[int, int] | tuple[int]) -> Tensor:
        """An array of unknown contents; ``name`` is unique."""

    def discard(self) -> None:
        """Something failed: leave nothing behind."""


class MemoryStorage:
    """Arrays in host memory."""

    def empty(self, name: str, dtype: torch.dtype, shape: tuple[int, int] | tuple[int]) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def discard(self) -> None:
        """Nothing is left."""


class FileStorage:
    """Arrays in files."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: The directory to make.

        Raises:
            ConfigError: It exists.
            OSError: It cannot be made.
        """
        if os.path.lexists(path):
            raise ConfigError(f"freeze: path {str(path)!r} exists. Pass a path at which there is nothing yet.")
        self.path = path
        self._partial = path.with_name(f".{path.name}.unfinished")
        shutil.rmtree(self._partial, ignore_errors=True)  # of a run that was killed
        self._partial.mkdir(parents=True)

    def empty(self, name: str, dtype: torch.dtype, shape: tuple[int, int] | tuple[int]) -> Tensor:
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        file = self._partial / name
        with file.open("wb") as f:
            os.posix_fallocate(f.fileno(), 0, numel * dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=numel, dtype=dtype).view(shape)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Everything was written: make it last, and put it in its place.

        Args:
            manifest: What JSON can say of the arrays.
        """
        whole: dict[str, Any] = {"format": FORMAT, "version": VERSION, **manifest}
        whole["sha256"] = _digest(whole)
        (self._partial / MANIFEST).write_text(json.dumps(whole, indent=1, allow_nan=True))
        for file in (*self._partial.iterdir(), self._partial):
            _sync(file)
        self._partial.rename(self.path)
        _sync(self.path.parent)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class MappedFiles:
    """The arrays of a directory that `FileStorage` wrote. Pages are read when they are used, and may be dropped."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: It is no such directory, or of another version.
        """
        self._path = path
        try:
            self.manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"load: {str(path / MANIFEST)!r} cannot be read ({e}). Pass a path that freeze() wrote."
            ) from e
        if not isinstance(self.manifest, dict):
            raise ConfigError(f"load: {str(path / MANIFEST)!r} is no manifest. Pass a path that freeze() wrote.")
        found = self.manifest.get("format"), self.manifest.get("version")
        if found != (FORMAT, VERSION):
            raise ConfigError(
                f"load: {str(path / MANIFEST)!r} says format and version {found}. Accepted: {(FORMAT, VERSION)}. "
                "Freeze again with this version of hybridrec."
            )
        if self.manifest.pop("sha256", None) != _digest(self.manifest):
            raise ConfigError(
                f"load: {str(path / MANIFEST)!r} is damaged: it does not say what was written. Freeze or copy it again."
            )

    def array(self, name: str, dtype: torch.dtype, shape: tuple[int, int] | tuple[int]) -> Tensor:
        """One array; what is written into it stays in this process.

        Raises:
            ConfigError: Its file is missing or has another size.
        """
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        file = self._path / name
        wanted = numel * dtype.itemsize
        have = file.stat().st_size if file.exists() else None
        if have != wanted:
            size = "is missing" if have is None else f"has {have:,} bytes"
            raise ConfigError(f"load: file {str(file)!r} {size}; it should have {wanted:,}. Freeze or copy it again.")
        return torch.from_file(str(file), shared=False, size=numel, dtype=dtype).view(shape)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
