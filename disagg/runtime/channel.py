"""The control channel: a ZeroMQ ROUTER that peers connect to, and one DEALER per rank that this one connects to. One thread
owns it.

libzmq's threads ping every peer, so a connection survives a busy interpreter and ends with the process. Only the ROUTER
pings: every pair of ranks has a connection in each direction, and a ping also tells the DEALER how long it may be silent.

An epoll names the sockets on which something has happened, so idle peers cost nothing. libzmq signals that once, and any
call on the socket may consume the signal, so a socket that was used is looked at again.
"""

from __future__ import annotations

import ctypes
import secrets
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import zmq
import zmq.auth.thread

from disagg.core import _native
from disagg.core.address import bracketed, is_loopback, parse_address
from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.machine.tcp import new_listeners, retransmit_soon
from disagg.protocol.messages import MAX_MESSAGE_NBYTES
from disagg.runtime.keys import KeyPair, authenticator
from disagg.runtime.monitor import Monitor
from disagg.runtime.wire import Arrival, Closed, Inbound, Late, Reply

logger = ThreadLog(__name__)
FAILED_PAUSE_S = 0.01
MAX_SOCKETS = 16384
"""libzmq's own limit is 1,023."""
MAX_SILENCE_MS = 6_553_500
"""A ping carries tenths of a second in 16 bits."""
MAX_REPLIES = 16
"""Answers to hellos that wait for a connection that does not read. Later ones are lost, and hellos are repeated."""


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    descriptor: int
    unsent: list[bytes] = field(default_factory=list)


