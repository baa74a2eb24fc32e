"""Names of torch.distributed that changed between the versions that hybridrec runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

# torch 2.13 renamed it and warns of the old name; 2.10 has the old name alone.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def private_store(group: dist.ProcessGroup, prefix: str) -> Any:
    """The store through which a group was formed, under a prefix, on a connection of its own where that can be had.

    On a shared connection a thread that waits for a key makes all others wait.
    """
    store = distributed_c10d._get_process_group_store(group)
    return PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)


def store_address(group: dist.ProcessGroup) -> str:
    """``host:port`` of a group's store, or what kind of store it is."""
    store = distributed_c10d._get_process_group_store(group)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    return type(store).__name__
