"""Local sockets beside the TCP connections of the control channel, between processes of one machine.

A message over TCP wakes two threads of ZeroMQ besides the one that reads it, which is most of the cost of a small request. So a
rank that accepts a peer invites it to a local socket: a name in this network namespace, and a token. A peer that can connect
sends its messages there from then on; any other ignores the invitation. Messages may be lost when a local connection ends, and
may overtake those that still travel over TCP. The protocol allows for both.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from disagg.core.thread_log import ThreadLog
from disagg.machine.processes import peer_credentials
from disagg.runtime.completion_page import CompletionPage, CompletionPageView

logger = ThreadLog(__name__)

MAX_PACKET_NBYTES = 64 << 10
"""Longer messages go over TCP."""
TOKEN_NBYTES = 16
MAX_INVITATIONS = 4096
"""Invitations, accepted or not. Beyond this the oldest are void."""
MAX_UNAUTHENTICATED = 64
"""Connections that have not sent their token yet. Beyond this the oldest are closed."""
MAX_PACKETS = 256
"""Packets taken from one connection before the next one is read."""
_BACKLOG = 64
_LENGTH = struct.Struct("<I")
_NOTHING = bytes(4)
"""The result of FIONREAD if nothing is queued."""


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The name of a local socket and the token that it asks for. `polls`: its reader also polls completion pages."""

    name: str
    token: bytes
    polls: bool = False


_INVITATION = msgspec.msgpack.Decoder(Invitation)


class Source(NamedTuple):
    """The TCP connection that a local one belongs to, and the public key that its peer has there."""

    connection: bytes
    user: str


