"""The peer table: configured instances, their ranks, handshakes and liveness. No I/O and no clock.

Every rank connects to every rank of a peer instance and sends `hello`. The answer is `welcome`, `busy` or `reject` on the same
connection, which then carries all other messages to that rank. Messages from a peer count only after its hello was accepted. A
leader's welcome names the other ranks of its instance. A restarted rank has a new epoch; connections of the old epoch stay
closed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Set

from disagg.core.errors import DisaggError, LayoutError, RemoteProtocolError
from disagg.protocol.inbound import Accepted, InboundConnections
from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Busy,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Reject,
    Welcome,
)
from disagg.protocol.peer_state import (
    Connect,
    ConnectionLimits,
    ConnectionState,
    Disconnect,
    Identity,
    Lost,
    PeerConnection,
    PeerEffect,
    PeerInstance,
    Ready,
    ReplyOn,
    SendHello,
    SendTo,
)
from disagg.protocol.types import NEVER, PeerRank

RECONNECT_AFTER = 4
"""Unanswered hellos before the connection is reopened."""
HelloAcceptor = Callable[[Hello, Callable[[], tuple[Member, ...]]], Welcome]
"""Validates a configured peer's hello and returns the welcome. Raises `DisaggError` to reject it."""
WelcomeValidator = Callable[[Welcome], int]
"""Validates a welcome and returns the peer's number of ranks. Raises `DisaggError` to refuse it."""


