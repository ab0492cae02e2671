"""Staging rings of the simulated ranks, and transfers that are packed into them slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from disagg.core.memory import RemoteRegion
from disagg.core.rings import Ring
from disagg.protocol.messages import Filled
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import CreditSlots, PeerRank, UnpackSlot
from disagg.transfer.staging import RemoteRing
from harness.simulator.faults import Behaviour, TransferResult
from harness.simulator.model import Flight, Host, Violation
from harness.simulator.ring_pool import SLOT_CELLS, SlotContent
from harness.simulator.world import World

RETRY_S = 0.05
"""How long a writer waits before it looks for a free slot again."""


class PackedTransfer:
    """One transfer through the ring of its destination, as the transfer worker carries it out."""

    def __init__(self, rings: Rings, flight: Flight, behaviour: Behaviour, ring: RemoteRing) -> None:
        self._world = rings.world
        self._flight, self._behaviour, self._ring = flight, behaviour, ring
        self._offset = 0
        self._late: tuple[int, int] | None = None

    def step(self) -> None:
        """Write the next slot, or end the transfer."""
        flight, result = self._flight, self._behaviour.result
        source = flight.source
        if not source.alive:
            self._world.flights.discard(flight)
            return
        session = source.sessions.sends.sessions.get((flight.ticket.peer.instance, flight.ticket.key))
        destination = session.destinations.get(flight.ticket.peer) if session is not None else None
        if destination is None or destination.reason:
            self._end("the attempt ended before everything was sent")
            return
        left = len(flight.moves) - self._offset
        if left <= 0:
            self._end("")
        elif result is TransferResult.FAILED and (self._offset or left <= SLOT_CELLS):
            self._end("broken wire")
        elif (use := self._ring.take()) is None:
            self._again(RETRY_S)
        elif result in (TransferResult.LATE, TransferResult.STUCK) and left <= SLOT_CELLS:
            self._late = use
            flight.late_write = partial(self._write, use)
            self._settled("the engine cannot tell", unsettled=True)
            if result is TransferResult.LATE:
                self._world.at(self._world.now + self._behaviour.late_s, self._write_late, of=flight.source)
        else:
            self._write(use)
            self._fill(use)
            self._again(self._behaviour.seconds / 4)

    def _again(self, delay_s: float) -> None:
        self._world.at(self._world.now + delay_s, self.step, of=self._flight.source)

    def _write(self, use: tuple[int, int]) -> None:
        """Write cells into a slot. Bytes of a dead source still land."""
        flight, destination = self._flight, self._flight.destination
        slot, sequence = use
        moves = flight.moves[self._offset : self._offset + SLOT_CELLS]
        cells = []
        for move in moves:
            if flight.source.alive and flight.source.owner[move.source_row] is not flight.holding:
                raise Violation(f"{flight.ticket} packed row {move.source_row} of {flight.source.name}, which is not its own")
            cells.append((move.row, move.cell, flight.source.cells[move.source_row][move.source_cell]))
        if flight.stale or not destination.alive:
            return
        if destination.rings.owners.get(self._ring.ring.address) != flight.source.name:
            raise Violation(f"{flight.ticket} wrote into a ring of {destination.name} that was given back")
        destination.rings.memory[self._ring.ring.slot(slot)] = SlotContent(flight.ticket, sequence, cells)

    def _fill(self, use: tuple[int, int]) -> None:
        flight, (slot, sequence) = self._flight, use
        nbytes = min(SLOT_CELLS, len(flight.moves) - self._offset)
        filled = Filled(slot, sequence, flight.ticket.chunk, (), self._offset, nbytes, self._ring.ring.address)
        self._offset += nbytes
        self._world.act(flight.source, partial(flight.source.sessions.slot_filled, flight.ticket, filled, self._world.now))

    def _write_late(self) -> None:
        assert self._late is not None
        self._write(self._late)
        self._flight.late_write = None
        if self._behaviour.late_error:
            self._end(self._behaviour.late_error)
        else:
            self._fill(self._late)
            self._end("")

    def _end(self, error: str) -> None:
        self._world.flights.discard(self._flight)
        self._settled(error)

    def _settled(self, error: str, *, unsettled: bool = False) -> None:
        flight, packed = self._flight, 0 if error else len(self._flight.moves)
        settled = flight.source.sessions.sends.settled
        call = partial(settled, flight.ticket, now=self._world.now, error=error, unsettled=unsettled, packed=packed)
        self._world.act(flight.source, call)


class Rings:
    """Grants rings, carries out packed transfers, unpacks slots and takes credits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._written: dict[tuple[Host, PeerRank, int], RemoteRing] = {}
        world.on(UnpackSlot, self._unpack)
        world.on(CreditSlots, self._credit)

    def start(self, flight: Flight, behaviour: Behaviour) -> bool:
        """Start a transfer through its destination's ring. `False` if the writer has none."""
        source, destination = flight.source, flight.destination
        epoch = source.epochs[destination.name]
        if destination.epochs[source.name] != epoch or flight.stale or not destination.alive:
            return False
        key = source, destination.name, epoch
        if key not in self._written:
            destination.rings.next_owner = source.name
            grant = destination.sessions.credits.grant(source.name, epoch, 0)
            if grant is None:
                return False
            ring = Ring(grant.address, grant.slot_nbytes, grant.num_slots)
            regions = (RemoteRegion(ring.address, ring.slot_nbytes * ring.num_slots),)
            self._written[key] = RemoteRing(ring, regions, first=grant.first)
        flight.packed, flight.target = True, None
        PackedTransfer(self, flight, behaviour, self._written[key]).step()
        return True

    def _unpack(self, host: Host, effect: UnpackSlot) -> None:
        self.world.at(self.world.now + self.world.faults.unpack_s(), partial(self._scatter, host, effect), of=host)

    def _scatter(self, host: Host, effect: UnpackSlot) -> None:
        """Scatter a slot into the rows of its session."""
        if not host.alive:
            return
        session: ReceiveSession = effect.session
        content = host.rings.memory.get(effect.address)
        opened = next(o for o in host.opened if o.session is session)
        if content is None or content.sequence != effect.filled.sequence or content.ticket.key != session.key:
            raise Violation(f"slot {effect.filled.slot} of {host.name} was overwritten before it was unpacked")
        for row, cell, value in content.cells:
            if host.owner[row] is not opened.holding:
                raise Violation(f"{session.key} was unpacked into row {row} of {host.name}, which is not its own")
            host.cells[row][cell] = value
        self.world.act(host, partial(host.sessions.unpacked, effect, self.world.now))

    def _credit(self, host: Host, effect: CreditSlots) -> None:
        for (writer, peer, _), ring in self._written.items():
            if writer is host and peer == effect.peer and ring.ring.address == effect.ring:
                for slot, sequence in effect.slots:
                    ring.credit(slot, sequence)


def check_rings(hosts: Sequence[Host], *, proved: bool) -> None:
    """Every filled slot was credited. If every loss was `proved`, only rings of present connections are granted."""
    for host in hosts:
        ledger = host.sessions.credits
        if host.alive and ledger._unacknowledged:
            raise Violation(f"{host.name} still reports filled slots: {list(ledger._unacknowledged)}")
        if host.alive and proved and ledger._retired:
            raise Violation(f"{host.name} still has retired rings: {list(ledger._retired)}")
