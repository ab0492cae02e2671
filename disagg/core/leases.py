"""Leases: whether a transfer may still touch a request's rows.

A lease is *held* while a transfer may touch the rows, and *released* once it is proved that none will. A timeout is no proof.
Rows without one are *quarantined*, with the reason, until a proof arrives.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from disagg.core.thread_log import ThreadLog

logger = ThreadLog(__name__)


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
        self._status = LeaseState.HELD, ""
        self._callbacks: list[Callable[[], None]] = []

    @property
    def status(self) -> tuple[LeaseState, str]:
        """State and reason at one moment, while another thread may change them."""
        return self._status

    @property
    def state(self) -> LeaseState:
        return self._status[0]

    @property
    def reason(self) -> str:
        """Why the rows are quarantined; empty if they are not."""
        return self._status[1]

    @property
    def released(self) -> bool:
        return self.state is LeaseState.RELEASED

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the rows are safe to reuse. If they already are, call it now, in this thread."""
        with self._lock:
            if not self.released:
                self._callbacks.append(callback)
                return
        callback()

    def quarantine(self, reason: str) -> None:
        """Record that no proof has arrived for these rows. The first reason is kept. A released lease stays released."""
        with self._lock:
            if self.state is LeaseState.HELD:
                self._status = LeaseState.QUARANTINED, reason

    def release(self) -> None:
        """Release the rows and run the callbacks. A second call does nothing."""
        with self._lock:
            if self.released:
                return
            self._status = LeaseState.RELEASED, ""
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # also SystemExit: it would end the manager's thread, not the process
                logger.exception("lease: a release callback failed")
