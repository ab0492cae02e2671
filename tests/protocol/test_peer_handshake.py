"""Handshakes of peers: hellos, welcomes, and rejections with their reasons."""

from __future__ import annotations

import msgspec
import pytest

from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    Busy,
    Hello,
    Member,
    Reject,
    Welcome,
)
from disagg.protocol.peer_effects import (
    Connect,
    Disconnect,
    Ready,
    Refused,
    ReplyOn,
    SendHello,
)
from disagg.protocol.types import PeerRank
from harness.simulator.connections import welcome
from tests.protocol.peer_table import (
    DECODE,
    DRAINED,
    LEADER,
    LIMITS,
    SECOND,
    hello,
    make_ready,
    peer_table,
    reply,
    take_effects,
    take_reply,
)


def test_a_silent_peer_gets_hellos_at_growing_intervals() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, "key", 0.0)
    assert take_effects(table) == [Connect(0, LEADER, "key")]
    times = []
    for now in range(20):
        table.tick(float(now))
        times += [now for effect in take_effects(table) if isinstance(effect, SendHello)]
    assert times == [0, 1, 3, 7, 11, 15, 19]
    assert table.next_tick == 23.0
    assert "no answer yet" in table.instances["decode-0"].problem


@pytest.mark.parametrize("message", [welcome("decode-9"), welcome(rank=3)])
def test_an_answer_in_another_name_is_refused(message: Welcome) -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    take_effects(table)
    reply(table, SECOND, message, 0.0)
    assert not any(isinstance(effect, Ready) for effect in take_effects(table))
    assert "answers as" in table.instances["decode-0"].problem


def test_a_refused_welcome_sets_the_problem_and_is_retried() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    take_effects(table)
    reply(table, LEADER, welcome(version=99), 0.0)
    assert "protocol version" in table.instances["decode-0"].problem
    assert "protocol version" in table.instances["decode-0"].refusal
    (told,) = take_effects(table)
    assert isinstance(told, Refused)
    assert ((told.instance, told.address), "protocol version" in told.problem) == (("decode-0", LEADER), True)
    table.tick(LIMITS.refused_retry_s - 1.0)
    assert take_effects(table) == []
    table.tick(LIMITS.refused_retry_s)
    assert take_effects(table) == [Disconnect(0), Connect(1, LEADER, None), SendHello(1)]
    reply(table, LEADER, welcome(), 30.0)
    assert table.instances["decode-0"].ready
    assert table.instances["decode-0"].refusal == ""


def test_a_refused_peer_that_says_hello_gets_one_at_once() -> None:
    """It was configured there, or started anew with other settings."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    reply(table, LEADER, Reject(field="hello", reason="not configured", final=True), 0.0)
    take_effects(table)
    assert table.instances["decode-0"].refusal == f"{LEADER}: not configured"
    table.on_inbound(b"c1", "", hello(), 1.0)
    assert table.instances["decode-0"].refusal == ""
    table.tick(1.0)
    assert take_effects(table)[-3:] == [Disconnect(0), Connect(1, LEADER, None), SendHello(1, 0, 7)]


def test_a_name_that_has_led_to_another_rank_is_looked_up_again() -> None:
    """Two pods have swapped their addresses, or the record was stale. Each connection looks it up."""
    table = peer_table()
    table.add_peer("decode-0", "tcp://decode-0:7100", None, 0.0)
    other = Reject(field="hello", reason="expected decode-0/0 here", final=True)
    num_connects, now = 0, 0.0
    while now < 600.0:
        table.tick(now)
        for effect in take_effects(table):
            num_connects += isinstance(effect, Connect)
            if isinstance(effect, SendHello):
                table.on_reply(effect.dial, other, now)
        now = max(now + 0.1, table.next_tick)
    assert num_connects >= 600.0 // LIMITS.refused_retry_s
    table.on_inbound(b"c1", "", hello(), now)  # the right one
    table.tick(now)
    *_, disconnect, connect, asked = take_effects(table)
    assert (type(disconnect), type(connect), type(asked)) == (Disconnect, Connect, SendHello)


def test_a_refusal_that_has_passed_is_found_out_by_the_peers_hello() -> None:
    """Also where that hello is rejected: the peer has configured this rank, and gives another reason now."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    reply(table, LEADER, Reject(field="hello", reason="not configured"), 0.0)
    table.on_inbound(b"c1", "", hello(table=b"bad"), 1.0)
    take_effects(table)
    table.tick(1.0)
    assert SendHello(0) in take_effects(table)


