"""Which collectives a rank issued, and the first one in which ranks differ: what else shows as a hang or as garbage."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrec._compat.torch_distributed import all_gather_single, intercepted_collectives
from hybridrec.backend import HOST
from hybridrec.distributed.watchdog import current_place
from hybridrec.errors import ConfigError, StateError

CAPACITY = 4096
"""Collectives of one group that are kept; what is older is in the digests alone."""
_SAME_SIZES = {"allreduce", "allgather", "broadcast", "reduce", "reduce_scatter"}
"""Operations whose tensors are as large on every rank."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call."""

    number: int
    """Among those of its group, from 0."""
    operation: str
    place: str
    """Stage and batch; empty outside hybridrec's."""
    sizes: tuple[int, ...]
    """Elements of its tensors."""
    digest: str
    """Of it and all before it: equal on all ranks if these are."""

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else ""
        return f"{self.operation}{where} of sizes {list(self.sizes)}"


class CollectiveLog:
    """What one rank issued while it was recorded, group by group. Any thread may write."""

    def __init__(self) -> None:
        self._groups: dict[str, collections.deque[Collective]] = {}
        self._lock = threading.Lock()
        self._silent = threading.local()

    def collectives(self, group: dist.ProcessGroup) -> list[Collective]:
        """The last `CAPACITY` of a group, in order."""
        with self._lock:
            return list(self._groups.get(group.group_name, ()))

    def record(self, group: dist.ProcessGroup, operation: str, arguments: tuple[Any, ...]) -> None:
        """Called before a collective."""
        if getattr(self._silent, "is_silent", False):
            return
        place = current_place()
        sizes = tuple(tensor.numel() for tensor in _tensors(arguments))
        text = f"{operation} {place or ''} {sizes if operation in _SAME_SIZES else ''}"
        with self._lock:
            log = self._groups.setdefault(group.group_name, collections.deque(maxlen=CAPACITY))
            number, before = (log[-1].number + 1, log[-1].digest) if log else (0, "")
            digest = hashlib.sha256((before + text).encode()).hexdigest()[:16]
            log.append(
                Collective(number=number, operation=operation, place=str(place or ""), sizes=sizes, digest=digest)
            )

    def check(self) -> int:
        """Compare all ranks' sequences as far as all have come. Collective over the default group.

        Returns:
            How many collectives all ranks had in common.

        Raises:
            ConfigError: There is no default process group. On this rank.
            StateError: They differ; names the group, the number and what each rank issued there. Or there is nothing
                to compare, since a rank is so far behind that its collectives were forgotten. On all ranks alike.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "CollectiveLog.check(): there is no default process group over which to compare. Call it between "
                "dist.init_process_group() and dist.destroy_process_group()."
            )
        with self._lock:
            mine = {name: [[c.number, c.digest, str(c)] for c in log] for name, log in self._groups.items()}
        self._silent.is_silent = True
        try:
            everyone = _exchange(mine)
        finally:
            self._silent.is_silent = False
        common = 0
        for name in sorted(set.intersection(*(set(groups) for groups in everyone))):
            by_rank = [{number: (digest, text) for number, digest, text in groups[name]} for groups in everyone]
            numbers = sorted(set.intersection(*(set(entries) for entries in by_rank)))
            if not numbers:
                newest = ", ".join(f"rank {rank}: {max(entries)}" for rank, entries in enumerate(by_rank))
                raise StateError(
                    f"process group {name!r}: the ranks are so many collectives apart ({newest}) that of the last "
                    f"{CAPACITY} they have none in common. Call check() more often."
                )
            for number in numbers:
                if len({entries[number][0] for entries in by_rank}) > 1:
                    issued = "; ".join(f"rank {rank}: {entries[number][1]}" for rank, entries in enumerate(by_rank))
                    raise StateError(
                        f"the ranks differ in collective {number} of process group {name!r}: {issued}. All ranks have "
                        "to make the same calls in the same order: look for a branch on data that differs by rank."
                    )
            common += len(numbers)
        return common


@contextlib.contextmanager
def recorded_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives that this process issues from Python, on all threads, until the block ends.

    Enter it on all ranks at the same place, before the pipeline's first `progress`. Blocks may be nested or overlap:
    each has a log of its own.

    Example:
        with recorded_collectives() as log:
            for step in range(100):
                pipeline.progress(iterator)
            log.check()
    """
    log = CollectiveLog()
    with intercepted_collectives(log.record):
        yield log


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _device_of(backend: str) -> torch.device:
    """Where a backend takes tensors: on the host, if it does there."""
    devices = dist.Backend.backend_capability.get(backend, [HOST.type])
    return HOST if HOST.type in devices else torch.device(devices[0])


def _exchange(value: Any) -> list[Any]:
    """Every rank's value, as JSON."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    device = _device_of(dist.get_backend())
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([payload.numel()], device=device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload.to(device)
    everyone = padded.new_empty(dist.get_world_size() * longest)
    all_gather_single(everyone, padded)
    rows = everyone.view(-1, longest).cpu()
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]
