"""The four state tables, tested exhaustively.

A pair outside a table changes nothing. Some call or message performs every pair in a table.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from disagg.core.errors import ConfigError, RequestAborted
from disagg.core.rows import Pages
from disagg.protocol.connection import CONNECTION_TABLE, ConnectionState, ConnectionStep, PeerConnection
from disagg.protocol.messages import Abort, Complete, Drained, Outcome, Reject, Reserve, Written, pack_rows
from disagg.protocol.peer_effects import Lost
from disagg.protocol.peers import PeerTable
from disagg.protocol.receive_session import (
    RECEIVE_TABLE,
    WRITER_TABLE,
    ReceiveSession,
    ReceiveState,
    ReceiveStep,
    Writer,
    WriterState,
    WriterStep,
)
from disagg.protocol.send_session import SEND_TABLE, Destination, SendSession, SendState, SendStep
from disagg.protocol.sending import MAX_RESENT
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, PeerRank, RequestKey, SendMessage, StartTransfer, Ticket
from harness.simulator.connections import welcome
from tests.protocol.peer_table import DECODE, LEADER, hello, peer_table, reply, take_effects

P, D = PeerRank("P", 0), PeerRank("D", 0)
KEY = RequestKey(b"request-of-table", 0)
IDS: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt, "nonce": 7}
ROWS = {"kv": Pages(np.array([1, 2]))}
RESERVE = Reserve(**IDS, source_group=0, destination_group=0, rows={"kv": pack_rows(ROWS["kv"])}, need={"kv": (0, 8)})
RECEIVE_PAIRS = list(itertools.product(ReceiveState, ReceiveStep))
SEND_PAIRS = list(itertools.product(SendState, SendStep))
WRITER_PAIRS = list(itertools.product(WriterState, WriterStep))
CONNECTION_PAIRS = list(itertools.product(ConnectionState, ConnectionStep))
FAILED = RequestAborted("client gone")


# ------------------------------------------------------------------------------------------------------------ receiving


def receive_in(state: ReceiveState) -> tuple[Sessions, ReceiveSession]:
    """A receive that calls and messages have brought into `state`."""
    sessions = Sessions()
    session = sessions.receives.open(
        KEY,
        peer="P",
        nonce=7,
        source_group=0,
        rows=ROWS,
        need={"kv": (0, 8)},
        expected={0: {"kv": ((0,), (0, 8))}},
        now=0.0,
        deadline=10.0,
        ready=state is not ReceiveState.WAITING,
    )
    if state is ReceiveState.SUCCEEDED:
        receive_step(sessions, session, ReceiveStep.COVERED)
    elif state is ReceiveState.VERIFYING:
        receive_step(sessions, session, ReceiveStep.LANDED)
    elif state is not ReceiveState.WAITING and state is not ReceiveState.OPEN:
        sessions.receives.abort(session, FAILED, 1.0)
        if state is ReceiveState.FAILED:
            receive_step(sessions, session, ReceiveStep.QUIET)
    assert session.state is state
    sessions.effects.clear()
    return sessions, session


def receive_step(sessions: Sessions, session: ReceiveSession, step: ReceiveStep) -> None:
    """Make the call, or deliver the message, that performs `step` where the state allows it."""
    match step:
        case ReceiveStep.READY:
            sessions.receives.ready(session, 2.0)
        case ReceiveStep.COVERED if session.state is ReceiveState.VERIFYING:
            sessions.receives.verified("P", KEY, 2.0, error=None)
        case ReceiveStep.LANDED | ReceiveStep.COVERED:
            session.verify = "full" if step is ReceiveStep.LANDED else "off"
            sessions.on_message(P, Complete(**IDS, written=(Written(0, "kv", None, 0, 8),)), 2.0)
        case ReceiveStep.FAILURE:
            sessions.receives.abort(session, RequestAborted("a second abort"), 2.0)
        case ReceiveStep.QUIET:
            sessions.on_message(P, Drained(**IDS), 2.0)


def receive_snapshot(session: ReceiveSession) -> tuple[Any, ...]:
    return session.state, session.error, session.payload, session.lease.state


@pytest.mark.parametrize(("state", "step"), RECEIVE_PAIRS, ids=str)
def test_a_receive_moves_exactly_as_its_table_says(state: ReceiveState, step: ReceiveStep) -> None:
    sessions, session = receive_in(state)
    before = receive_snapshot(session)
    receive_step(sessions, session, step)
    # `Drained` also means that the writer failed, and `Complete` also that it is quiescent.
    implied = {
        ReceiveStep.QUIET: ReceiveStep.FAILURE,
        ReceiveStep.COVERED: ReceiveStep.QUIET,
        ReceiveStep.LANDED: ReceiveStep.QUIET,
    }
    may_change = (state, step) in RECEIVE_TABLE or (state, implied.get(step, step)) in RECEIVE_TABLE
    if state is ReceiveState.WAITING and step in (ReceiveStep.COVERED, ReceiveStep.LANDED):
        may_change = False  # no writer has received the nonce yet
    assert (receive_snapshot(session) != before) is may_change
    if may_change:
        reached = [RECEIVE_TABLE.get((state, each), state) for each in (step, implied.get(step, step))]
        assert session.state in [*reached, *(RECEIVE_TABLE.get((each, ReceiveStep.QUIET)) for each in reached)]
    else:
        assert not [e for e in sessions.effects if not isinstance(e, SendMessage) or not isinstance(e.message, Outcome)]


# -------------------------------------------------------------------------------------------------------------- writers

EPOCH, LATER = 3, 9
"""Of the process that is lost, and of one in its place."""


def writer_in(state: WriterState) -> tuple[Sessions, ReceiveSession, Writer]:
    """A receive from two writers of which calls and messages have brought the first into `state`; the second writes still."""
    sessions = Sessions()
    expected = {rank: {"kv": ((0,), (0, 8))} for rank in (0, 1)}
    session = sessions.receives.open(
        KEY, peer="P", nonce=7, source_group=0, rows=ROWS, need={"kv": (0, 8)}, expected=expected, now=0.0, deadline=10.0
    )
    writer = session.writers[P]
    for step in {
        WriterState.RESERVED: [],
        WriterState.COMPLETE: [WriterStep.COVERED],
        WriterState.ABORTING: [WriterStep.FAILURE],
        WriterState.QUIET: [WriterStep.QUIET],
        WriterState.LOST: [WriterStep.PEER_LOST],
    }[state]:
        writer_step(sessions, session, step)
    assert writer.state is state
    return sessions, session, writer


def writer_step(sessions: Sessions, session: ReceiveSession, step: WriterStep, *, epoch: int = EPOCH) -> None:
    """Make the call, or deliver the message, that performs `step` where the state allows it."""
    match step:
        case WriterStep.COVERED:
            sessions.on_message(P, Complete(**IDS, written=(Written(0, "kv", None, 0, 8),)), 2.0)
        case WriterStep.FAILURE:
            sessions.receives.abort(session, RequestAborted("the client has gone"), 2.0)
        case WriterStep.QUIET:  # what a writer of slots is at its loss, and another with the proof
            sessions.peer_lost(P, "it died", 2.0, epoch=epoch, direct=False)
            sessions.peer_quiet(P, epoch=epoch)
        case WriterStep.DRAINED:
            sessions.on_message(P, Drained(**IDS), 2.0)
        case WriterStep.PEER_LOST:
            sessions.peer_lost(P, "it died", 2.0, epoch=epoch)
        case WriterStep.PEER_BACK:
            sessions.receives.peer_back(P, 2.0, epoch=epoch)


@pytest.mark.parametrize(("state", "step"), WRITER_PAIRS, ids=str)
def test_a_writer_moves_exactly_as_its_table_says(state: WriterState, step: WriterStep) -> None:
    sessions, session, writer = writer_in(state)
    writer_step(sessions, session, step)
    # A complete message of a request that has failed says no more than that its writer has stopped.
    meant = WriterStep.DRAINED if step is WriterStep.COVERED and session.error is not None else step
    assert writer.state is WRITER_TABLE.get((state, meant), state)
    assert not session.lease.released, "the second writer has not stopped"


def test_the_end_of_a_later_process_proves_nothing_for_a_lost_writer() -> None:
    sessions, session, writer = writer_in(WriterState.LOST)
    writer_step(sessions, session, WriterStep.PEER_LOST, epoch=LATER)
    writer_step(sessions, session, WriterStep.PEER_BACK, epoch=LATER)
    sessions.receives.peer_quiet(P, epoch=LATER)
    assert not writer.state.quiet
    sessions.receives.peer_quiet(P, epoch=EPOCH)
    assert writer.state.quiet


# -------------------------------------------------------------------------------------------------------------- sending


def send_in(state: SendState) -> tuple[Sessions, SendSession, Destination]:
    """A send whose only destination calls and messages have brought into `state`."""
    sessions = Sessions()
    session = sessions.sends.open(KEY, peer="D", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=10.0)
    sessions.sends.send(session, Chunk(0, ROWS, (0, 8), None), 0.0)
    if state is SendState.AWAITED:
        destination = session.destinations.setdefault(D, Destination())
        session.destinations.pop(D)
        return sessions, session, destination
    sessions.on_message(D, RESERVE, 0.0)
    if state in (SendState.COMPLETED, SendState.CLOSED):
        send_step(sessions, session, SendStep.LANDED)
    if state in (SendState.ABORTING, SendState.DRAINED):
        send_step(sessions, session, SendStep.FAILURE)
    if state is SendState.DRAINED:
        send_step(sessions, session, SendStep.QUIET)
    if state is SendState.CLOSED:
        send_step(sessions, session, SendStep.OUTCOME)
    if state is SendState.LOST:
        send_step(sessions, session, SendStep.PEER_LOST)
    destination = session.destinations[D]
    assert destination.state is state
    sessions.effects.clear()
    return sessions, session, destination


def send_step(sessions: Sessions, session: SendSession, step: SendStep) -> None:
    """Make the call, or deliver the message, that performs `step` where the state allows it."""
    match step:
        case SendStep.RESERVED:
            sessions.on_message(D, RESERVE, 2.0)
        case SendStep.LANDED:
            if not session.finished:
                sessions.sends.finish(session, b"", 2.0)
            sessions.sends.settled(Ticket(D, KEY, 0), now=2.0)
        case SendStep.FAILURE:
            sessions.on_message(D, Abort(**IDS, reason="client gone"), 2.0)
        case SendStep.QUIET:
            sessions.sends.settled(Ticket(D, KEY, 0), now=2.0)
        case SendStep.OUTCOME:
            sessions.on_message(D, Outcome(**IDS, ok=True), 2.0)
        case SendStep.PEER_LOST:
            sessions.peer_lost(D, "it died", 2.0)
        case SendStep.UNANSWERED if session.destinations[D].state is SendState.DRAINED:
            session.destinations[D].resent = MAX_RESENT
            sessions.tick(5.0)


@pytest.mark.parametrize(("state", "step"), [p for p in SEND_PAIRS if p[0] is not SendState.AWAITED], ids=str)
def test_a_destination_moves_exactly_as_its_table_says(state: SendState, step: SendStep) -> None:
    sessions, session, destination = send_in(state)
    send_step(sessions, session, step)
    settled = SendStep.QUIET if step is SendStep.LANDED else step  # the same report about a failed destination
    expected = SEND_TABLE.get((state, step)) or SEND_TABLE.get((state, settled))
    if expected is not None:  # with nothing in flight it is quiet at once
        assert destination.state in (expected, SEND_TABLE.get((expected, SendStep.QUIET)))
    else:
        assert destination.state is state
        assert not [e for e in sessions.effects if isinstance(e, StartTransfer)]


@pytest.mark.parametrize("state", [SendState.CLOSED])
@pytest.mark.parametrize("step", SendStep)
def test_an_ended_send_reports_no_second_event(state: SendState, step: SendStep) -> None:
    sessions, session, _ = send_in(state)
    before = session.error, session.lease.state, session.payload
    if step is not SendStep.LANDED:
        send_step(sessions, session, step)
    sessions.tick(1000.0)
    assert (session.error, session.lease.state, session.payload) == before
    assert not [e for e in sessions.effects if isinstance(e, Event | StartTransfer)]


# ---------------------------------------------------------------------------------------------------------- connections


def connection_in(state: ConnectionState) -> tuple[PeerTable, PeerConnection]:
    """A table whose only connection calls and messages have brought into `state`, and that connection."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    link = table.instances["decode-0"].links[0]
    steps = {
        ConnectionState.GREETING: [],
        ConnectionState.REFUSED: [ConnectionStep.WELCOMED, ConnectionStep.REJECTED],
        ConnectionState.ONE_WAY: [ConnectionStep.WELCOMED],
        ConnectionState.READY: [ConnectionStep.WELCOMED, ConnectionStep.CONFIRMED],
        ConnectionState.CLOSED: [ConnectionStep.WELCOMED, ConnectionStep.CONFIRMED, ConnectionStep.ENDED],
    }[state]
    for step in steps:
        connection_step(table, link, step, 1.0)
    assert link.state is state
    take_effects(table)
    return table, link


