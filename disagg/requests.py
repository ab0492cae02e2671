"""The handles of requests. They check what the server passes, and post commands to the control thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from disagg.arguments import (
    GivenRows,
    Ids,
    SentTokens,
    as_rows,
    check_declared,
    check_layers,
    check_payload,
    check_ready,
    check_text,
    check_timeout,
)
from disagg.core import _native
from disagg.core.errors import DisaggError, LocalProtocolError, RequestAborted
from disagg.core.events import ReadyEvent
from disagg.core.leases import Lease, withdraw
from disagg.core.rows import Rows, TokenRange, token_range
from disagg.core.timeline import Timeline
from disagg.ending import Ending
from disagg.layout.agreement import LocalRank
from disagg.protocol.messages import MAX_ITEMS
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.send_session import SendSession
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, RequestKey


def combine(events: Iterable[Event]) -> DisaggError | None:
    """The first failure among the events of the ranks that took part in a request; `None` if all succeeded. Ranks in other
    processes send `event.error`, which can be pickled. Raises `LocalProtocolError` without events.
    """
    given = list(events)
    if not given:
        raise LocalProtocolError("combine: expected an event of each rank, found none")
    return next((event.error or RequestAborted("a rank failed") for event in given if not event.ok), None)


class Requests(Protocol):
    def drop_event(self, handle: RequestHandle) -> None:
        """Take the event of a request out of the server's queue."""

    def hold(self, handle: Sender, rows: Mapping[str, Rows], tokens: TokenRange | None) -> None:
        """A request reads the rows that hold `tokens` (`None`: all) from now on. Raises `LocalProtocolError` for a row
        that a receive holds.
        """


class Control(Protocol):
    """What handles need of their manager. No call blocks."""

    @property
    def requests(self) -> Requests:
        """This rank's requests."""

    @property
    def sessions(self) -> Sessions:
        """Only commands may touch them."""

    @property
    def local(self) -> LocalRank:
        """This rank's layout."""

    @property
    def problem(self) -> str:
        """Why the manager has ended; empty while it works."""

    @property
    def inherited(self) -> str:
        """Why a forked child cannot use the manager; empty elsewhere."""

    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that call the server."""

    def command(self, run: Callable[[float], None], on_error: Callable[[DisaggError], None] | None = None) -> None:
        """Have the control thread call `run(now)`. Its `DisaggError` goes to `on_error`."""

    def end_unopened(self, handle: RequestHandle, error: DisaggError) -> None:
        """End a request that has no session yet. In the control thread."""


Place = tuple[str, str, RequestKey, bool]
"""Direction, peer (empty: any), attempt, and whether any attempt: unique among a rank's open requests."""


