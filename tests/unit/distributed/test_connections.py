"""The connections of a process: listed without a trace, broken at the end of somebody else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from hybridrec.distributed.connections import break_links, own_links


@pytest.fixture(params=["127.0.0.1", "::1"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    host = request.param
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no address {host}")
    with server, socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0] as accepted:
        yield client, accepted


def link_of(end: socket.socket) -> tuple[str, str]:
    (host, port, *_), (other, other_port, *_) = end.getsockname(), end.getpeername()
    return f"{host}:{port}", f"{other}:{other_port}"


def test_both_ends_are_listed_and_nothing_else_is(ends: tuple[socket.socket, socket.socket]) -> None:
    before = set(own_links())
    assert {link_of(end) for end in ends} <= before
    here, there = socket.socketpair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, socket.socket() as unconnected, here, there:
        datagrams.connect(("127.0.0.1", 9))
        assert unconnected.fileno() >= 0
        assert set(own_links()) == before


def test_listing_changes_no_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    """A default timeout is applied to every socket object that Python makes, and to the connection beneath."""
    num_descriptors = len(os.listdir("/proc/self/fd"))
    socket.setdefaulttimeout(30.0)
    try:
        own_links()
    finally:
        socket.setdefaulttimeout(None)
    assert all(os.get_blocking(end.fileno()) for end in ends)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_a_link_is_broken_as_the_other_end_lists_it(ends: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = ends
    port = str(accepted.getsockname()[1])
    assert break_links([link_of(accepted)], but_ports=[port]) == 0
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    assert break_links([link_of(accepted)]) == 1
    assert client.recv(1) == accepted.recv(1) == b""
