"""Resolves peers' host names. libzmq would do it in the thread that moves all messages, and a slow name server would hold
that up.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable

from disagg.core.address import bracketed, is_numeric, parse_address

MAX_RESOLVING = 8
MAX_EACH = 2
"""Of one instance, which may name thousands of hosts for its ranks."""
Resolved = Callable[[str | OSError], None]
"""Gets the address with a numeric host, or why there is none."""


class Resolver:
    """The control thread calls it. `command` runs a function in the control thread."""

    def __init__(self, command: Callable[[Callable[[float], None]], None], *, name: str) -> None:
        self._command = command
        self._name = name
        self._waiting: dict[tuple[str, str], list[Resolved]] = {}  # by instance and address
        self._queued: dict[str, deque[str]] = {}  # addresses by instance; the one whose turn it is comes first
        self._running: Counter[str] = Counter()
        self._asked: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()
        self._closed = False

    def resolve(self, address: str, instance: str, then: Resolved) -> None:
        """`then` runs in the control thread, at once if the host is numeric. Instances take turns."""
        if is_numeric(parse_address(address, what="peer address")[0]):
            then(address)
            return
        waiting = self._waiting.setdefault((instance, address), [])
        waiting.append(then)
        if len(waiting) == 1:
            self._queued.setdefault(instance, deque()).append(address)
            self._ask()

    def _ask(self) -> None:
        while self._running.total() < MAX_RESOLVING:
            instance = next((name for name in self._queued if self._running[name] < MAX_EACH), None)
            if instance is None:
                return
            queued = self._queued.pop(instance)
            address = queued.popleft()
            if queued:
                self._queued[instance] = queued  # behind the others
            self._running[instance] += 1
            self._asked.put((instance, address))
            if self._num_threads < self._running.total():
                self._start_thread(instance, address)

    def _start_thread(self, instance: str, address: str) -> None:
        thread = threading.Thread(target=self._run, name=f"disagg-resolve-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            if not self._num_threads:
                self._asked.get_nowait()
                failure = OSError(f"no thread to resolve it with: {error}")
                self._command(functools.partial(self._finish, instance, address, failure))
            return
        self._num_threads += 1

    def close(self) -> None:
        """Does not wait for a name server."""
        with self._lock:
            self._closed = True
        for _ in range(self._num_threads):
            self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            instance, address = asked
            found = _resolve(address)
            with self._lock:
                if self._closed:
                    return
                self._command(functools.partial(self._finish, instance, address, found))

    def _finish(self, instance: str, address: str, found: str | OSError, _: float) -> None:
        self._running[instance] -= 1
        if not self._running[instance]:
            del self._running[instance]
        self._ask()
        for then in self._waiting.pop((instance, address)):
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
