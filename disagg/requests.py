"""What `KVManager.receiver` and `KVManager.sender` give back: one request each."""

from __future__ import annotations

import itertools
import math
import operator
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from disagg.core import _native
from disagg.core.errors import DisaggError, LocalProtocolError, RequestAborted
from disagg.core.events import ReadyEvent
from disagg.core.rows import Rows, token_range
from disagg.protocol.messages import MAX_PAYLOAD_NBYTES, TokenRange
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.send_session import SendSession
from disagg.protocol.types import Chunk, Event, RequestKey

BEGUN_S = 20e-3
"""For how long a thread that waits for a request stays awake once its bytes are being copied."""


def combine(events: Iterable[Event]) -> DisaggError | None:
    """How a request ended that several ranks took part in: the first failure among their events, `None` where all went
    well. Which ranks those are is the server's matter; nothing here waits for another rank.
    """
    return next((event.error or RequestAborted("a rank failed") for event in events if not event.ok), None)


class Requests(Protocol):
    """What handles ask of their manager. Nothing blocks; steps are taken in the control thread."""

    @property
    def spin_s(self) -> float:
        """For how long a thread that waits for a request looks at it without a sleep, in seconds."""

    def check_kinds(self, rows: Mapping[str, Rows]) -> None: ...
    def send(self, sender: Sender, chunk: Chunk) -> None: ...
    def finish(self, sender: Sender, payload: bytes, chunk: Chunk | None) -> None: ...
    def abort(self, handle: Receiver | Sender, error: RequestAborted) -> None: ...


class RequestHandle:
    """What `receiver` and `sender` give back. Thread-safe."""

    def __init__(self, requests: Requests, key: RequestKey, peer: str, tag: Any) -> None:
        self._requests = requests
        self._spin_s = requests.spin_s
        self._over = _native.Flag()
        self.key = key
        self.peer = peer
        self.tag = tag
        self.opened_at = time.monotonic()
        self._pending = threading.Lock()  # held until the request has ended; an `Event` takes ten times as long to make
        self._pending.acquire()
        self._event: Event | None = None

    @property
    def request_id(self) -> bytes:
        return self.key.request_id

    def poll(self) -> Event | None:
        """How the request ended; `None` while it has not, and then the manager's threads have had the interpreter while they
        had work, for 100 us at most.
        """
        if self._event is None:
            _native.yield_gil()
        return self._event

    def wait(self, *, timeout_s: float | None = None) -> Event:
        """How the request ended; raises `TimeoutError` where it has not within `timeout_s`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (event := self._event) is None:
            if self._spin_s and self._over.busy_poll(min(self._spin_s, until - time.monotonic())):
                continue
            left_s = until - time.monotonic()
            if not self._pending.acquire(timeout=min(max(left_s, 0), threading.TIMEOUT_MAX)):
                raise TimeoutError(f"request {self.key}: not ended within {timeout_s} s")
            if self._event is not None:
                self._let_go()  # whoever else waits
        return event

    def begin(self) -> None:
        """Called by the manager: the request will end soon, so whoever waits for it should be awake."""
        if self._spin_s:
            self._spin_s = BEGUN_S
            self._let_go()

    def end(self, event: Event) -> None:
        """Called by the manager, once: the request has ended."""
        self._event = event

    def wake(self) -> None:
        """Called by the manager once it has ended: whoever waits goes on."""
        self._over.set()
        self._let_go()

    def let_go_first(self) -> None:
        """Called by the manager after that: whoever waits without a sleep has the interpreter before the caller goes on."""
        if self._spin_s:
            self._over.yield_to_waiter()

    def _let_go(self) -> None:
        try:
            self._pending.release()
        except RuntimeError:  # nobody has seen yet that it was let go of before
            return


class Receiver(RequestHandle):
    """One request that this rank receives."""

    direction = "receive"
    session: ReceiveSession | None = None

    def __init__(self, requests: Requests, key: RequestKey, peer: str, tag: Any, need: Mapping[str, TokenRange]) -> None:
        super().__init__(requests, key, peer, tag)
        self.need = need

    def abort(self, reason: str) -> None:
        """End the request; the rows stay leased until every writer is proved quiet."""
        self._requests.abort(self, RequestAborted(reason))


class Sender(RequestHandle):
    """One request that this rank sends, to every rank of the peer's group that it writes to."""

    direction = "send"
    session: SendSession | None = None

    def __init__(self, requests: Requests, key: RequestKey, peer: str, tag: Any) -> None:
        super().__init__(requests, key, peer, tag)
        self._numbers = itertools.count()
        self._finished = False

    def needed(self, component: str) -> TokenRange | None:
        """The tokens `[start, stop)` of `component` that the receivers need; `None` until all of them have reserved."""
        return self.session.needed(component) if self.session is not None else None

    def send(
        self,
        rows: Mapping[str, Rows],
        *,
        tokens: TokenRange | None = None,
        layers: Sequence[int] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        """Send rows: the tokens `[start, stop)` of pages (`None`: all that is needed from `first_token` on), in `layers`
        (`None`: all). They are read once `ready` has passed, and stay leased until the request's lease is released.

        Returns at once. Raises `LocalProtocolError` for a component that was not declared, or after `finish`.
        """
        self._requests.send(self, self._chunk(rows, tokens, layers, ready))

    def finish(self, rows: Mapping[str, Rows] | None = None, *, payload: bytes = b"", ready: ReadyEvent | None = None) -> None:
        """Send the last rows, and say that nothing more will come. `payload` reaches every receiver with its success."""
        _check_payload(payload)
        if self._finished:
            raise LocalProtocolError(f"request {self.key}: finish() was already called")
        chunk = self._chunk(rows, None, None, ready) if rows else None
        self._finished = True
        self._requests.finish(self, payload, chunk)

    def abort(self, reason: str) -> None:
        """End the request towards every receiver."""
        self._requests.abort(self, RequestAborted(reason))

    def _chunk(
        self, rows: Mapping[str, Rows], tokens: TokenRange | None, layers: Sequence[int] | None, ready: ReadyEvent | None
    ) -> Chunk:
        if self._finished:
            raise LocalProtocolError(f"request {self.key}: nothing can be sent after finish()")
        self._requests.check_kinds(rows)
        asked = None if tokens is None else token_range(tokens)
        if asked is None and tokens is not None:
            raise LocalProtocolError(f"tokens: expected integers 0 <= start <= stop <= 2**40, found {tokens}")
        chosen = None if layers is None else _layer_ids(layers)
        return Chunk(next(self._numbers), dict(rows), asked, chosen, ready)


def _layer_ids(layers: Sequence[int]) -> tuple[int, ...]:
    try:
        chosen = tuple(operator.index(layer) for layer in layers)
    except TypeError as error:
        raise LocalProtocolError(f"layers: expected ids of layers, found {layers!r}") from error
    if any(not 0 <= layer < 2**31 for layer in chosen):
        raise LocalProtocolError(f"layers: expected ids of 0 to 2**31 - 1, found {list(chosen)}")
    return chosen


def _check_payload(payload: object) -> None:
    if not isinstance(payload, bytes) or len(payload) > MAX_PAYLOAD_NBYTES:
        found = f"{len(payload)} bytes" if isinstance(payload, bytes) else type(payload).__name__
        raise LocalProtocolError(f"payload: expected at most {MAX_PAYLOAD_NBYTES} bytes, found {found}")
