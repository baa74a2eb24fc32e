"""How much host memory the shards of one rank may take."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hybridrec.errors import ConfigError

DEFAULT_SHARE = 0.8
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

logger = logging.getLogger("hybridrec")


def host_budget_bytes(host_memory_bytes: int | None) -> int:
    """Bytes that this rank's shards may take.

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
    limits = [int(text) for p in _CGROUP_LIMITS if (text := _read(p)).isdigit()]
    available = _available_bytes()
    if available is not None:
        limits.append(available)
    if not limits:
        logger.warning("host memory cannot be read on this machine: no budget. Give host_memory_bytes.")
        return 0
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(DEFAULT_SHARE * min(limits) / ranks)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _available_bytes() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
