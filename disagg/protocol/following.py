"""Connects to the ranks that the leaders of peers name, a few in each turn: one may name thousands, and others each time."""

from __future__ import annotations

from disagg.protocol.links import Links
from disagg.protocol.messages import Member
from disagg.protocol.peer_state import LEADER, PeerInstance

MAX_MOVED = 16
"""Ranks that are connected to, or disconnected from, in one turn."""
CHANGE_S, MEMBER_S = 1.0, 0.01
"""How long other members of a peer are not looked at after a change: in all, and for each that has changed."""


class Following:
    """The members of every peer, and which of them are still to be connected to or disconnected from."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.pending: dict[str, None] = {}
        """Instances with ranks to connect to or to disconnect from."""

    def take(self, instance: PeerInstance, members: tuple[Member, ...], now: float) -> None:
        """Take the ranks that a leader names in its welcome. It names them in each."""
        named = {member.address: member.rank for member in members if member.rank != LEADER}
        if named == instance.members or now < instance.members_at:
            return
        num_changed = len(named.items() ^ instance.members.items())
        instance.members, instance.members_at = named, now + CHANGE_S + MEMBER_S * num_changed
        self.pending[instance.name] = None
        self.tick(now)

    def tick(self, now: float) -> None:
        """Connect to some ranks of one instance, or disconnect from some."""
        if not self.pending:
            return
        del self.pending[name := next(iter(self.pending))]
        instance = self._links.instances.get(name)
        if instance is None:
            return
        named = {**instance.members, instance.address: LEADER}
        others = [link for link in instance.links.values() if named.get(link.address) != link.rank]
        for link in others[:MAX_MOVED]:
            self._links.close(instance, link, "its leader names another address")
        missing = [(address, rank) for address, rank in named.items() if address not in instance.links]
        for address, rank in missing[: max(0, MAX_MOVED - len(others))]:
            self._links.open(instance, address, rank, now)
        if len(others) + len(missing) > MAX_MOVED:
            self.pending[name] = None  # behind the others
