"""How much host memory the shards of one rank may take."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping

from torch import nn

from hybridrec.backend import HOST, resolve_backend
from hybridrec.errors import ConfigError

DEFAULT_SHARE = 0.8


class HostBudget:
    """The budget of one rank, shared by all collections of one sharder.

    Each collection's core is given its part when it is sharded, in proportion to what the plan says that it takes. A
    collection that no planner of this process saw gets the whole.
    """

    def __init__(self, host_memory_bytes: int | None) -> None:
        """
        Args:
            host_memory_bytes: As for `host_budget_bytes`.

        Raises:
            ConfigError: It is not a positive integer.
        """
        self.total_bytes = host_budget_bytes(host_memory_bytes)
        self.is_given = host_memory_bytes is not None
        self._planned: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def plan(self, planned_bytes: Mapping[nn.Module, int]) -> None:
        """Note what the collections of a model will take; forgets what was planned before."""
        self._planned = weakref.WeakKeyDictionary(planned_bytes)

    def part_of(self, collection: nn.Module) -> int:
        """Bytes for one collection."""
        mine, everyone = self._planned.get(collection), sum(self._planned.values())
        if mine is None or everyone == 0:
            return self.total_bytes
        return max(1, self.total_bytes * mine // everyone)


def host_budget_bytes(host_memory_bytes: int | None) -> int:
    """Bytes that the shards of all collections may take on this rank.

    Args:
        host_memory_bytes: What the user gave for one rank, or None: 0.8 x min(cgroup limit, available memory) /
            LOCAL_WORLD_SIZE (the launcher's variable; 1 if it is unset).

    Raises:
        ConfigError: It is not a positive integer.
    """
    if host_memory_bytes is not None:
        if not isinstance(host_memory_bytes, int) or isinstance(host_memory_bytes, bool) or host_memory_bytes < 1:
            raise ConfigError(
                f"host_memory_bytes={host_memory_bytes!r}: it is the number of bytes of host memory that the shards of "
                "one rank may take. Pass a positive int, or None for 80 % of what is available."
            )
        return host_memory_bytes
    available, _ = resolve_backend(HOST.type).memory_bytes(HOST)
    return int(DEFAULT_SHARE * available / local_world_size())


def local_world_size() -> int:
    """Ranks on this machine, as the launcher says (LOCAL_WORLD_SIZE); 1 if it says nothing."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
