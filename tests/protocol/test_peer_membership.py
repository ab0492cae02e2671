"""Membership: configured peers, the ranks that a leader names, and the ranks of this instance."""

from __future__ import annotations

from collections import deque

import pytest

from disagg.protocol.messages import (
    Busy,
    Hello,
    Member,
    Reject,
    Welcome,
)
from disagg.protocol.peer_state import (
    Connect,
    Disconnect,
    Lost,
    SendHello,
)
from disagg.protocol.types import PeerRank
from tests.protocol.peer_table import DRAINED, LEADER, SECOND, hello, make_ready, peer_table, take_effects, take_reply, welcome


def test_adding_a_peer_again_replaces_its_connection_only_if_the_address_differs() -> None:
    table = peer_table()
    make_ready(table)
    table.add_peer("decode-0", LEADER, None, 1.0)
    assert take_effects(table) == []
    table.add_peer("decode-0", SECOND, None, 1.0)
    lost, disconnect, connect = take_effects(table)
    assert lost == Lost(PeerRank("decode-0", 0), 7, "its address was changed")
    assert (disconnect, connect) == (Disconnect(LEADER), Connect(SECOND, None))
    assert table.link(PeerRank("decode-0", 0)) is None


def test_a_restarted_peer_stays_accepted_when_its_new_address_is_added_later() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"old", "", hello(epoch=7), 0.0)
    take_effects(table)
    table.on_inbound(b"new", "", hello(epoch=8), 1.0)
    assert isinstance(take_reply(table), Welcome)
    table.add_peer("decode-0", SECOND, None, 2.0)
    take_effects(table)
    assert table.on_inbound(b"new", "", DRAINED, 3.0) == PeerRank("decode-0", 0)
    assert table.effects == deque()
    table.add_peer("decode-0", LEADER, "another key", 4.0)
    take_effects(table)
    assert table.on_inbound(b"new", "", DRAINED, 5.0) is None
    assert isinstance(reply := take_reply(table), Reject)
    assert reply.hello_first


def test_a_running_peer_must_send_hello_again_after_its_address_changes() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"live", "", hello(epoch=7), 0.0)
    take_effects(table)
    table.add_peer("decode-0", SECOND, None, 1.0)
    take_effects(table)
    assert table.on_inbound(b"live", "", DRAINED, 2.0) is None
    assert isinstance(reply := take_reply(table), Reject)
    assert reply.hello_first


def test_the_leaders_welcome_names_the_addresses_of_the_other_ranks() -> None:
    """Case 45: `10.0.0.1:80` and `10.0.0.1:8000` are two ranks."""
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    table.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    assert [e for e in take_effects(table) if isinstance(e, Connect)] == [Connect(LEADER, None), Connect(SECOND, None)]
    assert table.instances["decode-0"].problem == f"{SECOND}: no answer yet"
    assert table.instances["decode-0"].ready is False
    table.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    assert table.instances["decode-0"].problem == "not all of its ranks are known", "no connection is pending"
    first, second = table.link(PeerRank("decode-0", 0)), table.link(PeerRank("decode-0", 1))
    assert first is not None
    assert second is not None
    assert (first.address, second.address) == (LEADER, SECOND)


def test_a_rank_that_its_leader_no_longer_names_is_disconnected() -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    table.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    take_effects(table)
    other = "tcp://10.0.0.2:9"
    table.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, other, 9))), 1.0)
    effects = take_effects(table)
    assert Lost(PeerRank("decode-0", 1), 8, "its leader names another address") in effects
    assert Disconnect(SECOND) in effects
    assert Connect(other, None) in effects


def test_removing_a_peer_drops_its_connections() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    take_effects(table)
    table.remove_peer("decode-0", "removed")
    assert take_effects(table) == [Lost(PeerRank("decode-0", 0), 7, "removed"), Disconnect(LEADER)]
    assert table.on_inbound(b"c1", "", DRAINED, 0.0) is None
    assert table.link(PeerRank("decode-0", 0)) is None
    assert table.next_tick() == float("inf")


def test_the_leader_sends_welcomes_once_all_ranks_have_joined() -> None:
    table = peer_table(num_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Busy)
    assert reply.reason == "1 of 2 ranks of 'prefill-0' have joined"
    table.on_inbound(b"c2", "", hello("prefill-0", 1, 5, address=SECOND), 0.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c1", "", hello(), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Welcome)
    assert [member.address for member in reply.members] == ["tcp://127.0.0.1:7000", SECOND]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (hello("prefill-0", 2, address=SECOND), "rank 2 of 2"),
        (hello("prefill-0", 0, address=SECOND), "rank 0 of 2"),
        (hello("prefill-0", 1), "at None cannot join"),
        (hello("prefill-0", 1, address=SECOND, table=b"other"), "declares other layouts or another topology"),
    ],
)
def test_a_rejected_sibling_gets_the_reason(message: Hello, reason: str) -> None:
    table = peer_table(num_ranks=2)
    table.on_inbound(b"c1", "", message, 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert reason in reply.reason


def test_an_accepted_peer_is_refused_as_a_rank_of_this_instance() -> None:
    """The leader would name it to every other peer in place of that rank."""
    table = peer_table(num_ranks=2, own_key="own")
    table.on_inbound(b"c1", "decode-0's", hello("prefill-0", 1, address=SECOND), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert reply.reason == "rank 1 of 'prefill-0' has another public key than prefill-0/0"
    assert list(table.members) == [0]
    table.on_inbound(b"c2", "own", hello("prefill-0", 1, address=SECOND), 0.0)
    assert isinstance(take_reply(table), Welcome)
    assert list(table.members) == [0, 1]


def test_a_rank_keeps_sending_hellos_to_its_leader() -> None:
    table = peer_table(num_ranks=2, rank=1, leader="tcp://127.0.0.1:7000", own_key="key")
    table.join(0.0)
    assert take_effects(table) == [Connect("tcp://127.0.0.1:7000", "key")]
    table.tick(0.0)
    assert take_effects(table) == [SendHello("tcp://127.0.0.1:7000")]
    table.on_reply("tcp://127.0.0.1:7000", welcome("prefill-0", 0, 3), 0.0)
    table.tick(5.0)
    assert take_effects(table) == [SendHello("tcp://127.0.0.1:7000")]
    table.tick(20.0)
    table.tick(20.0)
    assert take_effects(table) == [SendHello("tcp://127.0.0.1:7000", 1)], (
        "a silent leader gets a new hello and is not reported as lost"
    )
    table.on_inbound(b"c1", "key", hello("prefill-0", 0, address=SECOND), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert "prefill-0/1 is not the leader" in reply.reason
