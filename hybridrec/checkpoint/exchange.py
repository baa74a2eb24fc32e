"""What the ranks of a model tell each other around a snapshot: errors, so that all raise alike, and small values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hybridrec.errors import BackendError, CapacityError, ConfigError, HybridRecError, StateError

_CLASSES: dict[str, type[HybridRecError]] = {c.__name__: c for c in (BackendError, CapacityError, ConfigError)}


class Ranks:
    """The ranks of one host group. All calls are collective, in one order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: gloo; nobody else uses it meanwhile."""
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in rank order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: Any) -> Any:
        """What rank 0 gave."""
        return self.gather(value if self.rank == 0 else None)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that every rank does for itself: if it fails on one, all raise the error of the lowest such rank."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:  # travels to the other ranks, then is raised below
            error = e
        told = None if error is None else (type(error).__name__, _text(error))
        failed = [(rank, *entry) for rank, entry in enumerate(self.gather(told)) if entry is not None]
        if not failed:
            return
        rank, kind, text = failed[0]
        where = f" (on rank {rank} of {self.world_size})" if self.world_size > 1 else ""
        raise _CLASSES.get(kind, StateError)(f"{text}{where}") from error


def _text(error: Exception) -> str:
    if isinstance(error, HybridRecError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