def connection_step(table: PeerTable, link: PeerConnection, step: ConnectionStep, now: float) -> None:
    """Make the call, or deliver the message, that performs `step` where the state allows it."""
    match step:
        case ConnectionStep.CALLED:
            reply(table, LEADER, Reject(field="connection", reason="send hello first", hello_first=True), now)
        case ConnectionStep.REJECTED:
            reply(table, LEADER, Reject(field="hello", reason="another model", final=True), now)
        case ConnectionStep.WELCOMED:
            reply(table, LEADER, welcome(generation=link.generation), now)
        case ConnectionStep.CONFIRMED:
            table.on_inbound(b"c1", "", hello(generation=link.generation), now)
        case ConnectionStep.ENDED:
            table.on_closed(b"c1", now)
        case ConnectionStep.DROPPED:
            table.on_unreachable(DECODE, "the engine's connection broke", now)


@pytest.mark.parametrize(("state", "step"), CONNECTION_PAIRS, ids=str)
def test_a_connection_moves_exactly_as_its_table_says(state: ConnectionState, step: ConnectionStep) -> None:
    table, link = connection_in(state)
    generation, was_ready = link.generation, link.is_ready
    connection_step(table, link, step, 2.0)
    # A peer that rejects this rank also ends the generation, and an end is noticed only of a connection that was there.
    dropped = CONNECTION_TABLE.get((state, ConnectionStep.DROPPED), state) if step is ConnectionStep.REJECTED else state
    expected = CONNECTION_TABLE.get((dropped, step), dropped)
    if (state, step) == (ConnectionState.ONE_WAY, ConnectionStep.ENDED):
        assert link.state is state
        connection_step(table, link, ConnectionStep.CONFIRMED, 2.0)
        connection_step(table, link, ConnectionStep.ENDED, 2.0)
    assert link.state is expected
    losses = [effect for effect in take_effects(table) if isinstance(effect, Lost)]
    assert len(losses) == link.generation - generation == (was_ready and not link.is_ready)
    assert link.lost_at == float("inf") or link.state in (ConnectionState.ONE_WAY, ConnectionState.CLOSED)


