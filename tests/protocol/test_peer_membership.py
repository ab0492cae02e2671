"""Membership: configured peers, the ranks that a leader names, and the ranks of this instance."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest

from disagg.protocol import links
from disagg.protocol.links import MAX_MOVED
from disagg.protocol.messages import (
    Busy,
    Hello,
    Member,
    Reject,
    Renew,
    Welcome,
)
from disagg.protocol.peer_effects import (
    Connect,
    Disconnect,
    Forgotten,
    Lost,
    Refused,
    SendHello,
    SendTo,
    Unanswered,
)
from disagg.protocol.types import PeerRank
from harness.simulator.connections import welcome
from tests.protocol.peer_table import (
    DRAINED,
    EPOCH,
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


def test_adding_a_peer_again_replaces_its_connection_only_if_the_address_differs() -> None:
    table = peer_table()
    make_ready(table)
    table.add_peer("decode-0", LEADER, None, 1.0)
    assert take_effects(table) == []
    table.add_peer("decode-0", SECOND, None, 1.0)
    lost, disconnect, connect = take_effects(table)
    assert lost == Lost(PeerRank("decode-0", 0), 7, 0, "its address was changed", expected=True)
    assert (disconnect, connect) == (Disconnect(0), Connect(1, SECOND, None))
    assert table.link(PeerRank("decode-0", 0)) is None


def test_a_restarted_peer_stays_accepted_when_its_new_address_is_added_later() -> None:
    table = peer_table()
    make_ready(table)
    table.on_closed(b"c1", 1.0)
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
    reply(table, LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    assert [e for e in take_effects(table) if isinstance(e, Connect)] == [Connect(0, LEADER, None), Connect(1, SECOND, None)]
    assert table.instances["decode-0"].problem == f"{SECOND}: no answer yet"
    assert table.instances["decode-0"].ready is False
    reply(table, SECOND, welcome(rank=1, epoch=8), 0.0)
    assert table.instances["decode-0"].problem == "not all of its ranks are known", "no connection is pending"
    first, second = table.link(PeerRank("decode-0", 0)), table.link(PeerRank("decode-0", 1))
    assert first is not None
    assert second is not None
    assert (first.address, second.address) == (LEADER, SECOND)


def test_a_rank_that_its_leader_no_longer_names_is_disconnected() -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    reply(table, SECOND, welcome(rank=1, epoch=8), 0.0)
    take_effects(table)
    other = "tcp://10.0.0.2:9"
    reply(table, LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, other, 9))), 2.0)
    effects = take_effects(table)
    assert Lost(PeerRank("decode-0", 1), 8, 0, "its leader names another address") in effects
    assert Disconnect(1) in effects
    assert Connect(2, other, None) in effects


def test_ranks_that_have_swapped_their_addresses_are_connected_anew() -> None:
    table = peer_table(peer_ranks=3)
    third = "tcp://10.0.0.3:1"
    table.add_peer("decode-0", LEADER, None, 0.0)
    first = (Member(0, LEADER, 7), Member(1, SECOND, 8), Member(2, third, 9))
    reply(table, LEADER, welcome(members=first), 0.0)
    swapped = (Member(0, LEADER, 7), Member(1, third, 8), Member(2, SECOND, 9))
    reply(table, LEADER, welcome(members=swapped), 2.0)
    reply(table, third, welcome(rank=1, epoch=8), 3.0)
    reply(table, SECOND, welcome(rank=2, epoch=9), 3.0)
    assert table.instances["decode-0"].ready


def test_a_rank_that_its_leader_refuses_for_now_asks_again_soon() -> None:
    """Its place may be free as soon as the leader sees that the last connection has ended."""
    table = peer_table(num_ranks=2, rank=1, leader=LEADER)
    table.join(0.0)
    table.tick(0.0)
    table.on_reply(0, Reject(field="hello", reason="another process is rank 1"), 1.0)
    take_effects(table)
    table.tick(1.0 + LIMITS.hello_retry_s)
    assert [type(effect) for effect in take_effects(table)] == [SendHello]


def many(port: int) -> tuple[Member, ...]:
    """The leader, and 100 ranks at ports from this one on."""
    return Member(0, LEADER, 7), *(Member(rank, f"tcp://10.0.0.9:{port + rank}", 7) for rank in range(1, 101))


@pytest.mark.parametrize("final", [False, True])
def test_a_rank_that_its_leader_refuses_for_good_tells_its_owner(final: bool) -> None:
    table = peer_table(num_ranks=2, rank=1, leader=LEADER)
    table.join(0.0)
    table.tick(0.0)
    take_effects(table)
    reply(table, LEADER, Reject(field="hello", reason="another topology", final=final), 0.0)
    told = [effect for effect in take_effects(table) if isinstance(effect, Refused)]
    assert told == ([Refused("prefill-0", LEADER, "another topology")] if final else [])
    assert table.leader_problem == f"{LEADER}: another topology"


def test_a_leader_that_names_many_ranks_costs_little_in_each_turn() -> None:
    table = peer_table(peer_ranks=101)
    table.add_peer("decode-0", LEADER, None, 0.0)
    take_effects(table)
    reply(table, LEADER, welcome(members=many(1000)), 0.0)
    turns = []
    while table.next_tick == 0.0:
        turns.append(sum(isinstance(effect, Connect | Disconnect) for effect in take_effects(table)))
        table.tick(0.0)
    assert max(turns) == MAX_MOVED
    assert len(table.instances["decode-0"].links) == 101
    for now in (0.5, 1.0):  # other ranks each time
        reply(table, LEADER, welcome(members=many(2000 + int(10 * now))), now)
        assert table.next_tick > 0.0
    reply(table, LEADER, welcome(members=many(3000)), 10.0)
    table.add_peer("decode-1", SECOND, None, 10.0)
    table.remove_peer("decode-0", "removed")
    table.tick(10.0)
    assert list(table.instances) == ["decode-1"]


def test_a_peer_that_is_configured_again_begins_another_generation() -> None:
    """Otherwise the same process would go on with the earlier connection's ring, whose uses are numbered anew here."""
    table = peer_table()
    make_ready(table)
    table.remove_peer("decode-0", "removed")
    table.add_peer("decode-0", SECOND, None, 1.0)
    take_effects(table)
    table.tick(1.0)
    assert SendHello(1, 1, 7) in take_effects(table)
    reply(table, SECOND, welcome(epoch=7), 2.0)
    assert not table.instances["decode-0"].ready, "the answer to a hello of the earlier generation"
    reply(table, SECOND, welcome(epoch=7, generation=1), 2.0)
    assert table.instances["decode-0"].ready


