"""Liveness of peers: heartbeats, silence, goodbyes, restarts, and renewed connections."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.core.errors import ConfigError
from disagg.protocol.messages import (
    Busy,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Reject,
    RingGrant,
    Welcome,
    decode,
    encode,
)
from disagg.protocol.peer_state import (
    Connect,
    ConnectionLimits,
    Disconnect,
    Identity,
    Lost,
    PeerEffect,
    Ready,
    ReplyOn,
    SendHello,
    SendTo,
)
from disagg.protocol.peers import PeerTable
from disagg.protocol.types import PeerRank
from tests.protocol.peer_table import (
    DRAINED,
    LEADER,
    LIMITS,
    SECOND,
    hello,
    make_ready,
    peer_table,
    take_effects,
    take_reply,
    welcome,
)


def test_a_connection_without_answers_is_reopened() -> None:
    table = peer_table(num_ranks=2, rank=1, leader=SECOND, own_key="own")
    table.add_peer("decode-0", LEADER, "key", 0.0)
    table.join(0.0)
    take_effects(table)
    for now in range(8):
        table.tick(float(now))
        assert all(isinstance(effect, SendHello) for effect in take_effects(table))
    table.on_reply(LEADER, Busy(reason="wait", retry_after_s=1.0), 8.0)
    for now in range(8, 13):
        table.tick(float(now))
    effects = take_effects(table)
    assert effects.count(Disconnect(SECOND)) == effects.count(Connect(SECOND, "own")) == 1
    assert Disconnect(LEADER) not in effects, "the leader of decode-0 has answered"
    for now in range(13, 40):
        table.tick(float(now))
    assert Connect(LEADER, "key") in take_effects(table)


def test_a_rank_that_answers_with_another_epoch_has_restarted() -> None:
    table = peer_table()
    make_ready(table)
    table.on_reply(LEADER, welcome(epoch=8), 1.0)
    assert take_effects(table) == [
        Lost(PeerRank("decode-0", 0), 7, "restarted"),
        Ready(PeerRank("decode-0", 0), 8, welcome(epoch=8)),
    ]
    table.on_reply(LEADER, welcome(epoch=8), 2.0)
    assert take_effects(table) == []


def test_a_hello_with_another_epoch_ends_the_old_generation_and_sends_a_hello_at_once() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(epoch=7), 1.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c2", "", hello(epoch=9), 2.0)
    effects = take_effects(table)
    assert Lost(PeerRank("decode-0", 0), 7, "restarted") in effects
    table.tick(2.0)
    assert SendHello(LEADER) in take_effects(table)
    assert table.on_inbound(b"c1", "", DRAINED, 2.0) is None, "messages on the old connection are ignored"
    assert table.on_inbound(b"c2", "", DRAINED, 2.0) == PeerRank("decode-0", 0)


def test_a_connection_unknown_to_the_peer_gets_a_new_hello() -> None:
    table = peer_table()
    make_ready(table)
    table.on_reply(LEADER, Reject(field="connection", reason="send hello first", hello_first=True), 3.0)
    assert take_effects(table) == [Lost(PeerRank("decode-0", 0), 7, "the peer does not know this connection any more")]
    table.tick(3.0)
    assert take_effects(table) == [SendHello(LEADER, 1)]


def test_silence_ends_a_connection_and_any_message_keeps_it() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    take_effects(table)
    for now in (10.0, 25.0):
        assert table.on_inbound(b"c1", "", Heartbeat(epoch=7), now) is None
        table.tick(now)
        assert not any(isinstance(effect, Lost) for effect in take_effects(table))
    table.tick(44.9)
    assert not any(isinstance(effect, Lost) for effect in take_effects(table))
    table.tick(45.0)
    assert take_effects(table) == [Lost(PeerRank("decode-0", 0), 7, "silent for 20.0 s")]
    table.tick(45.0)
    assert take_effects(table) == [SendHello(LEADER, 1)]


def test_two_idle_instances_stay_connected() -> None:
    """All pairs of leaders and other ranks, for longer than the heartbeat timeout."""
    network = {rank.identity.address: rank for name in ("prefill-0", "decode-0") for rank in instance_of_two(name)}
    for address, rank in network.items():
        other = "decode-0" if rank.identity.instance == "prefill-0" else "prefill-0"
        leader = next(a for a, peer in network.items() if peer.identity.instance == other and peer.identity.leader)
        rank.add_peer(other, leader, None, 0.0)
        rank.join(0.0)
        assert address != leader
    lost: list[PeerEffect] = []
    for now in range(100):
        for rank in network.values():
            rank.tick(float(now))
        while any(rank.effects for rank in network.values()):
            for address, rank in network.items():
                lost += deliver(network, address, rank, float(now))
    assert lost == []
    assert all(rank.instances[name].ready for rank in network.values() for name in rank.instances)


def instance_of_two(name: str) -> list[PeerTable]:
    ports = {"prefill-0": 7000, "decode-0": 8000}
    addresses = [f"tcp://127.0.0.1:{ports[name] + rank}" for rank in range(2)]
    tables = []
    for rank, address in enumerate(addresses):
        me = Identity(name, rank, 2, 1, "m", "", b"t", address, leader=rank == 0)

        def accept_hello(message: Hello, members: Callable[[], tuple[Member, ...]], rank: int = rank) -> Welcome:
            return welcome(name, rank, 1, members(), generation=message.generation)

        leader = None if rank == 0 else addresses[0]
        tables.append(
            PeerTable(me, leader=leader, own_key=None, accept_hello=accept_hello, validate_welcome=lambda _: 2, limits=LIMITS)
        )
    return tables


def deliver(network: dict[str, PeerTable], address: str, rank: PeerTable, now: float) -> list[PeerEffect]:
    """Deliver a rank's messages to the other ranks and return its `Lost` effects."""
    lost: list[PeerEffect] = []
    while rank.effects:
        match rank.effects.popleft():
            case SendHello(to, generation, dial):
                me = rank.identity
                greeting = hello(me.instance, me.rank, me.epoch, address=address, generation=generation, dial=dial)
                network[to].on_inbound(f"{address} {to}".encode(), "", greeting, now)
            case SendTo(to, message):
                network[to].on_inbound(f"{address} {to}".encode(), "", decode(encode(message)), now)
            case ReplyOn(connection, message):
                to, _, here = connection.decode().partition(" ")
                network[to].on_reply(here, decode(encode(message)), now)
            case Lost() as effect:
                lost.append(effect)
    return lost


