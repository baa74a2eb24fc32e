"""Ports for processes that a test starts, and that bind them seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST, END = 15_000, 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
if _RANGE.exists() and FIRST + 1_000 < (first_ephemeral := int(_RANGE.read_text().split()[0])):
    END = first_ephemeral
"""Ports from the first to before the last: below those that the system gives by itself."""


def free_port() -> int:
    """A port of the loopback interface that nobody has now, nor gets from the system until the test's process binds it.

    What a bind to port 0 gives comes from the range out of which every connection takes its own end, too: of those that
    other ranks open in the seconds in between, one may get it.
    """
    choose = random.SystemRandom()  # the same seeds elsewhere at the same time would give the same ports
    for _ in range(100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", choose.randrange(FIRST, END)))
            except OSError:
                continue
            return int(s.getsockname()[1])
    raise RuntimeError(f"no port between {FIRST} and {END} is free")