def test_a_rank_that_its_leader_names_again_takes_the_place_of_another_process() -> None:
    """The other one has said hello while the leader named neither."""
    both = Member(0, LEADER, 7), Member(1, SECOND, 70)
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(members=both), 0.0)
    reply(table, SECOND, welcome(rank=1, epoch=70), 0.0)
    reply(table, LEADER, welcome(members=both[:1]), 10.0)
    table.on_inbound(b"c9", "", hello(rank=1, epoch=71), 10.0)
    reply(table, LEADER, welcome(members=both), 20.0)
    assert table.on_inbound(b"c9", "", DRAINED, 20.0) is not None
    table.tick(20.0)
    reply(table, SECOND, welcome(rank=1, epoch=70, generation=1), 20.0)
    assert table.instances["decode-0"].ready
    assert table.on_inbound(b"c9", "", DRAINED, 20.0) is None


def test_the_closed_connections_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_CLOSED", 2)
    table = peer_table()
    for number in range(3):
        table.add_peer(f"decode-{number}", LEADER, None, 0.0)
        reply(table, LEADER, welcome(f"decode-{number}"), 0.0)
        table.remove_peer(f"decode-{number}", "removed")
    assert [peer.instance for peer in table._links._closed] == ["decode-1", "decode-2"]


def test_a_second_process_of_a_rank_is_refused_while_the_first_is_connected() -> None:
    table = peer_table(num_ranks=2)
    first, second = (hello("prefill-0", 1, epoch, address=SECOND) for epoch in (5, 6))
    table.on_inbound(b"c1", "", first, 0.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c2", "", second, 0.0)
    refused = take_reply(table)
    assert isinstance(refused, Reject)
    assert "another process is rank 1 of 'prefill-0' and is connected to prefill-0/0" in refused.reason
    assert not refused.final
    table.on_inbound(b"c3", "", first, 0.0)  # it has connected anew, before its first connection ends
    take_effects(table)
    table.on_closed(b"c1", 0.0)
    table.on_inbound(b"c2", "", second, 0.0)
    assert isinstance(take_reply(table), Reject)
    table.on_closed(b"c3", 0.0)
    table.on_inbound(b"c2", "", second, 0.0)
    assert isinstance(take_reply(table), Welcome)
    assert [member.epoch for member in table.members.named()] == [EPOCH, 6]


def test_removing_a_peer_drops_its_connections() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    take_effects(table)
    table.remove_peer("decode-0", "removed")
    lost = Lost(PeerRank("decode-0", 0), 7, 0, "removed", expected=True)
    assert take_effects(table) == [lost, Disconnect(0), Forgotten("decode-0", "removed")]
    assert table.on_inbound(b"c1", "", DRAINED, 0.0) is None
    assert table.link(PeerRank("decode-0", 0)) is None
    table.tick(60.0)
    assert table.next_tick == float("inf")


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
        (hello("prefill-0", 1, address="tcp://127.0.0.1:7000"), "expected an address of its own, found that of prefill-0/0"),
        (hello("prefill-0", 1, address=SECOND, table=b"other"), "declares other layouts or another topology"),
    ],
)
def test_a_rejected_sibling_gets_the_reason(message: Hello, reason: str) -> None:
    table = peer_table(num_ranks=2)
    table.on_inbound(b"c1", "", message, 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert reason in reply.reason


@pytest.mark.parametrize(
    ("own", "other", "is_refused"),
    [
        ("tcp://10.0.0.1:7000", "tcp://127.0.0.1:7001", True),
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.2:7001", False),
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001", False),
    ],
)
def test_a_sibling_that_only_its_own_host_reaches_is_refused(own: str, other: str, is_refused: bool) -> None:
    """The leader would name that address to peers of other hosts."""
    table = peer_table(num_ranks=2)
    table.members._identity = dataclasses.replace(table.members._identity, address=own)
    table.on_inbound(b"c1", "", hello("prefill-0", 1, address=other), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject) is is_refused
    if isinstance(reply, Reject):
        assert "expected an address that other hosts reach, as tcp://10.0.0.1:7000 of prefill-0/0, found" in reply.reason


def test_an_accepted_peer_is_refused_as_a_rank_of_this_instance() -> None:
    """The leader would name it to every other peer in place of that rank."""
    table = peer_table(num_ranks=2, own_key="own")
    table.on_inbound(b"c1", "decode-0's", hello("prefill-0", 1, address=SECOND), 0.0)
    reply = take_reply(table)
    assert isinstance(reply, Reject)
    assert reply.reason == "rank 1 of 'prefill-0' has another public key than prefill-0/0"
    assert len(table.members.named()) == 1
    table.on_inbound(b"c2", "own", hello("prefill-0", 1, address=SECOND), 0.0)
    assert isinstance(take_reply(table), Welcome)
    assert len(table.members.named()) == 2


def test_a_rank_keeps_sending_hellos_to_its_leader() -> None:
    table = peer_table(num_ranks=2, rank=1, leader="tcp://127.0.0.1:7000", own_key="key")
    table.join(0.0)
    assert take_effects(table) == [Connect(0, "tcp://127.0.0.1:7000", "key")]
    table.tick(0.0)
    assert take_effects(table) == [SendHello(0)]
    table.on_reply(0, welcome("prefill-0", 0, 3), 0.0)
    for now in (5.0, 10.0, 15.0, 20.0):
        table.tick(now)
        assert take_effects(table) == [SendHello(0, 0, 3)]
    table.tick(25.0)
    assert take_effects(table) == [
        Unanswered("prefill-0", "tcp://127.0.0.1:7000"),
        Disconnect(0),
        Connect(1, "tcp://127.0.0.1:7000", "key"),
        SendHello(1, 0, 3),
    ], "a silent leader is dialled anew, and not reported as lost"
    table.on_inbound(b"c1", "key", hello("prefill-0", 0, address=SECOND), 0.0)
    refusal = take_reply(table)
    assert isinstance(refusal, Reject)
    assert "prefill-0/1 is not the leader" in refusal.reason


@pytest.mark.parametrize("address", ["tcp://a b:5555", "nonsense", "ipc:///tmp/x", "tcp://%:5555", "tcp://*:1", "tcp://h:0"])
def test_an_address_that_cannot_be_dialled_harms_its_owner_only(address: str) -> None:
    """A leader passes the addresses of its ranks on; each is checked where it arrives."""
    table = peer_table(peer_ranks=2)
    make_ready(table)
    table.add_peer("decode-1", SECOND, None, 0.0)
    reply(table, SECOND, welcome("decode-1", members=(Member(0, SECOND, 7), Member(1, address, 8))), 0.0)
    assert address.partition("://")[2][:3] in table.instances["decode-1"].problem
    assert "rank 1 of 'decode-1'" in table.instances["decode-1"].problem
    assert not any(isinstance(effect, Connect) and effect.address == address for effect in take_effects(table))
    assert table.link(PeerRank("decode-0", 0)) is not None
    leader = peer_table(num_ranks=2)
    leader.on_inbound(b"c1", "", hello("prefill-0", 1, address=address), 0.0)
    assert isinstance(take_reply(leader), Reject)


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1), (0, 2)])
def test_members_that_the_instance_does_not_have_are_refused(ranks: tuple[int, ...]) -> None:
    """A leader could otherwise have this rank open connections without a bound."""
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    members = tuple(Member(rank, f"tcp://10.0.0.1:{port}", 7) for port, rank in enumerate(ranks, 80))
    reply(table, LEADER, welcome(members=members), 0.0)
    assert "expected each of its 2 ranks at most once" in table.instances["decode-0"].problem


