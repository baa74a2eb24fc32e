"""Names of torch.distributed that changed between the versions that hybridrec runs on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # not listed

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


_COLLECTIVES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "allgather": "allgather",
    "allgather_coalesced": "allgather",
    "_allgather_base": "allgather",
    "all_gather_single": "allgather",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall",
    "all_to_all_single": "alltoall",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "scatter": "scatter",
}
"""Method of a process group, of any version -> operation."""


_listeners: list[Callable[[dist.ProcessGroup, str, tuple[Any, ...]], None]] = []
_originals: dict[str, Any] = {}
"""What the class had before the first listener came."""
_listeners_lock = threading.Lock()


@contextlib.contextmanager
def intercepted_collectives(told: Callable[[dist.ProcessGroup, str, tuple[Any, ...]], None]) -> Iterator[None]:
    """For debugging: ``told(group, operation, arguments)`` before every collective that Python issues in this process.

    Those that C++ issues, as data parallelism does in the backward, are not seen. Several may listen, and leave in any
    order: the class is changed once, for all, and is as it was when the last one has left.
    """
    with _listeners_lock:
        if not _listeners:
            _intercept()
        _listeners.append(told)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners.remove(told)
            if not _listeners:
                for name, original in _originals.items():
                    setattr(dist.ProcessGroup, name, original)


def _intercept() -> None:
    def telling(name: str, original: Any) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            for told in tuple(_listeners):
                told(group, _COLLECTIVES[name], args)
            return original.__get__(group)(*args, **kwargs)

        return call

    # As they are in the class: what `getattr` gives is no method any more.
    _originals.update({name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES if name in vars(dist.ProcessGroup)})
    for name, original in _originals.items():
        setattr(dist.ProcessGroup, name, telling(name, original))
