"""Resolves peers' host names. libzmq would do it in the thread that moves all messages, and a slow name server would hold
that up.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
from collections.abc import Callable

from disagg.core.address import bracketed, is_numeric, parse_address

MAX_RESOLVING = 8
Resolved = Callable[[str | OSError], None]
"""Gets the address with a numeric host, or why there is none."""


class Resolver:
    """The control thread calls it. `command` runs a function in the control thread."""

    def __init__(self, command: Callable[[Callable[[float], None]], None], *, name: str) -> None:
        self._command = command
        self._name = name
        self._waiting: dict[str, list[Resolved]] = {}
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()
        self._closed = False

    def resolve(self, address: str, then: Resolved) -> None:
        """`then` runs in the control thread, at once if the host is numeric."""
        if is_numeric(parse_address(address, what="peer address")[0]):
            then(address)
            return
        waiting = self._waiting.setdefault(address, [])
        waiting.append(then)
        if len(waiting) > 1:
            return
        self._asked.put(address)
        if self._num_threads < min(MAX_RESOLVING, len(self._waiting)):
            thread = threading.Thread(target=self._run, name=f"disagg-resolve-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                if not self._num_threads:
                    self._asked.get_nowait()
                    self._finish(address, OSError(f"no thread to resolve it with: {error}"), 0.0)
                return
            self._num_threads += 1

    def close(self) -> None:
        """Does not wait for a name server."""
        with self._lock:
            self._closed = True
        for _ in range(self._num_threads):
            self._asked.put(None)

    def _run(self) -> None:
        while (address := self._asked.get()) is not None:
            found = _resolve(address)
            with self._lock:
                if self._closed:
                    return
                self._command(functools.partial(self._finish, address, found))

    def _finish(self, address: str, found: str | OSError, _: float) -> None:
        for then in self._waiting.pop(address):
            then(found)


def _resolve(address: str) -> str | OSError:
    """Prefers IPv4."""
    host, port = parse_address(address, what="peer address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    *_, place = min(found, key=lambda each: each[0] is not socket.AF_INET)
    return f"tcp://{bracketed(str(place[0]))}:{port}"
