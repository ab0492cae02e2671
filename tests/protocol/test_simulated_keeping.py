"""Simulated requests that are kept for whoever takes them first: two takers, and takers and owners that die."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from disagg.core.leases import release
from disagg.protocol.send_session import SendSession
from disagg.protocol.sending import Sends
from disagg.protocol.types import Limits, PeerRank, RequestKey
from harness.simulator.command import run_schedules
from harness.simulator.faults import FixedFaults
from harness.simulator.model import Violation
from harness.simulator.scenario import Loss, Piece, Scenario, Script
from harness.simulator.schedules import random_simulation
from harness.simulator.simulation import Simulation

NUM_SCHEDULES = 300
P0, D0 = PeerRank("P", 0), PeerRank("D", 0)
CHUNKS = (Piece(0.0, (0, 3)), Piece(0.0, (3, 5)), Piece(0.0, state=True))
KEPT = Script(kept=True, pieces=CHUNKS, finish_after_s=0.0, reserve_at=1.0, impostor_at=1.0)


def run(
    script: Script,
    faults: FixedFaults | None = None,
    *losses: Loss,
    tp: int = 1,
    num_senders: int = 1,
    num_receivers: int = 1,
    num_groups: int = 1,
) -> dict[str, bool]:
    """Whether the request succeeded, by rank. Nothing is left behind, and no row is held."""
    scenario = Scenario(
        scripts=(script,),
        num_senders=num_senders,
        num_receivers=num_receivers,
        num_groups=num_groups,
        tp=tp,
        losses=losses,
        limits=Limits(parked_reserve_s=15.0),
    )
    simulation = Simulation(scenario, faults or FixedFaults()).run()
    return {str(name): event.ok for name, host in simulation.hosts.items() for event in host.events.values()}


@pytest.mark.parametrize(("impostor_at", "taker"), [(None, "D/0"), (0.9, "E/0"), (1.1, "D/0")])
@pytest.mark.parametrize("send_at", [0.0, 3.0], ids=["kept before", "kept after"])
def test_the_first_taker_gets_it(impostor_at: float | None, taker: str, send_at: float) -> None:
    found = run(dataclasses.replace(KEPT, impostor_at=impostor_at, send_at=send_at))
    other = {} if impostor_at is None else {name: False for name in ("D/0", "E/0") if name != taker}
    assert found == {"P/0": True, taker: True, **other}


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.05, 0.3, 3.0])
@pytest.mark.parametrize("message", range(6))
def test_one_of_two_takers_gets_it(message: int, delay_s: float) -> None:
    """Whatever message is late."""
    found = run(KEPT, FixedFaults({message: (delay_s,)}, {}))
    assert found["P/0"]
    assert sorted((found["D/0"], found["E/0"])) == [False, True]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 2), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("replicated", [False, True])
def test_a_taker_of_other_parallelism(tp: int, num_senders: int, num_receivers: int, *, replicated: bool) -> None:
    """Also ranks of the owner that write nothing to it have been told so, and hold their rows no longer."""
    script = dataclasses.replace(KEPT, impostor_at=None, replicated=replicated)
    found = run(script, tp=tp, num_senders=num_senders, num_receivers=num_receivers)
    assert len(found) == num_senders + num_receivers
    assert set(found.values()) == {True}


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (0.9, {"P/0": True, "D/0": True, "E/0": False}),  # the taker's successor asks
        (1.0005, {"P/0": True, "E/0": True}),  # before it is heard
        (1.005, {"P/0": False, "E/0": False}),  # within the copy
        (2.0, {"P/0": True, "E/0": False}),
    ],
)
@pytest.mark.parametrize("proved", [True, False])
def test_a_taker_that_dies(at: float, expected: dict[str, bool], proved: bool) -> None:
    """It has all, or its owner has the rows again once it is known to be quiet. Before it is heard, another may take them."""
    loss = Loss(at, D0, proved=proved, notice_s=(0.0, 0.1))
    assert run(dataclasses.replace(KEPT, impostor_at=4.0), None, loss) == expected


@pytest.mark.parametrize(
    ("at", "taken"),
    [(0.9, False), (1.005, False), (2.0, True)],
    ids=["before", "within the copy", "after"],
)
def test_an_owner_that_dies_has_given_all_or_nothing(at: float, taken: bool) -> None:
    """No taker waits longer than it would anyway."""
    found = run(KEPT, None, Loss(at, P0, notice_s=(0.0, 0.1)))
    assert sorted(found.values()) == [False, taken]


def asks_again() -> dict[str, bool]:
    """D/0 receives its part, dies, and its successor asks for it while D/1 has not asked yet."""
    loss = Loss(2.0, D0, reopen=True, notice_s=(0.0, 0.0))
    return run(dataclasses.replace(KEPT, impostor_at=None, skew_s=3.0), None, loss, num_receivers=2)


def test_the_successor_of_a_taker_does_not_get_it_again() -> None:
    assert asks_again() == {"P/0": True, "D/0": False, "D/1": True}


def test_a_request_that_is_given_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner forgets a taker that died."""

    def broken(self: Sends, peer: PeerRank, *_: object, **__: object) -> None:
        for session in self.sessions.values():
            session.destinations.pop(peer, None)

    monkeypatch.setattr(Sends, "peer_lost", broken)
    with pytest.raises(Violation, match=r"CLOSED became SendState.ACTIVE|was received twice"):
        asks_again()


