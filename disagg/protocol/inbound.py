"""Connections that were opened to this rank, by peers and by the ranks that join their leader."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from disagg.core.address import dialable, is_loopback, parse_address
from disagg.core.errors import ConfigError, LayoutError, RemoteProtocolError
from disagg.protocol.messages import Hello, Member
from disagg.protocol.peer_effects import Identity
from disagg.protocol.types import PeerRank


class Accepted(NamedTuple):
    """`members` is `Members.num_changes` as of the welcome. `leader`: the address that its hello has named."""

    connection: bytes
    peer: PeerRank
    epoch: int
    dial: int = 0
    members: int = 0
    leader: str | None = None


class InboundConnections:
    def __init__(self) -> None:
        self._accepted: dict[bytes, Accepted] = {}
        self._newest: dict[PeerRank, Accepted] = {}

    def get(self, connection: bytes) -> Accepted | None:
        return self._accepted.get(connection)

    def of(self, peer: PeerRank) -> Accepted | None:
        return self._newest.get(peer)

    def accept(self, connection: bytes, hello: Hello, *, members: int = 0) -> None:
        """Replaces the rank's earlier connection."""
        peer = PeerRank(hello.instance, hello.rank)
        self.forget(connection)
        if peer in self._newest:
            self.forget(self._newest[peer].connection)
        accepted = Accepted(connection, peer, hello.epoch, hello.dial, members, hello.leader)
        self._accepted[connection] = self._newest[peer] = accepted

    def all_name(self, leader: str | None, instance: str) -> bool:
        """Whether every rank of the instance that is connected has named this address as its leader's."""
        return all(each.leader == leader for each in self._newest.values() if each.peer.instance == instance)

    def is_overtaken(self, connection: bytes, hello: Hello) -> bool:
        """Whether the same process was already accepted on a later connection."""
        newest = self.of(PeerRank(hello.instance, hello.rank))
        if newest is None or newest.connection == connection:
            return False
        return newest.epoch == hello.epoch and hello.dial < newest.dial

    def forget(self, connection: bytes) -> Accepted | None:
        accepted = self._accepted.pop(connection, None)
        if accepted is not None:
            del self._newest[accepted.peer]
        return accepted

    def forget_instance(self, name: str, epochs: Set[int] | None) -> None:
        """`epochs`: `None` for any."""
        for connection, accepted in list(self._accepted.items()):
            if accepted.peer.instance == name and (epochs is None or accepted.epoch in epochs):
                self.forget(connection)


class Members:
    """The ranks of this instance that this rank knows. They join at their leader, which names them to peers; the others know
    only themselves. `own_key` is the public key of the instance's ranks, if they have keys.
    """

    def __init__(self, identity: Identity, own_key: str | None) -> None:
        self._identity = identity
        self.own_key = own_key
        self.by_rank = {identity.rank: Member(identity.rank, identity.address, identity.epoch)}
        self._connections: dict[int, bytes] = {}  # of connected ranks
        self.num_changes = 0

    def named(self) -> tuple[Member, ...]:
        return tuple(self.by_rank[rank] for rank in sorted(self.by_rank))

    def missing(self) -> str:
        """What a leader still waits for; empty if all ranks have joined."""
        me = self._identity
        if not me.leader or len(self.by_rank) >= me.num_ranks:
            return ""
        return f"{len(self.by_rank)} of {me.num_ranks} ranks of {me.instance!r} have joined"

    def join(self, connection: bytes, user: str, hello: Hello) -> None:
        """Raises `RemoteProtocolError` or `LayoutError` for a rank that may not join, such as a second process of a
        connected one.
        """
        me = self._identity
        if self.own_key is not None and user != self.own_key:
            raise RemoteProtocolError(f"rank {hello.rank} of {hello.instance!r} has another public key than {me}")
        if not me.leader:
            raise RemoteProtocolError(f"{me} is not the leader of {hello.instance!r}")
        if hello.rank >= me.num_ranks or hello.rank == me.rank or hello.address is None:
            raise RemoteProtocolError(f"rank {hello.rank} of {me.num_ranks} at {hello.address!r} cannot join {me}")
        if hello.table != me.table:
            raise LayoutError(f"rank {hello.rank} of {hello.instance!r} declares other layouts or another topology than {me}")
        check_dialable(hello.address, f"rank {hello.rank} of {hello.instance!r}")
        if hello.address == me.address:
            raise RemoteProtocolError(
                f"rank {hello.rank} of {hello.instance!r}: expected an address of its own, found that of {me}: {me.address}; "
                "with port 0 `advertise` gets the port that a rank listens on"
            )
        own, its = (is_loopback(parse_address(each, what="address")[0]) for each in (me.address, hello.address))
        if its and not own:
            raise RemoteProtocolError(
                f"rank {hello.rank} of {hello.instance!r}: expected an address that other hosts reach, as {me.address} of "
                f"{me}, found {hello.address}: set `listen` for each rank"
            )
        known = self.by_rank.get(hello.rank)
        if known is not None and known.epoch != hello.epoch and hello.rank in self._connections:
            raise RemoteProtocolError(
                f"another process is rank {hello.rank} of {hello.instance!r} and is connected to {me}: end it, "
                "or start this one as another rank"
            )
        self._connections[hello.rank] = connection
        member = Member(hello.rank, hello.address, hello.epoch)
        self.num_changes += member != known
        self.by_rank[hello.rank] = member

    def leave(self, connection: bytes) -> None:
        """Its rank stays named, but another process may take its place."""
        for rank in [rank for rank, found in self._connections.items() if found == connection]:
            del self._connections[rank]


def check_dialable(address: str, whose: str) -> None:
    """Raise `RemoteProtocolError` for an address that this rank could not connect to."""
    try:
        dialable(address, what=whose)
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from error
