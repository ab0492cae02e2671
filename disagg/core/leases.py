"""Leases: whether a transfer may still touch a request's rows.

A lease is *held* while a transfer may touch the rows, and *released* once it is proved that none will. A timeout is no proof.
Rows without one are *quarantined*, with the reason, until a proof arrives.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class LeaseState(enum.Enum):
    HELD = "held"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Lease:
    """The lease of one side's rows of one request. Thread-safe.

    Callbacks run in the thread that releases the lease. Whatever one raises is logged, because the thread serves all requests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = LeaseState.HELD
        self._reason = ""
        self._callbacks: list[Callable[[], None]] = []

    @property
    def state(self) -> LeaseState:
        return self._state

    @property
    def reason(self) -> str:
        """Why the rows are quarantined; empty if they are not."""
        return self._reason

    @property
    def released(self) -> bool:
        return self._state is LeaseState.RELEASED

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the rows are safe to reuse. If they already are, call it now, in this thread."""
        with self._lock:
            if self._state is not LeaseState.RELEASED:
                self._callbacks.append(callback)
                return
        callback()

    def quarantine(self, reason: str) -> None:
        """Record that no proof has arrived for these rows. The first reason is kept. A released lease stays released."""
        with self._lock:
            if self._state is LeaseState.HELD:
                self._state, self._reason = LeaseState.QUARANTINED, reason

    def release(self) -> None:
        """Release the rows and run the callbacks. A second call does nothing."""
        with self._lock:
            if self._state is LeaseState.RELEASED:
                return
            self._state, self._reason = LeaseState.RELEASED, ""
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # also SystemExit: it would end the manager's thread, not the process
                logger.exception("lease: a release callback failed")