# ------------------------------------------------------------------------------------------------------------ the tables


@pytest.mark.parametrize(
    ("table", "states", "steps", "first"),
    [
        (RECEIVE_TABLE, ReceiveState, ReceiveStep, {ReceiveState.WAITING}),
        (SEND_TABLE, SendState, SendStep, {SendState.AWAITED}),
        (WRITER_TABLE, WriterState, WriterStep, {WriterState.RESERVED}),
    ],
    ids=["receive", "send", "writer"],
)
def test_every_state_is_reachable_every_step_is_used_and_every_state_leads_to_an_end(
    table: dict[tuple[Any, Any], Any], states: Any, steps: Any, first: set[Any]
) -> None:
    reached = set(first)
    while more := {after for (before, _), after in table.items() if before in reached} - reached:
        reached |= more
    assert reached == set(states)
    assert {step for _, step in table} == set(steps)
    ends = set(states) - {before for before, _ in table}
    assert {state.name for state in ends} <= {"SUCCEEDED", "FAILED", "CLOSED", "LOST", "COMPLETE", "QUIET"}
    leads_to_end = set(ends)
    while more := {before for (before, _), after in table.items() if after in leads_to_end} - leads_to_end:
        leads_to_end |= more
    assert leads_to_end == set(states)


def test_every_state_of_a_connection_is_reachable_from_every_other_and_every_step_is_used() -> None:
    assert {step for _, step in CONNECTION_TABLE} == set(ConnectionStep)
    for first in ConnectionState:
        reached = {first}
        while more := {after for (before, _), after in CONNECTION_TABLE.items() if before in reached} - reached:
            reached |= more
        assert reached == set(ConnectionState)


@pytest.mark.parametrize("name", [field.name for field in fields(Limits) if field.name.endswith("_s")])
def test_durations_that_never_elapse_are_refused(name: str) -> None:
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"limits {name}: expected more than 0"):
            Limits(**dict[str, Any]({name: value}))
