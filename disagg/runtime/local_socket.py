"""Short cuts of the control channel between processes of one machine: Unix sockets beside the TCP connections.

A message over TCP wakes two threads of ZeroMQ besides the one that reads it, which is most of what a small request costs.
So who lets a peer in offers it a lane: the name of a socket that only this machine's network namespace has, and a secret.
A peer that can open it sends its messages there from then on; any other never knows. A lane may lose what it holds when it
ends, and overtakes what still travels over TCP: the protocol allows for both.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import struct
import termios
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from disagg.core import _native
from disagg.runtime.completion_page import CompletionPage, CompletionPageView

logger = logging.getLogger(__name__)

MAX_PACKET_NBYTES = 64 << 10
"""Longer messages go over TCP."""
SECRET_NBYTES = 16
MAX_OFFERS = 4096
"""Lanes offered, opened or not; beyond it the oldest offers are void."""
MAX_UNPROVED = 64
"""Connections that have not shown a secret yet; beyond it the oldest are closed."""
MAX_PACKETS = 256
"""Packets that are taken from one lane before another has its turn."""
_BACKLOG = 64
_LENGTH = struct.Struct("<I")
_NOTHING = bytes(4)
"""No byte that waits, as the system says it."""
_CREDENTIALS = struct.Struct("3i")


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a lane begins, and what opens it; whether its reader `polls` without a sleep, at a board as well."""

    name: str
    secret: bytes
    polls: bool = False


_OFFER = msgspec.msgpack.Decoder(Offer)


class Source(NamedTuple):
    """The TCP connection that a lane stands beside, and the key that its peer has shown there."""

    connection: bytes
    user: str


