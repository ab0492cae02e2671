"""The connection that this rank opens to one rank of a peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.protocol.messages import Lending
from disagg.protocol.types import NEVER, PeerRank, State, take_step

LEADER = 0
NO_ANSWER = "no answer yet"
MAX_ASKED = 8
"""Hellos whose welcomes may still come."""


class ConnectionState(State):
    """A hello is sent when due in `GREETING` and `REFUSED`; in `REFUSED`, one side refuses the other until one restarts. In
    the other states transfers may start. `ONE_WAY`: the peer has not connected to this rank. `CLOSED`: it had, and that
    connection has ended.
    """

    GREETING = "greeting"
    REFUSED = "refused"
    ONE_WAY = "one_way"
    READY = "ready"
    CLOSED = "closed"


class ConnectionStep(State):
    CALLED = "a hello is needed"
    REJECTED = "one side refuses the other for good"
    WELCOMED = "the peer's welcome arrived"
    CONFIRMED = "the peer has opened a connection"
    ENDED = "the connection that the peer opened has ended"
    DROPPED = "this generation of the connection is over"


CONNECTION_TABLE: dict[tuple[ConnectionState, ConnectionStep], ConnectionState] = {
    (ConnectionState.GREETING, ConnectionStep.REJECTED): ConnectionState.REFUSED,
    (ConnectionState.GREETING, ConnectionStep.WELCOMED): ConnectionState.ONE_WAY,
    (ConnectionState.REFUSED, ConnectionStep.CALLED): ConnectionState.GREETING,
    (ConnectionState.REFUSED, ConnectionStep.WELCOMED): ConnectionState.ONE_WAY,
    (ConnectionState.ONE_WAY, ConnectionStep.CONFIRMED): ConnectionState.READY,
    (ConnectionState.ONE_WAY, ConnectionStep.ENDED): ConnectionState.CLOSED,
    (ConnectionState.ONE_WAY, ConnectionStep.DROPPED): ConnectionState.GREETING,
    (ConnectionState.READY, ConnectionStep.ENDED): ConnectionState.CLOSED,
    (ConnectionState.READY, ConnectionStep.DROPPED): ConnectionState.GREETING,
    (ConnectionState.CLOSED, ConnectionStep.CONFIRMED): ConnectionState.READY,
    (ConnectionState.CLOSED, ConnectionStep.DROPPED): ConnectionState.GREETING,
}


@dataclass
class PeerConnection:
    """Only its own methods change it, but for `armed_at`.

    `epoch` is that of the peer's process, 0 until known; `named` is what the last hello or renewal has named. A side that
    gives up starts a new `generation` and names it in its next hello, so that both end the old one; a new process starts at 0.
    `asked` counts hellos whose welcome may still come, `unanswered` those since anything came back. `heard`: the peer has said
    hello since this side last did. `renews`: the last hello was welcomed, and nothing has called for another since. The peer
    is lost at `lost_at` unless it has connected by then.
    """

    instance: str
    address: str
    rank: int
    dial: int
    generation: int = 0
    epoch: int = 0
    named: int = 0
    hello_at: float = 0.0
    state: ConnectionState = ConnectionState.GREETING
    problem: str = NO_ANSWER
    hello_retry_s: float = 0.0
    lost_at: float = NEVER
    unanswered: int = 0
    asked: int = 0
    heard: bool = False
    renews: bool = False
    lending: Lending | None = None
    armed_at: float = NEVER

    @property
    def peer(self) -> PeerRank:
        return PeerRank(self.instance, self.rank)

    @property
    def is_ready(self) -> bool:
        """Whether transfers to the peer may start."""
        return self.state not in (ConnectionState.GREETING, ConnectionState.REFUSED)

    @property
    def is_refused(self) -> bool:
        return self.state is ConnectionState.REFUSED

    @property
    def has_ended(self) -> bool:
        return self.state is ConnectionState.CLOSED

    @property
    def is_alone(self) -> bool:
        return self.state in (ConnectionState.ONE_WAY, ConnectionState.CLOSED)

    @property
    def due(self) -> float:
        return min(self.hello_at, self.lost_at)

    def _step(self, step: ConnectionStep) -> bool:
        return take_step(CONNECTION_TABLE, self, step)

    # -- hellos ------------------------------------------------------------------------------------------------------

    def greet_soon(self, now: float) -> None:
        self._step(ConnectionStep.CALLED)
        self.hello_at, self.hello_retry_s, self.renews = now, 0.0, False

    def hello_by(self, at: float) -> None:
        self.hello_at = min(self.hello_at, at)

    def ask_by(self, at: float) -> None:
        """Send a hello instead of a renewal by `at`, to get the peer's whole welcome."""
        self.hello_by(at)
        self.renews = False

    def greet_at(self, at: float) -> None:
        self.hello_at = at

    def greet(self, *, awaited: bool) -> None:
        """`awaited`: the connection is of no use without the answer."""
        self.asked, self.heard = min(self.asked + 1, MAX_ASKED), False
        self.name_process()
        self.unanswered += awaited

    def renew(self) -> None:
        self.heard = False
        self.name_process()

    def name_process(self) -> None:
        self.named = self.epoch

    def back_off(self, first_s: float, most_s: float) -> float:
        """The seconds to wait for an answer: twice as long as for the last."""
        self.hello_retry_s = min(self.hello_retry_s * 2 or first_s, most_s)
        return self.hello_retry_s

    def cannot_dial(self, problem: str, unanswered: int) -> None:
        """This counts as `unanswered` hellos."""
        self.problem, self.unanswered = problem, unanswered

    def redial(self, dial: int, problem: str) -> None:
        self._step(ConnectionStep.DROPPED)
        self.dial, self.unanswered, self.problem = dial, 0, problem

    def dialled(self, now: float) -> None:
        """A hello that was sent before is lost. The next one waits as long as it would have."""
        self.unanswered = 0
        self.ask_by(now)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self) -> None:
        self.unanswered = 0

    def hear(self) -> None:
        self.heard = True

    def take_welcome(self) -> bool:
        """Whether a hello asked for the welcome that has come."""
        if not self.asked:
            return False
        self.asked -= 1
        return True

    def welcome(self, lending: Lending | None, next_at: float, *, renews: bool) -> bool:
        """Returns whether the connection was not ready before."""
        is_first = self._step(ConnectionStep.WELCOMED)
        if is_first:
            self.lending = lending
        self.problem, self.hello_retry_s, self.hello_at, self.renews = "", 0.0, next_at, renews
        return is_first

    def wait(self, problem: str, retry_at: float) -> None:
        """The peer or this rank needs more time to answer."""
        self.problem = problem
        self.hello_by(retry_at)

    def defer(self, problem: str, retry_at: float) -> None:
        """One side refuses the other for now."""
        self._step(ConnectionStep.CALLED)
        self.problem, self.hello_at, self.hello_retry_s = problem, retry_at, 0.0

    def reject(self, problem: str, retry_at: float, unanswered: int) -> None:
        """One side refuses the other for a reason that will not pass by itself. This counts as `unanswered` hellos: the peer's
        name may lead to another rank by now.
        """
        self._step(ConnectionStep.REJECTED)
        self.problem, self.hello_at, self.hello_retry_s, self.unanswered = problem, retry_at, 0.0, unanswered

    def cannot_use(self, problem: str, retry_at: float) -> None:
        """A ready peer cannot be used now. Its generation goes on."""
        self._step(ConnectionStep.DROPPED)
        self.lost_at, self.problem, self.hello_at = NEVER, problem, retry_at

    # -- the peer's own connection -----------------------------------------------------------------------------------

    def confirm(self) -> None:
        if self._step(ConnectionStep.CONFIRMED):
            self.lost_at = NEVER

    def expect(self, lost_at: float) -> None:
        self.lost_at = lost_at

    def end(self, lost_at: float) -> None:
        self._step(ConnectionStep.ENDED)
        self.lost_at = lost_at

    # -- the end of a generation -------------------------------------------------------------------------------------

    def drop(self, cause: str) -> bool:
        """End this generation, if it is ready. The next hello begins another. Returns whether it was ready."""
        if not self._step(ConnectionStep.DROPPED):
            return False
        self.lost_at, self.problem, self.generation = NEVER, cause, self.generation + 1
        return True

    def begin(self, epoch: int, generation: int) -> None:
        self.epoch, self.generation = epoch, generation


