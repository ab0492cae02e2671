"""Ports for servers that a test starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound now."""
    sockets = [socket.socket(type=kind) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other program gets meanwhile.

    It refuses connections until a server listens there that sets SO_REUSEADDR, as ZeroMQ does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
