"""What Linux is told about the TCP connections of this process."""

from __future__ import annotations

import os
import socket

import pytest

from disagg.machine.tcp import TCP_RTO_MAX_MS, sockets_of


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