def test_a_rank_that_names_the_address_of_another_peer_harms_itself_only() -> None:
    """Connections go by their own number: what comes back on one is never taken for an answer on another."""
    table = peer_table()
    table.add_peer("decode-1", LEADER, None, 0.0)  # the wrong address, that of decode-0
    make_ready(table)
    table.on_reply(0, welcome("decode-0"), 1.0)
    assert "answers as decode-0/0, expected decode-1/0" in table.instances["decode-1"].problem
    assert table.link(PeerRank("decode-0", 0)) is not None
    assert table.link(PeerRank("decode-1", 0)) is None


@pytest.mark.parametrize("second_at", [0.3, 0.9, 1.5])
def test_ranks_that_are_replaced_one_after_the_other_are_all_found(second_at: float) -> None:
    """The leader stays, and answers a renewal with a renewal once it has named its ranks in a welcome."""
    table = peer_table(peer_ranks=3)
    places = {0: (LEADER, 7), 1: ("tcp://10.0.0.1:81", 8), 2: ("tcp://10.0.0.1:82", 9)}
    replaced = {10.0: (1, ("tcp://10.0.0.1:91", 18)), 10.0 + second_at: (2, ("tcp://10.0.0.1:92", 19))}
    named: dict[int, tuple[str, int]] = {}
    dialled: dict[int, str] = {}
    table.add_peer("decode-0", LEADER, None, 0.0)
    for step in range(2000):
        now = step / 20
        for at in [at for at in replaced if now >= at]:
            rank, place = replaced.pop(at)
            table.on_closed(b"%d" % places[rank][1], now)
            places[rank] = place
            table.on_inbound(b"%d" % place[1], "", hello(rank=rank, epoch=place[1]), now)
        table.tick(now)
        by_address = {address: (rank, epoch) for rank, (address, epoch) in places.items()}
        for effect in take_effects(table):
            if isinstance(effect, Connect):
                dialled[effect.dial] = effect.address
            elif isinstance(effect, SendHello) and dialled[effect.dial] in by_address:
                rank, epoch = by_address[dialled[effect.dial]]
                members = () if rank else tuple(Member(each, *place) for each, place in places.items())
                named = named if rank else dict(places)
                generation = effect.generation if effect.peer_epoch in (0, epoch) else 0
                answer = welcome(rank=rank, epoch=epoch, generation=generation, members=members)
                table.on_reply(effect.dial, answer, now)
                table.on_inbound(b"%d" % epoch, "", hello(rank=rank, epoch=epoch), now)
            elif isinstance(effect, SendTo) and dialled[effect.dial] in by_address:
                if dialled[effect.dial] == LEADER and named != places:
                    table.on_reply(effect.dial, Reject(field="members", reason="changed", hello_first=True), now)
                else:
                    table.on_reply(effect.dial, Renew(), now)
    assert table.instances["decode-0"].ready
