"""What Linux is told about the TCP connections of this process, and a port that answers nobody."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from disagg.machine.tcp import TCP_RTO_MAX_MS, sockets_of
from tests.support.cluster import DEADLINE_S


def longest_waits_ms(*, since: dict[str, int]) -> list[int]:
    """Of every established TCP connection that this process has opened or accepted since then. Skips where Linux cannot say."""
    found = []
    for inode, descriptor in sockets_of("self").items():
        with socket.socket(fileno=os.dup(descriptor)) as each:
            if inode not in since and each.family in (socket.AF_INET, socket.AF_INET6) and is_connected(each):
                found.append(longest_wait_ms(each))
    return found


def is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return connection.type == socket.SOCK_STREAM


def longest_wait_ms(connection: socket.socket) -> int:
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        pytest.skip("Linux before 6.15")


@contextmanager
def full_port() -> Iterator[int]:
    """A port of the loopback address whose queue is full: the kernel drops the packets that would open a connection."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        deadline = time.monotonic() + DEADLINE_S
        while num_to_accept(full) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield int(full.getsockname()[1])


def num_to_accept(listening: socket.socket) -> int:
    """The number of connections that were made to a socket and not accepted."""
    (found,) = struct.unpack_from("I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
    assert isinstance(found, int)
    return found