def test_any_attempt_is_taken_once() -> None:
    assert run(dataclasses.replace(KEPT, any_attempt=True)) == {"P/0": True, "D/0": True, "E/0": False}


def test_of_two_groups_of_an_instance_one_gets_it() -> None:
    """The other one gives it up after 50 ms, and takes nothing away."""
    script = dataclasses.replace(KEPT, impostor_at=None, stray_at=1.1)
    assert run(script, num_groups=2) == {"P/0": True, "D/0": True, "D/1": False}


@pytest.mark.parametrize(("at", "taken"), [(0.5, False), (1.005, False), (2.0, True)])
def test_an_owner_that_gives_it_up(at: float, taken: bool) -> None:
    found = run(dataclasses.replace(KEPT, impostor_at=None, send_aborts={0: at}))
    assert found == {"P/0": taken, "D/0": taken}


def test_a_request_that_nobody_takes_expires() -> None:
    script = dataclasses.replace(KEPT, impostor_at=None, reserve_at=9.0, send_deadline_s=4.0, deadline_s=4.0)
    assert run(script) == {"P/0": False, "D/0": False}


@pytest.mark.sweep
def test_random_schedules_give_requests_to_either_taker() -> None:
    """At least a sixth of the kept requests, despite all faults. Takers that die are among those of both instances."""
    taken: Counter[str] = Counter()
    died: Counter[str] = Counter()
    num_kept = 0
    for seed in range(NUM_SCHEDULES):
        simulation = random_simulation(seed, kept=True).run()
        scenario = simulation.scenario
        num_kept += len(scenario.scripts)
        taken.update(simulation.takers)
        died.update(loss.rank.instance for loss in scenario.losses if loss.other is None)
    assert sum(taken.values()) > num_kept / 6
    assert min(taken["D"], taken["E"]) > num_kept / 30
    assert min(died["P"], died["D"], died["E"]) > NUM_SCHEDULES / 60


@pytest.mark.sweep
def test_some_schedules_keep_requests_without_being_asked() -> None:
    assert sum(any(script.kept for script in random_simulation(seed).scenario.scripts) for seed in range(200)) > 20


# ------------------------------------------------------------------------------------ protocols broken on purpose


def it_is_given_to_others_too(patch: pytest.MonkeyPatch) -> None:
    """The session of its taker serves every instance."""
    find = Sends._find

    def broken(self: Sends, peer: PeerRank, key: RequestKey) -> object:
        found = find(self, peer, key)
        others = [session for (_, other), session in self.sessions.items() if other == key]
        return (others[0], others[0].destinations.get(peer)) if found[0] is None and others else found

    patch.setattr(Sends, "_find", broken)


def it_is_released_at_finish(patch: pytest.MonkeyPatch) -> None:
    finish = Sends.finish

    def broken(self: Sends, session: SendSession, payload: bytes, now: float) -> None:
        finish(self, session, payload, now)
        if not session.is_bound:
            release(session.lease)

    patch.setattr(Sends, "finish", broken)


def it_succeeds_untaken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sends, "_report", _with_success(Sends._report))


def _with_success(report: Callable[[Sends, SendSession], None]) -> Callable[[Sends, SendSession], None]:
    def broken(self: Sends, session: SendSession) -> None:
        error, session.error = session.error, None
        report(self, session)
        session.error = error

    return broken


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mutation", "violation"),
    [
        (it_is_given_to_others_too, "was received by"),
        (it_is_released_at_finish, "was taken by nobody"),
        (it_succeeds_untaken, "was sent with success, but"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_request_with_two_owners_or_none_is_found_out(
    mutation: Callable[[pytest.MonkeyPatch], None], violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(Violation, match=violation):
        run_schedules(range(NUM_SCHEDULES), kept=True)
