"""The end of a manager: once, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container


class Lifetime:
    """Calls `close` once. `threads` gives the manager's own threads, in which callbacks of the server run."""

    def __init__(self, close: Callable[[], None], *, threads: Callable[[], Container[threading.Thread | None]]) -> None:
        self._close = close
        self._threads = threads
        self._lock = threading.Lock()
        self._closer: threading.Thread | None = None
        self._over = threading.Event()

    @property
    def problem(self) -> str:
        """Why the manager cannot be used; empty while it can."""
        if self._over.is_set():
            return "the manager was closed"
        return "the manager is closing" if self._closer is not None else ""

    def end(self) -> None:
        """Close the manager, or wait for the thread that does.

        One of the manager's own threads cannot wait for its own end: then another thread closes, and this returns at once.
        """
        current = threading.current_thread()
        is_own = current in self._threads()
        with self._lock:
            is_first = self._closer is None
            if self._closer is None:
                self._closer = threading.Thread(target=self._run, name="disagg-close", daemon=True) if is_own else current
            closer = self._closer
        if closer is current:
            if is_first:  # else a callback in the thread that closes
                self._run()
        elif is_first:
            closer.start()
        elif not is_own:
            self._over.wait()

    def _run(self) -> None:
        try:
            self._close()
        finally:
            self._over.set()