def test_every_rank_gets_heartbeats_and_every_leader_hellos() -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    table.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    take_effects(table)
    assert table.next_tick() == 5.0
    table.tick(5.0)
    assert take_effects(table) == [SendHello(LEADER), SendTo(SECOND, Heartbeat(epoch=1))]


def test_a_goodbye_ends_the_connection_at_once_as_announced() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    take_effects(table)
    assert table.on_inbound(b"c1", "", Goodbye(reason="done"), 1.0) is None
    assert take_effects(table) == [Lost(PeerRank("decode-0", 0), 7, "closed: done", announced=True)]
    table.tick(1.1)
    assert take_effects(table) == []
    table.tick(1.0 + LIMITS.hello_retry_s)
    assert take_effects(table) == [SendHello(LEADER, 1)]


def test_a_connection_that_one_side_gave_up_ends_on_both_sides_and_is_renewed() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(), 0.0)
    take_effects(table)
    table.on_inbound(b"c2", "", hello(generation=1), 1.0)
    assert Lost(PeerRank("decode-0", 0), 7, "the peer has given the connection up", renewed=True) in take_effects(table)
    table.tick(1.0)
    assert take_effects(table) == [SendHello(LEADER, 1)]
    table.on_reply(LEADER, welcome(), 1.0)
    assert table.link(PeerRank("decode-0", 0)) is None, "this answers an earlier hello; its ring is not the latest grant"
    table.on_reply(LEADER, welcome(generation=1), 1.0)
    table.on_inbound(b"c2", "", hello(generation=1), 1.5)
    assert not any(isinstance(effect, Lost) for effect in take_effects(table))
    table.on_inbound(b"c3", "", hello(epoch=8), 2.0)
    assert Lost(PeerRank("decode-0", 0), 7, "restarted") in take_effects(table)
    table.tick(2.0)
    assert take_effects(table) == [SendHello(LEADER, 0)], "generations of a new process start at 0"


def test_a_welcome_with_another_ring_starts_a_new_connection() -> None:
    """Both sides must use the same ring: another ring holds old bytes or those of another peer."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8)), 0.0)
    take_effects(table)
    table.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8)), 0.5)
    assert take_effects(table) == []
    table.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8, 1 << 40)), 1.0)
    assert take_effects(table) == [Lost(PeerRank("decode-0", 0), 7, "the peer has started a new connection")]
    table.tick(1.0)
    assert take_effects(table) == [SendHello(LEADER, 1)]
    table.on_reply(LEADER, welcome(ring=RingGrant(8192, 512, 8), generation=1), 1.1)
    assert [type(effect) for effect in take_effects(table)] == [Ready]


def test_a_ring_granted_later_ends_no_connection_without_a_ring() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_reply(LEADER, welcome(), 0.0)
    take_effects(table)
    for address in (4096, 8192):
        table.on_reply(LEADER, welcome(ring=RingGrant(address, 512, 8)), 1.0)
    assert take_effects(table) == []
    assert table.link(PeerRank("decode-0", 0)) is not None


def test_a_goodbye_of_an_older_epoch_is_ignored() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"c1", "", hello(epoch=6), 0.0)
    table.on_reply(LEADER, welcome(epoch=7), 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "", Goodbye(reason="old"), 1.0)
    assert take_effects(table) == []
    assert table.instances["decode-0"].ready


def test_close_sends_goodbye_to_every_peer_that_has_answered() -> None:
    table = peer_table()
    make_ready(table)
    table.add_peer("decode-1", SECOND, None, 0.0)
    take_effects(table)
    table.close("the manager was closed")
    assert take_effects(table) == [SendTo(LEADER, Goodbye(reason="the manager was closed"))]
    peer_table().join(0.0)


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="heartbeat_s: expected more than 0, found 0"):
        ConnectionLimits(heartbeat_s=0)