class RequestHandle:
    """One request. Thread-safe. `lease` holds its rows; `trace` is the W3C `traceparent` of its span, if it has one.

    In an asyncio server `event = await handle` waits for its end and takes the event: `KVManager.events` does not return
    it. Cancelling the last task that awaits a request aborts it, unless `asyncio.shield` keeps it. As a context manager the
    handle aborts the request if the block raises.
    """

    direction = ""
    session: ReceiveSession | SendSession | None = None

    def __init__(
        self,
        control: Control,
        ending: Ending,
        *,
        key: RequestKey,
        peer: str,
        tag: Any,
        label: str = "",
        any_attempt: bool = False,
    ) -> None:
        self._control = control
        self._ending = ending
        self._awaiting: list[asyncio.Future[Event]] = []
        self.place: Place = (self.direction, peer, key, any_attempt)
        self.tag = tag
        self.label = label
        self.trace = ""
        self.lease = Lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")

    def __await__(self) -> Generator[Any, None, Event]:
        check_process(self._control)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Event] = loop.create_future()

        def settle(event: Event) -> None:
            if not future.done():
                self._ending.take()
                future.set_result(event)

        def ended(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody awaits the request
                loop.call_soon_threadsafe(settle, event)

        self._ending.is_awaited = True
        self._control.requests.drop_event(self)
        self._awaiting.append(future)
        self._ending.on_end(ended)
        try:
            event = yield from future
        except BaseException as error:  # the task was cancelled, or dropped with its loop
            self._awaiting.remove(future)
            if not self._awaiting and self._ending.event is None:
                self.abort(f"the task that awaited it was cancelled ({type(error).__name__})")
            raise
        self._awaiting.remove(future)
        return event

    @property
    def key(self) -> RequestKey:
        """Its attempt is 0 while any is meant."""
        return self.place[2] if self.session is None else self.session.key

    @property
    def peer(self) -> str:
        """The other instance; empty while it is not known."""
        return self.place[1] if self.session is None else self.session.peer

    @property
    def request_id(self) -> bytes:
        return self.key.request_id

    @property
    def timeline(self) -> Timeline:
        """Complete once the server has its event."""
        return self._ending.moments.timeline()

    @property
    def is_released(self) -> bool:
        return self.lease.released

    def abort(self, reason: str) -> None:
        """End the request on every rank of the other side. Its rows stay leased until nothing touches them. No receiver
        takes bytes that are read from a sender's rows after this call. Raises `LocalProtocolError` unless the reason is a
        `str`.
        """
        check_text(reason, "reason")
        check_process(self._control)
        withdraw(self.lease)

        def abort(now: float) -> None:
            if self.session is None:
                self._control.end_unopened(self, RequestAborted(reason))
            elif isinstance(self.session, ReceiveSession):
                self._control.sessions.receives.abort(self.session, RequestAborted(reason), now)
            else:
                self._control.sessions.sends.abort(self.session, RequestAborted(reason), now)

        if not self._control.problem:
            self._control.command(abort)

    def on_end(self, callback: Callable[[Event], object]) -> None:
        """Call `callback` once with the event, in a thread of the manager, or in this one if the request has ended.
        `KVManager.events` also returns the event. Raises `LocalProtocolError` if `callback` is not callable.
        """
        if not callable(callback):
            raise LocalProtocolError(f"on_end: expected a function, found {callback!r}")
        self._ending.on_end(callback)

    def poll(self) -> Event | None:
        """How the request ended, as `KVManager.events` also returns it; `None` while it has not, after yielding the GIL as
        `events` does.
        """
        check_process(self._control)
        if self._ending.event is None:
            _native.yield_gil()
        return self._ending.take()

    def wait(self, *, timeout_s: float | None = None) -> Event:
        """How the request ended; `KVManager.events` also returns that. Raises `TimeoutError` after `timeout_s` seconds
        (`None`: no limit), `LocalProtocolError` unless that is finite and at least 0, and in a callback before the end.
        """
        check_process(self._control)
        if self._ending.event is None:
            check_may_block(self._control, "wait")
        event = self._ending.wait(math.inf if timeout_s is None else check_timeout(timeout_s))
        if event is None:
            raise TimeoutError(f"request {self.key}: not ended within {timeout_s} s")
        return event

    def _command(self, run: Callable[[float], None]) -> None:
        check_alive(self._control)
        self._control.command(run)


class Receiver(RequestHandle):
    """A request that this rank receives."""

    direction = "receive"
    session: ReceiveSession | None = None

    def __init__(
        self,
        control: Control,
        ending: Ending,
        *,
        key: RequestKey,
        peer: str,
        tag: Any,
        label: str = "",
        need: Mapping[str, TokenRange],
        ids: Mapping[str, Ids],
    ) -> None:
        super().__init__(control, ending, key=key, peer=peer, tag=tag, label=label)
        self.need = need
        self.ids = ids


class Sender(RequestHandle):
    """A request that this rank sends, to every rank of the peer's group that it writes to."""

    direction = "send"
    session: SendSession | None = None

    def __init__(
        self,
        control: Control,
        ending: Ending,
        *,
        key: RequestKey,
        peer: str,
        tag: Any,
        label: str = "",
        any_attempt: bool = False,
    ) -> None:
        super().__init__(control, ending, key=key, peer=peer, tag=tag, label=label, any_attempt=any_attempt)
        self._numbers = itertools.count()
        self._sent = SentTokens()
        self._finished = False

    @property
    def readers(self) -> frozenset[int] | None:
        """The ranks of the peer's group that this rank writes to, perhaps none; `None` while the peer is not known."""
        return None if self.session is None else self.session.expected

    @property
    def is_declined(self) -> bool:
        """Whether all `readers` have left before they reserved. False if there are none."""
        session = self.session
        if session is None or session.num_awaited or not session.expected:
            return False
        return all(each.ended and each.reserve is None for each in tuple(session.destinations.values()))

    @property
    def wanted_at(self) -> float | None:
        """When a receiver last called `KVManager.want`, by `time.monotonic`."""
        return None if self.session is None else self.session.wanted_at

    def needed(self, component: str) -> TokenRange | None:
        """From the first to the last token, `[start, stop)`, that any receiver needs: an empty range if none needs any. `None`
        until all have reserved, and if none has named the component. Raises `LocalProtocolError` for an undeclared one.
        """
        check_process(self._control)
        check_declared(self._control.local, component, "needed")
        return self.session.needed(component) if self.session is not None else None

    def send(
        self,
        rows: GivenRows,
        *,
        tokens: TokenRange | None = None,
        layers: Sequence[int] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        """Send `rows`: `tokens` `[start, stop)` of pages (`None`: all that is needed from `first_token` on), in `layers`
        (`None`: all). They are read once `ready` has passed, and stay leased until the request's lease is released. Tokens
        that share a position (`Role.granule`) go with the last of them, so earlier ones must be computed by then.

        Raises `LocalProtocolError` for arguments of the wrong type, an undeclared component, tokens of a layer that were
        already sent, rows that a receive holds, more than 65,536 chunks, after `finish`, or once the manager has ended;
        `LayoutError` for invalid ids.
        """
        chunk = self._chunk(rows, tokens, layers, ready)

        def send(now: float) -> None:
            if self.session is not None:
                self._control.sessions.sends.send(self.session, chunk, now)

        self._command(send)

    def finish(self, rows: GivenRows | None = None, *, payload: bytes = b"", ready: ReadyEvent | None = None) -> None:
        """Send the last rows, if any, and give every receiver `payload` with its success, except those on ranks without layers,
        which succeed at once. This yields the GIL for up to 1 ms, so that copies start now and not once the server waits.

        Raises as `send` does, and `LocalProtocolError` the second time, or for a payload of more than 65,536 bytes.
        """
        check_payload(payload)
        if self._finished:
            raise LocalProtocolError(f"request {self.key}: finish() was already called")
        chunk = None if rows is None else self._chunk(rows, None, None, ready)
        self._finished = True

        def finish(now: float) -> None:
            sends = self._control.sessions.sends
            if self.session is not None:
                if chunk is not None:
                    sends.send(self.session, chunk, now)
                sends.finish(self.session, payload, now)

        self._command(finish)
        _native.yield_gil(always=True)

    def _chunk(
        self, rows: GivenRows, tokens: TokenRange | None, layers: Sequence[int] | None, ready: ReadyEvent | None
    ) -> Chunk:
        check_alive(self._control)
        if self._finished:
            raise LocalProtocolError(f"request {self.key}: nothing can be sent after finish()")
        given = as_rows(self._control.local, rows)
        check_ready(ready)
        chosen = None if tokens is None else token_range(tokens)
        if chosen is None and tokens is not None:
            raise LocalProtocolError(f"tokens: expected integers 0 <= start <= stop <= 2**40, found {tokens}")
        number = next(self._numbers)
        if number >= MAX_ITEMS:
            raise LocalProtocolError(f"request {self.key}: expected at most {MAX_ITEMS} chunks, found another one")
        chunk = Chunk(number, given, chosen, None if layers is None else check_layers(layers), ready)
        self._control.requests.hold(self, given, chosen)
        self._sent.add(self.key, chunk)
        return chunk


def check_process(control: Control) -> None:
    """Raises `LocalProtocolError` in a forked child, where nothing of the manager works."""
    if control.inherited:
        raise LocalProtocolError(control.inherited)


def check_may_block(control: Control, what: str) -> None:
    """Raises `LocalProtocolError` in a callback: nothing ends while a thread of the manager waits for it."""
    check_process(control)
    if threading.current_thread() in control.threads():
        raise LocalProtocolError(f"{what}: expected another thread, found a callback in the manager's own, which cannot wait")


def check_alive(control: Control) -> None:
    check_process(control)
    if control.problem:
        raise LocalProtocolError(f"the manager has ended: {control.problem}")
