"""Checks of one host after every call, of each success, and of everything at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from disagg.core.leases import LeaseState
from disagg.protocol.receive_session import RECEIVE_TABLE, WRITER_TABLE, ReceiveSession
from disagg.protocol.send_session import SEND_TABLE, SendSession
from disagg.protocol.types import Event, Limits, PeerRank, State
from harness.simulator.model import (
    NUM_LAYERS,
    PAGE_TOKENS,
    STATE_LAYER,
    Flight,
    Holding,
    Host,
    OpenSession,
    Request,
    Violation,
    cell,
)


def _reachable(table: Iterable[tuple[object, object]]) -> set[tuple[object, object]]:
    """Every pair of states of which the second can follow the first, in any number of steps."""
    pairs = set(table)
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b is c} | pairs
        if more == pairs:
            return pairs
        pairs = more


_REACHABLE = _reachable(
    [(before, after) for (before, _), after in RECEIVE_TABLE.items()]
    + [(before, after) for (before, _), after in SEND_TABLE.items()]
    + [(before, after) for (before, _), after in WRITER_TABLE.items()]
)


def check_host(host: Host, limits: Limits, *, num_instances: int) -> None:
    """Sessions move along their tables, memory is bounded, and every slot is in one place."""
    for opened in host.opened:
        for peer, state in _states(opened.session):
            before = opened.states.get(peer, state)
            if before is not state and (before, state) not in _REACHABLE:
                raise Violation(f"{opened.session.key} on {host.name}: {before} became {state}")
            opened.states[peer] = state
        _check_kept(host, opened)
    sends, receives = host.sessions.sends, host.sessions.receives
    if len(sends.parked) > limits.max_parked_reserves * num_instances:
        raise Violation(f"{host.name} has {len(sends.parked)} parked reserves")
    if max(len(sends.table.ended), len(receives._ended)) > limits.max_tombstones:
        raise Violation(f"{host.name} has {len(sends.table.ended)} and {len(receives._ended)} tombstones")
    lender, pool = host.sessions.lender, host.slots
    if lender.num_lent + pool.num_free + lender.num_lost != pool.total:
        raise Violation(
            f"{host.name} has {pool.total} slots: {lender.num_lent} lent, {pool.num_free} free, {lender.num_lost} lost"
        )


def _check_kept(host: Host, opened: OpenSession) -> None:
    """The rows of a request that nobody has taken stay with their owner until its end."""
    session = opened.session
    if isinstance(session, SendSession) and not session.is_bound and session.lease.released and session.tag not in host.events:
        raise Violation(f"{session.key} on {host.name} was taken by nobody, and its rows were released")


def _states(session: ReceiveSession | SendSession) -> list[tuple[PeerRank | None, State]]:
    if isinstance(session, ReceiveSession):
        return [(None, session.state), *((peer, writer.state) for peer, writer in session.writers.items())]
    return [(peer, destination.state) for peer, destination in session.destinations.items()]


def check_received(host: Host, opened: OpenSession, event: Event) -> None:
    """Every needed cell holds its value, and the payload is the request's."""
    holding, request = opened.holding, opened.holding.request
    script = request.script
    success = f"{event.key} succeeded on {host.name}"
    if host.cells[holding.slot][0] != request.value(STATE_LAYER, 0, 0):
        raise Violation(f"{success} without its state")
    first = script.hit // PAGE_TOKENS
    for token in range(script.hit, script.prompt):
        row = host.cells[holding.pages[token // PAGE_TOKENS - first]]
        for layer in range(NUM_LAYERS):
            for tp_rank in request.needed_tp_ranks(holding.rank):
                if row[cell(layer, token, tp_rank)] != request.value(layer, token, tp_rank):
                    raise Violation(f"{success} without token {token}, layer {layer}, tensor-parallel rank {tp_rank}")
    if event.payload != request.payload:
        raise Violation(f"{success} with payload {event.payload!r}")


def check_taken(host: Host, request: Request, sizes: Callable[[str], int]) -> None:
    """A request goes to one group, and to each of its ranks once: that of its destination, or any if it is kept. `sizes`: of
    the groups of an instance.
    """
    if host.name in request.received:
        raise Violation(f"{request.key} was received twice by {host.name}")
    request.received.add(host.name)
    others = [peer for peer in request.received if peer.instance != request.destination]
    if len(request.takers(sizes)) > 1 or (others and not request.script.kept):
        raise Violation(f"{request.key} was received by {', '.join(map(str, sorted(request.received)))}")


def check_sent(hosts: Mapping[PeerRank, Host], opened: OpenSession) -> None:
    """Every destination of a successful send is known and has received it, and none that lives has reported a failure."""
    session = opened.session
    assert isinstance(session, SendSession)
    if session.num_awaited or not opened.holding.request.received.issuperset(session.destinations):
        raise Violation(f"{session.key} was sent with success, but not received by all of its destinations")
    for peer, destination in session.destinations.items():
        host = hosts[peer]
        for other in host.opened:
            served = destination.reserve is None or destination.reserve.nonce == other.nonce
            if served and other.session.key == session.key and not host.events[other.session.tag].ok:
                raise Violation(f"{session.key} was sent with success, but {host.name} failed")


def check_ends(hosts: Mapping[PeerRank, Host], flights: set[Flight]) -> bool:
    """Every request on a living rank has ended and given up its rows.

    Returns whether nothing may remain: `False` where rows are quarantined, because of a transfer that never settled or a
    lost peer that was never proved quiet.
    """
    touched = {holding for flight in flights for holding in (flight.holding, flight.reserved)}
    touched.discard(None)
    complete = not touched
    for host in hosts.values():
        for opened in host.opened if host.alive else ():
            if opened.session.tag not in host.events:
                raise Violation(f"the end of {opened.session.key} was never reported to {host.name}")
            _check_lease(host, opened, touched)
            complete = complete and not host.unproved
    return complete


def check_nothing_left(hosts: Mapping[PeerRank, Host]) -> None:
    """No rank has a session, a parked reserve or a timer."""
    for host in hosts.values():
        sends, receives = host.sessions.sends, host.sessions.receives
        waiting = [*sends.table.offers, *sends.table.served, *sends.parked._expiries]
        left = [*sends.sessions, *receives.sessions, *waiting, *host.sessions._timers._heap]
        if left:
            raise Violation(f"{host.name} still has {left}")


def _check_lease(host: Host, opened: OpenSession, touched: set[Holding | None]) -> None:
    lease, rows = opened.session.lease, f"the rows of {opened.session.key} on {host.name}"
    if lease.state is LeaseState.HELD or (lease.state is LeaseState.QUARANTINED and not lease.reason):
        raise Violation(f"{rows} are held without a reason")
    if not lease.released and opened.holding not in touched and not host.unproved:
        raise Violation(f"{rows} stay in quarantine: {lease.reason}")
