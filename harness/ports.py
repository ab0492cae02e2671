"""Ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound now.

    They lie below those that the kernel gives to connections and to sockets that ask for any port. So nothing but another call
    of this function is likely to take one before the server binds it.
    """
    highest = max(int(_EPHEMERAL.read_text().split()[0]), 2 * LOWEST)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            each = stack.enter_context(socket.socket(type=kind))
            port = LOWEST + secrets.randbelow(highest - LOWEST)
            with contextlib.suppress(OSError):  # in use
                each.bind(("127.0.0.1", port))
                found.append(port)
    return found
