"""Connections that peers opened to this rank."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from disagg.protocol.messages import Hello
from disagg.protocol.types import PeerRank


class Accepted(NamedTuple):
    """The rank at the other end of a connection whose hello was accepted, and the hello's `epoch` and `dial`. `members` is
    `Members.num_changes` as of the welcome.
    """

    peer: PeerRank
    epoch: int
    dial: int = 0
    members: int = 0


class InboundConnections:
    """Accepted connections, at most one for each rank."""

    def __init__(self) -> None:
        self._accepted: dict[bytes, Accepted] = {}
        self._newest: dict[PeerRank, bytes] = {}

    def get(self, connection: bytes) -> Accepted | None:
        return self._accepted.get(connection)

    def of(self, peer: PeerRank) -> Accepted | None:
        """The connection of a rank."""
        return self._accepted.get(self._newest.get(peer, b""))

    def accept(self, connection: bytes, hello: Hello, *, members: int = 0) -> Accepted:
        """Record a connection whose hello was accepted, in place of its rank's earlier one."""
        peer = PeerRank(hello.instance, hello.rank)
        for earlier in {connection, self._newest.get(peer, connection)} & self._accepted.keys():
            self.forget(earlier)
        accepted = self._accepted[connection] = Accepted(peer, hello.epoch, hello.dial, members)
        self._newest[peer] = connection
        return accepted

    def is_overtaken(self, connection: bytes, hello: Hello) -> bool:
        """Whether the same process has already been accepted on a connection that it opened later. The hello is late then."""
        newest = self._newest.get(PeerRank(hello.instance, hello.rank), connection)
        accepted = self._accepted.get(newest)
        return newest != connection and accepted is not None and (accepted.epoch == hello.epoch and hello.dial < accepted.dial)

    def forget(self, connection: bytes) -> Accepted | None:
        """The connection has ended. Returns what it was, if it was accepted."""
        accepted = self._accepted.pop(connection, None)
        if accepted is not None:
            del self._newest[accepted.peer]
        return accepted

    def forget_epoch(self, peer: PeerRank, epoch: int) -> None:
        """Forget the connection of a rank if its process is the one at `epoch`."""
        accepted = self.of(peer)
        if accepted is not None and accepted.epoch == epoch:
            self.forget(self._newest[peer])

    def forget_other(self, peer: PeerRank, epoch: int) -> None:
        """Forget the connection of a rank unless its process is the one at `epoch`."""
        accepted = self.of(peer)
        if accepted is not None and accepted.epoch != epoch:
            self.forget(self._newest[peer])

    def forget_instance(self, name: str, epochs: Set[int] | None) -> None:
        """Forget the ranks of an instance at these epochs (`None`: at any)."""
        for connection, accepted in list(self._accepted.items()):
            if accepted.peer.instance == name and (epochs is None or accepted.epoch in epochs):
                self.forget(connection)
