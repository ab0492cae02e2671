"""Every request of this rank that is open, or whose lease is not released, in one table."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from disagg.core.errors import Cause, DisaggError, LocalProtocolError, RequestAborted
from disagg.core.leases import Lease, quarantine, release
from disagg.core.rows import Rows, TokenRange
from disagg.core.thread_log import ThreadLog
from disagg.core.timeline import Moments
from disagg.ending import Ending
from disagg.layout.agreement import LocalRank
from disagg.layout.binding import listed_rows
from disagg.protocol.types import Event
from disagg.requests import Place, Receiver, RequestHandle, Sender
from disagg.runtime.accounting import HeldSize, RequestRecord, Session, account, wanted
from disagg.runtime.held_rows import HeldRows
from disagg.runtime.metrics import Metrics
from disagg.runtime.tracing import Tracing

logger = ThreadLog(__name__)


@dataclass
class Request:
    """`ended` is set by the thread that makes its event. `held` is the number of its rows in `HeldRows`."""

    handle: Receiver | Sender
    ending: Ending
    held: int = 0
    session: Session | None = None
    ended: bool = False


class RequestTable:
    """Any thread may call it, but `open` and `end` only the control thread, or another one after its end."""

    def __init__(
        self, *, name: str, local: LocalRank, group_rank: int, metrics: Metrics | None, tracing: Tracing | None
    ) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._layouts = local.table.ranks[group_rank].by_name
        self._placements = local.placements
        self._sizes = {component: HeldSize(layout) for component, layout in self._layouts.items()}
        self._requests: dict[Lease, Request] = {}
        self._places: dict[Place, Request] = {}
        self._held_rows = HeldRows(local.placements)
        self._ended: dict[RequestHandle, Ending] = {}  # the server has not taken their events
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._draining = False
        self._metrics = metrics
        self._tracing = tracing

    # -- the server's threads ----------------------------------------------------------------------------------------

    def add(self, handle: Receiver | Sender, ending: Ending) -> None:
        """Raises `LocalProtocolError` if the attempt is under way, another request holds a row, or the manager drains."""
        request = Request(handle, ending)
        with self._lock:  # `drain` waits for all that were added before
            if self._draining:
                raise LocalProtocolError("the manager is draining: it takes no new requests")
            known = self._places.setdefault(handle.place, request)
            if known is request:
                self._requests[handle.lease] = request
        if known is not request:
            state = "was already used" if known.ended else "is under way"
            raise LocalProtocolError(f"request {handle.key}: this attempt {state}; use a new attempt number")
        try:
            request.held = self._held_rows.take(handle) if isinstance(handle, Receiver) else self._held_rows.open(handle)
        except BaseException:
            self._drop(handle.lease)
            raise
        if self._tracing is not None:
            self._tracing.begin(handle)

    def hold(self, handle: Sender, rows: Mapping[str, Rows], tokens: TokenRange | None) -> None:
        request = self._requests.get(handle.lease)
        if request is not None:
            layouts, placements = self._layouts, self._placements
            self._held_rows.read(
                request.held,
                {
                    name: listed_rows(layouts[name], placements[name], each, tokens)
                    for name, each in rows.items()
                    if name in layouts and name in placements
                },
            )

    def fileno(self) -> int:
        return self._event_fd

    @property
    def num_events(self) -> int:
        return len(self._ended)

    def take_events(self) -> list[Event]:
        """Without those of awaited requests."""
        with self._lock:
            ended, self._ended = self._ended, {}
            self._clear_descriptor()
        return [event for ending in ended.values() if (event := ending.take()) is not None]

    def drop_event(self, handle: RequestHandle) -> None:
        with self._lock:
            if self._ended.pop(handle, None) is not None and not self._ended:
                self._clear_descriptor()

    def _clear_descriptor(self) -> None:
        if self._event_fd >= 0:
            with contextlib.suppress(BlockingIOError):  # nothing to read
                os.eventfd_read(self._event_fd)

    @property
    def is_draining(self) -> bool:
        return self._draining

    def drain(self, timeout_s: float) -> bool:
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        for request in tuple(self._requests.values()):  # also those that end just now: their events come first
            if request.ending.wait(max(0.0, deadline - time.monotonic())) is None:
                return False
        return not self.open_handles()

    def open_handles(self) -> list[Receiver | Sender]:
        return [request.handle for request in tuple(self._requests.values()) if not request.ended]

    def leased_sessions(self) -> list[Session]:
        return [request.session for request in tuple(self._requests.values()) if request.session is not None]

    # -- the control thread ------------------------------------------------------------------------------------------

    def has(self, handle: Receiver | Sender) -> bool:
        return handle.lease in self._requests

    def open(self, handle: Receiver | Sender, run: Callable[[], Session]) -> None:
        """Does nothing if the request has ended meanwhile."""
        request = self._requests.get(handle.lease)
        if request is None:
            return
        request.session = run()
        handle.lease.on_release(functools.partial(self._on_release, handle.lease))

    def moments_of(self, session: Session) -> Moments:
        request = self._requests.get(session.lease)
        return Moments() if request is None else request.ending.moments

    def end(self, events: Sequence[Event]) -> None:
        """Waking comes last, because a woken thread may take the GIL."""
        ended: list[Ending] = []
        try:
            for event in events:
                request = self._requests.get(event.lease)
                if request is None or not self._claim(request):
                    continue
                request.ending.moments.ended_at = time.monotonic()
                try:
                    self._account(event, request)
                except BaseException:  # of the server's log filters and handlers
                    logger.exception("request %s: its log line", event.key)
                if self._tracing is not None:
                    self._tracing.end(request.handle, event)
                ended.append(request.ending)
                self._put(request, event)
                if request.session is None or event.lease.released:
                    self._drop(event.lease)
        finally:
            if ended:
                self._write_descriptor()
                for ending in ended:
                    ending.wake()
                ended[-1].yield_to_waiter()

    def _put(self, request: Request, event: Event) -> None:
        with self._lock:
            request.ending.end(event)
            if not request.ending.is_awaited:
                self._ended[request.handle] = request.ending

    def _write_descriptor(self) -> None:
        with self._lock:
            if self._ended and self._event_fd >= 0:
                os.eventfd_write(self._event_fd, 1)

    def _claim(self, request: Request) -> bool:
        """Whether the caller ends the request: two threads may try while the manager ends."""
        with self._lock:
            first, request.ended = not request.ended, True
        return first

    def end_unopened(self, handle: Receiver | Sender, error: DisaggError) -> None:
        """Nothing has touched its rows."""
        release(handle.lease)
        self.end([_failed(handle, error)])

    def fail_all(self, reason: str) -> None:
        requests = tuple(self._requests.values())
        for request in requests:
            if request.session is not None:
                quarantine(request.session.lease, reason)
        error = RequestAborted(reason, cause=Cause.ENDED)
        for request in requests:
            if request.session is None:
                self.end_unopened(request.handle, error)
            elif not request.ended:
                self.end([_failed(request.handle, error)])

    def release_all(self) -> None:
        """The engine's end proves all rows quiet."""
        for session in self.leased_sessions():
            release(session.lease)

    def close(self) -> None:
        """Handles still report requests that end from now on."""
        with self._lock:
            descriptor, self._event_fd = self._event_fd, -1
        os.close(descriptor)

    def _on_release(self, lease: Lease) -> None:
        request = self._requests.get(lease)
        if request is not None and request.ended:
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        request = self._requests.pop(lease, None)
        if request is not None:
            del self._places[request.handle.place]
            self._held_rows.forget(request.held)

    # -- accounting --------------------------------------------------------------------------------------------------

    def _account(self, event: Event, request: Request) -> None:
        cause = None if event.error is None else event.error.cause
        if wanted(self._metrics, cause):
            account(self._record(event, request, cause), self._metrics)

    def _record(self, event: Event, request: Request, cause: Cause | None) -> RequestRecord:
        handle, moments = request.handle, request.ending.moments
        nbytes = moments.nbytes
        if isinstance(handle, Receiver):
            nbytes = self._needed_nbytes(handle.need) if event.ok else 0
        return RequestRecord(
            rank=self._name,
            request_id=event.key.request_id.hex(),
            label=handle.label,
            attempt=event.key.attempt,
            direction=event.direction,
            peer=event.peer,
            outcome="ok" if cause is None else "failed",
            cause="" if cause is None else cause.value,
            nbytes=nbytes,
            pieces=moments.pieces,
            timeline=moments.timeline(),
            lease=event.lease.state.value,
            error="" if event.error is None else str(event.error),
        )

    def _needed_nbytes(self, needs: Mapping[str, tuple[int, int]]) -> int:
        return sum(self._sizes[name].nbytes(need) for name, need in needs.items())


def _failed(handle: Receiver | Sender, error: DisaggError) -> Event:
    return Event(handle.key, handle.peer or "", handle.direction, False, b"", error, handle.lease, handle.tag)
