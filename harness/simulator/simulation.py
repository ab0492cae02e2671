"""Joins the parts of a simulation and runs it to its end."""

from __future__ import annotations

from disagg.protocol.types import PeerRank
from harness.simulator.checks import check_ends, check_nothing_left
from harness.simulator.engine import Engine
from harness.simulator.faults import Faults
from harness.simulator.loans import Staging, check_loans
from harness.simulator.losses import Losses
from harness.simulator.model import Host
from harness.simulator.network import Network
from harness.simulator.scenario import Scenario
from harness.simulator.servers import Servers
from harness.simulator.world import World


class Simulation:
    """One scenario with its faults."""

    def __init__(self, scenario: Scenario, faults: Faults) -> None:
        self._world = World(scenario, faults)
        staging = Staging(self._world)
        self._network = Network(self._world, staging)
        self._engine = Engine(self._world, self._network, staging)
        Losses(self._world, Servers(self._world))

    @property
    def hosts(self) -> dict[PeerRank, Host]:
        """The ranks; a restarted one in place of the dead one."""
        return self._world.hosts

    @property
    def scenario(self) -> Scenario:
        return self._world.scenario

    @property
    def takers(self) -> list[str]:
        """The instances that have taken requests that are kept, once for each request."""
        kept = [request for request in self._world.requests if request.script.kept]
        return [instance for request in kept for instance, _ in request.takers(self._world.scenario.group_size)]

    @property
    def now(self) -> float:
        return self._world.now

    @property
    def num_steps(self) -> int:
        return self._world.num_steps

    @property
    def num_messages(self) -> int:
        return self._network.num_messages

    def run(self) -> Simulation:
        """Run the scenario. Raises `Violation` as soon as a promise is broken, or if something is left at the end."""
        world = self._world
        world.run_until(world.scenario.end)
        complete = check_ends(world.hosts, world.flights)
        for flight in list(world.flights):
            self._engine.land(flight, slice(None), finished=True)
        if complete:
            check_nothing_left(world.hosts)
            check_loans(list(world.hosts.values()))
        return self
