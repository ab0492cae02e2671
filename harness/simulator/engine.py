"""The transfer engine: moves cells, fails, loses track of transfers, and lets bytes land late."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from disagg.core.rows import Slot
from disagg.protocol.messages import unpack_rows
from disagg.protocol.send_session import SendSession
from disagg.protocol.types import CancelTransfers, PeerRank, StartTransfer
from harness.simulator.faults import TransferResult
from harness.simulator.loans import Staging
from harness.simulator.model import PAGE_TOKENS, Flight, Holding, Host, Move, Violation, cell
from harness.simulator.network import Network
from harness.simulator.world import World


class Engine:
    """Carries out the transfers of a world. Half of a transfer's cells land half way, the rest at its end."""

    def __init__(self, world: World, network: Network, staging: Staging) -> None:
        self.num_transfers = 0
        self._world, self._network, self._staging = world, network, staging
        world.on(StartTransfer, self.start)
        world.on(CancelTransfers, lambda *_: None)  # every transfer begins at once

    def start(self, host: Host, start: StartTransfer) -> None:
        """Start a transfer; the faults decide how it goes."""
        world, peer = self._world, start.ticket.peer
        opened = next(o for o in host.opened if isinstance(o.session, SendSession) and o.session.key == start.ticket.key)
        if world.hosts[peer].born <= host.epochs[peer] and not start.is_for(world.hosts[peer].process):
            host.sessions.sends.settled(start.ticket, now=world.now, error=f"{peer} has restarted")
            return
        flight = Flight(host, world.hosts[peer], start, opened.holding, list(_moves(opened.holding, peer, start)))
        world.flights.add(flight)
        behaviour = world.faults.transfer(self.num_transfers)
        packed = world.scenario.slots_only or world.faults.packed(self.num_transfers)
        self.num_transfers += 1
        if packed and self._staging.start(flight, behaviour):
            return
        if world.scenario.slots_only:
            world.flights.discard(flight)
            host.sessions.sends.settled(start.ticket, now=world.now, error=f"{peer} cannot be reached")
            return
        half_way, end, at = world.now + behaviour.seconds / 2, world.now + behaviour.seconds, partial(world.at, of=host)
        half = len(flight.moves) // 2
        world.at(half_way, partial(self.land, flight, slice(0, half)))
        if behaviour.result is TransferResult.DONE:
            at(end, partial(self.land, flight, slice(half, None), finished=True))
            at(end, partial(self._settled, flight, ""))
        elif behaviour.result is TransferResult.FAILED:
            at(end, partial(self.land, flight, slice(0, 0), finished=True))
            at(end, partial(self._settled, flight, "broken wire"))
        else:
            at(end, partial(self._settled, flight, "the engine cannot tell", unsettled=True))
        if behaviour.result is TransferResult.LATE:
            at(end + behaviour.late_s, partial(self.land, flight, slice(half, None), finished=True))
            at(end + behaviour.late_s, partial(self._settled, flight, behaviour.late_error))

    def land(self, flight: Flight, part: slice, *, finished: bool = False) -> None:
        """Copy cells. Bytes of a dead source still land: the network has them."""
        source, destination = flight.source, flight.destination
        if flight.packed:
            if flight.late_write is not None:
                flight.late_write()
            part = slice(0, 0)
        for move in flight.moves[part]:
            if source.alive and source.owner[move.source_row] is not flight.holding:
                raise Violation(f"{flight.ticket} read row {move.source_row} of {source.name}, which is not its own")
            if flight.stale or not destination.alive:
                continue
            if flight.target is None or destination.owner[move.row] is not flight.target:
                raise Violation(f"{flight.ticket} wrote row {move.row} of {destination.name}, which is not its own")
            destination.cells[move.row][move.cell] = source.cells[move.source_row][move.source_cell]
        if finished:
            self._world.flights.discard(flight)

    def _settled(self, flight: Flight, error: str, *, unsettled: bool = False) -> None:
        host, now = flight.source, self._world.now
        settled = host.sessions.sends.settled
        self._world.act(host, partial(settled, flight.ticket, now=now, error=error, unsettled=unsettled))


def _moves(holding: Holding, peer: PeerRank, start: StartTransfer) -> Iterable[Move]:
    """The cells of a transfer that its source was elected to write."""
    request = holding.request
    tp_rank = holding.rank % request.tp
    elected = request.elected(holding.rank, peer.rank % request.num_destinations)
    for written in start.written:
        rows = unpack_rows(start.reserve.rows[written.component])
        if isinstance(rows, Slot):
            yield Move(holding.slot, 0, rows.id, 0)
            continue
        ids, first = rows.ids.tolist(), rows.first_token // PAGE_TOKENS
        for layer in elected.get("kv", ()):
            if written.layers is not None and layer not in written.layers:
                continue
            for token in range(written.start, written.stop):
                page, at = token // PAGE_TOKENS, cell(layer, token, tp_rank)
                yield Move(holding.pages[page], at, ids[page - first], at)
