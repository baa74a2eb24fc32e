"""How much host memory the shards of one rank may take."""

from __future__ import annotations

import os

from hybridrec.backend import HOST, resolve_backend
from hybridrec.errors import ConfigError

DEFAULT_SHARE = 0.8


def host_budget_bytes(host_memory_bytes: int | None) -> int:
    """Bytes that the shards of a collection may take on this rank.

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
