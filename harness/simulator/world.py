"""Virtual time, the ranks, and the effects of their sessions."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from disagg.core.leases import quarantine, release
from disagg.protocol.types import NEVER, PeerRank, QuarantineLease, ReleaseLease
from harness.simulator.checks import check_host
from harness.simulator.faults import Faults
from harness.simulator.model import Flight, Host, Request, Violation
from harness.simulator.scenario import DECODE, INTRUDER, PREFILL, Scenario


class World:
    """The ranks of one scenario, what is in flight between them, and a queue of actions in virtual time."""

    def __init__(self, scenario: Scenario, faults: Faults) -> None:
        self.scenario, self.faults = scenario, faults
        self.now = 0.0
        self.num_steps = 0
        self.numbers = itertools.count()
        """Unique numbers: nonces, and the order of actions that are due at one time."""
        self.flights: set[Flight] = set()
        self.violation: Violation | None = None
        """Found within a callback, where the protocol may catch it; raised when the call returns."""
        self.requests = [Request(index, script, scenario) for index, script in enumerate(scenario.scripts)]
        self.hosts: dict[PeerRank, Host] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._handlers: dict[type, Callable[[Host, Any], None]] = {}
        for instance in (PREFILL, DECODE, INTRUDER):
            for rank in range(scenario.group_size(instance) * scenario.num_groups):
                name = PeerRank(instance, rank)
                self.hosts[name] = Host(name, scenario, self.requests)
        for host in self.hosts.values():
            host.epochs = dict.fromkeys(self.hosts, 0)

    def at(self, when: float, action: Callable[[], None], *, of: Host | PeerRank | None = None) -> None:
        """Run `action` at time `when`, or once the rank `of` that it is an action of goes on."""
        run: Callable[[], None] = partial(self._run, action, of)
        heapq.heappush(self._queue, (when, next(self.numbers), run))

    def _run(self, action: Callable[[], None], of: Host | PeerRank | None) -> None:
        host = self.hosts[of] if isinstance(of, PeerRank) else of
        if host is not None and host.alive and self.now < host.stopped_until:
            self.at(host.stopped_until, action, of=of)
        else:
            action()

    def on(self, effect: type, handler: Callable[[Host, Any], None]) -> None:
        """Carry out effects of this type with `handler(host, effect)`."""
        self._handlers[effect] = handler

    def run_until(self, end: float) -> None:
        """Run every action due by `end`, then tick every rank."""
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.num_steps += 1
        self.now = end
        for host in self.hosts.values():
            self.act(host, partial(host.sessions.tick, end))

    def act(self, host: Host, call: Callable[[], None]) -> None:
        """Call into a living host's sessions, carry out the effects, and check the host."""
        if not host.alive:
            return
        call()
        self._carry_out(host)
        host.sessions.flush(self.now)
        self._carry_out(host)
        check_host(host, self.scenario.limits, num_instances=len({peer.instance for peer in self.hosts}))
        due = host.sessions.next_tick
        if due < host.tick_at:
            host.tick_at = due
            self.at(max(due, self.now) + self.faults.lateness_s(), partial(self._tick, host, due), of=host)

    def _carry_out(self, host: Host) -> None:
        effects = host.sessions.effects
        while effects:
            match effects.popleft():
                case ReleaseLease(lease):
                    release(lease)
                case QuarantineLease(lease, reason):
                    quarantine(lease, reason)
                case effect:
                    self._handlers[type(effect)](host, effect)
        if self.violation is not None:
            raise self.violation

    def _tick(self, host: Host, due: float) -> None:
        if host.tick_at == due:
            host.tick_at = NEVER
        self.act(host, partial(host.sessions.tick, self.now))