class PeerTable:
    """Every connection of one rank, in both directions."""

    def __init__(
        self,
        identity: Identity,
        *,
        leader: str | None,
        own_key: str | None = None,
        accept_hello: HelloAcceptor,
        validate_welcome: WelcomeValidator,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.identity = identity
        self.effects: deque[PeerEffect] = deque()
        self.instances: dict[str, PeerInstance] = {}
        self.members: dict[int, Member] = {identity.rank: Member(identity.rank, identity.address, identity.epoch)}
        self._leader = leader
        self._own_key = own_key
        self._accept_hello = accept_hello
        self._validate_welcome = validate_welcome
        self._limits = limits or ConnectionLimits()
        self._inbound = InboundConnections()
        self._dials = itertools.count()
        self._found: dict[PeerRank, PeerConnection] = {}
        if leader is not None:
            self._siblings = PeerInstance(identity.instance, leader, own_key)

    def add_peer(self, name: str, address: str, public_key: str | None, now: float) -> None:
        """Configure an instance by the address of its leader. A new address or key replaces the connections. Ranks that
        restarted and sent hello before this side knew their new address stay accepted.
        """
        known = self.instances.get(name)
        if known is not None and (known.address, known.public_key) == (address, public_key):
            return
        if known is not None:
            epochs = {link.epoch for link in known.links.values()} if known.public_key == public_key else None
            self.remove_peer(name, "its address was changed", epochs=epochs)
        instance = self.instances[name] = PeerInstance(name, address, public_key)
        self._open(instance, address, None, now)

    def remove_peer(self, name: str, cause: str, *, epochs: Set[int] | None = None) -> None:
        """Forget an instance: its requests end. Its ranks at `epochs` (`None`: at any) are not accepted any more."""
        instance = self.instances.pop(name)
        for link in list(instance.links.values()):
            self._drop(link, cause)
            self.effects.append(Disconnect(link.address))
        self._inbound.forget_instance(name, epochs)

    def join(self, now: float) -> None:
        """Connect to the leader of this instance, if that is another rank."""
        if self._leader is not None:
            self._open(self._siblings, self._leader, None, now)

    def refuse(self, peer: PeerRank, problem: str, now: float) -> None:
        """A rank that has answered cannot be used. Send it hello again later."""
        link = self.link(peer)
        if link is not None:
            link.state, link.heartbeat_at, link.problem = ConnectionState.GREETING, NEVER, problem
            link.hello_at = now + self._limits.max_hello_retry_s

    def link(self, peer: PeerRank) -> PeerConnection | None:
        """The ready connection to a rank."""
        link = self._to(peer)
        return link if link is not None and link.state is ConnectionState.READY else None

    def _to(self, peer: PeerRank) -> PeerConnection | None:
        """The connection to a rank, ready or not."""
        instance = self.instances.get(peer.instance)
        if instance is None:
            return None
        known = self._found.get(peer)
        if known is not None and known.rank == peer.rank and instance.links.get(known.address) is known:
            return known
        found = next((link for link in instance.links.values() if link.rank == peer.rank), None)
        if found is not None:
            self._found[peer] = found
        return found

    def on_inbound(self, connection: bytes, user: str, message: AnyMessage, now: float) -> PeerRank | None:
        """Take a message from a connection that a peer opened. Returns its rank if the message is for the sessions."""
        if isinstance(message, Hello):
            self._on_hello(connection, user, message, now)
            return None
        accepted = self._inbound.get(connection)
        if accepted is None:
            self.effects.append(ReplyOn(connection, Reject(field="connection", reason="send hello first", hello_first=True)))
            return None
        self._heard(accepted, now)
        if isinstance(message, Goodbye):
            self._inbound.forget(connection)
            self._on_goodbye(accepted, f"closed: {message.reason}", now)
            return None
        return None if isinstance(message, Heartbeat | Welcome | Reject) else accepted.peer

    def _on_hello(self, connection: bytes, user: str, hello: Hello, now: float) -> None:
        peer = PeerRank(hello.instance, hello.rank)
        try:
            if hello.version != PROTOCOL_VERSION:
                raise RemoteProtocolError(f"protocol version: {hello.version} at {peer}, {PROTOCOL_VERSION} at {self._me}")
            if hello.instance == self.identity.instance:
                self._on_sibling(connection, user, hello)
                return
            instance = self.instances.get(hello.instance)
            if instance is None:
                raise RemoteProtocolError(f"peer {hello.instance!r} is not configured at {self._me}")
            if instance.public_key is not None and instance.public_key != user:
                raise RemoteProtocolError(f"peer {hello.instance!r} is configured with another public key at {self._me}")
            if self._missing:
                reason = f"{len(self.members)} of {self.identity.num_ranks} ranks of {self.identity.instance!r} have joined"
                self.effects.append(ReplyOn(connection, Busy(reason=reason, retry_after_s=self._limits.hello_retry_s)))
                return
            if self._inbound.is_overtaken(connection, hello):
                return
            welcome = self._accept_hello(hello, self._named)
        except DisaggError as error:
            self._reject(connection, error)
            return
        accepted = self._inbound.accept(connection, hello)
        self.effects.append(ReplyOn(connection, welcome))
        link = self._to(peer)
        if link is None:
            return
        restarted = link.state is ConnectionState.READY and link.epoch != hello.epoch
        if restarted or hello.generation > link.generation:
            self._drop(link, "restarted" if restarted else "the peer has given the connection up", renewed=not restarted)
            link.greet_soon(now)
            link.generation = hello.generation
        else:
            self._heard(accepted, now)  # peers send hellos to a leader as heartbeats

    def _on_sibling(self, connection: bytes, user: str, hello: Hello) -> None:
        """Another rank of this instance joins its leader. If there are keys, it has the instance's own."""
        if self._own_key is not None and user != self._own_key:
            raise RemoteProtocolError(f"rank {hello.rank} of {hello.instance!r} has another public key than {self._me}")
        if not self.identity.leader:
            raise RemoteProtocolError(f"{self._me} is not the leader of {hello.instance!r}")
        if hello.rank >= self.identity.num_ranks or hello.rank == self.identity.rank or hello.address is None:
            raise RemoteProtocolError(
                f"rank {hello.rank} of {self.identity.num_ranks} at {hello.address!r} cannot join {self._me}"
            )
        if hello.table != self.identity.table:
            raise LayoutError(
                f"rank {hello.rank} of {hello.instance!r} declares other layouts or another topology than {self._me}"
            )
        self.members[hello.rank] = Member(hello.rank, hello.address, hello.epoch)
        welcome = self._accept_hello(hello, self._named)
        self.effects.append(ReplyOn(connection, welcome))

    def _reject(self, connection: bytes, error: DisaggError) -> None:
        field_name = "layout" if isinstance(error, LayoutError) else "hello"
        self.effects.append(ReplyOn(connection, Reject(field=field_name, reason=str(error)[:4096])))

    def on_reply(self, address: str, message: AnyMessage, now: float) -> None:
        """Take an answer on a connection that this rank opened."""
        link = self._by_address(address)
        if link is None:
            return
        link.heard_at, link.unanswered = now, 0
        match message:
            case Welcome():
                self._on_welcome(link, message, now)
            case Reject(hello_first=True):
                self._drop(link, "the peer does not know this connection any more")
                link.greet_soon(now)
            case Reject():
                self._drop(link, f"rejected: {message.reason}")
                link.problem = message.reason
            case Busy(request_id=None):
                link.problem = message.reason
                link.hello_at = min(link.hello_at, now + max(message.retry_after_s, 0.01))

    def _on_welcome(self, link: PeerConnection, welcome: Welcome, now: float) -> None:
        if welcome.generation != link.generation:
            return  # the answer to a hello of an earlier generation, whose ring is retired
        try:
            if welcome.instance != link.instance or (link.rank is not None and welcome.rank != link.rank):
                found = PeerRank(welcome.instance, welcome.rank)
                raise RemoteProtocolError(f"{link.address} answers as {found}, expected {link.peer}")
            num_ranks = 1 if link.instance == self.identity.instance else self._validate_welcome(welcome)
        except DisaggError as error:
            self._drop(link, f"refused: {error}")
            link.problem = str(error)
            return
        if link.state is ConnectionState.READY and link.epoch != welcome.epoch:
            self._drop(link, "restarted")
        elif link.state is ConnectionState.READY and link.ring not in (None, welcome.ring):
            self._drop(link, "the peer has started a new connection")
            link.greet_soon(now)
            return
        first = link.state is not ConnectionState.READY
        link.ring = welcome.ring if first else link.ring
        link.rank, link.epoch, link.state, link.problem = welcome.rank, welcome.epoch, ConnectionState.READY, ""
        link.hello_retry_s, link.heartbeat_at = 0.0, now + self._limits.heartbeat_s
        if link.instance == self.identity.instance:
            return
        instance = self.instances[link.instance]
        instance.num_ranks = num_ranks
        if first:
            self.effects.append(Ready(link.peer, welcome.epoch, welcome))
        if link.address == instance.address:
            self._on_members(instance, welcome.members, now)

    def _on_members(self, instance: PeerInstance, members: tuple[Member, ...], now: float) -> None:
        """Connect to the ranks that the leader names, and disconnect from those that it does not name any more."""
        named = {member.address for member in members} | {instance.address}
        for link in [found for found in instance.links.values() if found.address not in named]:
            self._drop(link, "its leader names another address")
            self.effects.append(Disconnect(link.address))
            del instance.links[link.address]
        leader = instance.links[instance.address]
        for member in members:
            if member.rank != leader.rank and member.address not in instance.links:
                self._open(instance, member.address, member.rank, now)

    def tick(self, now: float) -> None:
        """Send hellos and heartbeats, and drop silent peers. Call it after all arrived messages were taken."""
        for link in list(self._links()):
            if link.state is ConnectionState.GREETING and now >= link.hello_at:
                self._greet(link, now)
            elif link.state is ConnectionState.READY and now - link.heard_at >= self._limits.heartbeat_timeout_s:
                self._drop(link, f"silent for {self._limits.heartbeat_timeout_s} s")
                link.greet_soon(now)
            elif now >= link.heartbeat_at:
                link.heartbeat_at = now + self._limits.heartbeat_s
                self._beat(link)

    def _beat(self, link: PeerConnection) -> None:
        """Send a heartbeat. A leader gets a hello instead, whose answer names the ranks of its instance."""
        is_leader = link.instance == self.identity.instance or link.address == self.instances[link.instance].address
        hello = SendHello(link.address, link.generation, link.dial)
        self.effects.append(hello if is_leader else SendTo(link.address, Heartbeat(epoch=self.identity.epoch)))

    def next_tick(self) -> float:
        """When `tick` next has something to do."""
        return min((link.due(self._limits) for link in self._links()), default=NEVER)

    def close(self, reason: str) -> None:
        """Say goodbye to every connected rank."""
        for link in self._links():
            if link.state is ConnectionState.READY:
                self.effects.append(SendTo(link.address, Goodbye(reason=reason)))

    @property
    def _me(self) -> str:
        return f"{self.identity.instance}/{self.identity.rank}"

    def _named(self) -> tuple[Member, ...]:
        """The ranks of this instance that have joined."""
        return tuple(self.members[rank] for rank in sorted(self.members))

    @property
    def _missing(self) -> bool:
        return self.identity.leader and len(self.members) < self.identity.num_ranks

    def _links(self) -> list[PeerConnection]:
        siblings = list(self._siblings.links.values()) if self._leader is not None else []
        return [link for instance in self.instances.values() for link in instance.links.values()] + siblings

    def _by_address(self, address: str) -> PeerConnection | None:
        return next((link for link in self._links() if link.address == address), None)

    def _open(self, instance: PeerInstance, address: str, rank: int | None, now: float) -> None:
        instance.links[address] = PeerConnection(
            instance.name, address, rank, hello_at=now, heard_at=now, dial=next(self._dials)
        )
        self.effects.append(Connect(address, instance.public_key))

    def _greet(self, link: PeerConnection, now: float) -> None:
        limits = self._limits
        link.hello_retry_s = min(link.hello_retry_s * 2 or limits.hello_retry_s, limits.max_hello_retry_s)
        link.hello_at = now + link.hello_retry_s
        if link.unanswered >= RECONNECT_AFTER:
            # ZeroMQ does not retry a connection that was refused, for instance because its key was not known there yet.
            link.unanswered = 0
            link.dial = next(self._dials)
            instance = self._siblings if link.instance == self.identity.instance else self.instances[link.instance]
            self.effects.extend((Disconnect(link.address), Connect(link.address, instance.public_key)))
        link.unanswered += 1
        self.effects.append(SendHello(link.address, link.generation, link.dial))

    def _drop(self, link: PeerConnection, cause: str, *, announced: bool = False, renewed: bool = False) -> None:
        """End this generation of a connection. The next hello begins another."""
        was_ready, link.state, link.problem = link.state is ConnectionState.READY, ConnectionState.GREETING, cause
        link.heartbeat_at = NEVER
        link.generation += was_ready
        if was_ready and link.instance != self.identity.instance:
            self.effects.append(Lost(link.peer, link.epoch, cause, announced, renewed))

    def _on_goodbye(self, accepted: Accepted, cause: str, now: float) -> None:
        link = self.link(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            self._drop(link, cause, announced=True)
            link.hello_at, link.hello_retry_s = now + self._limits.hello_retry_s, 0.0

    def _heard(self, accepted: Accepted, now: float) -> None:
        link = self.link(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            link.heard_at = now
