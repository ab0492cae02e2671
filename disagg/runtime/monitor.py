"""libzmq's reports of connections that peers open: which were refused, and which have ended."""

from __future__ import annotations

from collections import OrderedDict

import zmq
import zmq.utils.monitor

from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.runtime.endless import EndlessMessages

logger = ThreadLog(__name__)

MAX_ENDED = 1 << 16
"""Ended connections of which messages may still be read."""
_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it was interrupted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZMTP, or not with the required mechanism",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it was not authenticated",
}
_EVENTS = sum(_REFUSALS) | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Monitor:
    """The monitor of a ROUTER. `socket` is readable when there are events.

    libzmq names a connection by its descriptor, which may be used again, and its messages by a routing id. `add` joins the
    two; call `take` first, to be past the events of an earlier connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        self._router = router
        endpoint = f"inproc://monitor-{id(router)}"
        router.monitor(endpoint, _EVENTS)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread would wait for room, and answer no ping meanwhile
        self.socket.connect(endpoint)
        self.num_refused = 0
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)  # hundreds of peers may reconnect at a time
        self._open: set[int] = set()
        self._by_descriptor: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._late: list[bytes] = []
        self._endless = EndlessMessages()

    def hears(self, connection: bytes) -> bool:
        """Whether the connection of a message was added, and has not ended."""
        descriptor = self._known.get(connection)
        if descriptor is not None:
            self._endless.hear(descriptor)
        return descriptor is not None

    def end_endless(self, port: int) -> None:
        self._endless.end(tuple(self._open), port, known=self._by_descriptor)

    def end(self, descriptor: int | None, port: int) -> None:
        """End a connection that sends what no rank sends."""
        if descriptor in self._open:
            self._endless.shut(descriptor, port, "its message has too many frames")

    def add(self, connection: bytes, descriptor: int | None) -> bool:
        """Join a routing id and a descriptor. Returns whether that connection is still open."""
        if descriptor is None or descriptor not in self._open or connection in self._over:
            return False
        known = self._by_descriptor.get(descriptor)
        if known is not None:  # libzmq has closed one of the two since, and its message is read late
            if not _is_later(connection, known):
                return False
            self._forget(known)
            self._late.append(known)
        self._by_descriptor[descriptor] = connection
        self._known[connection] = descriptor
        return True

    def _forget(self, connection: bytes) -> None:
        del self._by_descriptor[self._known.pop(connection)]
        self._over[connection] = None
        if len(self._over) > MAX_ENDED:
            self._over.popitem(last=False)

    @property
    def has_late(self) -> bool:
        """Whether a connection has ended without an event to come."""
        return bool(self._late)

    def take(self) -> list[bytes]:
        ended, self._late = self._late, []
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = zmq.utils.monitor.recv_monitor_message(self.socket, zmq.DONTWAIT)
            event, value = zmq.Event(message["event"]), int(message["value"])
            if event is zmq.Event.ACCEPTED:
                self._open.add(value)
            elif event is zmq.Event.DISCONNECTED:
                self._open.discard(value)
                connection = self._by_descriptor.get(value)
                if connection is not None:
                    self._forget(connection)
                    ended.append(connection)
            else:
                self.num_refused += 1
                where = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
                self._warnings.warning("refused a connection to %s: %s", where, _REFUSALS[event])
        return ended

    def close(self) -> None:
        self._router.disable_monitor()
        self.socket.close(0)


def _is_later(connection: bytes, other: bytes) -> bool:
    """A ROUTER counts connections in their routing ids. One that chose its id itself, as no rank does, is never later."""
    number, before = _count_in(connection), _count_in(other)
    if number is None or before is None:
        return number is not None
    return (number - before) % (1 << 32) < 1 << 31


def _count_in(connection: bytes) -> int | None:
    """An id is a zero byte and a number of 32 bits. The first number is random."""
    return int.from_bytes(connection[1:]) if len(connection) == 5 and not connection[0] else None
