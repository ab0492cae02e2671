"""Runs actions after a delay."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from disagg.core.errors import DisaggError

logger = logging.getLogger(__name__)


class DelayedActions:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._due)

    def run_after(self, seconds: float, action: Callable[[], None]) -> None:
        """Never runs if closed before."""
        with self._changed:
            if not self._open:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disagg-faults", daemon=True)
                self._thread.start()
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), action))
            self._changed.notify()

    def run_now(self) -> None:
        with self._changed:
            self._due = [(0.0, number, action) for _, number, action in self._due]
            heapq.heapify(self._due)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if not self._open:
                    return
                _, _, action = heapq.heappop(self._due)
            try:
                action()
            except DisaggError as error:  # the peer is gone, or the engine is closed
                logger.debug("a delayed write failed: %s", error)

    def close(self) -> None:
        """Drop all actions that have not run."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
