"""Hellos of peers: who is admitted, under whose name, and which answer each gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from disagg.core.errors import DisaggError, LayoutError, RemoteProtocolError
from disagg.protocol.inbound import Accepted, InboundConnections
from disagg.protocol.links import Links
from disagg.protocol.members import Members
from disagg.protocol.messages import PROTOCOL_VERSION, Busy, Hello, Member, Reject, Renew, Welcome
from disagg.protocol.peer_state import Identity, PeerConnection, PeerEffect, ReplyOn, Undecided
from disagg.protocol.types import PeerRank

GREET_AGAIN_S = 5.0
"""A hello that is due later than this waits because the peer has refused the last one."""
HelloAcceptor = Callable[[Hello, Callable[[], tuple[Member, ...]]], Welcome]
"""Validates a configured peer's hello and returns the welcome. Raises `DisaggError` to reject it for good, `Undecided` to be
asked again.
"""


class NotConfigured(RemoteProtocolError):
    """A hello comes from an instance that nobody has configured here, perhaps not yet."""


class Admission:
    """Answers the hellos that reach one rank."""

    def __init__(
        self,
        identity: Identity,
        *,
        members: Members,
        links: Links,
        inbound: InboundConnections,
        effects: deque[PeerEffect],
        accept_hello: HelloAcceptor,
        admit: Callable[[Hello, str, float], bool],
        expel: Callable[[str], None],
        hello_retry_s: float,
    ) -> None:
        self._identity = identity
        self._members = members
        self._links = links
        self._inbound = inbound
        self._effects = effects
        self._accept_hello = accept_hello
        self._admit_unknown = admit
        self._expel = expel
        self._hello_retry_s = hello_retry_s

    def on_hello(self, connection: bytes, user: str, hello: Hello, now: float) -> None:
        """Answer a hello on a connection that a peer opened."""
        try:
            if hello.version != PROTOCOL_VERSION:
                peer = PeerRank(hello.instance, hello.rank)
                self._reject(
                    connection,
                    f"protocol version: {hello.version} at {peer}, {PROTOCOL_VERSION} at {self._identity}",
                    final=True,
                )
                return
            if self._is_for_another(connection, hello):
                return
            if hello.instance == self._identity.instance:
                self._members.join(connection, user, hello)
            else:
                self._admit(user, hello, now)
                self._greet_again(PeerRank(hello.instance, hello.rank), now)
                if missing := self._members.missing():
                    self._effects.append(ReplyOn(connection, Busy(reason=missing, retry_after_s=self._hello_retry_s)))
                    return
                if self._inbound.is_overtaken(connection, hello):
                    return
        except NotConfigured as error:
            self._reject(connection, str(error), final=False, field="instance")
            return
        except RemoteProtocolError as error:
            self._reject(connection, str(error), final=False)
            return
        except LayoutError as error:
            self._reject(connection, str(error), final=True)
            return
        if hello.peer_epoch != self._identity.epoch:  # its generation counts for an earlier process than this one
            hello = msgspec.structs.replace(hello, generation=0)
        try:
            welcome = self._accept_hello(hello, self._members.named)
        except Undecided as error:
            self._effects.append(ReplyOn(connection, Busy(reason=str(error), retry_after_s=error.retry_s)))
            return
        except DisaggError as error:
            self._reject(connection, str(error), final=True)
            self._expel(hello.instance)
            return
        if hello.instance != self._identity.instance:
            self._inbound.accept(connection, hello, members=self._members.num_changes)
            self._on_accepted(hello, now)
        self._effects.append(ReplyOn(connection, welcome))  # last: the peer connects its engine once it gets this

    def _is_for_another(self, connection: bytes, hello: Hello) -> bool:
        """Reject a hello to another rank: accepted, it would take the place of the connection that the same process has opened
        to this rank by its right name.
        """
        me = self._identity
        if hello.to is None or hello.to == me.peer:
            return False
        peer, expected = PeerRank(hello.instance, hello.rank), PeerRank(*hello.to)
        self._reject(connection, f"{me} is at {me.address}, where {peer} expects {expected}", final=True)
        return True

    def _admit(self, user: str, hello: Hello, now: float) -> None:
        """Check that a hello comes from a peer that is configured, or that the server admits. Raises `RemoteProtocolError` with
        a reason that may pass.
        """
        peer = PeerRank(hello.instance, hello.rank)
        if hello.instance not in self._links.instances and not self._admit_unknown(hello, user, now):
            raise NotConfigured(f"peer {hello.instance!r} is not configured at {self._identity}")
        instance = self._links.instances[hello.instance]
        if instance.public_key is not None and instance.public_key != user:
            raise RemoteProtocolError(f"peer {hello.instance!r} is configured with another public key at {self._identity}")
        link, accepted = self._links.to(peer), self._inbound.of(peer)
        holder = link.epoch if link is not None and link.is_ready and not link.ended else None
        if holder is None and accepted is not None:
            holder = accepted.epoch
        if holder not in (None, hello.epoch):
            raise RemoteProtocolError(
                f"another process has the name {peer} and is connected to {self._identity}: end it, or choose another name"
            )

    def on_renew(self, connection: bytes, accepted: Accepted, now: float) -> None:
        """Answer a peer whose hello on this connection was accepted, and still holds."""
        if accepted.members != self._members.num_changes:
            reason = f"the ranks of {self._identity.instance!r} have changed: send hello"
            self._effects.append(ReplyOn(connection, Reject(field="members", reason=reason, hello_first=True)))
            return
        self._greet_again(accepted.peer, now)
        link = self._links.to(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            self._confirm(link, now)
        self._effects.append(ReplyOn(connection, Renew()))

    def _greet_again(self, peer: PeerRank, now: float) -> None:
        """A peer that had refused this rank for a reason that may pass says hello: ask it again, whatever it gets itself."""
        link = self._links.to(peer)
        if link is None:
            return
        link.heard = True
        if not link.is_ready and not link.refused and link.hello_at > now + GREET_AGAIN_S:
            self._links.greet_soon(link, now)

    def _on_accepted(self, hello: Hello, now: float) -> None:
        """A hello of a peer was accepted: see whether its process, or the generation of the connection, is new."""
        link = self._links.to(PeerRank(hello.instance, hello.rank))
        if link is None:
            return
        is_new = link.epoch != hello.epoch
        if is_new:
            self._links.drop(link, "restarted")
            link.epoch, link.generation = hello.epoch, hello.generation
        elif hello.generation > link.generation:
            self._links.drop(link, "the peer has given the connection up", renewed=True)
            link.generation = hello.generation
        if is_new:
            link.refused = False
        self._confirm(link, now)
        if link.is_ready and hello.again:
            self._links.greet_soon(link, now)

    def _confirm(self, link: PeerConnection, now: float) -> None:
        """A connection that the peer opened is there: it is not lost, or it is greeted in return."""
        if link.is_ready:
            link.confirm()
        elif not link.refused:
            link.greet_soon(now)
        self._links.arm(link)

    def _reject(self, connection: bytes, reason: str, *, final: bool, field: str = "hello") -> None:
        self._effects.append(ReplyOn(connection, Reject(field=field, reason=reason[:4096], final=final)))
