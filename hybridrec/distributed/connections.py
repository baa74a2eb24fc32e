"""This process's TCP connections, and how to break those to other ranks.

A thread that waits inside gloo for a rank that will never answer cannot be told to stop: gloo has no abort. It does
notice when its connection ends, as it does when the other process dies; so that is what we make it see.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

Link = tuple[str, str]
"""(address of this end, address of the other), each ``host:port``."""

_DESCRIPTORS = "/proc/self/fd"


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
    for link, connection in _connections():
        if link in wanted and not (kept and (link[0].endswith(kept) or link[1].endswith(kept))):
            with contextlib.suppress(OSError):  # it ended by itself meanwhile
                connection.shutdown(socket.SHUT_RDWR)
                num_broken += 1
    return num_broken


def _connections() -> Iterator[tuple[Link, socket.socket]]:
    """Each connection with a descriptor of its own, closed afterwards."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:  # not Linux
        return
    for name in names:
        with contextlib.suppress(OSError):  # no socket, not connected, or closed since it was listed
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    ours, theirs = connection.getsockname(), connection.getpeername()
                    yield (f"{ours[0]}:{ours[1]}", f"{theirs[0]}:{theirs[1]}"), connection
