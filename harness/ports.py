"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOWEST = 20000


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound now, below those that the kernel gives to programs that name none.

    A server may take long until it binds its port. Raises `RuntimeError` if there are not enough.
    """
    limit = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(LOWEST, limit))
    random.SystemRandom().shuffle(ports)
    found: list[int] = []
    with ExitStack() as bound:
        for port in ports:
            with suppress(OSError):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"expected {count} free ports from {LOWEST} to {limit}, found {len(found)}")


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other program gets meanwhile.

    It refuses connections until a server listens there that sets SO_REUSEADDR, as ZeroMQ does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
