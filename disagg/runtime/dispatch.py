"""Passes arrivals to the protocol and carries out effects on peers. Only the control thread calls this."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from disagg.core.errors import DisaggError, PeerUnreachable, RemoteProtocolError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.machine.descriptors import shortage, too_many_ranks
from disagg.protocol.messages import (
    MAX_HELLO_NBYTES,
    MAX_MESSAGE_NBYTES,
    Message,
    Reject,
    Welcome,
    Writing,
    decode,
    encode,
)
from disagg.protocol.peer_effects import (
    Connect,
    Disconnect,
    Forgotten,
    Lost,
    PeerEffect,
    Probe,
    Ready,
    Refused,
    ReplyOn,
    SendHello,
    SendTo,
    Unanswered,
)
from disagg.protocol.peers import PeerTable
from disagg.protocol.types import PeerRank
from disagg.runtime.connections import Connections
from disagg.runtime.handshake import Handshake
from disagg.runtime.probes import Probes
from disagg.runtime.resolver import Resolver
from disagg.runtime.transfers import Transfers
from disagg.runtime.wire import Arrival, Closed, Late, Reply, Wire

logger = ThreadLog(__name__)

NOT_CONFIGURED_S, REFUSED_S = 3.0, 15.0
"""The log reports a peer that is not configured here, and one that refuses this rank, if that lasts so long: the two sides are
seldom configured at once.
"""
SHORTAGE_S = 0.1
"""How long a shortage of descriptors is taken to last."""


class Dispatch:
    """`command` hands a call over to the control thread."""

    def __init__(
        self,
        *,
        channel: Wire,
        peers: PeerTable,
        handshake: Handshake,
        connections: Connections,
        transfers: Transfers,
        command: Callable[[Callable[[float], None]], None],
        on_peer_changed: Callable[[str], None],
        on_forgotten: Callable[[str, str], None],
    ) -> None:
        self.channel = channel
        self._peers = peers
        self._handshake = handshake
        self._connections = connections
        self._resolver = Resolver(command, name=str(handshake.me))
        self._dials: dict[int, str] = {}  # the resolved address of each connection, empty until then
        self.probes = Probes(peers.on_gone)
        self.transfers = transfers
        self._on_peer_changed = on_peer_changed
        self._on_forgotten = on_forgotten
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._short, self._short_until = "", 0.0
        self._has_warned_of_limit = False
        self.num_refused_messages = self.num_rejected_hellos = 0

    # -- in ----------------------------------------------------------------------------------------------------------

    def take(self, arrived: Arrival, now: float) -> bool:
        """Returns whether `arrived` was about a request. A message that breaks the protocol is refused and changes nothing."""
        if isinstance(arrived, Closed):
            if self._peers.on_closed(arrived.connection, now) is not None:
                self._connections.check_soon()
            return False
        try:
            is_stranger = not isinstance(arrived, Reply) and (
                isinstance(arrived, Late) or not self._peers.accepts(arrived.connection)
            )
            message = decode(arrived.data, most=MAX_HELLO_NBYTES if is_stranger else MAX_MESSAGE_NBYTES)
            if isinstance(arrived, Reply):
                answering = self._peers.expected_at(arrived.dial)
                self._peers.on_reply(arrived.dial, message, now)
                if answering is not None and isinstance(message, Reject | Welcome):
                    self._on_peer_changed(answering.instance)
                    self.announce(answering)
                return False
            if isinstance(arrived, Late):
                self._peers.on_late(arrived.user, message, now)
                return False
            peer = self._peers.on_inbound(arrived.connection, arrived.user, message, now)
            if peer is None:
                return False
            if isinstance(message, Writing):
                self._handshake.written_by(peer, message)
                return False
            self.transfers.on_message(peer, message, now)
        except RemoteProtocolError as error:
            self._refuse(error)
            return False
        except BaseException:  # a fault here must not end the thread that serves every other peer
            logger.exception("%s: fault in a message of %d bytes", self._handshake.me, len(arrived.data))
            return False
        return True

    def _refuse(self, error: RemoteProtocolError) -> None:
        self.num_refused_messages += 1
        self._warnings.warning("%s: refused a message: %s", self._handshake.me, error)

    # -- out ---------------------------------------------------------------------------------------------------------

    def carry_out(self, now: float) -> None:
        """Requests end last: that may yield the GIL."""
        self.carry_out_peers(now)
        self.transfers.carry_out(self.send, now)
        self.channel.flush()
        self.transfers.finish()

    def carry_out_peers(self, now: float) -> None:
        while self._peers.effects:
            effect = self._peers.effects.popleft()
            try:
                self._carry_out_peer(effect, now)
            except BaseException:  # concerns one peer
                logger.exception("%s: fault in %s", self._handshake.me, type(effect).__name__)

    def _carry_out_peer(self, effect: PeerEffect, now: float) -> None:
        match effect:
            case Connect(dial, address, public_key):
                self._dials[dial] = ""
                to = self._peers.expected_at(dial)
                connect = functools.partial(self._connect, dial, address, public_key)
                self._resolver.resolve(address, "" if to is None else to.instance, connect)
            case Disconnect(dial):
                self._dials.pop(dial, None)
                self.probes.close(dial)
                self.channel.disconnect(dial)
            case SendHello(dial) as sent:
                leader, to = self._peers.leader_address, self._peers.expected_at(dial)
                self.channel.send(dial, encode(self._handshake.hello(sent, leader=leader, to=to)))
            case SendTo(dial, message):
                self.channel.send(dial, encode(message))
            case ReplyOn(connection, message):
                if isinstance(message, Reject) and not message.hello_first:
                    self.num_rejected_hellos += 1
                    # Usual at the start: it passes once `add_peer` is called here, too.
                    after_s = NOT_CONFIGURED_S if message.field == "instance" else 0.0
                    self._warnings.warning("%s: rejected a hello: %s", self._handshake.me, message.reason, after_s=after_s)
                self.channel.reply(connection, encode(message))
            case Unanswered(instance, address):
                me = self._handshake.me
                what = "another rank of this instance" if instance == me.instance else f"peer {instance!r}"
                logger.warning("%s: %s does not answer at %s", me, what, address)
            case Refused(instance, address, problem):
                me = self._handshake.me
                if instance == me.instance:
                    self._warnings.warning("%s: its leader at %s refused it: %s", me, address, problem)
                else:
                    what = "%s: peer %r at %s cannot be used: %s"
                    self._warnings.warning(what, me, instance, address, problem, after_s=REFUSED_S)
            case Probe(dial):
                if resolved := self._dials.get(dial):
                    self.probes.begin(dial, resolved, now)
            case Ready() as ready:
                self._connections.connect(ready)
            case Lost() as lost:
                self._connections.lose(lost, now)
                self.transfers.lost(lost.peer, lost.cause, now)
                self._on_peer_changed(lost.peer.instance)
            case Forgotten(instance, cause):
                self._on_forgotten(instance, cause)

    def _connect(self, dial: int, address: str, public_key: str | None, resolved: str | OSError) -> None:
        if dial not in self._dials:
            return
        try:
            if isinstance(resolved, OSError):
                raise PeerUnreachable(f"{address}: the host cannot be resolved: {resolved}")
            if short := self._shortage():
                raise PeerUnreachable(f"{address}: {short}")
            self.channel.connect(dial, resolved, public_key=public_key)
            self._dials[dial] = resolved
            self._warn_of_limit()
        except DisaggError as error:
            self._warnings.warning("%s: %s", self._handshake.me, error)
            self._peers.cannot_dial(dial, str(error))
            if isinstance(resolved, OSError):
                self._peers.on_gone(dial, str(error))
        else:
            if resolved != address:
                self._peers.dialled(dial, time.monotonic())

    def _warn_of_limit(self) -> None:
        if not self._has_warned_of_limit and (problem := too_many_ranks(self._peers.num_ranks)):
            self._has_warned_of_limit = True
            logger.warning("%s: %s", self._handshake.me, problem)

    def _shortage(self) -> str:
        """Why no connection may be opened now; empty if one may."""
        now = time.monotonic()
        if not self._short or now >= self._short_until:
            self._short, self._short_until = shortage(), now + SHORTAGE_S
        return self._short

    def announce(self, peer: PeerRank) -> None:
        """Tell a peer by which engine this rank writes to it, if there are several."""
        if (writing := self._handshake.writing(peer)) is not None:
            self.send(peer, writing)

    def send(self, peer: PeerRank, message: Message) -> None:
        """The protocol resends a message that cannot be sent now. One that cannot be encoded only fails its request."""
        link = self._peers.link(peer)
        if link is None:
            return
        try:
            data = encode(message)
        except BaseException:
            logger.exception("%s: a %s for %s could not be encoded", self._handshake.me, type(message).__name__, peer)
            return
        self.channel.send(link.dial, data)

    def close(self) -> None:
        self._resolver.close()
        self.probes.close_all()
