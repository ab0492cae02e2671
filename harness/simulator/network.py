"""Control messages: delayed, duplicated, reordered or lost."""

from __future__ import annotations

from functools import partial

from disagg.protocol.messages import Borrow, Busy, Lend, RequestMessage, Reserve, decode, encode
from disagg.protocol.types import PeerRank, SendMessage
from harness.simulator.loans import Staging
from harness.simulator.model import Host
from harness.simulator.world import World


class Network:
    """Carries the encoded messages of a world between its ranks."""

    def __init__(self, world: World, staging: Staging) -> None:
        self.num_messages = 0
        self._world, self._staging = world, staging
        world.on(SendMessage, self.send)

    def send(self, host: Host, effect: SendMessage) -> None:
        """Send a message; the faults decide which copies arrive, and when."""
        world = self._world
        if isinstance(effect.message, Reserve):
            self._staging.lend_ahead(host, effect.peer)
        data, epoch = encode(effect.message), host.epochs[effect.peer]
        for delay in world.faults.message(self.num_messages, world.now):
            world.at(world.now + delay, partial(self.deliver, host, effect.peer, epoch, data), of=effect.peer)
        self.num_messages += 1

    def deliver(self, source: Host, peer: PeerRank, epoch: int, data: bytes) -> None:
        """Deliver a message, unless its connection has ended for its receiver and is not read to its end."""
        host = self._world.hosts[peer]
        if host.epochs[source.name] == epoch or self._is_read_late(source, host, epoch):
            host.heard[source.name] = max(source.born, host.heard.get(source.name, 0))
            message = decode(data)
            assert isinstance(message, RequestMessage | Busy | Lend | Borrow)
            self._world.act(host, partial(host.sessions.on_message, source.name, message, self._world.now))

    def _is_read_late(self, source: Host, host: Host, epoch: int) -> bool:
        """Whether a rank reads what a process had sent before its death."""
        if source.alive or self._world.now >= source.read_until or host.heard.get(source.name, 0) > source.born:
            return False
        return source.epochs[host.name] == epoch
