"""Ports for servers that a test starts."""

from __future__ import annotations

import socket


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
