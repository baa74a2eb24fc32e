"""Host name, interfaces, and the variables that choose among them. Standard library alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridrec.doctor.report import Finding, Status

SECTION = "Network"
HOST_VARIABLE = "GLOO_SOCKET_IFNAME"
_IFF_LOOPBACK = 0x8  # netdevice(7)


def findings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """All of this module, in the order of the report."""
    yield host_name(environment)
    yield Finding(section=SECTION, what="interfaces", value=", ".join(interfaces()) or "none")
    # Collective libraries follow one custom: NAME_SOCKET_IFNAME chooses the interface.
    names = sorted({HOST_VARIABLE} | {name for name in environment if name.endswith("_SOCKET_IFNAME")})
    yield from (interface_variable(name, environment) for name in names)
    addresses = sorted(name for name in environment if name.endswith("_IF_IP"))
    for name in (*addresses, "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        if name in environment:
            yield Finding(section=SECTION, what=name, value=environment[name])


def host_name(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether the machine's own name leads to an address, which is what gloo asks unless told an interface."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        value = f"{name!r} does not resolve ({error})"
        if environment.get(HOST_VARIABLE):
            return Finding(section=SECTION, what="host name", value=f"{value}; {HOST_VARIABLE} takes its place")
        return Finding(section=SECTION, what="host name", value=value, status=Status.WARN, remedy=interface_hint())
    value = f"{name!r} resolves to {address}"
    if address.startswith("127.") and not environment.get(HOST_VARIABLE):
        value += f": right on one machine; several need {HOST_VARIABLE}"
    return Finding(section=SECTION, what="host name", value=value)


def interface_variable(name: str, environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether a variable that chooses an interface names one. ``^x`` excludes, ``=x`` is exact, else a prefix."""
    value = environment.get(name)
    if not value:
        return Finding(section=SECTION, what=name, value="not set", status=Status.OFF)
    wanted = [part.removeprefix("=").partition(":")[0] for part in value.removeprefix("=").split(",")]
    is_known = value.startswith("^") or any(i.startswith(w) for i in interfaces() for w in wanted if w)
    if name == HOST_VARIABLE:  # gloo takes the whole text as one name
        is_known = any(part in interfaces() for part in value.split(","))
    if not is_known:
        remedy = f"This machine has {', '.join(interfaces())}. Set {name} to one of them, or unset it."
        return Finding(
            section=SECTION, what=name, value=f"{value!r} is no interface here", status=Status.WARN, remedy=remedy
        )
    return Finding(section=SECTION, what=name, value=value)


def interfaces() -> list[str]:
    """Names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def loopback() -> str | None:
    """The interface of 127.0.0.1."""
    for name in interfaces():
        try:
            flags = int(Path(f"/sys/class/net/{name}/flags").read_text(encoding="ascii"), 16)
        except (OSError, ValueError):
            continue
        if flags & _IFF_LOOPBACK:
            return name
    return None


def interface_hint() -> str:
    """What to do where the host's own name leads nowhere."""
    others = [name for name in interfaces() if name != loopback()]
    across = f"; across machines, the interface between them ({', '.join(others)})" if others else ""
    return f"On one machine: export {HOST_VARIABLE}={loopback() or 'the loopback interface'}{across}."