def test_a_refusal_that_the_peers_hello_has_overtaken_is_asked_about_again() -> None:
    """The peer refused this rank, configured it, and said hello, which came before the refusal."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    table.on_inbound(b"c1", "", hello(table=b"bad"), 0.1)
    reply(table, LEADER, Reject(field="hello", reason="not configured"), 0.2)
    take_effects(table)
    table.tick(0.2 + LIMITS.hello_retry_s)
    assert SendHello(0) in take_effects(table)
    reply(table, LEADER, Reject(field="hello", reason="not configured"), 2.0)
    assert take_effects(table) == [Refused("decode-0", LEADER, "not configured")]
    table.tick(2.0 + LIMITS.max_hello_retry_s)
    assert take_effects(table) == []


def test_reject_and_busy_set_the_problem() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    reply(table, LEADER, Reject(field="model", reason="model: 'a' there"), 0.1)
    assert "model: 'a' there" in table.instances["decode-0"].problem
    reply(table, LEADER, Busy(reason="1 of 2 ranks have joined", retry_after_s=0.5), 0.1)
    assert "1 of 2 ranks have joined" in table.instances["decode-0"].problem
    assert table.next_tick == pytest.approx(0.6)
    table.on_reply(99, welcome(), 0.1)
    reply(table, LEADER, DRAINED, 0.1)
    assert not table.instances["decode-0"].ready


def test_messages_before_an_accepted_hello_are_ignored() -> None:
    table = peer_table()
    make_ready(table)
    assert table.on_inbound(b"c9", "", DRAINED, 0.0) is None
    found = take_reply(table)
    assert isinstance(found, Reject)
    assert found.hello_first
    table.on_inbound(b"c9", "", hello(table=b"bad"), 0.0)
    found = take_reply(table)
    assert isinstance(found, Reject)
    assert (found.final, found.reason) == (True, "axis 'kv_head': 4 here, 8 at the peer")
    assert table.on_inbound(b"c9", "", DRAINED, 0.0) is None


@pytest.mark.parametrize(
    ("message", "user", "reason"),
    [
        (hello("stranger"), "", "peer 'stranger' is not configured at prefill-0/0"),
        (hello(version=99), "", f"protocol version: 99 at decode-0/0, {PROTOCOL_VERSION} at prefill-0/0"),
        (hello(), "other key", "configured with another public key at prefill-0/0"),
        (hello("prefill-0", 1, address=SECOND), "", "rank 1 of 1"),
    ],
)
def test_a_rejected_hello_gets_the_reason(message: Hello, user: str, reason: str) -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, "key" if user else None, 0.0)
    take_effects(table)
    table.on_inbound(b"c1", user, message, 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert reason in reply.reason


def test_a_hello_with_the_configured_key_is_accepted() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, "key", 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "key", hello(), 0.0)
    assert isinstance(take_reply(table), Welcome)


def test_a_refused_rank_gets_a_hello_again_later() -> None:
    table = peer_table()
    make_ready(table)
    table.refuse(PeerRank("decode-0", 0), "memory contradicts layouts", 1.0)
    table.refuse(PeerRank("decode-0", 1), "unknown", 1.0)
    assert "memory contradicts layouts" in table.instances["decode-0"].problem
    table.tick(1.0)
    assert take_effects(table) == []
    table.tick(5.0)
    assert take_effects(table) == [SendHello(0, 0, 7)]
    reply(table, LEADER, welcome(), 5.0)
    assert take_effects(table) == [Ready(PeerRank("decode-0", 0), 7, welcome())]


def test_a_rank_that_cannot_be_used_before_one_side_restarts_is_refused() -> None:
    table = peer_table()
    make_ready(table)
    table.refuse(PeerRank("decode-0", 0), "another release", 1.0, final=True)
    (refused,) = take_effects(table)
    assert refused == Refused("decode-0", LEADER, "another release")
    assert "another release" in table.instances["decode-0"].refusal
    later = 1.0 + LIMITS.refused_retry_s
    table.tick(later - 1.0)
    assert take_effects(table) == []
    table.tick(later)
    assert any(isinstance(effect, SendHello) for effect in take_effects(table))


def test_a_process_that_has_refused_this_rank_is_not_asked_again_for_each_hello() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    table.on_inbound(b"c1", "", hello(), 1.0)
    reply(table, LEADER, Reject(field="hello", reason="another process has the name", final=True), 1.0)
    take_effects(table)
    table.on_inbound(b"c2", "", hello(), 2.0)
    table.tick(2.0)
    assert not any(isinstance(effect, SendHello) for effect in take_effects(table))
    assert "another process has the name" in table.instances["decode-0"].refusal


def test_a_connection_belongs_to_one_rank_and_a_rank_has_one_connection() -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"c1", "", hello(rank=0), 0.0)
    table.on_inbound(b"c1", "", hello(rank=1), 0.0)
    assert table.on_inbound(b"c1", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    table.on_inbound(b"c2", "", hello(rank=0), 0.0)
    assert table.on_inbound(b"c1", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    table.on_inbound(b"c2", "", hello(rank=1), 0.0)
    assert table.on_inbound(b"c2", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    assert table.on_inbound(b"c1", "", DRAINED, 0.0) is None


def test_a_late_hello_of_a_closed_connection_does_not_replace_a_later_connection() -> None:
    """Under load such a hello is read late. It would drop the newer connection and its active requests."""
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c2", "", msgspec.structs.replace(hello(epoch=7), dial=2), 1.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c1", "", msgspec.structs.replace(hello(epoch=7), dial=1), 1.1)
    assert take_effects(table) == []
    assert table.on_inbound(b"c2", "", DRAINED, 1.2) == DECODE, "the later connection stays accepted"
    table.on_inbound(b"c3", "", msgspec.structs.replace(hello(epoch=7), dial=3), 1.3)
    assert isinstance(take_reply(table), Welcome)
    table.on_closed(b"c3", 1.4)
    table.on_inbound(b"c4", "", hello(epoch=8), 1.4)
    assert any(isinstance(effect, ReplyOn) and isinstance(effect.message, Welcome) for effect in take_effects(table)), (
        "a new process"
    )


@pytest.mark.parametrize("to", [("prefill-9", 0), ("prefill-0", 1)])
def test_a_hello_to_another_rank_is_rejected_and_takes_the_place_of_no_connection(to: tuple[str, int]) -> None:
    """A process that knows this rank by two names, or has a stale address."""
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c2", "", hello(epoch=7, dial=9, to=to), 1.0)
    answer = take_reply(table)
    assert isinstance(answer, Reject)
    assert answer.reason == f"prefill-0/0 is at tcp://127.0.0.1:7000, where decode-0/0 expects {to[0]}/{to[1]}"
    assert answer.final
    assert table.on_inbound(b"c1", "", DRAINED, 1.0) == DECODE, "the connection by the right name goes on"
    table.on_inbound(b"c1", "", hello(epoch=7, to=("prefill-0", 0)), 2.0)
    assert isinstance(take_reply(table), Welcome)


def test_hellos_carry_the_number_of_their_connection() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    dials = []
    for now in range(200):
        table.tick(float(now))
        dials += [effect.dial for effect in take_effects(table) if isinstance(effect, SendHello)]
    assert dials == sorted(dials)
    assert dials[:4] == [0] * 4
    assert dials[-1] > 0
