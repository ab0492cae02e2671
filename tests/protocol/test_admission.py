"""Instances that nobody configured: admitted, refused, forgotten; and a leader that is known late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.protocol import peers
from disagg.protocol.messages import Hello, Reject, Welcome
from disagg.protocol.peer_effects import Connect, Disconnect, Forgotten, Lost, PeerEffect, Probe, ReplyOn
from disagg.protocol.peers import PeerTable
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import PeerRank, RequestKey
from harness.simulator.connections import welcome
from tests.protocol.peer_table import LEADER, LIMITS, SECOND, hello, make_ready, peer_table, reply, take_effects, take_reply


def admitting(admit: Callable[[str, str, str], bool] | None) -> PeerTable:
    table = peer_table()
    table._admits = admit
    return table


def stranger(name: str = "decode-0", leader: str | None = LEADER, rank: int = 0) -> Hello:
    return hello(name, rank, leader=leader)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_admitted_instance_is_welcomed_and_greeted_at_its_leader(rank: int) -> None:
    asked: list[tuple[str, str, str]] = []

    def admit(name: str, address: str, public_key: str) -> bool:
        asked.append((name, address, public_key))
        return True

    table = admitting(admit)
    table.on_inbound(b"c1", "key", stranger(rank=rank), 0.0)
    assert asked == [("decode-0", LEADER, "key")]
    connect, answer = take_effects(table)
    assert connect == Connect(0, LEADER, "key")
    assert isinstance(answer, ReplyOn)
    assert isinstance(answer.message, Welcome)
    table.on_inbound(b"c1", "key", stranger(rank=rank), 1.0)
    assert len(asked) == 1, "it is a peer now"


@pytest.mark.parametrize(
    ("admit", "leader"), [(None, LEADER), (lambda *_: False, LEADER), (lambda *_: True, None), (lambda *_: True, "nonsense")]
)
def test_others_are_refused_for_now(admit: Callable[[str, str, str], bool] | None, leader: str | None) -> None:
    table = admitting(admit)
    table.on_inbound(b"c1", "", stranger(leader=leader), 0.0)
    answer = take_reply(table)
    assert isinstance(answer, Reject)
    assert not answer.final
    assert table.instances == {}


def test_the_number_of_admitted_instances_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_ADMITTED", 2)
    table = admitting(lambda *_: True)
    table.add_peer("configured", "tcp://127.0.0.1:9000", None, 0.0)
    for number in range(3):
        table.on_inbound(b"c%d" % number, "", stranger(f"decode-{number}", f"tcp://127.0.0.1:{9001 + number}"), 0.0)
    assert sorted(table.instances) == ["configured", "decode-0", "decode-1"]
    answer = take_effects(table)[-1]
    assert isinstance(answer, ReplyOn)
    assert "has admitted 2 instances" in str(answer.message)


def test_an_admitted_instance_whose_hello_is_rejected_is_forgotten() -> None:
    table = admitting(lambda *_: True)
    table.on_inbound(b"c1", "", hello(table=b"bad", leader=LEADER), 0.0)
    answer, forgotten = take_effects(table)  # and it is not dialled
    assert forgotten == Forgotten("decode-0", "its hello was rejected")
    assert isinstance(answer, ReplyOn)
    assert isinstance(answer.message, Reject)
    assert table.instances == {}
    make_ready(table)
    table.on_inbound(b"c1", "", hello(table=b"bad", leader=LEADER), 1.0)
    assert list(table.instances) == ["decode-0"], "it is configured"
    table.add_peer("decode-1", SECOND, None, 1.0, lasting=False)
    table.on_inbound(b"c2", "", hello("decode-1", table=b"bad", leader=SECOND), 1.0)
    assert "decode-1" in table.instances, "a request has named it"


def test_an_admitted_instance_is_forgotten_once_it_was_away() -> None:
    table = admitting(lambda *_: True)
    table.on_inbound(b"c1", "", stranger(), 0.0)
    table.tick(0.0)
    reply(table, LEADER, welcome(epoch=7), 0.0)
    take_effects(table)
    away = LIMITS.forget_s
    table.tick(away - 1.0)
    table.on_closed(b"c1", away)
    table.tick(away + 1.0)
    assert any(isinstance(effect, Lost) for effect in take_effects(table))
    table.tick(2 * away - 2.0)
    assert "decode-0" in table.instances
    table.tick(2 * away + 1.0)
    assert table.instances == {}
    effects = take_effects(table)
    assert effects[-1] == Forgotten("decode-0", f"it has been away for {LIMITS.forget_s} s")
    assert any(isinstance(effect, Disconnect) for effect in effects)


def test_a_peer_of_a_request_is_forgotten_too_unless_it_is_configured_for_good() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0, lasting=False)
    table.add_peer("decode-1", SECOND, None, 0.0, lasting=False)
    table.add_peer("decode-1", SECOND, None, 1.0)
    table.add_peer("decode-1", LEADER, None, 2.0, lasting=False)
    table.tick(LIMITS.forget_s - 1.0)
    assert set(table.instances) == {"decode-0", "decode-1"}
    table.tick(LIMITS.forget_s + 5.0)
    assert set(table.instances) == {"decode-1"}


def test_a_leader_that_is_known_late_is_joined_then() -> None:
    table = peer_table(num_ranks=2, rank=1, leader=None, own_key="key")
    table.join(0.0)
    assert take_effects(table) == []
    assert table.leader_address is None
    table.set_leader(SECOND)
    table.join(1.0)
    assert take_effects(table) == [Connect(0, SECOND, "key")]
    assert table.leader_address == SECOND


def test_a_leaders_own_address_is_that_of_the_leader() -> None:
    assert peer_table(num_ranks=2).leader_address == "tcp://127.0.0.1:7000"


def test_the_ended_attempts_of_a_forgotten_instance_are_forgotten() -> None:
    sessions, key = Sessions(), RequestKey(b"request-reserved", 0)
    sent = sessions.sends.open(key, peer="D", expected=frozenset(), now=0.0, deadline=9.0)
    sessions.receives.open(key, peer="D", nonce=1, source_group=0, rows={}, need={}, expected={}, now=0.0, deadline=9.0)
    sessions.sends.finish(sent, b"", 0.0)
    assert (len(sessions.sends.table.ended), len(sessions.receives._ended)) == (1, 1)
    sessions.forget("D", 1.0)
    assert (len(sessions.sends.table.ended), len(sessions.receives._ended)) == (0, 0)
    assert sessions.sends.table.has_ended(PeerRank("D", 0), key) is None


def probes(table: PeerTable, until: float) -> list[PeerEffect]:
    """The probes that a table asks for until then."""
    for now in range(int(until)):
        table.tick(float(now))
    return [effect for effect in take_effects(table) if isinstance(effect, Probe)]


def test_a_peer_of_a_request_is_forgotten_at_once_if_nobody_listens() -> None:
    """It is probed once its first hello was not answered."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0, lasting=False)
    assert probes(table, 1.0) == []
    assert probes(table, 3.0) == [Probe(0)]
    table.on_gone(0, f"nobody listens at {LEADER}")
    assert take_effects(table) == [Disconnect(0), Forgotten("decode-0", f"nobody listens at {LEADER}")]
    assert table.instances == {}
    table.on_gone(0, f"nobody listens at {LEADER}")
    assert take_effects(table) == []


def test_the_ranks_of_an_instance_that_is_forgotten_are_lost_as_expected() -> None:
    """Its leader has said goodbye, or the server has removed it: that others are lost then is no news."""
    table = peer_table()
    make_ready(table)
    table.remove_peer("decode-0", "it was removed")
    (lost,) = (effect for effect in take_effects(table) if isinstance(effect, Lost))
    assert (lost.peer, lost.cause, lost.expected) == (PeerRank("decode-0", 0), "it was removed", True)


@pytest.mark.parametrize("why", ["it is configured for good", "it is connected to this rank", "it has answered"])
def test_an_instance_that_is_kept_although_nobody_listens(why: str) -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0, lasting=why == "it is configured for good")
    if why == "it is connected to this rank":
        table.on_inbound(b"c1", "", hello(), 0.0)
    elif why == "it has answered":
        table.tick(0.0)
        reply(table, LEADER, welcome(epoch=7), 0.0)
        table.on_inbound(b"c1", "", hello(), 0.0)
    assert probes(table, 9.0) == []
    table.on_gone(0, f"nobody listens at {LEADER}")
    assert list(table.instances) == ["decode-0"]
