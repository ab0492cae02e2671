"""What servers do: open sessions, send and finish or abort, and release rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from disagg.core.errors import LocalProtocolError, RequestAborted
from disagg.core.rows import Pages, Slot
from disagg.protocol.receive_session import ReceiveSession, ReceiveState
from disagg.protocol.send_session import SendSession
from disagg.protocol.send_table import ANY
from disagg.protocol.types import Chunk, Event, PeerRank, StartVerify
from harness.simulator.checks import check_received, check_sent, check_taken
from harness.simulator.model import NUM_LAYERS, PAGE_TOKENS, STATE_LAYER, Holding, Host, OpenSession, Request, Violation, cell
from harness.simulator.scenario import INTRUDER, Piece
from harness.simulator.world import World

MAX_REPORT_DELAY_S = 2.0
"""How long after its deadline the end of a request may be reported: ticks run late."""
DECODE_S = 1.0
"""How long a server uses received rows after their release from the transfer."""


class Servers:
    """The servers of all ranks. They follow the scripts of the scenario."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.on(Event, self._on_event)
        world.on(StartVerify, self._verify)
        for request in world.requests:
            self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """Queue what each rank does for a request."""
        world, script = self._world, request.script
        for rank in range(request.num_destinations):
            name = PeerRank(request.destination, script.destination_group * request.num_destinations + rank)
            when = script.reserve_at + script.skew_s * rank
            world.at(when, partial(self.open_receive, name, request), of=name)
            if script.repeat:
                world.at(when + 0.3, partial(self.open_receive, name, request), of=name)
            if rank in script.receive_aborts:
                world.at(script.receive_aborts[rank], partial(self._abort, name, request), of=name)
        for rank in range(request.num_sources):
            name = PeerRank(request.source, script.source_group * request.num_sources + rank)
            if script.send_at is not None:
                world.at(script.send_at + script.skew_s * rank, partial(self._open_send, name, request), of=name)
            if rank in script.send_aborts:
                world.at(script.send_aborts[rank], partial(self._abort, name, request), of=name)
        if script.impostor_at is not None:
            intruder = PeerRank(INTRUDER, 0)
            world.at(script.impostor_at, partial(self.open_receive, intruder, request), of=intruder)
        if script.stray_at is not None:
            group = (script.destination_group + 1) % world.scenario.num_groups
            stray = PeerRank(request.destination, group * request.num_destinations)
            world.at(script.stray_at, partial(self.open_receive, stray, request))
            world.at(script.stray_at + 0.05, partial(self._abort, stray, request))

    def open_receive(self, name: PeerRank, request: Request) -> None:
        """Allocate rows for the part of the prompt that missed the cache, and reserve them."""
        world, host, script = self._world, self._world.hosts[name], request.script
        holding = host.hold(request, range(script.hit, script.prompt))
        need = {"kv": (script.hit, script.prompt), "ssm": (0, script.prompt)}
        first = script.source_group * request.num_sources
        expected = {
            first + source: {part: (layers, need[part]) for part, layers in parts.items()}
            for source in range(request.num_sources)
            if (parts := request.elected(source, holding.rank))
        }
        deadline = world.now + script.deadline_s
        nonce = next(world.numbers)
        try:
            session = host.sessions.receives.open(
                request.key_of(name),
                peer=request.source,
                nonce=nonce,
                source_group=script.source_group,
                rows={"kv": Pages(np.array(holding.pages, dtype=np.int32), script.hit), "ssm": Slot(holding.slot)},
                need=need,
                expected=expected,
                now=world.now,
                deadline=deadline,
                ready=False,
                verify="full" if nonce % 2 else "off",
                tag=len(host.opened),
            )
        except LocalProtocolError:
            host.recycle(holding)
            return
        opened = OpenSession(session, holding, deadline)
        host.opened.append(opened)
        session.lease.on_release(partial(self._on_release, host, opened))
        if script.kept:
            idle = set(range(first, first + request.num_sources)) - expected.keys()
            decline = partial(host.sessions.decline, session.key, peer=request.source, nonce=nonce)
            world.act(host, partial(decline, source_group=script.source_group, ranks=sorted(idle)))
        if script.ready_after_s:
            world.at(world.now + script.ready_after_s, partial(self._ready, host, session), of=host)
        else:
            self._ready(host, session)

    def _ready(self, host: Host, session: ReceiveSession) -> None:
        self._world.act(host, partial(host.sessions.receives.ready, session, self._world.now))

    def _open_send(self, name: PeerRank, request: Request) -> None:
        world, host, script = self._world, self._world.hosts[name], request.script
        holding = host.hold(request, range(script.prompt))
        deadline = world.now + script.send_deadline_s
        expected, size = request.readers(holding.rank, request.destination, request.num_destinations)
        session = host.sessions.sends.open(
            request.key,
            peer=ANY if script.kept else request.destination,
            expected=None if script.kept else expected,
            peer_group_size=1 if script.kept else size,
            any_attempt=script.any_attempt,
            now=world.now,
            deadline=deadline,
            tag=len(host.opened),
        )
        opened = OpenSession(session, holding, deadline)
        host.opened.append(opened)
        session.lease.on_release(partial(self._on_release, host, opened))
        for number, piece in enumerate(script.all_pieces):
            world.at(world.now + piece.after_s, partial(self._send, host, opened, number, piece), of=host)
        if script.finish_after_s is not None:
            world.at(world.now + script.finish_after_s, partial(self._finish, host, opened), of=host)
        world.act(host, lambda: None)

    def _send(self, host: Host, opened: OpenSession, number: int, piece: Piece) -> None:
        """Compute the piece and send it, unless the request has ended."""
        session, holding = opened.session, opened.holding
        assert isinstance(session, SendSession)
        if not host.alive or session.finished or session.tag in host.events or session.lease.released:
            return
        self._compute(host, holding, piece)
        rows = {name: holding.rows[name] for name in (("ssm",) if piece.state else ("kv",))}
        chunk = Chunk(number, rows, None if piece.state else piece.tokens, piece.layers)
        self._world.act(host, partial(host.sessions.sends.send, session, chunk, self._world.now))

    def _compute(self, host: Host, holding: Holding, piece: Piece) -> None:
        """Write the correct values of a piece into the sender's rows."""
        request = holding.request
        tp_rank = holding.rank % request.tp
        if piece.state:
            host.cells[holding.slot][0] = request.value(STATE_LAYER, 0, 0)
        for token in range(*piece.tokens):
            page = host.cells[holding.pages[token // PAGE_TOKENS]]
            for layer in range(NUM_LAYERS):
                page[cell(layer, token, tp_rank)] = request.value(layer, token, tp_rank)

    def _finish(self, host: Host, opened: OpenSession) -> None:
        session = opened.session
        assert isinstance(session, SendSession)
        if host.alive and not session.finished and session.tag not in host.events:
            payload = opened.holding.request.payload
            self._world.act(host, partial(host.sessions.sends.finish, session, payload, self._world.now))

    def _abort(self, name: PeerRank, request: Request) -> None:
        world, host = self._world, self._world.hosts[name]
        error = RequestAborted("the client is gone")
        for opened in host.opened:
            session = opened.session
            if session.key != request.key:
                continue
            if isinstance(session, ReceiveSession):
                world.act(host, partial(host.sessions.receives.abort, session, error, world.now))
            else:
                world.act(host, partial(host.sessions.sends.abort, session, error, world.now))

    def _verify(self, host: Host, start: StartVerify) -> None:
        """Report matching checksums some time later. The content is checked when the request ends."""
        world = self._world
        world.at(world.now + world.faults.lateness_s(), partial(self._verified, host, start), of=host)

    def _verified(self, host: Host, start: StartVerify) -> None:
        now = self._world.now
        self._world.act(host, partial(host.sessions.receives.verified, start.peer, start.key, now, error=None))

    def _on_event(self, host: Host, event: Event) -> None:
        """Check the end of a request, and record it."""
        opened, now = host.opened[event.tag], self._world.now
        if event.tag in host.events:
            raise Violation(f"the end of {event.key} was reported twice to {host.name}")
        if now > opened.deadline + MAX_REPORT_DELAY_S + host.stopped_s:
            late_s = now - opened.deadline
            raise Violation(f"the end of {event.key} was reported to {host.name} {late_s} s after its deadline")
        host.events[event.tag] = event
        if event.ok == (event.error is not None):
            raise Violation(f"{host.name}: expected either a success or an error, found {event}")
        if event.ok and event.direction == "receive":
            check_received(host, opened, event)
            check_taken(host, opened.holding.request, self._world.scenario.group_size)
        elif event.ok:
            check_sent(self._world.hosts, opened)

    def _on_release(self, host: Host, opened: OpenSession) -> None:
        """Return released rows to the pool: received ones after they were used, all others at once."""
        world = self._world
        for flight in world.flights:
            if opened.holding in (flight.holding, flight.target):
                rows = f"the rows of {opened.session.key} on {host.name}"
                world.violation = world.violation or Violation(f"{rows} were released during {flight.ticket}")
        if getattr(opened.session, "state", None) is ReceiveState.SUCCEEDED:
            world.at(world.now + DECODE_S, partial(host.recycle, opened.holding))
        else:
            host.recycle(opened.holding)
