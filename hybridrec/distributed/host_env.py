"""The host group: over which ids and verdicts travel."""

from __future__ import annotations

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from hybridrec.errors import ConfigError


def check_host_env(host_env: ShardingEnv) -> dist.ProcessGroup:
    """The host group of an environment.

    Raises:
        ConfigError: It is no `ShardingEnv`, has no process group, or one that cannot move host memory.
    """
    example = 'ShardingEnv(world_size=..., rank=..., pg=dist.new_group(backend="gloo"))'
    if not isinstance(host_env, ShardingEnv):
        raise ConfigError(f"host_env={host_env!r} has type {type(host_env).__name__}. Pass {example}.")
    group: dist.ProcessGroup | None = host_env.process_group
    if group is None:
        raise ConfigError(f"host_env has no process group, so ids cannot travel between ranks. Pass {example}.")
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise ConfigError(
            f"host_env's process group has backend {backend!r}, which does not exchange host memory the way ids "
            f"travel. It must be 'gloo'. Pass {example}."
        )
    return group
