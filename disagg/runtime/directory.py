"""The peers of one manager by name, and whether they are ready."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.layout.agreement import Agreement, LocalRank
from disagg.protocol.peers import MAX_ADMITTED, PeerTable
from disagg.protocol.send_table import Readers
from disagg.protocol.types import NEVER
from disagg.runtime.handshake import Handshake


class PeerStatus(NamedTuple):
    """The state of a peer instance, and why it is not ready."""

    state: Literal["unknown", "connecting", "ready", "refused"]
    reason: str


class Directory:
    """Any thread may call it. `command` runs a function in the control thread. There, `carry_out` carries out the peer
    table's effects, and `on_changed` is called with a peer's name after a change of its configuration.
    """

    def __init__(
        self,
        *,
        peers: PeerTable,
        handshake: Handshake,
        local: LocalRank,
        command: Callable[[Callable[[float], None]], None],
        carry_out: Callable[[float], None],
        on_changed: Callable[[str], None],
        allowed_keys: set[str],
        admits_unknown: bool,
    ) -> None:
        self._peers = peers
        self._handshake = handshake
        self._local = local
        self._command = command
        self._carry_out = carry_out
        self._on_changed = on_changed
        self._allowed_keys = allowed_keys
        self.admits_unknown = admits_unknown
        self.has_leader = peers.leader_address is not None
        self._changed = threading.Condition()
        self._added: set[str] = set()
        self._changing: Counter[str] = Counter()  # not made yet by the control thread

    def add(self, name: str, address: str, public_key: str | None, *, lasting: bool = True) -> None:
        """Raises `PeerUnreachable` for an instance that is not `lasting`, if there are `MAX_ADMITTED` of these."""
        name = str(name)  # messages cannot have a subclass
        known = self._peers.instances.get(name)
        if not lasting and known is None:
            others = sum(each.forget_at < NEVER for each in list(self._peers.instances.values())) + len(self._changing)
            if others >= MAX_ADMITTED:
                raise PeerUnreachable(
                    f"peer {name!r}: {others} instances that are not configured for good are known, and no more are added"
                )
        if public_key is not None:
            self._allowed_keys.add(public_key)
        self._added.add(name)

        def add(now: float) -> None:
            self._peers.add_peer(name, address, public_key, now, lasting=lasting)

        if name not in self._changing and known is not None and (known.address, known.public_key) == (address, public_key):
            self._command(add)  # it may be lasting now
        else:
            self._change(name, add)

    def lacks(self, name: str, address: str) -> bool:
        """Whether an instance is unknown, or not ready at the address of an older request."""
        if self.status(name).state == "unknown":
            return True
        known = self._peers.instances.get(name)
        has_moved = known is not None and known.forget_at < NEVER and known.address != address
        return has_moved and name not in self._changing and not self.is_ready(name)

    def remove(self, name: str) -> None:
        self._added.discard(name)

        def remove(now: float) -> None:
            if name in self._peers.instances:
                self._peers.remove_peer(name, "it was removed")
                self._carry_out(now)  # the next command may add it again

        self._change(name, remove)

    def _change(self, name: str, change: Callable[[float], None]) -> None:
        """In the control thread. Until then the instance does not count as ready."""
        with self._changed:
            self._changing[name] += 1

        def run(now: float) -> None:
            try:
                change(now)
            finally:
                with self._changed:
                    self._changing[name] -= 1
                    if not self._changing[name]:
                        del self._changing[name]
            self._on_changed(name)

        self._command(run)

    def forgotten(self, name: str) -> None:
        """The control thread calls this."""
        self._added.discard(name)
        self.notify()

    def set_leader(self, address: str) -> None:
        """Raises `ConfigError` on rank 0, and the second time."""
        if self.has_leader:
            raise ConfigError(f"set_leader: {self._handshake.me} is the leader, or knows it")
        self.has_leader = True

        def join(now: float) -> None:
            self._peers.set_leader(address)
            self._peers.join(now)

        self._command(join)

    def names(self) -> list[str]:
        """Of peers that are configured, admitted, or named by a request."""
        return list(self._peers.instances)

    def lasting(self) -> list[str]:
        """Of configured peers only."""
        return [name for name, each in list(self._peers.instances.items()) if each.forget_at == NEVER]

    def is_ready(self, name: str) -> bool:
        """Whether every rank that this one connects to is connected."""
        instance = None if name in self._changing else self._peers.instances.get(name)
        if instance is None or instance.wanted is None:
            return False
        links = [instance.links.get(rank) for rank in instance.wanted]
        return all(link is not None and link.is_ready and self._handshake.is_connected(link) for link in links)

    def refusal(self, name: str) -> str:
        """Why it cannot become ready before one side is restarted; empty if it can."""
        instance = None if name in self._changing else self._peers.instances.get(name)
        return "" if instance is None else instance.refusal

    def problem(self, name: str) -> str:
        """Why it is not ready; empty if it is."""
        instance = self._peers.instances.get(name)
        if name in self._changing:
            return "its configuration is being changed"
        if instance is None:
            return "it is not configured; add_peer() it, or give its address"
        return "" if self.is_ready(name) else instance.problem

    def status(self, name: str) -> PeerStatus:
        if self.is_ready(name):
            return PeerStatus("ready", "")
        if refusal := self.refusal(name):
            return PeerStatus("refused", refusal)
        is_removed = name in self._changing and name not in self._added
        is_known = name in self._added or (name in self._peers.instances and not is_removed)
        return PeerStatus("connecting" if is_known else "unknown", self.problem(name))

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, name: str, timeout_s: float, *, has_ended: Callable[[], object]) -> PeerStatus:
        """Wait until an instance is ready or never will be, or the manager has ended."""
        found = self.status(name)

        def is_settled() -> object:
            nonlocal found
            found = self.status(name)
            return found.state in ("ready", "refused") or has_ended()

        with self._changed:
            self._changed.wait_for(is_settled, min(timeout_s, threading.TIMEOUT_MAX))
        return found

    def agreement(self, name: str) -> Agreement | None:
        return self._handshake.agreement(name) if self.is_ready(name) else None

    def known_agreement(self, name: str) -> Agreement:
        """Raises `PeerUnreachable` if there is none."""
        agreement = self._handshake.agreement(name)
        if agreement is None:
            raise PeerUnreachable(f"peer {name!r} is not ready: {self.problem(name)}")
        return agreement

    def readers(self, name: str) -> Readers:
        agreement = self.known_agreement(name)
        return agreement.readers(self._local), agreement.group_size
