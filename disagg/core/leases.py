"""Leases: whether a transfer may still touch a request's rows.

A lease is *held* while a transfer may touch the rows, and *released* once it is proved that none will. A timeout is no
proof: without one, rows are *quarantined*.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from disagg.core.errors import LocalProtocolError
from disagg.core.thread_log import ThreadLog

logger = ThreadLog(__name__)


class LeaseState(enum.Enum):
    HELD = "held"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Lease:
    """The lease of one side's rows of one request. Thread-safe.

    Callbacks run in the thread that releases the lease. It serves all requests, so whatever a callback raises is logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = LeaseState.HELD, ""
        self._callbacks: list[Callable[[], object]] = []
        self._withdrawn = False

    @property
    def status(self) -> tuple[LeaseState, str]:
        """State and reason at one moment."""
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

    @property
    def withdrawn(self) -> bool:
        """Whether the server has aborted the request. Its rows may hold another request's from then on."""
        return self._withdrawn

    def on_release(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, when the rows are safe to reuse. If they already are, call it now, in this thread. Raises
        `LocalProtocolError` if it is not callable.
        """
        if not callable(callback):
            raise LocalProtocolError(f"on_release: expected a function, found {callback!r}")
        with self._lock:
            if not self.released:
                self._callbacks.append(callback)
                return
        _call(callback)


def withdraw(lease: Lease) -> None:
    lease._withdrawn = True


def quarantine(lease: Lease, reason: str) -> None:
    """The first reason is kept. A released lease stays released."""
    with lease._lock:
        if lease.state is LeaseState.HELD:
            lease._status = LeaseState.QUARANTINED, reason


def release(lease: Lease) -> None:
    """A second call does nothing."""
    with lease._lock:
        if lease.released:
            return
        lease._status = LeaseState.RELEASED, ""
        callbacks, lease._callbacks = lease._callbacks, []
    for callback in callbacks:
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:  # also SystemExit, which would end the manager's thread, not the process
        logger.exception("lease: a release callback failed")