class Listener:
    """The receiving ends of lanes. Used by one thread; `fileno`s of it and of its lanes are for that thread to poll.
    `polls`: that thread does so without a sleep at times, and peers are to show their boards.
    """

    def __init__(self, *, polls: bool = False) -> None:
        self._looks = polls
        self._name = f"disagg-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(_BACKLOG)
        self._offers: OrderedDict[Source, Offer] = OrderedDict()
        self._unproved: OrderedDict[int, socket.socket] = OrderedDict()
        self._lanes: dict[int, tuple[socket.socket, Source]] = {}
        self._boards: dict[Source, tuple[int, CompletionPageView]] = {}

    def fileno(self) -> int:
        """Readable when a peer opens a lane."""
        return self._socket.fileno()

    def offer(self, source: Source) -> bytes:
        """What is to be told to the peer of a connection; the same as long as the connection lives."""
        offer = self._offers.get(source) or Offer(self._name, secrets.token_bytes(SECRET_NBYTES), polls=self._looks)
        self._offers[source] = offer
        self._offers.move_to_end(source)
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return msgspec.msgpack.encode(offer if offer.polls else (offer.name, offer.secret))

    def accept(self) -> Iterator[int]:
        """Take connections of this user's processes; the descriptors to poll from now on."""
        while True:
            try:
                found, _ = self._socket.accept()
            except OSError:  # no more, or it is gone again
                return
            found.setblocking(False)
            if _user_of(found) != os.geteuid():
                found.close()
                continue
            self._unproved[found.fileno()] = found
            yield found.fileno()

    def excess(self) -> list[int]:
        """Descriptors of connections to close, since too many have shown no secret."""
        return list(self._unproved)[: max(0, len(self._unproved) - MAX_UNPROVED)]

    def board(self, source: Source) -> CompletionPageView | None:
        """What a peer shows, as long as it has a lane; `None` where that is nothing, or nobody here polls."""
        found = self._boards.get(source)
        return found[1] if found is not None else None

    def take(self, descriptor: int) -> tuple[Source, list[bytes]] | None:
        """What has arrived in a lane, and from whom; `None` where the lane is over, or none: it is to be closed."""
        if descriptor in self._unproved and not self._prove(descriptor):
            return None
        known = self._lanes.get(descriptor)
        if known is None:
            return None
        lane, source = known
        messages: list[bytes] = []
        for _ in range(MAX_PACKETS):
            try:
                packet = lane.recv(MAX_PACKET_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet or not _unpack(packet, messages):
                return (source, messages) if messages else None  # if there are any, the next look finds its end again
            if fcntl.ioctl(descriptor, termios.FIONREAD, _NOTHING) == _NOTHING:
                break
        return source, messages

    def _prove(self, descriptor: int) -> bool:
        """Whether a connection has shown the secret of an offer."""
        found = self._unproved[descriptor]
        shown: list[int] = []
        try:
            secret, shown, _, _ = socket.recv_fds(found, SECRET_NBYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
            source = next((s for s, offer in self._offers.items() if secrets.compare_digest(offer.secret, secret)), None)
            if source is None:
                return False
            if shown and self._looks:
                board = CompletionPageView.of(shown[0])
                if board is None:  # its peer would rely on it
                    return False
                self._boards[source] = descriptor, board
        except OSError:
            return False
        finally:
            for each in shown:
                os.close(each)
        self._lanes[descriptor] = self._unproved.pop(descriptor), source
        return True

    def descriptors(self) -> list[int]:
        """Of everything that has been accepted and not closed."""
        return [*self._unproved, *self._lanes]

    def close_lane(self, descriptor: int) -> None:
        """Close a lane, or what has not become one."""
        found = self._unproved.pop(descriptor, None)
        if found is None:
            found, source = self._lanes.pop(descriptor)
            if self._boards.get(source, (-1,))[0] == descriptor:
                del self._boards[source]
        found.close()

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self.descriptors():
            self.close_lane(descriptor)
        self._socket.close()


def _user_of(peer: socket.socket) -> int:
    """Whose process is at the other end."""
    user: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def _unpack(packet: bytes, messages: list[bytes]) -> bool:
    """Append the messages of a packet; whether it is one."""
    at, end = 0, len(packet)
    while at < end:
        if at + _LENGTH.size > end:
            return False
        (nbytes,) = _LENGTH.unpack_from(packet, at)
        at += _LENGTH.size
        if nbytes > end - at:
            return False
        messages.append(packet[at : at + nbytes])
        at += nbytes
    return True


class Lane:
    """The sending end of a lane. Used by one thread. `shows`: its reader has this side's board."""

    def __init__(self, opened: socket.socket, offer: bytes, *, shows: bool) -> None:
        self._socket = opened
        self.offer = offer
        self.shows = shows

    @classmethod
    def open(cls, offer: bytes, board: CompletionPage | None = None) -> Lane | None:
        """The lane that was offered, its reader shown `board` if it polls; `None` where this process cannot reach it: it is
        another host's, say.
        """
        try:
            wanted = _OFFER.decode(offer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.connect(f"\0{wanted.name}")
            if _user_of(opened) != os.geteuid():
                raise PermissionError
            shown = [board.fileno()] if board is not None and wanted.polls else []
            socket.send_fds(opened, [wanted.secret], shown)
        except (OSError, ValueError):
            opened.close()
            return None
        return cls(opened, offer, shows=bool(shown))

    def send(self, messages: list[bytes]) -> int:
        """Queue messages; how many of them, from the first, there was room for. Raises `OSError` where the lane is over."""
        sent = 0
        for stop in _packets(messages):
            packet = b"".join(part for message in messages[sent:stop] for part in (_LENGTH.pack(len(message)), message))
            try:
                _native.send(self._socket.fileno(), packet)
            except BlockingIOError:
                return sent
            sent = stop
        return sent

    def close(self) -> None:
        """The peer still reads what is queued."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _packets(messages: list[bytes]) -> Iterator[int]:
    """Where packets end that hold all messages up to the first that is too long for one."""
    nbytes = 0
    for number, message in enumerate(messages):
        needed = _LENGTH.size + len(message)
        if needed > MAX_PACKET_NBYTES:
            if number:
                yield number
            return
        if nbytes + needed > MAX_PACKET_NBYTES:
            yield number
            nbytes = 0
        nbytes += needed
    if messages:
        yield len(messages)
