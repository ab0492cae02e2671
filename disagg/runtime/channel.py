"""The control channel: one ZeroMQ ROUTER that peers connect to, and one DEALER per rank that this one connects to.

The channel does not decode messages. Messages for one connection leave together. One thread owns a channel; only `wake` may be
called from any thread.

libzmq's own threads ping every peer, so a connection ends when the peer's process does not answer or has ended, and stays when
the peer's interpreter is busy. The ROUTER's monitor tells which connection has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
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
from disagg.runtime.wire import Arrival, Closed, Inbound, Reply

logger = ThreadLog(__name__)
FAILED_PAUSE_S = 0.01
"""Pause after an error of the system, which may last."""
MAX_SOCKETS = 16384
"""Sockets of a manager, one for each peer rank; libzmq's own limit is 1,023."""


@dataclass
class _Peer:
    """A connection that this side opened, and the messages to send."""

    socket: zmq.Socket[bytes]
    unsent: list[bytes] = field(default_factory=list)


class Channel:
    """A bound ROUTER and the DEALERs of one manager.

    `listen` is `tcp://host:port`; off loopback it takes `keys`, or `insecure=True`. `allow` decides whether a public key may
    connect. Peers are pinged every `heartbeat_s`, and their connections end after `heartbeat_timeout_s` without an answer.

    Raises `ConfigError` that names an address which cannot be bound.
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
        self._heartbeat_ms = max(1, round(heartbeat_s * 1e3)), max(1, round(heartbeat_timeout_s * 1e3))
        self._warnings = RateLimitedLog(logger, repeat_s=10.0)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._alarm = _native.Alarm()
        self._poller = zmq.Poller()
        self._peers: dict[int, _Peer] = {}
        try:
            if keys is not None:
                self._authenticator = authenticator(self._context, allow)
            self._router = self._socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        self._descriptors: npt.NDArray[np.int32] | None = None  # cached until sockets change

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        interval_ms, timeout_ms = self._heartbeat_ms
        socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        return socket

    def connect(self, dial: int, address: str, *, public_key: str | None = None) -> None:
        """Connect to `address`, as connection `dial`. ZeroMQ reconnects by itself.

        Raises `ConfigError` for an address that cannot be dialled, `PeerUnreachable` if this process cannot open a socket now.
        """
        host, _ = parse_address(address, what="peer address")
        try:
            self._connect(dial, address, public_key, ipv6=":" in host)
        except zmq.ZMQError as error:
            raise PeerUnreachable(f"{address}: cannot be dialled: {error}") from error
        self._descriptors = None

    def _connect(self, dial: int, address: str, public_key: str | None, *, ipv6: bool) -> None:
        if self._keys is not None and public_key is None:
            raise ConfigError(f"peer address {address!r}: this side has keys, so the peer's public key is needed")
        socket = self._socket(zmq.DEALER)
        try:
            self._set_up(socket, public_key, ipv6=ipv6)
            socket.connect(address)
        except BaseException:
            socket.close(0)
            raise
        self._peers[dial] = _Peer(socket)
        self._poller.register(socket, zmq.POLLIN)

    def _set_up(self, socket: zmq.Socket[bytes], public_key: str | None, *, ipv6: bool) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # TCP waits up to 16 s before it retransmits a SYN
        socket.setsockopt(zmq.IPV6, int(ipv6))
        if self._keys is not None and public_key is not None:
            socket.curve_serverkey = public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()

    def disconnect(self, dial: int) -> None:
        """Drop the connection and its unsent messages."""
        peer = self._peers.pop(dial, None)
        if peer is not None:
            self._poller.unregister(peer.socket)
            peer.socket.close(0)
            self._descriptors = None

    def send(self, dial: int, data: bytes) -> bool:
        """Queue `data` for a connection, to leave with the next `poll` or `flush`. Returns whether there is that connection.
        Lost messages are resent by the protocol.
        """
        peer = self._peers.get(dial)
        if peer is None:
            return False
        peer.unsent.append(data)
        return True

    def reply(self, connection: bytes, data: bytes) -> bool:
        """Send `data` on a connection that a peer opened. Returns whether the connection is still there and had room."""
        return _send(self._router, [connection, data])

    @property
    def refused(self) -> int:
        """Connections that failed before their first message."""
        return self._monitor.num_refused

    def wake(self) -> None:
        """Make `poll` return. Any thread may call it; once is enough until `poll` has returned."""
        self._alarm.set()

    def poll(self, timeout_s: float) -> Iterator[Arrival]:
        """Everything that has arrived. Waits up to `timeout_s` seconds for the first message, or for `wake`. An error of the
        system, such as that no descriptor is left, costs what has arrived on that connection; the next call goes on.
        """
        try:
            yield from self._poll(timeout_s)
        except (zmq.ZMQError, OSError) as error:
            self._warnings.warning("%s: polling failed: %s", self.address, error)
            time.sleep(FAILED_PAUSE_S)

    def _poll(self, timeout_s: float) -> Iterator[Arrival]:
        woken = self._alarm.clear()
        self.flush()
        ready = dict(self._poller.poll(0))
        if timeout_s > 0 and not ready and not woken:
            self._alarm.wait(timeout_s, self._watched())
            ready = dict(self._poller.poll(0))
        if ready.pop(self._monitor.socket, None):
            yield from self._ended()
        if ready.pop(self._router, None):
            yield from self._inbound()
        self._monitor.end_endless(self._port)
        for dial, peer in list(self._peers.items()) if ready else ():
            if peer.socket in ready:
                yield from self._replies(dial, peer)

    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool:
        """Poll without a sleep, right after `poll` has found nothing. Returns whether there is a message or a completion."""
        return _native.busy_poll(seconds, self._watched(), completions)

    def _watched(self) -> npt.NDArray[np.int32]:
        """Every descriptor on which something may arrive, right after `poll` has found nothing there."""
        if self._descriptors is None:
            sockets = self._router, self._monitor.socket, *(peer.socket for peer in self._peers.values())
            self._descriptors = np.array([self._alarm.fileno(), *(each.get(zmq.FD) for each in sockets)], np.int32)
        return self._descriptors

    def flush(self) -> None:
        """Send what was queued. The messages for one connection leave together."""
        for peer in self._peers.values():
            if not peer.unsent:
                continue
            messages, peer.unsent = peer.unsent, []
            for batch in _batches(messages):
                _send(peer.socket, batch)

    def _replies(self, dial: int, peer: _Peer) -> Iterator[Reply]:
        for frames in _frames(peer.socket):  # few: a welcome each second, by which libzmq may have connected anew
            retransmit_soon(_descriptor_of(frames[0]) or -1)
            if len(frames) == 1:
                yield Reply(dial, frames[0].bytes)

    def _inbound(self) -> Iterator[Inbound | Closed]:
        for frames in _frames(self._router):
            if len(frames) < 2:
                continue
            connection, user, is_open = frames[0].bytes, "", True
            if not self._monitor.hears(connection):
                yield from self._ended()
                is_open = self._monitor.add(connection, _descriptor_of(frames[1]))
            if self._keys is not None:
                user = str(frames[1].get("User-Id"))
            for frame in frames[1:]:
                yield Inbound(connection, user, frame.bytes)
            if not is_open:
                yield Closed(connection)

    def _ended(self) -> Iterator[Closed]:
        """Connections that have ended."""
        for connection in self._monitor.take():
            yield Closed(connection)

    def close(self) -> None:
        """Close every socket, after 200 ms for queued messages to leave. A second call does nothing."""
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
        self._context.term()


MAX_BATCH = 1024
MAX_FRAMES = 64
"""Messages that leave together."""


def _batches(messages: list[bytes]) -> Iterator[list[bytes]]:
    """Messages that leave together: a few, and no more bytes than one may have."""
    batch: list[bytes] = []
    for message in messages:
        if batch and (len(batch) == MAX_FRAMES or sum(map(len, batch)) + len(message) > MAX_MESSAGE_NBYTES):
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Messages that have arrived on a socket, up to a bound, so that no socket starves another."""
    for _ in range(MAX_BATCH):
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # an `Again` exception would cost several times as much
            return
        yield socket.recv_multipart(zmq.DONTWAIT, copy=False)


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The descriptor of the connection that a message came by. `None` for versions of ZMTP before 3, which no rank speaks."""
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
