"""The host group: over which ids and verdicts travel."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from hybridrec.errors import ConfigError

_EXAMPLE = 'ShardingEnv(world_size=..., rank=..., pg=dist.new_group(backend="gloo"))'


def check_host_env(host_env: ShardingEnv | None) -> dist.ProcessGroup:
    """The host group of an environment; without one, the default process group.

    Raises:
        ConfigError: It is no `ShardingEnv`, has no process group, or one that cannot move host memory.
    """
    if host_env is None:
        return _default_group()
    if not isinstance(host_env, ShardingEnv):
        raise ConfigError(f"host_env={host_env!r} has type {type(host_env).__name__}. Pass {_EXAMPLE}.")
    group: dist.ProcessGroup | None = host_env.process_group
    if group is None:
        raise ConfigError(f"host_env has no process group, so ids cannot travel between ranks. Pass {_EXAMPLE}.")
    return _require_gloo(group, "host_env's process group")


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ConfigError(
            "no host_env is given and there is no default process group to take its place. Call "
            f'dist.init_process_group("gloo") before, or pass host_env={_EXAMPLE}.'
        )
    group = dist.GroupMember.WORLD
    assert group is not None
    return _require_gloo(group, "no host_env is given, and the default process group")


def _require_gloo(group: dist.ProcessGroup, what: str) -> dist.ProcessGroup:
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise ConfigError(
            f"{what} has backend {backend!r}, which does not exchange host memory the way ids "
            f"travel. It must be 'gloo'. Pass {_EXAMPLE}."
        )
    return group


_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_host_group(group: dist.ProcessGroup, model_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The host group, or a new one of its ranks if the model uses it too. Collective over the group the first time.

    A pipeline sends ids on a thread of its own, and collectives that two threads issue over one group have no order.
    """
    if group is not model_group:
        return group
    own = _own_groups.get(group)
    if own is None:
        ranks = dist.get_process_group_ranks(group)
        own = _own_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return own
