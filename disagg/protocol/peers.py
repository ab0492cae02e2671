"""The peer table: configured instances, handshakes with their ranks, and liveness. No I/O and no clock.

docs/protocol.md has the rules. A peer lives as long as the connection that it opened to this rank, which libzmq pings even
while the peer's interpreter is busy, and for `CLOSED_GRACE_S` after it. A name belongs to one process at a time, and in any
case to what answers at a configured address.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Set

import msgspec

from disagg.core.errors import DisaggError, LayoutError, RemoteProtocolError
from disagg.protocol.connection import LEADER, PeerConnection, PeerInstance
from disagg.protocol.inbound import Accepted, InboundConnections, Members, check_dialable
from disagg.protocol.links import Links
from disagg.protocol.messages import PROTOCOL_VERSION, AnyMessage, Busy, Goodbye, Hello, Member, Reject, Renew, Welcome
from disagg.protocol.peer_effects import (
    ConnectionLimits,
    Forgotten,
    Identity,
    PeerEffect,
    Probe,
    Ready,
    Refused,
    ReplyOn,
    SendHello,
    SendTo,
    Undecided,
)
from disagg.protocol.types import NEVER, PeerRank

RECONNECT_AFTER = 4
MIN_RETRY_S = 0.01
CLOSED_GRACE_S = 0.5
ASK_AGAIN_S = 0.1
"""How often a peer is asked to connect again: a hello on a dead connection is lost."""
FORGET_CHECK_S = 0.5
NUM_PHASES = 16
"""Intervals of renewal differ, so that a thousand peers are not renewed at once."""
MAX_ADMITTED = 1024
"""The limit on instances that are not configured for good."""
GREET_AGAIN_S = 5.0
"""A hello due later than this waits because the peer refused the last one."""
HelloAcceptor = Callable[[Hello, Callable[[], tuple[Member, ...]]], Welcome]
"""Returns the welcome for a configured peer's hello. Raises `DisaggError` to reject it for good, `Undecided` to be asked
again.
"""
Admit = Callable[[str, str, str], bool]
"""Whether an instance of this name, leader's address and public key (empty: none) may connect."""
WelcomeValidator = Callable[[Welcome], tuple[int, frozenset[int]]]
"""Returns the peer's number of ranks, and those that this rank connects to, the leader among them. Raises as
`HelloAcceptor`.
"""


class NotConfigured(RemoteProtocolError):
    """The instance of a hello is not configured here, perhaps not yet."""


