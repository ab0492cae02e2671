"""Who has this process's memory mapped: each mapping holds a connection to a socket of its owner, for as long as it lasts.

The kernel closes a connection with its process, so the owner learns of every end; nothing runs meanwhile, and nothing is
sent. The sockets are abstract: peers of another network namespace cannot hold one, and their mappings are not known here.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time

BACKLOG = 4096
_CREDENTIALS = struct.Struct("3i")


class Mappings:
    """The owner's side: `address` is what holders are told."""

    def __init__(self) -> None:
        self.address = f"disagg-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + self.address)
        self._listener.listen(BACKLOG)
        self._held: list[tuple[socket.socket, int]] = []

    def holders(self) -> tuple[int, ...]:
        """Process ids of those that have a mapping now, once for each."""
        self._accept()
        ended = {id(connection) for connection, _ in self._held if _has_ended(connection)}
        for connection, _ in self._held:
            if id(connection) in ended:
                connection.close()
        self._held = [held for held in self._held if id(held[0]) not in ended]
        return tuple(pid for _, pid in self._held)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._held.append((connection, _CREDENTIALS.unpack(credentials)[0]))

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until no mapping is left; those that are there when time is up."""
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
    """A holder's side: to be closed when the mapping is undone. `None` where the owner's socket cannot be reached."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect("\0" + address)
    except OSError:
        connection.close()
        return None
    return connection
