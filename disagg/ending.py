"""The end of a request: its event, and the threads and callbacks that wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from disagg.core import _native
from disagg.core.thread_log import ThreadLog
from disagg.core.timeline import Moments
from disagg.protocol.types import Event

logger = ThreadLog(__name__)


class Ending:
    """The manager calls `end`, `wake` and `yield_to_waiter`, each once. Thread-safe.

    A waiting thread polls for `spin_s` seconds without a sleep. `is_awaited`: a task awaits the request, or has, so
    `KVManager.events` leaves its event out.
    """

    def __init__(self, spin_s: float) -> None:
        self.moments = Moments()
        self.event: Event | None = None
        self.is_awaited = False
        self._spin_s = spin_s
        self._over = _native.Flag()
        self._pending = threading.Lock()  # held until the request has ended; cheaper to make than a `threading.Event`
        self._pending.acquire()
        self._callbacks: list[Callable[[Event], object]] = []

    def end(self, event: Event) -> None:
        self.event = event

    def wake(self) -> None:
        """Callbacks run in this thread."""
        self._over.set()
        self._release()
        self._call_back()

    def yield_to_waiter(self) -> None:
        """A thread that polls without a sleep gets the GIL."""
        if self._spin_s:
            self._over.yield_to_waiter()

    def take(self) -> Event | None:
        if self.event is not None:
            self.moments.take()
        return self.event

    def wait(self, timeout_s: float) -> Event | None:
        """`None` if the request has not ended within `timeout_s` seconds, which may be infinite."""
        until = time.monotonic() + timeout_s
        while (event := self.event) is None:
            if self._spin_s and self._over.busy_poll(min(self._spin_s, until - time.monotonic())):
                continue
            left_s = until - time.monotonic()
            if not self._pending.acquire(timeout=min(max(left_s, 0), threading.TIMEOUT_MAX)):
                return None
            if self.event is not None:
                self._release()  # for other threads that wait
        self.moments.take()
        return event

    def on_end(self, callback: Callable[[Event], object]) -> None:
        """Call `callback` once: in `wake`, or now if the request has ended. Its exceptions are logged."""
        self._callbacks.append(callback)
        if self.event is not None:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks and self.event is not None:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread has taken it
                return
            try:
                callback(self.event)
            except BaseException:  # also SystemExit: it would end the manager's thread, not the process
                logger.exception("request %s: a callback failed", self.event.key)

    def _release(self) -> None:
        try:
            self._pending.release()
        except RuntimeError:  # already released
            return