class LocalListener:
    """The receiving ends of local connections. Used by one thread, which polls `fileno` and the `descriptors`.

    `polls`: that thread polls without a sleep at times, so peers should pass their completion pages.
    """

    def __init__(self, *, polls: bool = False) -> None:
        self._polls = polls
        self._name = f"disagg-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(_BACKLOG)
        self._invitations: OrderedDict[Source, Invitation] = OrderedDict()
        self._unauthenticated: OrderedDict[int, socket.socket] = OrderedDict()
        self._connections: dict[int, tuple[socket.socket, Source]] = {}
        self._pages: dict[Source, tuple[int, CompletionPageView]] = {}

    def fileno(self) -> int:
        """Readable when a peer connects."""
        return self._socket.fileno()

    def invite(self, source: Source) -> bytes:
        """The encoded invitation for the peer of a TCP connection. It stays the same as long as that connection lives."""
        invitation = self._invitations.get(source) or Invitation(
            self._name, secrets.token_bytes(TOKEN_NBYTES), polls=self._polls
        )
        self._invitations[source] = invitation
        self._invitations.move_to_end(source)
        while len(self._invitations) > MAX_INVITATIONS:
            self._invitations.popitem(last=False)
        return msgspec.msgpack.encode(invitation if invitation.polls else (invitation.name, invitation.token))

    def revoke(self, source: Source) -> None:
        """The TCP connection has ended. Its peer may still get the invitation, from an answer that was on its way."""
        self._invitations.pop(source, None)

    def accept(self) -> Iterator[int]:
        """Accept connections of this user's processes. Yields the descriptors to poll from now on."""
        while True:
            try:
                found, _ = self._socket.accept()
            except OSError:  # none left, or it has gone again
                return
            found.setblocking(False)
            if peer_credentials(found).user != os.geteuid():
                found.close()
                continue
            self._unauthenticated[found.fileno()] = found
            yield found.fileno()

    def excess(self) -> list[int]:
        """Descriptors of connections to close, because too many have not sent a token."""
        return list(self._unauthenticated)[: max(0, len(self._unauthenticated) - MAX_UNAUTHENTICATED)]

    def page_of(self, source: Source) -> CompletionPageView | None:
        """The completion page of a peer that has a local connection, or `None`."""
        found = self._pages.get(source)
        return found[1] if found is not None else None

    def take(self, descriptor: int) -> tuple[Source, list[bytes]] | None:
        """The source and the messages that have arrived. `None` if the connection must be closed: it has ended, or its token
        is not valid.
        """
        if descriptor in self._unauthenticated and not self._authenticate(descriptor):
            return None
        known = self._connections.get(descriptor)
        if known is None:
            return None
        connection, source = known
        messages: list[bytes] = []
        for _ in range(MAX_PACKETS):
            try:
                packet = connection.recv(MAX_PACKET_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet or not _unpack(packet, messages):
                return (source, messages) if messages else None  # the next call finds the end again
            if fcntl.ioctl(descriptor, termios.FIONREAD, _NOTHING) == _NOTHING:
                break
        return source, messages

    def _authenticate(self, descriptor: int) -> bool:
        """Whether a connection has sent the token of an invitation."""
        found = self._unauthenticated[descriptor]
        shown: list[int] = []
        try:
            token, shown, _, _ = socket.recv_fds(found, TOKEN_NBYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
            source = next(
                (s for s, invitation in self._invitations.items() if secrets.compare_digest(invitation.token, token)), None
            )
            if source is None:
                return False
            if shown and self._polls:
                page = CompletionPageView.of(shown[0])
                if page is None:  # its peer would rely on it
                    return False
                self._pages[source] = descriptor, page
        except OSError:
            return False
        finally:
            for each in shown:
                os.close(each)
        self._connections[descriptor] = self._unauthenticated.pop(descriptor), source
        return True

    def descriptors(self) -> list[int]:
        """Descriptors of everything that was accepted and not closed."""
        return [*self._unauthenticated, *self._connections]

    def holds(self, descriptor: int) -> bool:
        """Whether a descriptor was accepted and not closed."""
        return descriptor in self._unauthenticated or descriptor in self._connections

    def of(self, connection: bytes) -> list[int]:
        """Descriptors of the local connections that belong to a TCP connection."""
        return [descriptor for descriptor, (_, source) in self._connections.items() if source.connection == connection]

    def close_connection(self, descriptor: int) -> None:
        """Close one connection."""
        found = self._unauthenticated.pop(descriptor, None)
        if found is None:
            found, source = self._connections.pop(descriptor)
            if self._pages.get(source, (-1,))[0] == descriptor:
                del self._pages[source]
        found.close()

    def close(self) -> None:
        """Close the socket and every connection."""
        for descriptor in self.descriptors():
            self.close_connection(descriptor)
        self._socket.close()


def _unpack(packet: bytes, messages: list[bytes]) -> bool:
    """Append the messages of a packet. Returns whether the packet is well-formed."""
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


class LocalConnection:
    """The sending end of a local connection. Used by one thread. `polled`: its reader polls this side's completion page."""

    def __init__(self, opened: socket.socket, invitation: bytes, *, polled: bool) -> None:
        self._socket = opened
        self.invitation = invitation
        self.polled = polled

    @classmethod
    def open(cls, invitation: bytes, page: CompletionPage | None = None) -> LocalConnection | None:
        """Accept an invitation, and pass this side's `page` if the reader polls. `None` if this process cannot reach it, for
        instance because it is on another host.
        """
        try:
            wanted = _INVITATION.decode(invitation)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        try:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:  # no descriptor is left
            return None
        try:
            opened.connect(f"\0{wanted.name}")
            if peer_credentials(opened).user != os.geteuid():
                raise PermissionError
            shown = [page.fileno()] if page is not None and wanted.polls else []
            socket.send_fds(opened, [wanted.token], shown)
        except (OSError, ValueError):
            opened.close()
            return None
        return cls(opened, invitation, polled=bool(shown))

    def send(self, messages: list[bytes]) -> int:
        """Queue messages. Returns how many of them, from the first, fitted. Raises `OSError` if the connection has ended."""
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
        """Close this end. The peer still reads what is queued."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _packets(messages: list[bytes]) -> Iterator[int]:
    """The ends of packets that hold all messages up to the first that is too long for a packet."""
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
