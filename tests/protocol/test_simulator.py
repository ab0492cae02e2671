"""Simulated schedules: faults in every control message, random schedules, and broken protocols."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.errors import DisaggError
from disagg.core.leases import release
from disagg.protocol.receive_session import Coverage, ReceiveSession, WriterState
from disagg.protocol.receiving import Receives
from disagg.protocol.send_session import Destination, SendSession
from disagg.protocol.sending import Sends
from disagg.protocol.timers import Tombstones
from disagg.protocol.types import Event, Limits, PeerRank
from harness.simulator.command import main
from harness.simulator.faults import Behaviour, FixedFaults, TransferResult
from harness.simulator.model import NUM_LAYERS, Violation
from harness.simulator.scenario import MAX_LOST, Loss, Piece, Scenario, Script, Stop
from harness.simulator.schedules import random_simulation
from harness.simulator.simulation import Simulation

P0, D0 = PeerRank("P", 0), PeerRank("D", 0)
LIMITS = Limits(parked_reserve_s=15.0)
CHUNKS = (Piece(0.0, (0, 3)), Piece(0.3, (3, 5)), Piece(0.5, state=True))


def outcomes(simulation: Simulation) -> dict[str, bool]:
    """Whether the request succeeded, by rank."""
    return {
        f"{name.instance}{name.rank}": event.ok for name, host in simulation.hosts.items() for event in host.events.values()
    }


def run(script: Script | tuple[Script, ...], faults: FixedFaults | None = None, **scenario: Any) -> Simulation:
    scripts = script if isinstance(script, tuple) else (script,)
    return Simulation(Scenario(scripts=scripts, **scenario), faults or FixedFaults()).run()


def run_schedules(count: int, *, first: int = 0) -> None:
    """Run the random schedules with `count` seeds."""
    for seed in range(first, first + count):
        random_simulation(seed).run()


# -------------------------------------------------------------------------------------------------------- without faults


@pytest.mark.parametrize("num_senders", [1, 2, 3])
@pytest.mark.parametrize("num_receivers", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("replicated", [False, True])
def test_without_faults_every_rank_succeeds(num_senders: int, num_receivers: int, tp: int, *, replicated: bool) -> None:
    script = Script(prompt=7, hit=3, replicated=replicated, pieces=(Piece(0, (0, 4)), Piece(0, (4, 7)), Piece(0, state=True)))
    simulation = run(script, num_senders=num_senders, num_receivers=num_receivers, tp=tp)
    assert len(simulation.hosts) == num_senders + num_receivers + 1
    assert set(outcomes(simulation).values()) == {True}


@pytest.mark.parametrize(
    "script",
    [
        Script(reserve_at=3.0),
        Script(send_at=3.0),
        Script(ready_after_s=2.0),
        Script(hit=5),
        Script(reverse=True),
        Script(source_group=1, destination_group=1),
        Script(impostor_at=1.0),
        Script(repeat=True),
        Script(pieces=(*(Piece(0.0, (0, 5), (layer,)) for layer in range(NUM_LAYERS)), Piece(0.0, state=True))),
        Script(pieces=(Piece(0.0, (2, 5)), Piece(0.0, state=True), Piece(0.05, (0, 3)))),
    ],
    ids=["reserve late", "send late", "ready late", "full hit", "reverse", "groups", "impostor", "repeat", "layers", "overlap"],
)
def test_servers_may_act_in_any_order(script: Script) -> None:
    ok_by_rank = outcomes(run(script, num_groups=2))
    assert ok_by_rank.pop("E0", False) is False
    assert list(ok_by_rank.values()) == [True, True]


# ----------------------------------------------------------------------------------------------------------- with faults

SMALL_SCRIPTS: dict[str, tuple[Script, dict[str, bool] | None]] = {
    "success": (Script(pieces=CHUNKS, finish_after_s=0.6), {"P0": True, "D0": True}),
    "send first": (Script(pieces=CHUNKS, finish_after_s=0.6, reserve_at=1.0), {"P0": True, "D0": True}),
    "reserve first": (Script(pieces=CHUNKS, finish_after_s=0.6, send_at=1.0), {"P0": True, "D0": True}),
    "decode aborts": (Script(pieces=CHUNKS, finish_after_s=2.0, receive_aborts={0: 0.305}), {"P0": False, "D0": False}),
    "decode aborts before the sender": (Script(send_at=1.0, receive_aborts={0: 0.5}), {"P0": False, "D0": False}),
    "decode aborts at once": (Script(send_at=1.0, receive_aborts={0: 0.0}), {"P0": False, "D0": False}),
    "prefill aborts": (Script(pieces=CHUNKS, finish_after_s=2.0, send_aborts={0: 0.305}), {"P0": False, "D0": False}),
    "prefill rejects": (Script(reserve_at=0.5, send_aborts={0: 0.1}), {"P0": False, "D0": False}),
    "both abort": (Script(pieces=CHUNKS, send_aborts={0: 0.305}, receive_aborts={0: 0.3049}), {"P0": False, "D0": False}),
    "abort after the end": (Script(send_aborts={0: 0.1125}, receive_aborts={0: 0.1125}), None),
    "without the state": (Script(pieces=CHUNKS[:2]), {"P0": False, "D0": False}),
    "a part twice, another missing": (Script(pieces=(CHUNKS[0], CHUNKS[0], CHUNKS[2])), {"P0": False, "D0": False}),
    "never finished": (Script(finish_after_s=None, deadline_s=4.0, send_deadline_s=6.0), {"P0": False, "D0": False}),
    "never sent": (Script(send_at=None, deadline_s=4.0), {"D0": False}),
}
MESSAGE_FAULTS: dict[str, tuple[float, ...]] = {
    "lost": (),
    "duplicated": (0.001, 0.002),
    "duplicated late": (0.001, 3.0),
    "delayed": (0.4,),
    "reordered": (1.3,),
    "very late": (8.0,),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
@pytest.mark.parametrize("name", SMALL_SCRIPTS)
def test_each_control_message_lost_duplicated_delayed_or_reordered(name: str, fault: str) -> None:
    script, expected = SMALL_SCRIPTS[name]
    num_messages = run(script).num_messages
    for index in range(num_messages + 2):
        ok_by_rank = outcomes(run(script, FixedFaults({index: MESSAGE_FAULTS[fault]})))
        assert expected is None or ok_by_rank == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["success", "decode aborts", "prefill aborts", "decode aborts before the sender"])
def test_every_two_control_messages_with_faults(name: str) -> None:
    script, expected = SMALL_SCRIPTS[name]
    for first, second in itertools.combinations(range(run(script).num_messages + 1), 2):
        for one, other in itertools.product(MESSAGE_FAULTS.values(), repeat=2):
            assert outcomes(run(script, FixedFaults({first: one, second: other}))) == expected


@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
def test_each_control_message_with_a_fault_between_instances_of_two_ranks(fault: str) -> None:
    script = Script(pieces=CHUNKS, finish_after_s=0.6)
    for index in range(run(script, num_senders=2, num_receivers=2).num_messages):
        simulation = run(script, FixedFaults({index: MESSAGE_FAULTS[fault]}), num_senders=2, num_receivers=2)
        assert set(outcomes(simulation).values()) == {True}


@pytest.mark.parametrize("result", TransferResult)
@pytest.mark.parametrize("abort", ["neither", "decode", "prefill"])
@pytest.mark.parametrize("index", range(3))
def test_each_transfer_with_each_result(result: TransferResult, abort: str, index: int) -> None:
    when = {0: 0.35}
    script = Script(
        pieces=CHUNKS,
        finish_after_s=0.6,
        receive_aborts=when if abort == "decode" else {},
        send_aborts=when if abort == "prefill" else {},
    )
    simulation = run(script, FixedFaults(transfers={index: Behaviour(result, 0.2, 9.0, "cancelled")}))
    assert set(outcomes(simulation).values()) == {result is TransferResult.DONE and abort == "neither"}


@pytest.mark.sweep
@pytest.mark.parametrize("at", [0.0005, 0.05, 0.105, 0.1115, 0.3, 5.0])
@pytest.mark.parametrize("rank", [P0, D0], ids=str)
@pytest.mark.parametrize("other", [None, "other"])
@pytest.mark.parametrize("proved", [True, False])
@pytest.mark.parametrize("reopen", [True, False])
def test_a_peer_or_connection_lost_at_any_time(
    at: float, rank: PeerRank, other: str | None, *, proved: bool, reopen: bool
) -> None:
    partner = {P0: D0, D0: P0}[rank]
    for notice_s in ((0.0, 0.0), (0.0, 0.5), (0.7, 0.001)):
        loss = Loss(at, rank, partner if other else None, proved=proved, reopen=reopen, notice_s=notice_s)
        run((Script(pieces=CHUNKS), Script(reserve_at=2.0, send_at=2.0)), losses=(loss,), num_senders=2)


def test_after_one_rank_restarts_a_later_request_succeeds() -> None:
    loss = Loss(0.05, D0)
    later = Script(reserve_at=2.0, send_at=2.0)
    simulation = run((Script(), later), losses=(loss,), num_senders=2, num_receivers=2)
    later_id = (1).to_bytes(16, "big")
    events = [event for host in simulation.hosts.values() for event in host.events.values()]
    assert [event.ok for event in events if event.key.request_id == later_id] == [True] * 4


def test_deadlines_hold_while_no_message_arrives() -> None:
    lost: Mapping[int, tuple[float, ...]] = dict.fromkeys(range(1, 16), ())
    simulation = run(Script(deadline_s=4.0, send_deadline_s=4.0), FixedFaults(lost), heal_at=30.0)
    assert outcomes(simulation) == {"P0": False, "D0": False}


# ------------------------------------------------------------------------------------------------------------- at random

DELAYS = st.lists(st.sampled_from((0.0, 0.001, 0.1, 0.7, 2.5)), max_size=2).map(tuple)
BEHAVIOURS = st.builds(
    Behaviour, st.sampled_from(TransferResult), st.sampled_from((0.0, 0.02, 0.6)), st.sampled_from((0.1, 6.0))
)
TIMES = st.sampled_from((0.0, 0.0005, 0.05, 0.2, 0.5, 1.0, 2.0))
PIECES = st.lists(
    st.builds(
        Piece,
        TIMES,
        st.sampled_from(((0, 5), (0, 2), (2, 5), (1, 4))),
        st.sampled_from((None, (0,), (1,))),
    )
    | st.builds(Piece, TIMES, state=st.just(True)),
    max_size=5,
).map(tuple)
ABORTS = st.dictionaries(st.integers(0, 1), TIMES, max_size=2)
SCRIPTS = st.builds(
    Script,
    hit=st.sampled_from((0, 3, 5)),
    reserve_at=TIMES,
    ready_after_s=TIMES,
    send_at=st.none() | TIMES,
    pieces=st.none() | PIECES,
    finish_after_s=st.none() | TIMES,
    deadline_s=st.sampled_from((1.0, 8.0)),
    send_deadline_s=st.sampled_from((1.0, 8.0)),
    receive_aborts=ABORTS,
    send_aborts=ABORTS,
    reverse=st.booleans(),
    replicated=st.booleans(),
    impostor_at=st.none() | TIMES,
    stray_at=st.none() | TIMES,
    repeat=st.booleans(),
    skew_s=st.sampled_from((0.0, 0.1)),
)
RANKS = st.sampled_from((P0, D0))
SCENARIOS = st.builds(
    Scenario,
    scripts=st.lists(SCRIPTS, min_size=1, max_size=2).map(tuple),
    num_senders=st.integers(1, 2),
    num_receivers=st.integers(1, 2),
    num_groups=st.integers(1, 2),
    tp=st.integers(1, 2),
    losses=st.lists(
        st.builds(
            Loss, TIMES, RANKS, proved=st.booleans(), reopen=st.booleans(), notice_s=st.tuples(TIMES, TIMES), late_s=TIMES
        )
        | st.builds(Loss, TIMES, st.just(P0), st.just(D0), proved=st.booleans(), notice_s=st.tuples(TIMES, TIMES)),
        max_size=2,
    ).map(tuple),
    stops=st.lists(st.builds(Stop, TIMES, RANKS, TIMES), max_size=2).map(tuple),
    limits=st.just(LIMITS),
)


# CI runs 10,000 examples: 42 s on one core.
@settings(deadline=None, max_examples=10_000 if os.environ.get("CI") == "true" else settings().max_examples)
@given(SCENARIOS, st.lists(DELAYS, max_size=MAX_LOST), st.lists(BEHAVIOURS, max_size=4))
def test_any_schedule_keeps_the_guarantees(
    scenario: Scenario, messages: list[tuple[float, ...]], transfers: list[Behaviour]
) -> None:
    Simulation(scenario, FixedFaults(dict(enumerate(messages)), dict(enumerate(transfers)))).run()


def test_a_message_that_arrives_after_many_were_lost_leaves_nothing_behind() -> None:
    """The last abort of a receive that nobody serves is parked for a while."""
    for lost in range(MAX_LOST + 1):
        run(Script(send_at=None, deadline_s=1.0, send_deadline_s=1.0), FixedFaults(dict.fromkeys(range(lost), ()), {}))


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(4))
def test_random_schedules_keep_the_guarantees(block: int) -> None:
    for seed in range(7_000_000 + 150 * block, 7_000_000 + 150 * (block + 1)):
        random_simulation(seed).run()


def test_command_runs_schedules_and_prints_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "20", "--seed", "9"]) == 0
    assert capsys.readouterr().out.startswith("20 schedules, ")
    assert main(["--only", "9000003"]) == 0
    assert main(["--schedules", "20", "--seed", "9", "--pair", "--jobs", "2"]) == 0


# ------------------------------------------------------------------------------------ protocols broken on purpose


def release_at_abort(patch: pytest.MonkeyPatch) -> None:
    abort = Receives.abort

    def broken(self: Receives, session: ReceiveSession, error: DisaggError, now: float) -> None:
        abort(self, session, error, now)
        release(session.lease)

    patch.setattr(Receives, "abort", broken)


def release_at_finish(patch: pytest.MonkeyPatch) -> None:
    finish = Sends.finish

    def broken(self: Sends, session: SendSession, payload: bytes, now: float) -> None:
        finish(self, session, payload, now)
        release(session.lease)

    patch.setattr(Sends, "finish", broken)


def release_at_the_drain_deadline(patch: pytest.MonkeyPatch) -> None:
    tick = Receives.tick

    def broken(self: Receives, session: ReceiveSession, now: float) -> None:
        late = now >= session.drain_deadline
        tick(self, session, now)
        if late:
            release(session.lease)

    patch.setattr(Receives, "tick", broken)


def unsettled_is_quiescent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Destination, "quiet", property(lambda self: not self.in_flight))


def everything_is_quiescent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Destination, "quiet", property(lambda _self: True))


def a_lost_peer_is_quiescent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WriterState, "quiet", property(lambda self: self in (WriterState.COMPLETE, WriterState.QUIET, WriterState.LOST))
    )


def success_by_count(patch: pytest.MonkeyPatch) -> None:
    """Succeed once enough tokens were sent, without checking which tokens."""

    def add(self: Coverage, layers: tuple[int, ...] | None, start: int, stop: int) -> int:
        left = self.__dict__.setdefault("left", (self.need[1] - self.need[0]) * len(self.missing))
        self.__dict__["left"] = left - (stop - start) * len(self.missing if layers is None else layers)
        if self.__dict__["left"] <= 0:
            self._missing.remove(*self.need)
        return 1

    patch.setattr(Coverage, "add", add)


def success_without_coverage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "complete", property(lambda _self: True))


def success_by_one_writer(patch: pytest.MonkeyPatch) -> None:
    on_complete = Receives.on_complete

    def broken(self: Receives, peer: PeerRank, message: Any, now: float) -> None:
        session = self._receive_of(peer, message)
        for writer in session.writers.values() if session is not None else ():
            writer.state = WriterState.COMPLETE
        on_complete(self, peer, message, now)

    patch.setattr(Receives, "on_complete", broken)


def no_tombstones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "put", lambda *_: None)


def no_retries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receives, "_schedule", lambda _self, _session, writer, _now: setattr(writer, "retry_at", float("inf")))


def no_report_of_failures(patch: pytest.MonkeyPatch) -> None:
    report = Receives._report

    def broken(self: Receives, session: ReceiveSession, *, ok: bool) -> None:
        if ok:
            report(self, session, ok=ok)

    patch.setattr(Receives, "_report", broken)


def reports_twice(patch: pytest.MonkeyPatch) -> None:
    report = Receives._report

    def broken(self: Receives, session: ReceiveSession, *, ok: bool) -> None:
        report(self, session, ok=ok)
        event = self._effects[-1]
        assert isinstance(event, Event)
        self._effects.append(event)

    patch.setattr(Receives, "_report", broken)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mutation", "violation"),
    [
        (release_at_abort, "released during|unpacked into row"),
        (release_at_finish, "released during"),
        (release_at_the_drain_deadline, "released during"),
        (unsettled_is_quiescent, "released during|wrote row"),
        (everything_is_quiescent, "released during|wrote row|without"),
        (a_lost_peer_is_quiescent, "released during|wrote row"),
        (success_by_count, "without token|without its state"),
        (success_without_coverage, "without token|without its state"),
        (success_by_one_writer, "without|released during"),
        (no_tombstones, "wrote row|released during|still has|reported"),
        (no_retries, "never reported|quarantine|after its deadline|still has"),
        (no_report_of_failures, "never reported"),
        (reports_twice, "reported twice"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_protocol_is_caught(
    mutation: Callable[[pytest.MonkeyPatch], None], violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(Violation, match=violation):
        run_schedules(3000, first=7000 if mutation is no_tombstones else 0)  # it is seldom seen
