"""Two instances with any kinds of state, with a manager for each rank; every byte is checked against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from disagg import KVManager, ModelId, new_request_id
from disagg.core.rows import Rows
from disagg.protocol.types import Event
from disagg.requests import Receiver, Sender
from disagg.testing.reference_states import StateRows
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS
from tests.support.instances import InstanceSpec, Range, Rank, library_rows
from tests.support.kinds import Kind
from tests.support.states import Request, Scene

Handle = Receiver | Sender


@dataclass
class Servers:
    """A scene whose ranks have managers: prefill ranks send, decode ranks receive."""

    scene: Scene
    prefill: list[KVManager] = field(default_factory=list)
    decode: list[KVManager] = field(default_factory=list)

    def receive(self, request: Request, request_id: bytes) -> list[Receiver]:
        """Reserve a request's rows on every decode rank."""
        return [
            manager.receiver(
                request_id,
                peer="prefill-0",
                rows=self.rows(rank, rows, request.needs),
                need={kind.name: request.needs[kind.name] for kind in self.scene.kinds if kind.model.paged},
                deadline_s=DEADLINE_S,
            )
            for manager, rank, rows in zip(self.decode, self.scene.destination.ranks, request.destination_rows, strict=True)
        ]

    def send(
        self, request: Request, request_id: bytes, *, chunks: Sequence[int] = (), leave_out: frozenset[str] = frozenset()
    ) -> list[Sender]:
        """Send full attention in chunks of tokens, and everything else with `finish`."""
        senders = []
        for manager, rank, taken in zip(self.prefill, self.scene.source.ranks, request.source_rows, strict=True):
            sender = manager.sender(request_id, peer="decode-0", deadline_s=DEADLINE_S)
            rows = self.rows(rank, taken, request.held)
            last = {name: given for name, given in rows.items() if name not in leave_out | {"kv"}}
            for tokens in itertools.pairwise([*request.held["kv"][:1], *chunks, request.held["kv"][1]]):
                sender.send({"kv": rows["kv"]}, tokens=tokens)
            sender.finish(last, payload=b"token")
            senders.append(sender)
        return senders

    def rows(self, rank: Rank, taken: Mapping[str, StateRows], tokens: Mapping[str, Range]) -> dict[str, Rows]:
        """The rows as the library takes them, for the states of the rank's instance."""
        return {name: library_rows(rows, state=rank.states[name], tokens=tokens[name]) for name, rows in taken.items()}

    def transfer(self, num_tokens: int, *, chunks: Sequence[int] = (), **changes: Any) -> Request:
        """Transfer one request and check it. Its rows stay in use."""
        request, request_id = self.scene.open(num_tokens, **changes), new_request_id()
        handles: list[Handle] = [*self.receive(request, request_id), *self.send(request, request_id, chunks=chunks)]
        for event in wait(handles):
            assert event.ok, event.error
            assert event.payload == b"token"
        assert self.scene.difference(request) is None
        return request


def wait(handles: Sequence[Handle]) -> list[Event]:
    return [handle.wait(timeout_s=DEADLINE_S) for handle in handles]


def start(ranks: Sequence[Rank], name: str, settings: Mapping[str, Any]) -> Iterator[KVManager]:
    """A manager for every rank of an instance, over its components."""
    leader = None
    for rank in ranks:
        manager = KVManager(
            name=name,
            topology=rank.topology,
            components=[*rank.components.values()],
            leader=leader,
            model=ModelId("toy"),
            **{"backend": "local", "limits": FAST, "connection_limits": FAST_LINKS, **settings},
        )
        leader = leader or manager.address
        yield manager


@contextmanager
def servers(
    kinds: Sequence[Kind], source: InstanceSpec, destination: InstanceSpec, *, settings: Mapping[str, Any] | None = None
) -> Iterator[Servers]:
    """Both instances, connected. At the end every manager must be healthy. `settings` are arguments of `KVManager`."""
    made = Servers(Scene(kinds, source, destination))
    try:
        for manager in start(made.scene.source.ranks, "prefill-0", settings or {}):
            made.prefill.append(manager)
        for manager in start(made.scene.destination.ranks, "decode-0", settings or {}):
            made.decode.append(manager)
        for managers, peer, others in (
            (made.prefill, "decode-0", made.decode),
            (made.decode, "prefill-0", made.prefill),
        ):
            for manager in managers:
                manager.add_peer(peer, address=others[0].address)
        for managers, peer in ((made.prefill, "decode-0"), (made.decode, "prefill-0")):
            for manager in managers:
                manager.wait_ready(peer, timeout_s=DEADLINE_S)
        yield made
        for manager in made.prefill + made.decode:
            assert manager.health().ok, manager.health().problem
    finally:
        for manager in made.prefill + made.decode:
            manager.close()
