"""This process's TCP connections, and how to break those to other ranks.

A thread that waits inside gloo for a rank that will never answer cannot be told to stop: gloo has no abort. It does
notice when its connection ends, as it does when the other process dies; so that is what we make it see.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any

Link = tuple[str, str]
"""(address of this end, address of the other), each ``host:port``."""

_DESCRIPTORS = "/proc/self/fd"
# Not by socket.socket(fileno=...): where a default timeout is set that makes the connection itself non-blocking, which
# belongs to gloo or the store.
_LIBC = ctypes.CDLL(None) if os.path.isdir(_DESCRIPTORS) else None  # Linux
_ADDRESS_BYTES = 128


def own_links() -> list[Link]:
    """Of every TCP connection of this process, sorted; empty where the system does not list descriptors."""
    return sorted(link for link, _ in _connections())


def break_links(links: Iterable[Link], *, but_ports: Iterable[str] = ()) -> int:
    """End connections of this process.

    Args:
        links: As the processes at the other ends listed them.
        but_ports: Connections with such a port at either end stay.

    Returns:
        How many were ended.
    """
    kept = tuple(f":{port}" for port in but_ports)
    wanted = {(theirs, ours) for ours, theirs in links}
    num_broken = 0
    for link, descriptor in _connections():
        if link in wanted and not (kept and (link[0].endswith(kept) or link[1].endswith(kept))):
            num_broken += _call("shutdown", descriptor, socket.SHUT_RDWR)  # False: it ended by itself meanwhile
    return num_broken


def _connections() -> Iterator[tuple[Link, int]]:
    """Each connection, with its descriptor."""
    if _LIBC is None:
        return
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        ours, theirs = _address("getsockname", descriptor), _address("getpeername", descriptor)
        if ours and theirs and _is_stream(descriptor):
            yield (ours, theirs), descriptor


def _is_stream(descriptor: int) -> bool:
    kind, size = ctypes.c_int(), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    is_known = _call(
        "getsockopt", descriptor, socket.SOL_SOCKET, socket.SO_TYPE, ctypes.byref(kind), ctypes.byref(size)
    )
    return is_known and kind.value == socket.SOCK_STREAM


def _address(call: str, descriptor: int) -> str:
    """``host:port`` of an end; empty if it is no internet socket, or not connected."""
    raw, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if not _call(call, descriptor, raw, ctypes.byref(size)):
        return ""
    # struct sockaddr_in: family, port, 4 bytes of address; sockaddr_in6: family, port, 4 bytes, 16 bytes of address
    family, port = int.from_bytes(raw.raw[:2], sys.byteorder), int.from_bytes(raw.raw[2:4], "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, raw.raw[4:8])}:{port}"
    if family == socket.AF_INET6:
        return f"{socket.inet_ntop(family, raw.raw[8:24])}:{port}"
    return ""


def _call(name: str, *args: Any) -> bool:
    """A function of the C library that works on a descriptor; whether it succeeded."""
    return bool(getattr(_LIBC, name)(*args) == 0)
