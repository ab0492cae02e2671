"""Who may touch a request's rows, and until when.

A lease is *held* while the transfer may still touch the rows, *released* when that is proved over. Only a proof
releases; a timeout never does: rows without one are *quarantined* and stay visible with the reason.
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
    """The rows of one side of one request. Thread-safe; callbacks run in the thread that releases, or at once.

    A callback that raises there is logged: it belongs to one request, the thread to all of them.
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
        """Why the rows are quarantined; empty otherwise."""
        return self._reason

    @property
    def released(self) -> bool:
        return self._state is LeaseState.RELEASED

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the rows are safe to reuse; at once if they already are."""
        with self._lock:
            if self._state is not LeaseState.RELEASED:
                self._callbacks.append(callback)
                return
        callback()

    def quarantine(self, reason: str) -> None:
        """Nothing proves these rows quiet yet. The first reason stays; a released lease stays released."""
        with self._lock:
            if self._state is LeaseState.HELD:
                self._state, self._reason = LeaseState.QUARANTINED, reason

    def release(self) -> None:
        """The rows are proved quiet. A second call does nothing."""
        with self._lock:
            if self._state is LeaseState.RELEASED:
                return
            self._state, self._reason = LeaseState.RELEASED, ""
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback on released rows failed")
