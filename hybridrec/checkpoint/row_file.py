"""`RowFile`: embeddings by id in a file of another format, read chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridrec.errors import ConfigError


class RowFile(Protocol):
    """A file of R embeddings with their ids. What is wrong with it is a `ConfigError`, when it is opened or read."""

    rows: int
    """R."""

    def ids(self, n: int) -> Iterator[Tensor]:
        """All ids, in order: int64 [at most n]."""
        ...

    def chunks(self, n: int, part: int = 0, num_parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids int64 [at most n] and embeddings float32 [at most n, D]: of the whole file, or of one part of it."""
        ...


def file_error(path: Path, problem: str, remedy: str) -> ConfigError:
    """What a file that cannot be imported raises."""
    return ConfigError(f"{path} {problem}. {remedy}")


def dim_error(path: Path, found: object, dim: int) -> ConfigError:
    """Embeddings of another number of columns than the table's."""
    return file_error(
        path, f"has embeddings of {found} columns, the table has {dim}", "Import it into a table like it."
    )