class PeerTable:
    def __init__(
        self,
        identity: Identity,
        *,
        leader: str | None,
        own_key: str | None = None,
        accept_hello: HelloAcceptor,
        validate_welcome: WelcomeValidator,
        admit: Admit | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.identity = identity
        self.effects: deque[PeerEffect] = deque()
        self.members = Members(identity, own_key)
        self._accept_hello = accept_hello
        self._validate_welcome = validate_welcome
        self._admits = admit
        self._limits = limits or ConnectionLimits()
        self._inbound = InboundConnections()
        self.instances: dict[str, PeerInstance] = {}
        self._forget_at = 0.0
        self._links = Links(identity.instance, self.instances, self.effects)
        self._siblings = PeerInstance(identity.instance, leader, own_key) if leader is not None else None

    # -- configuration -----------------------------------------------------------------------------------------------

    def add_peer(self, name: str, address: str, public_key: str | None, now: float, *, lasting: bool = True) -> None:
        """Configure an instance by its leader's address. A new address or key replaces the connections. With the same key, a
        rank that restarted and has already sent hello stays accepted. An instance that is not `lasting` is forgotten after
        an absence.
        """
        known = self.instances.get(name)
        lasting = lasting or (known is not None and known.forget_at == NEVER)
        forget_at = NEVER if lasting else now + self._limits.forget_s
        if known is not None and (known.address, known.public_key) == (address, public_key):
            known.forget_at = forget_at
            known.admitted &= not lasting
            return
        if known is not None:
            ready = {link.epoch for link in known.links.values() if link.is_ready}
            epochs = ready if known.public_key == public_key else None
            self._drop_instance(name, "its address was changed", epochs)
        instance = self.instances[name] = PeerInstance(name, address, public_key, forget_at)
        self._links.open(instance, address, LEADER, now)

    def remove_peer(self, name: str, cause: str) -> None:
        """Forget an instance: its requests end, and its ranks are refused."""
        self._drop_instance(name, cause, None)
        self.effects.append(Forgotten(name, cause))

    def _drop_instance(self, name: str, cause: str, epochs: Set[int] | None) -> None:
        """Forget the ranks of an instance at `epochs` (`None`: at any)."""
        instance = self.instances.pop(name)
        for link in list(instance.links.values()):
            self._links.close(instance, link, cause, expected=True)
        self._inbound.forget_instance(name, epochs)

    def _add_unknown(self, hello: Hello, user: str, now: float) -> bool:
        """Add the instance of a hello, if the server admits it. Raises `RemoteProtocolError` if there are too many."""
        if self._admits is None or hello.leader is None:
            return False
        others = (instance for name, instance in self.instances.items() if name != hello.instance)
        if sum(instance.forget_at < NEVER for instance in others) >= MAX_ADMITTED:
            raise RemoteProtocolError(f"{self.identity} has admitted {MAX_ADMITTED} instances, and admits no more")
        check_dialable(hello.leader, f"the leader of {hello.instance!r}")
        if not self._admits(hello.instance, hello.leader, user):
            return False
        self.add_peer(hello.instance, hello.leader, user or None, now, lasting=False)
        self.instances[hello.instance].admitted = True
        return True

    def _expel(self, name: str) -> None:
        instance = self.instances.get(name)
        if instance is not None and instance.admitted and not instance.is_connected:
            self.remove_peer(name, "its hello was rejected")

    def _forget_absent(self, now: float) -> None:
        for instance in [each for each in self.instances.values() if each.forget_at < NEVER]:
            if instance.is_connected:
                instance.forget_at = now + self._limits.forget_s
            elif now >= instance.forget_at:
                self.remove_peer(instance.name, f"it has been away for {self._limits.forget_s} s")

    def set_leader(self, address: str) -> None:
        self._siblings = PeerInstance(self.identity.instance, address, self.members.own_key)

    @property
    def leader_address(self) -> str | None:
        if self.identity.leader:
            return self.identity.address
        return None if self._siblings is None else self._siblings.address

    @property
    def leader_problem(self) -> str:
        """Why this rank has not joined its leader; empty if it has, or leads."""
        siblings = self._siblings
        return "" if siblings is None or siblings.is_connected else siblings.problem

    def join(self, now: float) -> None:
        if self._siblings is not None:
            self._links.open(self._siblings, self._siblings.address, LEADER, now)

    def cannot_dial(self, dial: int, problem: str) -> None:
        link = self._links.get(dial)
        if link is not None:
            link.cannot_dial(problem, RECONNECT_AFTER)

    def on_gone(self, dial: int, cause: str) -> None:
        """The host of a connection refuses it, or its name is unknown."""
        link = self._links.get(dial)
        if link is not None and self._may_be_gone(link):
            self.remove_peer(link.instance, cause)

    def _may_be_gone(self, link: PeerConnection) -> bool:
        """Whether the instance is forgotten if nobody is at the other end: the connection is to its leader, the instance is
        not configured for good, and neither side is connected.
        """
        instance = self._instance_of(link)
        is_passing = instance.forget_at < NEVER and link.address == instance.address
        return is_passing and not link.is_ready and self._inbound.of(link.peer) is None

    def dialled(self, dial: int, now: float) -> None:
        """A connection was opened after its host name was resolved. Earlier messages on it were lost."""
        link = self._links.get(dial)
        if link is not None:
            link.dialled(now)
            self._links.arm(link)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self._links)

    def expected_at(self, dial: int) -> PeerRank | None:
        link = self._links.get(dial)
        return link.peer if link is not None else None

    def link(self, peer: PeerRank) -> PeerConnection | None:
        link = self._links.to(peer)
        return link if link is not None and link.is_ready else None

    def refuse(self, peer: PeerRank, problem: str, now: float, *, final: bool = False) -> None:
        """A rank that has answered cannot be used now, or if `final` before one side restarts. It gets a hello later."""
        link = self.link(peer)
        if link is not None:
            link.cannot_use(problem, now + self._limits.max_hello_retry_s)
            if final:
                self._refuse(link, problem, now, final=True)
            self._links.arm(link)

    # -- connections that peers opened -------------------------------------------------------------------------------

    def accepts(self, connection: bytes) -> bool:
        """Whether a hello on it was accepted."""
        return self._inbound.get(connection) is not None

    def on_inbound(self, connection: bytes, user: str, message: AnyMessage, now: float) -> PeerRank | None:
        """Returns the peer if the message is for the sessions."""
        if isinstance(message, Hello):
            self._on_hello(connection, user, message, now)
            return None
        accepted = self._inbound.get(connection)
        if accepted is None:
            self.effects.append(ReplyOn(connection, Reject(field="connection", reason="send hello first", hello_first=True)))
            return None
        if isinstance(message, Renew):
            self._on_renew(connection, accepted, message, now)
            return None
        if isinstance(message, Goodbye):
            self._inbound.forget(connection)
            self._on_goodbye(accepted, f"closed: {message.reason}", now)
            return None
        return None if isinstance(message, Welcome | Reject) else accepted.peer

    def on_closed(self, connection: bytes, now: float) -> PeerRank | None:
        """Returns the peer, if it was accepted."""
        self.members.leave(connection)
        return self._end_inbound(connection, now)

    def _end_inbound(self, connection: bytes, now: float) -> PeerRank | None:
        """Take nothing more on a connection before another hello."""
        accepted = self._inbound.forget(connection)
        if accepted is None:
            return None
        link = self.link(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            link.end(now + CLOSED_GRACE_S)
            self._links.greet_soon(link, now)
        return accepted.peer

    def on_late(self, user: str, message: AnyMessage, now: float) -> None:
        """The first message of a connection that ended before it was read, so that nobody hears an answer. Its process has
        ended, or says hello again.
        """
        if not isinstance(message, Hello):
            return
        peer = PeerRank(message.instance, message.rank)
        instance, link = self.instances.get(peer.instance), self.link(peer)
        if instance is None or instance.public_key not in (None, user) or message.to not in (None, self.identity.peer):
            return
        if link is not None and link.epoch == message.epoch and not link.has_ended and self._inbound.of(peer) is None:
            link.end(now + CLOSED_GRACE_S)
            self._links.greet_soon(link, now)

    def on_ended(self, peer: PeerRank, epoch: int, now: float) -> None:
        """The process of a rank is proved to have ended. Nothing it sent is accepted from now on."""
        accepted, link = self._inbound.of(peer), self.link(peer)
        if accepted is not None and accepted.epoch == epoch:
            self._inbound.forget(accepted.connection)
        if link is not None and link.epoch == epoch:
            self._links.lose(link, "its process has ended", now)

    def on_unreachable(self, peer: PeerRank, cause: str, now: float) -> None:
        """The engine's connection to a rank is broken. Both sides end what they share, and connect anew."""
        link = self.link(peer)
        if link is not None:
            self._links.lose(link, cause, now)

    def start_anew(self, peer: PeerRank, cause: str, now: float) -> None:
        """As `on_unreachable`, also for a peer that may have connected its engine although it is not ready here: the next
        hello is of another generation.
        """
        link = self._links.to(peer)
        if link is not None and link.is_ready:
            self._links.lose(link, cause, now)
        elif link is not None and link.epoch:
            link.begin(link.epoch, link.generation + 1)
            self._links.greet_soon(link, now)

    def _on_goodbye(self, accepted: Accepted, cause: str, now: float) -> None:
        link = self.link(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            self._links.drop(link, cause, expected=True)
            link.defer(cause, now + self._limits.hello_retry_s)
            self._links.arm(link)

    # -- hellos of peers: who is admitted, under whose name, and which answer each gets --------------------------------

    def _on_hello(self, connection: bytes, user: str, hello: Hello, now: float) -> None:
        try:
            if hello.version != PROTOCOL_VERSION:
                peer = PeerRank(hello.instance, hello.rank)
                self._reject(
                    connection,
                    f"protocol version: {hello.version} at {peer}, {PROTOCOL_VERSION} at {self.identity}",
                    final=True,
                )
                return
            if self._is_for_another(connection, hello):
                return
            if hello.instance == self.identity.instance:
                self.members.join(connection, user, hello)
            else:
                self._admit(user, hello, now)
                self._greet_again(PeerRank(hello.instance, hello.rank), now)
                if missing := self.members.missing():
                    self.effects.append(ReplyOn(connection, Busy(reason=missing, retry_after_s=self._limits.hello_retry_s)))
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
        is_for_another = hello.peer_epoch not in (0, self.identity.epoch)
        if is_for_another:  # a process before this one: so are the generation, and what follows
            hello = msgspec.structs.replace(hello, generation=0)
            self._end_inbound(connection, now)
        try:
            welcome = self._accept_hello(hello, self.members.named)
        except Undecided as error:
            self.effects.append(ReplyOn(connection, Busy(reason=str(error), retry_after_s=error.retry_s)))
            return
        except DisaggError as error:
            self._reject(connection, str(error), final=True)
            self._expel(hello.instance)
            return
        if hello.instance != self.identity.instance and not is_for_another:
            self._inbound.accept(connection, hello, members=self.members.num_changes)
            self._on_accepted(hello, now)
        self.effects.append(ReplyOn(connection, welcome))  # last: the peer connects its engine once it gets this

    def _is_for_another(self, connection: bytes, hello: Hello) -> bool:
        """Reject a hello meant for another rank. If accepted, it would replace the same process's rightful connection."""
        me = self.identity
        if hello.to is None or hello.to == me.peer:
            return False
        peer, expected = PeerRank(hello.instance, hello.rank), PeerRank(*hello.to)
        self._reject(connection, f"{me} is at {me.address}, where {peer} expects {expected}", final=True)
        return True

    def _admit(self, user: str, hello: Hello, now: float) -> None:
        """Check that the peer is configured or admitted, and its name free. Raises `RemoteProtocolError` for a reason that
        may pass.
        """
        peer = PeerRank(hello.instance, hello.rank)
        if hello.instance not in self.instances and not self._add_unknown(hello, user, now):
            raise NotConfigured(f"peer {hello.instance!r} is not configured at {self.identity}")
        instance = self.instances[hello.instance]
        if instance.public_key is not None and instance.public_key != user:
            raise RemoteProtocolError(f"peer {hello.instance!r} is configured with another public key at {self.identity}")
        link, accepted = self._links.to(peer), self._inbound.of(peer)
        holder = link.epoch if link is not None and link.is_ready and not link.has_ended else None
        if holder is None and accepted is not None:
            holder = accepted.epoch
        if holder not in (None, hello.epoch):
            raise RemoteProtocolError(
                f"another process has the name {peer} and is connected to {self.identity}: end it, or choose another name"
            )
        if self._has_moved(instance, hello) and not self._add_unknown(hello, user, now):
            raise NotConfigured(f"peer {hello.instance!r} is not configured at {self.identity}")

    def _has_moved(self, instance: PeerInstance, hello: Hello) -> bool:
        """Whether an instance that nobody configured has started again at another address: neither side of a connection to
        the address known here is there.
        """
        if not instance.admitted or instance.forget_at == NEVER or hello.leader in (None, instance.address):
            return False
        return not instance.is_connected and self._inbound.all_name(hello.leader, instance.name)

    def _on_renew(self, connection: bytes, accepted: Accepted, renew: Renew, now: float) -> None:
        if renew.epoch not in (0, self.identity.epoch):
            self._end_inbound(connection, now)
            reason = f"{self.identity} has restarted: send hello"
            self.effects.append(ReplyOn(connection, Reject(field="epoch", reason=reason, hello_first=True)))
            return
        if accepted.members != self.members.num_changes:
            reason = f"the ranks of {self.identity.instance!r} have changed: send hello"
            self.effects.append(ReplyOn(connection, Reject(field="members", reason=reason, hello_first=True)))
            return
        self._greet_again(accepted.peer, now)
        link = self._links.to(accepted.peer)
        if link is not None and link.epoch == accepted.epoch:
            self._confirm(link, now)
        self.effects.append(ReplyOn(connection, Renew()))

    def _greet_again(self, peer: PeerRank, now: float) -> None:
        """The peer says hello: if it had refused this rank for a reason that may pass, ask it again."""
        link = self._links.to(peer)
        if link is None:
            return
        link.hear()
        if not link.is_ready and not link.is_refused and link.hello_at > now + GREET_AGAIN_S:
            self._links.greet_soon(link, now)

    def _on_accepted(self, hello: Hello, now: float) -> None:
        link = self._links.to(PeerRank(hello.instance, hello.rank))
        if link is None:
            return
        if link.epoch != hello.epoch:
            self._links.drop(link, "restarted")
            link.begin(hello.epoch, hello.generation)
            link.greet_soon(now)
        elif hello.generation > link.generation:
            self._links.drop(link, "the peer has given the connection up")
            link.begin(hello.epoch, hello.generation)
        self._confirm(link, now)
        if link.is_ready and hello.again:
            self._links.greet_soon(link, now)

    def _confirm(self, link: PeerConnection, now: float) -> None:
        if link.is_ready:
            link.confirm()
        elif not link.is_refused:
            link.greet_soon(now)
        self._links.arm(link)

    def _reject(self, connection: bytes, reason: str, *, final: bool, field: str = "hello") -> None:
        self.effects.append(ReplyOn(connection, Reject(field=field, reason=reason[:4096], final=final)))

    # -- connections that this rank opened ---------------------------------------------------------------------------

    def on_reply(self, dial: int, message: AnyMessage, now: float) -> None:
        link = self._links.get(dial)
        if link is None:
            return
        link.answer()
        match message:
            case Welcome() if link.take_welcome():  # otherwise unsolicited
                self._on_welcome(link, message, now)
            case Reject(hello_first=True):  # libzmq has reconnected
                link.greet_soon(now)
            case Reject():
                self._links.drop(link, f"rejected: {message.reason}")
                self._refuse(link, message.reason, now, final=message.final)
            case Busy(request_id=None):
                link.wait(message.reason, now + max(message.retry_after_s, MIN_RETRY_S))
        self._links.arm(link)

    def _refuse(self, link: PeerConnection, problem: str, now: float, *, final: bool) -> None:
        """Say hello again much later, since a change at the peer brings its own hello. If that has already come, or never
        will (a leader sends none to its own ranks), say it soon, unless the reason is final.
        """
        is_own = link.instance == self.identity.instance
        if final or not is_own:
            self.effects.append(Refused(link.instance, link.address, problem))
        if final:
            link.reject(problem, now + self._limits.refused_retry_s, RECONNECT_AFTER)
            return
        is_overtaken = link.heard or is_own
        link.defer(problem, now + (self._limits.hello_retry_s if is_overtaken else self._limits.refused_retry_s))

    def _on_welcome(self, link: PeerConnection, welcome: Welcome, now: float) -> None:
        siblings = link.instance == self.identity.instance
        try:
            found = PeerRank(welcome.instance, welcome.rank)
            if found != link.peer:
                raise RemoteProtocolError(f"{link.address} answers as {found}, expected {link.peer}")
            num_ranks, wanted = (self.identity.num_ranks, frozenset()) if siblings else self._validate_welcome(welcome)
            _check_members(welcome, num_ranks)
        except Undecided as error:
            link.wait(str(error), now + error.retry_s)
            return
        except DisaggError as error:
            self._links.drop(link, f"refused: {error}")
            self._refuse(link, str(error), now, final=True)
            return
        if welcome.epoch not in (link.epoch, link.named):
            self._links.drop(link, "restarted")
            link.begin(welcome.epoch, 0)
        accepted = self._inbound.of(link.peer)
        if accepted is not None and accepted.epoch != link.epoch:  # another process has the name
            self._inbound.forget(accepted.connection)
            accepted = None
        if link.named not in (0, link.epoch):  # the peer takes nothing after a hello or a renewal for another process
            self._links.greet_soon(link, now)
            return
        if welcome.generation != link.generation:
            return  # of an earlier generation, whose loans are void
        if link.is_ready and link.lending not in (None, welcome.lending):
            self._links.lose(link, "the peer has started a new connection", now)
            return
        is_first = link.welcome(welcome.lending, now + self._ask_again_s(link), renews=not siblings)
        if siblings:
            return
        instance = self.instances[link.instance]
        instance.wanted = wanted
        if is_first:
            if not link.named:  # another hello that names nobody may still reach a later process
                link.name_process()
                self.effects.append(SendTo(link.dial, Renew(epoch=link.epoch)))
            if accepted is not None:
                link.confirm()
            else:
                link.expect(now + self._limits.connect_back_s)
            self.effects.append(Ready(link.peer, welcome.epoch, welcome))
        if link.address == instance.address:
            self._links.take_members(instance, welcome.members, now)

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send hellos, and drop lost peers. Call it after all arrived messages were taken."""
        self._links.connect_some(now)
        if now < self._links.next_due:
            return
        for link in self._links.take_due(now):
            if link.is_ready and now >= link.lost_at:
                silence = f"it has not connected to {self.identity} within {self._limits.connect_back_s:g} s"
                self._links.lose(link, "its connection has ended" if link.has_ended else silence, now)
            if now >= link.hello_at:
                self._greet(link, now)
            self._links.arm(link)
        if now >= self._forget_at:
            self._forget_at = now + min(FORGET_CHECK_S, self._limits.forget_s)
            self._forget_absent(now)

    @property
    def next_tick(self) -> float:
        """When `tick` next has something to do; it may be earlier."""
        return 0.0 if self._links.is_pending else self._links.next_due

    def _greet(self, link: PeerConnection, now: float) -> None:
        limits = self._limits
        instance = self._instance_of(link)
        is_awaited = not link.is_ready or instance is self._siblings
        if is_awaited:
            retry_s = link.back_off(limits.hello_retry_s, limits.max_hello_retry_s)
            link.greet_at(now + (limits.heartbeat_s if link.is_ready else retry_s))
            if link.unanswered >= RECONNECT_AFTER:
                self._links.redial(instance, link)
            elif link.unanswered and self._may_be_gone(link):
                self.effects.append(Probe(link.dial))
        else:
            link.greet_at(now + self._ask_again_s(link) if link.is_alone else self._renew_at(link, now))
            if link.address == instance.address and not instance.ready:
                link.hello_by(now + limits.max_hello_retry_s)
            if link.renews and not link.is_alone:
                link.renew()
                self.effects.append(SendTo(link.dial, Renew(epoch=link.epoch)))
                return
        link.greet(awaited=is_awaited)
        self.effects.append(SendHello(link.dial, link.generation, link.epoch, again=not is_awaited and link.is_alone))

    def _ask_again_s(self, link: PeerConnection) -> float:
        return ASK_AGAIN_S if link.has_ended else self._limits.heartbeat_s

    def _renew_at(self, link: PeerConnection, now: float) -> float:
        """Renewals are grouped, so that this rank wakes up less often."""
        together_s = self._limits.heartbeat_s / 4
        later_s = self._limits.renew_s * (1 - link.dial % NUM_PHASES / (2 * NUM_PHASES))
        return math.ceil((now + later_s) / together_s) * together_s

    def _instance_of(self, link: PeerConnection) -> PeerInstance:
        siblings = self._siblings
        return siblings if siblings is not None and link.instance == siblings.name else self.instances[link.instance]

    def close(self, reason: str) -> None:
        for link in self._links.all():
            if link.is_ready:
                self.effects.append(SendTo(link.dial, Goodbye(reason=reason)))


def _check_members(welcome: Welcome, num_ranks: int) -> None:
    ranks = {member.rank for member in welcome.members}
    if len(ranks) < len(welcome.members) or any(rank >= num_ranks for rank in ranks):
        raise RemoteProtocolError(
            f"members of {welcome.instance!r}: expected each of its {num_ranks} ranks at most once, found others"
        )
    for member in welcome.members:
        check_dialable(member.address, f"rank {member.rank} of {welcome.instance!r}")