class Channel:
    """Off loopback it needs `keys`, or `insecure=True`. `allow` decides whether a public key may connect. A
    connection ends if a ping is not answered within `heartbeat_timeout_s`; the peer ends it if a ping is that late. Raises
    `ConfigError` for an address that cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        *,
        keys: KeyPair | None = None,
        insecure: bool = False,
        allow: Callable[[str], bool] = lambda _: False,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = 8.0,
    ) -> None:
        host, port = parse_address(listen, what="listen")
        if keys is None and not insecure and not is_loopback(host):
            raise ConfigError(
                f"listen: {listen!r} can be reached from other hosts, so it needs keys (disagg keygen), or insecure=True"
            )
        self._keys = keys
        self._warnings = RateLimitedLog(logger, repeat_s=10.0)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._alarm = _native.Alarm()
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by the descriptor that libzmq signals
        self._unread: set[int] = set()  # descriptors of sockets that may have messages
        self._watched = np.array([self._alarm.fileno(), self._epoll.fileno()], np.int32)
        self._peers: dict[int, _Peer] = {}
        self._dials: dict[int, int] = {}  # by descriptor
        self._unsent: dict[int, _Peer] = {}
        try:
            if keys is not None:
                self._authenticator = authenticator(self._context, allow)
            _draw_ids()
            self._router = self._socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.SNDHWM, MAX_REPLIES)
            self._set_heartbeats(heartbeat_s, heartbeat_timeout_s)
            self._monitor = Monitor(self._context, self._router)
            if keys is not None:
                self._router.curve_server = True
                self._router.curve_publickey, self._router.curve_secretkey = keys.public.encode(), keys.secret.encode()
            self._router.setsockopt(zmq.IPV6, int(":" in host))
            with new_listeners():
                self._router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigError(f"listen: cannot bind {listen!r}: {error}") from error
        self._port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = f"tcp://{bracketed(host)}:{self._port}"
        self._router_descriptor, self._monitor_descriptor = self._watch(self._router), self._watch(self._monitor.socket)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        return socket

    def _set_heartbeats(self, interval_s: float, timeout_s: float) -> None:
        interval_ms, timeout_ms = max(1, round(interval_s * 1e3)), max(1, round(timeout_s * 1e3))
        self._router.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        self._router.setsockopt(zmq.HEARTBEAT_TTL, min(interval_ms + timeout_ms, MAX_SILENCE_MS))

    def _watch(self, socket: zmq.Socket[bytes]) -> int:
        """Returns the descriptor that libzmq signals."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._epoll.register(descriptor, select.EPOLLIN)
        self._sockets[descriptor] = socket
        self._unread.add(descriptor)
        return descriptor

    def connect(self, dial: int, address: str, *, public_key: str | None = None) -> None:
        """Connect to `address`, as connection `dial`; ZeroMQ reconnects by itself. Raises `ConfigError` for an invalid
        address or a missing key, `PeerUnreachable` if no socket can be opened now.
        """
        host, _ = parse_address(address, what="peer address")
        try:
            self._connect(dial, address, public_key, ipv6=":" in host)
        except (zmq.ZMQError, OSError) as error:
            raise PeerUnreachable(f"{address}: cannot be dialled: {error}") from error

    def _connect(self, dial: int, address: str, public_key: str | None, *, ipv6: bool) -> None:
        if self._keys is not None and public_key is None:
            raise ConfigError(f"peer address {address!r}: this side has keys, so the peer's public key is needed")
        socket = self._socket(zmq.DEALER)
        try:
            self._set_up(socket, public_key, ipv6=ipv6)
            socket.connect(address)
            descriptor = self._watch(socket)
        except BaseException:
            socket.close(0)
            raise
        self._peers[dial] = _Peer(socket, descriptor)
        self._dials[descriptor] = dial

    def _set_up(self, socket: zmq.Socket[bytes], public_key: str | None, *, ipv6: bool) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # TCP waits up to 16 s before it retransmits a SYN
        socket.setsockopt(zmq.IPV6, int(ipv6))
        if self._keys is not None and public_key is not None:
            socket.curve_serverkey = public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()

    def disconnect(self, dial: int) -> None:
        peer = self._peers.pop(dial, None)
        if peer is not None:
            self._unsent.pop(dial, None)
            self._epoll.unregister(peer.descriptor)
            self._unread.discard(peer.descriptor)
            del self._sockets[peer.descriptor], self._dials[peer.descriptor]
            peer.socket.close(0)

    def send(self, dial: int, data: bytes) -> bool:
        """Queue `data`, to leave with the next `poll` or `flush`. Lost messages are resent by the protocol."""
        peer = self._peers.get(dial)
        if peer is None:
            return False
        peer.unsent.append(data)
        self._unsent[dial] = peer
        return True

    def reply(self, connection: bytes, data: bytes) -> bool:
        """Returns whether the connection is still there and had room."""
        self._unread.add(self._router_descriptor)
        return _send(self._router, [connection, data])

    @property
    def refused(self) -> int:
        """Connections that failed before their first message."""
        return self._monitor.num_refused

    def wake(self) -> None:
        """Make `poll` return. Any thread may call it."""
        self._alarm.set()

    def poll(self, timeout_s: float) -> Iterator[Arrival]:
        """Wait up to `timeout_s` seconds for the first message, or for `wake`. An error of the system loses what has
        arrived on that connection; the next call goes on.
        """
        try:
            yield from self._poll(timeout_s)
        except (zmq.ZMQError, OSError) as error:
            self._warnings.warning("%s: polling failed: %s", self.address, error)
            time.sleep(FAILED_PAUSE_S)

    def _poll(self, timeout_s: float) -> Iterator[Arrival]:
        woken = self._alarm.clear()
        self.flush()
        readable = self._readable()
        if timeout_s > 0 and not readable and not woken:
            self._alarm.wait(timeout_s, self._watched)
            readable = self._readable()
        has_ended = self._monitor_descriptor in readable
        if has_ended or self._router_descriptor in readable:
            yield from self._inbound()
        if has_ended or self._monitor.has_late:  # after its messages, of which the last may be a goodbye
            yield from self._ended()
        self._monitor.end_endless(self._port)
        for descriptor in readable:
            dial = self._dials.get(descriptor)
            if dial is not None:
                yield from self._replies(dial, self._peers[dial])

    def _readable(self) -> list[int]:
        self._unread.update(descriptor for descriptor, _ in self._epoll.poll(0))
        readable = [each for each in self._unread if int(self._sockets[each].getsockopt(zmq.EVENTS)) & zmq.POLLIN]
        self._unread = set(readable)
        return readable

    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool:
        """Call it right after `poll` has found nothing. Returns whether there is a message or a completion."""
        return _native.busy_poll(seconds, self._watched, completions)

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for peer in unsent.values():
            messages, peer.unsent = peer.unsent, []
            self._unread.add(peer.descriptor)
            for batch in _batches(messages):
                _send(peer.socket, batch)

    def _replies(self, dial: int, peer: _Peer) -> Iterator[Reply]:
        for frames in _frames(peer.socket):  # few: a welcome each second, by which libzmq may have connected anew
            retransmit_soon(_descriptor_of(frames[0]) or -1)
            if len(frames) == 1:
                yield Reply(dial, frames[0].bytes)

    def _inbound(self) -> Iterator[Inbound | Late | Closed]:
        for frames in _frames(self._router):
            if len(frames) < 2:
                continue
            if len(frames) > MAX_FRAMES + 1:
                self._monitor.end(_descriptor_of(frames[1]), self._port)
                continue
            connection = frames[0].bytes
            user = "" if self._keys is None else str(frames[1].get("User-Id"))
            if not self._monitor.hears(connection):
                yield from self._ended()
                if not self._monitor.add(connection, _descriptor_of(frames[1])):
                    yield Late(user, frames[1].bytes)
                    continue
            for frame in frames[1:]:
                yield Inbound(connection, user, frame.bytes)

    def _ended(self) -> Iterator[Closed]:
        for connection in self._monitor.take():
            yield Closed(connection)

    def close(self) -> None:
        """Queued messages have 200 ms to leave. A second call does nothing."""
        if self._context.closed:
            return
        self.flush()
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        if hasattr(self, "_monitor"):
            self._monitor.close()
        if hasattr(self, "_router"):
            self._router.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._epoll.close()
        self._context.term()


MAX_BATCH = 1024
"""Messages that are taken from one socket in one poll, but no more once they have `MAX_MESSAGE_NBYTES`."""
MAX_FRAMES = 64
"""Messages that leave together."""


def _draw_ids() -> None:
    """Draw the number from which ROUTERs count connections, which `rand` gives. Libzmq ends the process if a connection has
    chosen the id that the next one gets, so nobody may know it.
    """
    ctypes.CDLL(None).srand(secrets.randbits(32))


def _batches(messages: list[bytes]) -> Iterator[list[bytes]]:
    """Each batch has no more bytes than one message may have."""
    batch: list[bytes] = []
    for message in messages:
        if batch and (len(batch) == MAX_FRAMES or sum(map(len, batch)) + len(message) > MAX_MESSAGE_NBYTES):
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Bounded, so that no socket starves another. A message with too many frames, which no rank sends, is truncated."""
    left = MAX_MESSAGE_NBYTES
    for _ in range(MAX_BATCH):
        if left <= 0 or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an `Again` exception
            return
        frames = [socket.recv(zmq.DONTWAIT, copy=False)]
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.DONTWAIT, copy=False)
            if len(frames) < MAX_FRAMES + 2:  # one is the ROUTER's, and one more shows that there are too many
                frames.append(frame)
        left -= sum(map(len, frames))
        yield frames


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The descriptor of the message's connection. `None` before ZMTP 3, which no rank speaks."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.ZMQError:  # no room, the connection has ended, or no descriptor is left
        return False
    return True
