"""Ranks that die and restart, and connections that end."""

from __future__ import annotations

import itertools
from functools import partial

from disagg.protocol.types import PeerRank
from harness.simulator.model import NUM_ROWS, Host
from harness.simulator.scenario import Loss
from harness.simulator.servers import Servers
from harness.simulator.world import World

PROOF_RETRY_S = 0.5


class Losses:
    """Carries out the losses of a scenario. Each loss starts a new epoch of the connections that it ends."""

    def __init__(self, world: World, servers: Servers) -> None:
        self._world, self._servers = world, servers
        self._epochs = itertools.count(1)
        for loss in world.scenario.losses:
            world.at(loss.at, partial(self._lose, loss))

    def _lose(self, loss: Loss) -> None:
        """Kill and restart a rank, or end a connection; the peers notice one after the other."""
        world = self._world
        epoch = next(self._epochs)
        early, late = loss.notice_s
        if loss.other is not None:
            world.at(world.now + early, partial(self._notice, world.hosts[loss.rank], loss.other, epoch, loss.proved))
            world.at(world.now + late, partial(self._notice, world.hosts[loss.other], loss.rank, epoch, loss.proved))
            return
        restarted = self._restart(loss.rank, epoch)
        if loss.reopen:
            self._reopen(loss.rank)
        for index, other in enumerate(world.hosts.values()):
            if other is not restarted:
                when = world.now + (late if index % 2 else early)
                world.at(when, partial(self._notice, other, loss.rank, epoch, loss.proved))

    def _restart(self, rank: PeerRank, epoch: int) -> Host:
        world = self._world
        world.hosts[rank].alive = False
        host = world.hosts[rank] = Host(rank, world.scenario)
        host.born = epoch
        host.epochs = dict.fromkeys(world.hosts, epoch)
        return host

    def _reopen(self, rank: PeerRank) -> None:
        """Reserve again, on a restarted rank, every request that it was to receive."""
        world = self._world
        for request in world.requests:
            script = request.script
            group = range(request.num_destinations * script.destination_group, NUM_ROWS)[: request.num_destinations]
            if rank.instance == request.destination and rank.rank in group:
                when = max(world.now, script.reserve_at) + 0.6
                world.at(when, partial(self._servers.open_receive, rank, request))

    def _notice(self, host: Host, peer: PeerRank, epoch: int, proved: bool) -> None:
        if host.epochs[peer] >= epoch:
            return
        ended, host.epochs[peer] = host.epochs[peer], epoch
        self._world.act(host, partial(host.sessions.peer_lost, peer, "connection reset", self._world.now, epoch=ended))
        host.unproved.add(peer)
        if proved:
            self._prove(host, peer, epoch, ended)

    def _prove(self, host: Host, peer: PeerRank, epoch: int, ended: int) -> None:
        """Report the peer quiet once nothing is or can be in flight over the ended connections."""
        world, pair = self._world, {host.name, peer}
        unaware = world.hosts[peer].epochs[host.name] < epoch
        if unaware or any({f.source.name, f.destination.name} == pair and f.epoch < epoch for f in world.flights):
            world.at(world.now + PROOF_RETRY_S, partial(self._prove, host, peer, epoch, ended))
        else:
            if host.epochs[peer] == epoch:
                host.unproved.discard(peer)
            world.act(host, partial(host.sessions.peer_quiet, peer, epoch=ended))
