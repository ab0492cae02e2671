"""Which processes have this process's memory mapped.

A peer stays connected to an abstract Unix socket of the owner while its mapping exists; the kernel disconnects it when its
process ends. Mappings from another network namespace are unknown here.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time

from disagg.machine.processes import pid_of

BACKLOG = 4096
MAX_HELD = 1024
"""Any process of this host may connect. More mappings are not known."""


class Mappings:
    """The owner's side. Peers connect to `address`; the kernel keeps `BACKLOG` of them until `holders` is called,
    which any thread may do.
    """

    def __init__(self) -> None:
        self.address = f"disagg-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + self.address)
        self._listener.listen(BACKLOG)
        self._lock = threading.Lock()
        self._held: list[tuple[socket.socket, int]] = []
        self.seen: set[int] = set()
        """Process ids of all mappings found so far; 0: another namespace's, or not known."""

    def holders(self) -> tuple[int, ...]:
        with self._lock:
            self._accept()
            ended = {id(connection) for connection, _ in self._held if _has_ended(connection)}
            for connection, _ in self._held:
                if id(connection) in ended:
                    connection.close()
            self._held = [held for held in self._held if id(held[0]) not in ended]
            return tuple(pid for _, pid in self._held)

    def _accept(self) -> None:
        for _ in range(BACKLOG):  # others may connect meanwhile
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left
                self.seen.add(0)
                return
            if len(self._held) >= MAX_HELD:
                connection.close()
                self.seen.add(0)
                continue
            pid = pid_of(connection)
            self._held.append((connection, pid))
            self.seen.add(pid)

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        deadline = time.monotonic() + timeout_s
        while holders := self.holders():
            left = deadline - time.monotonic()
            if left <= 0:
                return holders
            poller = select.poll()
            for connection, _ in self._held:
                poller.register(connection, select.POLLIN)
            poller.poll(max(1, int(left * 1000)))
        return ()

    def close(self) -> None:
        self._listener.close()
        for connection, _ in self._held:
            connection.close()
        self._held = []


def _has_ended(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def hold(address: str) -> socket.socket | None:
    """Register a mapping with its owner; close the connection after unmapping. `None` if the owner cannot be reached."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect("\0" + address)
    except OSError:
        connection.close()
        return None
    return connection
