"""Loans of staging slots between simulated ranks, and transfers that are packed into them slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from disagg.core.memory import RemoteRegion
from disagg.protocol.messages import Filled
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import NEVER, PeerRank, ReturnLoans, TakeLoans, UnpackSlot
from disagg.transfer.staging import Loans
from harness.simulator.faults import Behaviour, TransferResult
from harness.simulator.model import Flight, Host, Violation
from harness.simulator.slots import SLOT_CELLS, SlotContent
from harness.simulator.world import World

RETRY_S = 0.05
"""How long a writer waits before it looks for a free slot again."""


class PackedTransfer:
    """One transfer through slots of its destination, as the transfer worker carries it out."""

    def __init__(self, world: World, flight: Flight, behaviour: Behaviour, loans: Loans) -> None:
        self._world = world
        self._flight, self._behaviour, self._loans = flight, behaviour, loans
        self._offset = 0
        self._late: tuple[int, int] | None = None
        self._has_asked = False
        self._demand = -(-len(flight.moves) // SLOT_CELLS)
        loans.want(self._demand)

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
        elif (loan := self._take()) is None:
            self._again(RETRY_S)
        elif result in (TransferResult.LATE, TransferResult.STUCK) and left <= SLOT_CELLS:
            self._late = loan
            flight.late_write = partial(self._write, loan)
            self._settled("the engine cannot tell", unsettled=True)
            if result is TransferResult.LATE:
                self._world.at(self._world.now + self._behaviour.late_s, self._write_late, of=flight.source)
        else:
            self._write(loan)
            self._fill(loan)
            self._again(self._behaviour.seconds / 4)

    def _take(self) -> tuple[int, int] | None:
        loan = self._loans.take()
        if loan is not None:
            self._demand -= 1
        elif not self._has_asked:
            self._has_asked = True
            sessions, peer = self._flight.source.sessions, self._flight.ticket.peer
            self._world.act(self._flight.source, partial(sessions.borrower.want, peer, self._loans, self._world.now))
        return loan

    def _again(self, delay_s: float) -> None:
        self._world.at(self._world.now + delay_s, self.step, of=self._flight.source)

    def _write(self, loan: tuple[int, int]) -> None:
        """Write cells into a slot. Bytes of a dead source still land."""
        flight, destination = self._flight, self._flight.destination
        number, address = loan
        cells = []
        for move in flight.moves[self._offset : self._offset + SLOT_CELLS]:
            if flight.source.alive and flight.source.owner[move.source_row] is not flight.holding:
                raise Violation(f"{flight.ticket} packed row {move.source_row} of {flight.source.name}, which is not its own")
            cells.append((move.row, move.cell, flight.source.cells[move.source_row][move.source_cell]))
        if flight.stale or not destination.alive:
            return
        lender = destination.sessions.lender
        others = [
            peer for peer, each in lender._accounts.items() if address in (*each.unfilled.values(), *each.unpacked.values())
        ]
        if address in destination.slots.free or any(peer != flight.source.name for peer in others):
            raise Violation(f"{flight.ticket} wrote into a slot of {destination.name} that is not lent to it any more")
        destination.slots.memory[address] = SlotContent(flight.ticket, number, cells)

    def _fill(self, loan: tuple[int, int]) -> None:
        flight = self._flight
        nbytes = min(SLOT_CELLS, len(flight.moves) - self._offset)
        filled = Filled(loan[0], flight.ticket.chunk, (), self._offset, nbytes)
        self._offset += nbytes
        self._world.act(flight.source, partial(flight.source.sessions.slot_filled, flight.ticket, filled, self._world.now))

    def _write_late(self) -> None:
        assert self._late is not None
        self._write(self._late)
        self._flight.late_write = None
        if self._behaviour.late_error:
            self._loans.put_back(*self._late)
            self._end(self._behaviour.late_error)
        else:
            self._fill(self._late)
            self._end("")

    def _end(self, error: str) -> None:
        self._world.flights.discard(self._flight)
        self._settled(error)

    def _settled(self, error: str, *, unsettled: bool = False) -> None:
        self._loans.want(-self._demand)
        self._demand = 0
        flight, packed = self._flight, 0 if error else len(self._flight.moves)
        settled = flight.source.sessions.sends.settled
        call = partial(settled, flight.ticket, now=self._world.now, error=error, unsettled=unsettled, packed=packed)
        self._world.act(flight.source, call)


class Staging:
    """Opens accounts, carries out packed transfers, unpacks slots, takes loans and returns them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._loans: dict[tuple[Host, PeerRank], tuple[int, Loans]] = {}
        world.on(UnpackSlot, self._unpack)
        world.on(TakeLoans, self._take)
        world.on(ReturnLoans, self._return)

    def start(self, flight: Flight, behaviour: Behaviour) -> bool:
        """Start a transfer through slots of its destination. `False` if their connection has ended for one of them."""
        loans = self._open(flight.source, flight.destination)
        if loans is None or flight.stale:
            return False
        flight.packed, flight.target = True, None
        PackedTransfer(self.world, flight, behaviour, loans).step()
        return True

    def _open(self, source: Host, destination: Host) -> Loans | None:
        """The loans of a destination, of which the source has heard once it is connected."""
        epoch = source.epochs[destination.name]
        if destination.epochs[source.name] != epoch or not destination.alive:
            return None
        opened, loans = self._loans.get((source, destination.name), (-1, None))
        if loans is None or opened != epoch:
            lending = destination.sessions.lender.open(source.name, epoch, 0)
            assert lending is not None
            loans = Loans(lending.slot_nbytes, lending.first, (RemoteRegion(1, 1 << 40),), set())
            self._loans[source, destination.name] = epoch, loans
            source.heard[destination.name] = max(destination.born, source.heard.get(destination.name, 0))
        return loans

    def _of(self, host: Host, peer: PeerRank) -> Loans | None:
        epoch, loans = self._loans.get((host, peer), (-1, None))
        return loans if epoch == host.epochs[peer] else None

    def _take(self, host: Host, effect: TakeLoans) -> None:
        loans = self._of(host, effect.peer)
        if loans is not None:
            host.sessions.take_loans(effect, loans, self.world.now)

    def _return(self, host: Host, effect: ReturnLoans) -> None:
        loans = self._of(host, effect.peer)
        if loans is not None:
            host.sessions.borrower.give_back(effect.peer, loans, self.world.now)

    def lend_ahead(self, host: Host, peer: PeerRank) -> None:
        """A receiver reserves: lend the first slots."""
        if self._open(self.world.hosts[peer], host) is not None:
            host.sessions.lender.ahead(peer)

    def _unpack(self, host: Host, effect: UnpackSlot) -> None:
        self.world.at(self.world.now + self.world.faults.unpack_s(), partial(self._scatter, host, effect), of=host)

    def _scatter(self, host: Host, effect: UnpackSlot) -> None:
        """Scatter a slot into the rows of its session."""
        if not host.alive:
            return
        session: ReceiveSession = effect.session
        content = host.slots.memory.get(effect.address)
        opened = next(o for o in host.opened if o.session is session)
        if content is None or content.loan != effect.filled.loan or content.ticket.key != session.key:
            raise Violation(f"slot {effect.address} of {host.name} was overwritten before it was unpacked")
        for row, cell, value in content.cells:
            if host.owner[row] is not opened.holding:
                raise Violation(f"{session.key} was unpacked into row {row} of {host.name}, which is not its own")
            host.cells[row][cell] = value
        self.world.act(host, partial(host.sessions.unpacked, effect, self.world.now))


def check_loans(hosts: Sequence[Host]) -> None:
    """Every filled slot has arrived, nobody waits for a slot, and every slot is free again."""
    living = [host for host in hosts if host.alive]
    for host in living:
        borrower, lender, pool = host.sessions.borrower, host.sessions.lender, host.slots
        if borrower.next_tick < NEVER:
            raise Violation(
                f"{host.name} still reports filled slots or asks for more: {borrower._reported}, {borrower._wishes}"
            )
        if pool.num_free != pool.total:
            raise Violation(f"{host.name} has {pool.num_free} of {pool.total} slots free, {lender.num_lost} lost")
    for host in living:
        if host.sessions.borrower._wishes:
            raise Violation(f"{host.name} has not withdrawn its wishes for slots: {host.sessions.borrower._wishes}")
