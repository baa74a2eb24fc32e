"""`RowFile`: embeddings by id in a file of another format, read chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from hybridrec.errors import ConfigError


class RowFile(ABC):
    """A file of R embeddings with their ids. What is wrong with it is a `ConfigError`, when it is opened or read."""

    def __init__(self, path: Path, dim: int) -> None:
        """
        Args:
            path: Of the file.
            dim: D of the table that it is for.

        Raises:
            ConfigError: It is no such file, or what reads it is not installed; says what is wrong.
        """
        self._path, self._dim = path, dim
        self.rows = self._open()
        """R."""

    @abstractmethod
    def _open(self) -> int:
        """Check what it says of its contents; R."""

    @abstractmethod
    def chunks(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids int64 [at most n] and embeddings float32 [at most n, D], in order."""

    @abstractmethod
    def part(self, n: int, part: int, num_parts: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """As `chunks`; embeddings of one part of the file alone, None in place of others, which are not read."""


def file_error(path: Path, problem: str, remedy: str) -> ConfigError:
    """What a file that cannot be imported raises."""
    return ConfigError(f"{path} {problem}. {remedy}")


def dim_error(path: Path, found: object, dim: int) -> ConfigError:
    """Embeddings of another number of columns than the table's."""
    return file_error(
        path, f"has embeddings of {found} columns, the table has {dim}", "Import it into a table like it."
    )
