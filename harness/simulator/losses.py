"""Ranks that die and restart, or are stopped for a while, and connections that end."""

from __future__ import annotations

import itertools
from functools import partial

from disagg.protocol.types import PeerRank
from harness.simulator.model import NUM_ROWS, Host
from harness.simulator.scenario import INTRUDER, Loss, Stop
from harness.simulator.servers import Servers
from harness.simulator.world import World

PROOF_RETRY_S = 0.5


class Losses:
    """Carries out the losses and stops of a scenario. Each loss starts a new epoch of the connections that it ends."""

    def __init__(self, world: World, servers: Servers) -> None:
        self._world, self._servers = world, servers
        self._epochs = itertools.count(1)
        for loss in world.scenario.losses:
            world.at(loss.at, partial(self._lose, loss))
        for stop in world.scenario.stops:
            world.at(stop.at, partial(self._stop, stop))

    def _stop(self, stop: Stop) -> None:
        """Stop a rank, unless another process has its name by then or it is stopped for longer already."""
        host, now = self._world.hosts[stop.rank], self._world.now
        host.stopped_s += max(0.0, now + stop.seconds - max(now, host.stopped_until))
        host.stopped_until = max(host.stopped_until, now + stop.seconds)

    def _lose(self, loss: Loss) -> None:
        """Kill and restart a rank, or end a connection; the peers notice one after the other."""
        world = self._world
        epoch = next(self._epochs)
        early, late = loss.notice_s
        if loss.other is not None:
            for delay_s, name, peer in ((early, loss.rank, loss.other), (late, loss.other, loss.rank)):
                host = world.hosts[name]
                world.at(world.now + delay_s, partial(self._notice, host, peer, epoch, loss.proved), of=host)
            return
        world.hosts[loss.rank].read_until = world.now + loss.late_s
        restarted = self._restart(loss.rank, epoch)
        if loss.reopen:
            self._reopen(loss.rank)
        for index, other in enumerate(world.hosts.values()):
            if other is not restarted:
                when = world.now + (late if index % 2 else early)
                world.at(when, partial(self._notice, other, loss.rank, epoch, loss.proved), of=other)

    def _restart(self, rank: PeerRank, epoch: int) -> Host:
        world = self._world
        world.hosts[rank].alive = False
        host = world.hosts[rank] = Host(rank, world.scenario, world.requests, born=epoch)
        host.epochs = dict.fromkeys(world.hosts, epoch)
        return host

    def _reopen(self, rank: PeerRank) -> None:
        """Reserve again, on a restarted rank, every request that it was to receive."""
        world = self._world
        for request in world.requests:
            script = request.script
            group = range(request.num_destinations * script.destination_group, NUM_ROWS)[: request.num_destinations]
            intrudes = rank.instance == INTRUDER and script.impostor_at is not None
            if intrudes or (rank.instance == request.destination and rank.rank in group):
                when = max(world.now, script.reserve_at) + 0.6
                world.at(when, partial(self._servers.open_receive, rank, request), of=rank)

    def _notice(self, host: Host, peer: PeerRank, epoch: int, proved: bool) -> None:
        if host.epochs[peer] >= epoch:
            return
        ended, host.epochs[peer] = host.epochs[peer], epoch
        direct = not self._world.scenario.slots_only
        lose = partial(host.sessions.peer_lost, peer, "connection reset", self._world.now, epoch=ended, direct=direct)
        self._world.act(host, lose)
        host.unproved.add((peer, ended))
        if proved:
            self._prove(host, peer, epoch, ended)

    def _prove(self, host: Host, peer: PeerRank, epoch: int, ended: int) -> None:
        """Report the peer quiet once nothing is or can be in flight over the ended connections."""
        world, pair = self._world, {host.name, peer}
        unaware = world.hosts[peer].epochs[host.name] < epoch
        if unaware or any({f.source.name, f.destination.name} == pair and f.epoch < epoch for f in world.flights):
            world.at(world.now + PROOF_RETRY_S, partial(self._prove, host, peer, epoch, ended), of=host)
        else:
            host.unproved.discard((peer, ended))
            world.act(host, partial(host.sessions.peer_quiet, peer, epoch=ended))
