"""The connections that one rank has opened.

Only a few of the ranks that a leader names are connected to in each turn: it may name thousands, and others each time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque

from disagg.protocol.connection import LEADER, NO_ANSWER, PeerConnection, PeerInstance
from disagg.protocol.messages import Member
from disagg.protocol.peer_effects import Connect, Disconnect, Lost, PeerEffect, Unanswered
from disagg.protocol.timers import Timers
from disagg.protocol.types import PeerRank

NUM_NEWEST = 8
"""Effects among which `close` looks for a connection that was not opened yet."""
MAX_CLOSED = 4096
MAX_MOVED = 16
CHANGE_S, MEMBER_S = 1.0, 0.01
"""After a change other members are not taken for `CHANGE_S`, and `MEMBER_S` more for each that changed."""


class Links:
    """Connections by dial number. `own` is the name of this rank's instance."""

    def __init__(self, own: str, instances: dict[str, PeerInstance], effects: deque[PeerEffect]) -> None:
        self._own = own
        self.instances = instances
        self._effects = effects
        self._by_dial: dict[int, PeerConnection] = {}
        self._dials = itertools.count()
        self._closed: OrderedDict[PeerRank, tuple[int, int]] = OrderedDict()  # epoch and generation
        self._pending: dict[str, None] = {}  # instances with ranks to connect to or to disconnect from
        self._timers = Timers()

    @property
    def next_due(self) -> float:
        """When a connection next has something to do; it may be earlier."""
        return self._timers.next

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def __len__(self) -> int:
        return len(self._by_dial)

    def all(self) -> list[PeerConnection]:
        return list(self._by_dial.values())

    def get(self, dial: int) -> PeerConnection | None:
        return self._by_dial.get(dial)

    def to(self, peer: PeerRank) -> PeerConnection | None:
        instance = self.instances.get(peer.instance)
        return instance.links.get(peer.rank) if instance is not None else None

    def open(self, instance: PeerInstance, address: str, rank: int, now: float) -> None:
        """After an earlier connection to the same process, another generation begins, so that the process ends the earlier
        one with its loans.
        """
        epoch, generation = self._closed.pop(PeerRank(instance.name, rank), (0, 0))
        link = PeerConnection(instance.name, address, rank, next(self._dials), generation, epoch, hello_at=now)
        instance.links[rank] = link
        self._dial(instance, link)

    def _dial(self, instance: PeerInstance, link: PeerConnection) -> None:
        self._by_dial[link.dial] = link
        self._effects.append(Connect(link.dial, link.address, instance.public_key))
        self.arm(link)

    def redial(self, instance: PeerInstance, link: PeerConnection) -> None:
        """Open a connection anew: libzmq does not retry one that was refused, for instance because its key was not known."""
        problem = link.problem or NO_ANSWER
        if problem == NO_ANSWER:
            problem = f"{NO_ANSWER}, {link.unanswered} hellos sent"
            self._effects.append(Unanswered(link.instance, link.address))
        self._forget(link)
        link.redial(next(self._dials), problem)
        self._dial(instance, link)

    def close(self, instance: PeerInstance, link: PeerConnection, cause: str, *, expected: bool = False) -> None:
        self.drop(link, cause, expected=expected)
        del instance.links[link.rank]
        newest = itertools.islice(reversed(self._effects), NUM_NEWEST)
        asked = next((each for each in newest if isinstance(each, Connect) and each.dial == link.dial), None)
        self._forget(link)
        if asked is not None:  # an instance rejected at once is never dialled
            self._effects.remove(asked)
            self._effects.pop()
        if link.epoch:
            self._closed[link.peer] = link.epoch, link.generation
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def _forget(self, link: PeerConnection) -> None:
        del self._by_dial[link.dial]
        self._timers.disarm(link)
        self._effects.append(Disconnect(link.dial))

    def drop(self, link: PeerConnection, cause: str, *, expected: bool = False) -> None:
        """End this generation of a connection, if it was ready."""
        generation = link.generation
        if not link.drop(cause):
            return
        self._ask_leader(link)
        if link.instance != self._own:
            self._effects.append(Lost(link.peer, link.epoch, generation, cause, expected))

    def _ask_leader(self, link: PeerConnection) -> None:
        """The leader may know another rank in this one's place."""
        instance = self.instances.get(link.instance)
        leader = instance.links.get(LEADER) if instance is not None else None
        if leader is not None and leader is not link and leader.is_ready:
            leader.hello_by(0.0)
            self.arm(leader)

    def lose(self, link: PeerConnection, cause: str, now: float) -> None:
        self.drop(link, cause)
        self.greet_soon(link, now)

    def greet_soon(self, link: PeerConnection, now: float) -> None:
        link.greet_soon(now)
        self.arm(link)

    def arm(self, link: PeerConnection) -> None:
        self._timers.arm(link)

    def take_due(self, now: float) -> list[PeerConnection]:
        """The caller arms them again."""
        due = list[PeerConnection]()
        while (link := self._timers.pop(now)) is not None:
            assert isinstance(link, PeerConnection)
            due.append(link)
        return sorted(due, key=lambda each: each.dial)

    # -- the ranks that leaders name ---------------------------------------------------------------------------------

    def take_members(self, instance: PeerInstance, members: tuple[Member, ...], now: float) -> None:
        """Take the ranks of a leader's welcome that this rank connects to."""
        wanted = instance.wanted or frozenset()
        named = {member.address: member.rank for member in members if member.rank in wanted - {LEADER}}
        if named == instance.members:
            return
        if now < instance.members_at:  # the leader will not repeat them in a renewal: ask for them later
            leader = instance.links[LEADER]
            leader.ask_by(instance.members_at)
            self.arm(leader)
            return
        num_changed = len(named.items() ^ instance.members.items())
        instance.members, instance.members_at = named, now + CHANGE_S + MEMBER_S * num_changed
        self._pending[instance.name] = None
        self.connect_some(now)

    def connect_some(self, now: float) -> None:
        if not self._pending:
            return
        del self._pending[name := next(iter(self._pending))]
        instance = self.instances.get(name)
        if instance is None:
            return
        named = {**instance.members, instance.address: LEADER}
        others = [link for link in instance.links.values() if named.get(link.address) != link.rank]
        for link in others[:MAX_MOVED]:
            self.close(instance, link, "its leader names another address")
        missing = [(address, rank) for address, rank in named.items() if rank not in instance.links]
        for address, rank in missing[: max(0, MAX_MOVED - len(others))]:
            self.open(instance, address, rank, now)
        if len(others) + len(missing) > MAX_MOVED:
            self._pending[name] = None  # behind the others
