"""The control channel: one ZeroMQ ROUTER that peers dial, and one DEALER per rank that this one dials.

Nothing here understands a message. Between processes of one machine messages take a shorter way (`lanes`), and those for one
address leave together. One thread owns a channel; `wake` alone may be called from any thread.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from disagg.core import _native
from disagg.core.address import is_loopback, parse_address
from disagg.core.errors import ConfigError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.protocol.messages import MAX_MESSAGE_NBYTES
from disagg.runtime.completion_page import CompletionPage, CompletionPageView
from disagg.runtime.keys import KeyPair
from disagg.runtime.local_socket import MAX_OFFERS, Lane, Listener, Source

logger = logging.getLogger(__name__)
_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it speaks no ZMTP, or not the mechanism asked for",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it was not authenticated",
}


class Inbound(msgspec.Struct, frozen=True):
    """A message that a peer sent on a connection that it opened: answer it with `reply`. `page` is the completion page of that
    peer.
    """

    connection: bytes
    user: str
    data: bytes
    page: CompletionPageView | None = None


class Reply(msgspec.Struct, frozen=True):
    """A message that came back on a connection that this side opened."""

    address: str
    data: bytes


@dataclass
class _Dialled:
    """A connection that this side opened, its lane where the peer is on this machine, and what leaves with the next `poll`."""

    socket: zmq.Socket[bytes]
    lane: Lane | None = None
    unsent: list[bytes] = field(default_factory=list)


class Wire(Protocol):
    """What the control thread needs of its channel."""

    def connect(self, address: str, *, public_key: str | None = None) -> None: ...
    def disconnect(self, address: str) -> None: ...
    def send(self, address: str, data: bytes) -> bool: ...
    def reply(self, connection: bytes, data: bytes, *, offer_local: bool = False) -> bool: ...
    def completion_page(self, address: str) -> CompletionPage | None: ...
    def wake(self) -> None: ...
    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float) -> Iterator[Inbound | Reply]: ...


class Channel:
    """A bound ROUTER and the DEALERs of one manager.

    `listen` is `tcp://host:port`; off loopback `keys` must be given, or `insecure=True`. `allow` says whether a public
    key may connect, `looks` whether its thread will `linger`, and so sees what peers of this machine show. Raises
    `ConfigError` where the address cannot be bound, naming it.
    """

    def __init__(
        self,
        listen: str,
        *,
        keys: KeyPair | None = None,
        insecure: bool = False,
        allow: Callable[[str], bool] = lambda _: False,
        polls: bool = False,
    ) -> None:
        host, port = parse_address(listen, what="listen")
        if keys is None and not insecure and not is_loopback(host):
            raise ConfigError(
                f"listen: {listen!r} can be reached from other hosts, so it needs keys (disagg keygen), or insecure=True"
            )
        self._keys = keys
        self.refused = 0
        self._warnings = RateLimitedLog(logger)
        self._context = zmq.Context()
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._poller = zmq.Poller()
        self._dialled: dict[str, _Dialled] = {}
        self._users: OrderedDict[bytes, str] = OrderedDict()
        self._board = CompletionPage.make()
        self._lanes = Listener(polls=polls)
        try:
            if keys is not None:
                self._authenticator = _authenticator(self._context, allow)
            self._router = self._socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._monitor = self._router.get_monitor_socket(sum(_REFUSALS))
            if keys is not None:
                self._router.curve_server = True
                self._router.curve_publickey, self._router.curve_secretkey = keys.public.encode(), keys.secret.encode()
            bracketed = f"[{host}]" if ":" in host else host
            self._router.setsockopt(zmq.IPV6, int(":" in host))
            self._router.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"listen: cannot bind {listen!r}: {error}") from error
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = listen if port else f"tcp://{bracketed}:{bound.rpartition(':')[2]}"
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._lanes.fileno(), zmq.POLLIN)
        self._descriptors: npt.NDArray[np.int32] | None = None  # what is waited for, listed when it is asked

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        return socket

    def connect(self, address: str, *, public_key: str | None = None) -> None:
        """Dial `address`; a second call for it does nothing. The connection heals by itself."""
        if address in self._dialled:
            return
        host, _ = parse_address(address, what="peer address")
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        if self._keys is not None:
            if public_key is None:
                socket.close(0)
                raise ConfigError(f"peer address {address!r}: this side has keys, so the peer's public key is needed")
            socket.curve_serverkey = public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        socket.connect(address)
        self._dialled[address] = _Dialled(socket)
        self._poller.register(socket, zmq.POLLIN)
        self._descriptors = None

    def disconnect(self, address: str) -> None:
        """Drop the connection and what it has not sent yet."""
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            self._poller.unregister(dialled.socket)
            dialled.socket.close(0)
            self._leave(dialled)
            self._descriptors = None

    def send(self, address: str, data: bytes) -> bool:
        """Queue `data` for a dialled address, to leave with the next `poll`; whether that is dialled. What is lost is said
        again by the protocol.
        """
        dialled = self._dialled.get(address)
        if dialled is None:
            return False
        dialled.unsent.append(data)
        return True

    def reply(self, connection: bytes, data: bytes, *, offer_local: bool = False) -> bool:
        """Queue `data` for a connection that a peer opened, with the offer of a `lane` if it was let in; whether it is still
        there and had room.
        """
        offer = [self._lanes.offer(Source(connection, self._users.get(connection, "")))] if offer_local else []
        return _send(self._router, [connection, data, *offer])

    def completion_page(self, address: str) -> CompletionPage | None:
        """The completion page that the peer at `address` polls, or `None` if it does not."""
        dialled = self._dialled.get(address)
        return self._board if dialled is not None and dialled.lane is not None and dialled.lane.shows else None

    def wake(self) -> None:
        """Have `poll` return; from any thread. Once is enough until it has."""
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> Iterator[Inbound | Reply]:
        """Everything that has arrived; waits at most `timeout_s` for the first, or for `wake`."""
        self.flush()
        ready = dict(self._poller.poll(0))
        if timeout_s > 0 and not ready:
            _native.sleep(timeout_s, self._watched())
            ready = dict(self._poller.poll(0))
        if ready.pop(self._wake_fd, None):
            os.eventfd_read(self._wake_fd)
            self._woken = False
        if ready.pop(self._monitor, None):
            self._take_refusals()
        if ready.pop(self._router, None):
            yield from self._inbound()
        opened = ready.pop(self._lanes.fileno(), None)
        for address, dialled in list(self._dialled.items()) if ready else ():
            if ready.pop(dialled.socket, None):
                yield from self._replies(address, dialled)
        for descriptor in ready:  # what is left are lanes
            assert isinstance(descriptor, int)
            yield from self._from_lane(descriptor)
        if opened:
            self._take_lanes()

    def busy_poll(self, seconds: float, signs: list[_native.Completion]) -> bool:
        """Wait without a sleep for something that `poll` is to take, right after it has found nothing, or for a sign; whether
        one of them is there.
        """
        return _native.busy_poll(seconds, self._watched(), signs)

    def _watched(self) -> npt.NDArray[np.int32]:
        """Every descriptor that something may come by, right after `poll` has found nothing there."""
        if self._descriptors is None:
            sockets = self._router, self._monitor, *(dialled.socket for dialled in self._dialled.values())
            found = [self._wake_fd, self._lanes.fileno(), *self._lanes.descriptors(), *(each.get(zmq.FD) for each in sockets)]
            self._descriptors = np.array(found, np.int32)
        return self._descriptors

    def flush(self) -> None:
        """Send what was queued, as `poll` does first; what one address gets goes together."""
        for dialled in self._dialled.values():
            if not dialled.unsent:
                continue
            messages, dialled.unsent = dialled.unsent, []
            if dialled.lane is not None:
                try:
                    del messages[: dialled.lane.send(messages)]
                except OSError:
                    self._leave(dialled)
            for start in range(0, len(messages), MAX_FRAMES):
                _send(dialled.socket, messages[start : start + MAX_FRAMES])

    def _replies(self, address: str, dialled: _Dialled) -> Iterator[Reply]:
        for frames in _frames(dialled.socket):
            if len(frames) == 2:
                self._join(dialled, frames[1].bytes)
            if len(frames) in (1, 2):
                yield Reply(address, frames[0].bytes)

    def _inbound(self) -> Iterator[Inbound]:
        for frames in _frames(self._router):
            if len(frames) < 2:
                continue
            connection, user = frames[0].bytes, ""
            if self._keys is not None:
                user = self._users[connection] = str(frames[1].get("User-Id"))
                self._users.move_to_end(connection)
                while len(self._users) > MAX_OFFERS:
                    self._users.popitem(last=False)
            board = self._lanes.board(Source(connection, user))
            for frame in frames[1:]:
                yield Inbound(connection, user, frame.bytes, board)

    def _join(self, dialled: _Dialled, offer: bytes) -> None:
        """Take a lane that a peer offers, if it is a new one, and within reach."""
        if dialled.lane is None or dialled.lane.offer != offer:
            self._leave(dialled)
            dialled.lane = Lane.open(offer, self._board)

    @staticmethod
    def _leave(dialled: _Dialled) -> None:
        if dialled.lane is not None:
            dialled.lane.close()
            dialled.lane = None

    def _take_lanes(self) -> None:
        for descriptor in self._lanes.accept():
            self._poller.register(descriptor, zmq.POLLIN)
        for descriptor in self._lanes.excess():
            self._close_lane(descriptor)
        self._descriptors = None

    def _from_lane(self, descriptor: int) -> Iterator[Inbound]:
        found = self._lanes.take(descriptor)
        if found is None:
            self._close_lane(descriptor)
            return
        source, messages = found
        board = self._lanes.board(source)
        for message in messages:
            yield Inbound(source.connection, source.user, message, board)

    def _close_lane(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        self._lanes.close_lane(descriptor)
        self._descriptors = None

    def _take_refusals(self) -> None:
        """Count and log connections that did not get as far as a message."""
        for _ in range(MAX_BATCH):
            if not self._monitor.poll(0):
                return
            event = zmq.Event(zmq.utils.monitor.recv_monitor_message(self._monitor)["event"])
            self.refused += 1
            self._warnings.warning("refused a connection to %s: %s", self.address, _REFUSALS[event])

    def close(self) -> None:
        """Close every socket; what was queued has a moment to leave. A second call does nothing."""
        if self._context.closed:
            return
        self.flush()
        for dialled in self._dialled.values():
            dialled.socket.close()
            self._leave(dialled)
        self._dialled.clear()
        self._lanes.close()
        if self._board is not None:
            self._board.close()
        if hasattr(self, "_monitor"):
            self._router.disable_monitor()
            self._monitor.close(0)
        if hasattr(self, "_router"):
            self._router.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake_fd)


MAX_BATCH = 1024
MAX_FRAMES = 64
"""Messages that leave as one."""


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived on a socket, up to a bound, so that none starves another."""
    for _ in range(MAX_BATCH):
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # `Again` would cost several times as much
            return
        yield socket.recv_multipart(zmq.DONTWAIT, copy=False)


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def _authenticator(
    context: zmq.Context[zmq.Socket[bytes]], allow: Callable[[str], bool]
) -> zmq.auth.thread.ThreadAuthenticator:
    """Let in the keys that `allow` knows."""

    class Provider:
        def callback(self, _domain: str, key: bytes) -> bool:
            known = allow(key.decode())
            if not known:
                complaints.warning("refused a connection: its public key %s is none that is known", key.decode())
            return known

    complaints = RateLimitedLog(logger)
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", Provider())
    return authenticator