@dataclass
class PeerInstance:
    """A peer, and its `links` by rank. One not configured for good is forgotten at `forget_at`. `wanted`: the ranks that
    this one connects to, once known. `members`: those that the leader names, by address; others are not taken before
    `members_at`. `admitted`: its own hello introduced it. Any thread may read the properties.
    """

    name: str
    address: str
    public_key: str | None
    forget_at: float = NEVER
    links: dict[int, PeerConnection] = field(default_factory=dict)
    wanted: frozenset[int] | None = None
    members: dict[str, int] = field(default_factory=dict)
    members_at: float = 0.0
    admitted: bool = False

    @property
    def ready(self) -> bool:
        return self.wanted is not None and self.wanted <= {link.rank for link in tuple(self.links.values()) if link.is_ready}

    @property
    def is_connected(self) -> bool:
        return any(link.is_ready for link in tuple(self.links.values()))

    @property
    def refusal(self) -> str:
        """Why it cannot become ready before one side restarts; empty if it can."""
        return "; ".join(f"{link.address}: {link.problem}" for link in tuple(self.links.values()) if link.is_refused)

    @property
    def problem(self) -> str:
        waiting = [link for link in tuple(self.links.values()) if not link.is_ready]
        return "; ".join(f"{link.address}: {link.problem}" for link in waiting) or "not all of its ranks are known"
