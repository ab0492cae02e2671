"""Liveness of peers: connections that end, processes that end, goodbyes, restarts, and renewed connections."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from disagg.core.errors import ConfigError
from disagg.protocol.connection import PeerConnection
from disagg.protocol.messages import Busy, Goodbye, Hello, Lending, Member, Reject, Renew, Welcome, decode, encode
from disagg.protocol.peer_effects import (
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
    Unanswered,
)
from disagg.protocol.peers import ASK_AGAIN_S, CLOSED_GRACE_S, PeerTable
from disagg.protocol.types import NEVER, Limits, PeerRank
from harness.simulator.connections import welcome
from tests.protocol.peer_table import (
    DECODE,
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


def lost_in(table: PeerTable) -> list[Lost]:
    return [effect for effect in take_effects(table) if isinstance(effect, Lost)]


def test_a_connection_without_answers_is_reopened_and_reported_once() -> None:
    table = peer_table(num_ranks=2, rank=1, leader=SECOND, own_key="own")
    table.add_peer("decode-0", LEADER, "key", 0.0)
    table.join(0.0)
    assert take_effects(table) == [Connect(0, LEADER, "key"), Connect(1, SECOND, "own")]
    for now in range(8):
        table.tick(float(now))
        assert all(isinstance(effect, SendHello) for effect in take_effects(table))
    reply(table, LEADER, Busy(reason="wait", retry_after_s=1.0), 8.0)
    for now in range(8, 13):
        table.tick(float(now))
    effects = take_effects(table)
    assert effects.count(Disconnect(1)) == effects.count(Connect(2, SECOND, "own")) == 1
    assert Disconnect(0) not in effects, "the leader of decode-0 has answered"
    assert [effect.instance for effect in effects if isinstance(effect, Unanswered)] == ["prefill-0"]
    for now in range(13, 80):
        table.tick(float(now))
    effects = take_effects(table)
    assert any(isinstance(effect, Connect) and effect.address == LEADER for effect in effects)
    silent = peer_table()
    silent.add_peer("decode-0", LEADER, None, 0.0)
    for now in range(80):
        silent.tick(float(now))
    effects = take_effects(silent)
    assert sum(isinstance(effect, Connect) for effect in effects) > 2
    assert effects.count(Unanswered("decode-0", LEADER)) == 1
    assert silent.instances["decode-0"].problem == f"{LEADER}: no answer yet, 4 hellos sent"


def test_an_absent_peer_is_reported_within_five_seconds() -> None:
    table = peer_table(limits=ConnectionLimits())
    table.add_peer("decode-0", LEADER, None, 0.0)
    now, effects = 0.0, list[PeerEffect]()
    while (now := max(table.next_tick, now + 0.001)) < 5.0:
        table.tick(now)
        effects += take_effects(table)
    assert effects.count(Unanswered("decode-0", LEADER)) == 1


def test_a_connection_that_cannot_be_opened_is_tried_again() -> None:
    """No descriptor is left, for instance."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    take_effects(table)
    table.cannot_dial(0, "too many open files")
    table.cannot_dial(9, "not known any more")
    assert "too many open files" in table.instances["decode-0"].problem
    table.tick(0.0)
    assert take_effects(table) == [Disconnect(0), Connect(1, LEADER, None), SendHello(1)]


def test_a_rank_that_answers_with_another_epoch_has_restarted() -> None:
    table = peer_table()
    make_ready(table)
    reply(table, LEADER, welcome(epoch=8), 1.0)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "restarted")]
    table.tick(1.0)
    assert take_effects(table) == [SendHello(0, 0, 8)]
    reply(table, LEADER, welcome(epoch=8), 2.0)
    assert take_effects(table) == [Ready(DECODE, 8, welcome(epoch=8))]
    reply(table, LEADER, welcome(epoch=8), 2.5)
    assert take_effects(table) == []
    assert table.on_inbound(b"c1", "", DRAINED, 2.0) is None, "the connection of the earlier process counts no more"


def test_what_was_sent_to_an_earlier_process_is_not_taken() -> None:
    """The process that listens at the address now gets what the peer had sent to the one before it, such as a hello and a
    reserve. The rows of that reserve are released once the earlier process is proved quiet.
    """
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "", hello(peer_epoch=99), 0.1)
    assert isinstance(take_reply(table), Welcome), "the peer learns of this process"
    assert table.on_inbound(b"c1", "", DRAINED, 0.1) is None
    assert take_reply(table) == Reject(field="connection", reason="send hello first", hello_first=True)
    table.on_inbound(b"c1", "", hello(peer_epoch=EPOCH), 0.2)
    assert isinstance(take_reply(table), Welcome)
    assert table.on_inbound(b"c1", "", DRAINED, 0.2) == DECODE


def test_what_follows_a_renewal_for_an_earlier_process_is_not_taken() -> None:
    """That process had welcomed the first of two hellos that named nobody. The second one has not left before it ended."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "", hello(), 0.1)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c1", "", Renew(epoch=99), 0.1)
    rejected = take_reply(table)
    assert isinstance(rejected, Reject)
    assert rejected.hello_first
    assert table.on_inbound(b"c1", "", DRAINED, 0.1) is None
    table.on_inbound(b"c1", "", hello(peer_epoch=EPOCH), 0.2)
    table.on_inbound(b"c1", "", Renew(epoch=EPOCH), 0.2)
    assert table.on_inbound(b"c1", "", DRAINED, 0.2) == DECODE


def test_what_follows_a_rejected_hello_to_an_earlier_process_is_not_taken() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(table=b"bad", peer_epoch=99), 0.1)
    assert isinstance(take_reply(table), Reject)
    assert table.on_inbound(b"c1", "", DRAINED, 0.1) is None


def test_a_renewal_follows_the_welcome_to_a_hello_that_names_nobody() -> None:
    """Another such hello may still reach a later process."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    table.tick(LIMITS.hello_retry_s)
    take_effects(table)
    reply(table, LEADER, welcome(), 1.1)
    assert take_effects(table) == [SendTo(0, Renew(epoch=7)), Ready(DECODE, 7, welcome())]
    reply(table, LEADER, welcome(epoch=8), 1.2)  # the answer to the second hello
    assert take_effects(table) == [Lost(DECODE, 7, 0, "restarted")]
    table.tick(1.2)
    assert take_effects(table) == [SendHello(0, 0, 8)]


def test_a_welcome_of_a_process_that_has_ended_since_changes_nothing() -> None:
    """A later process has said hello meanwhile, and its connection stays accepted."""
    table = peer_table()
    make_ready(table)
    table.on_closed(b"c1", 1.0)
    table.tick(1.0)
    assert SendHello(0, 0, 7, again=True) in take_effects(table)
    table.on_inbound(b"c2", "", hello(epoch=8), 1.1)
    reply(table, LEADER, welcome(epoch=7), 1.1)
    assert Lost(DECODE, 7, 0, "restarted") in take_effects(table)
    assert table.on_inbound(b"c2", "", DRAINED, 1.1) == DECODE
    table.tick(1.1)
    assert SendHello(0, 0, 8) in take_effects(table)


def test_the_name_is_free_for_a_process_that_has_answered() -> None:
    """The host of the earlier process has vanished, so that its connection has not ended yet."""
    table = peer_table()
    make_ready(table)
    table.on_closed(b"c1", 1.0)
    table.tick(1.0)
    table.on_inbound(b"c2", "", hello(epoch=7, peer_epoch=EPOCH), 1.0)
    take_effects(table)
    reply(table, LEADER, welcome(epoch=8), 1.1)
    table.on_inbound(b"c3", "", hello(epoch=8), 1.1)
    assert isinstance(take_reply(table), Welcome)


def test_a_connection_on_which_hellos_are_for_another_process_counts_as_ended() -> None:
    """Otherwise the peer would stay ready, although nothing shows any more whether it lives."""
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(peer_epoch=99), 1.0)
    take_effects(table)
    table.tick(3.0)
    assert Lost(DECODE, 7, 0, "its connection has ended") in take_effects(table)


def test_a_new_process_takes_the_place_of_one_whose_connection_has_ended() -> None:
    table = peer_table()
    make_ready(table)
    assert table.on_closed(b"c1", 2.0) == DECODE
    table.on_inbound(b"c2", "", hello(epoch=9), 2.0)
    effects = take_effects(table)
    assert Lost(DECODE, 7, 0, "restarted") in effects
    table.tick(2.0)
    assert SendHello(0, 0, 9) in take_effects(table), "generations of a new process start at 0"
    assert table.on_inbound(b"c2", "", DRAINED, 2.0) == DECODE


@pytest.mark.parametrize(
    ("epoch", "is_connected", "key", "is_lost"),
    [
        (7, False, None, True),
        (7, False, "key", True),
        (7, False, "other", False),
        (8, False, None, False),
        (7, True, None, False),
    ],
)
def test_a_peer_whose_hello_comes_too_late(epoch: int, is_connected: bool, key: str | None, is_lost: bool) -> None:
    """It has ended before its hello was read. What another process has said, or one that is connected, changes nothing. Later
    ones do not put the end off.
    """
    table = peer_table()
    table.add_peer("decode-0", LEADER, key, 0.0)
    table.tick(0.0)
    reply(table, LEADER, welcome(epoch=7), 0.0)
    if is_connected:
        table.on_inbound(b"c1", "", hello(epoch=7), 0.0)
    table.on_late("key", DRAINED, 1.0)
    table.on_late("key", hello(epoch=epoch, dial=9), 1.0)
    table.on_late("key", hello("nobody"), 1.0)
    table.on_late("key", hello(epoch=epoch, dial=10), 1.0 + 0.9 * CLOSED_GRACE_S)
    table.tick(1.0 + 1.5 * CLOSED_GRACE_S)
    lost = [each for each in take_effects(table) if isinstance(each, Lost)]
    assert bool(lost) is is_lost


def test_a_second_process_of_one_name_is_refused_while_the_first_is_connected() -> None:
    """Two instances of one name, as in an overlapping rolling restart: the first stays, nothing flaps, both sides say so."""
    table = peer_table()
    make_ready(table)
    for now in range(1, 5):
        table.on_inbound(b"c2", "", hello(epoch=8, dial=now), float(now))
        refusal = take_reply(table)
        assert isinstance(refusal, Reject)
        assert "another process has the name decode-0/0 and is connected to prefill-0/0" in refusal.reason
        assert not refusal.final
        assert table.on_inbound(b"c1", "", DRAINED, float(now)) == DECODE
    table.on_closed(b"c1", 5.0)
    table.on_inbound(b"c2", "", hello(epoch=8, dial=6), 5.0)
    assert Lost(DECODE, 7, 0, "restarted") in take_effects(table)


def test_what_answers_at_the_configured_address_has_the_name() -> None:
    """The other process said hello first, so that nobody had the name yet."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"other", "", hello(epoch=8), 0.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"third", "", hello(epoch=9), 0.0)
    assert isinstance(take_reply(table), Reject)
    reply(table, LEADER, welcome(epoch=7), 1.0)
    assert [type(effect) for effect in take_effects(table)] == [SendTo, Ready]
    assert table.on_inbound(b"other", "", DRAINED, 1.0) is None
    table.on_inbound(b"other", "", hello(epoch=8), 1.0)
    refusals = [effect.message for effect in take_effects(table) if isinstance(effect, ReplyOn)]
    assert [isinstance(each, Reject) and each.hello_first for each in refusals] == [True, False]
    table.on_inbound(b"c1", "", hello(epoch=7), 1.0)
    assert isinstance(take_reply(table), Welcome)


def test_a_welcome_that_nobody_asked_for_changes_nothing() -> None:
    """Each would otherwise cost a thread that connects the engine."""
    table = peer_table()
    make_ready(table)
    table.on_reply(0, welcome(), 1.0)  # the answer to the last hello
    for epoch in range(100, 200):
        table.on_reply(0, welcome(epoch=epoch), 1.0)
    assert take_effects(table) == []


def test_a_connection_unknown_to_the_peer_gets_a_new_hello() -> None:
    table = peer_table()
    make_ready(table)
    reply(table, LEADER, Reject(field="connection", reason="send hello first", hello_first=True), 3.0)
    table.tick(3.0)
    assert take_effects(table) == [SendHello(0, 0, 7)]
    reply(table, LEADER, welcome(), 3.0)
    assert take_effects(table) == [], "the same process at the same generation: nothing is lost"


def test_a_connection_that_opens_late_gets_a_hello_at_once() -> None:
    """Its host name had to be resolved first. Messages sent before that were lost."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    take_effects(table)
    table.dialled(99, 0.1)
    table.dialled(0, 0.1)
    table.tick(0.1)
    assert take_effects(table) == [SendHello(0)]


@pytest.mark.parametrize("has_name", [False, True])
def test_a_slow_peer_has_as_long_to_answer_by_name_as_by_address(has_name: bool) -> None:
    """Each connection that is given up costs the peer a hello to read, and never gets its answer."""
    table = peer_table(limits=dataclasses.replace(LIMITS, hello_retry_s=0.25, max_hello_retry_s=2.0))
    table.add_peer("decode-0", "tcp://decode:80" if has_name else LEADER, None, 0.0)
    dialled_at = list[float]()
    for now in (count / 4 for count in range(200)):
        table.tick(now)
        for effect in take_effects(table):
            if isinstance(effect, Connect):
                dialled_at.append(now)
                if has_name:
                    table.dialled(effect.dial, now)
                    table.tick(now)
    lasted = [after - before for before, after in itertools.pairwise(dialled_at)]
    assert lasted[0] >= 3.0
    assert min(lasted[1:]) >= 8.0


def test_a_peer_that_has_not_connected_is_asked_to() -> None:
    """Its connection may have ended while this rank still said hello to it, and nothing else would tell it."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(), 0.0)
    take_effects(table)
    for count in (1, 2):
        table.tick(count * LIMITS.heartbeat_s)
        assert take_effects(table) == [SendHello(0, 0, 7, again=True)]
    table.on_inbound(b"c1", "", hello("decode-0"), 2 * LIMITS.heartbeat_s)
    take_effects(table)
    table.tick(2 * LIMITS.heartbeat_s + LIMITS.renew_s)
    assert not any(isinstance(effect, SendHello) and effect.again for effect in take_effects(table))


def test_a_peer_whose_connection_has_ended_is_asked_for_another() -> None:
    """As after a TCP reset: libzmq connects again by itself, and tells neither side of it."""
    table, peer = peer_table(), peer_table()
    for side in (table, peer):
        make_ready(side)
    table.on_closed(b"c1", 1.0)
    table.tick(1.0)
    assert take_effects(table) == [SendHello(0, 0, 7, again=True)]
    reply(table, LEADER, welcome(), 1.01)  # its own hello may be lost, on a connection that has ended as well
    table.tick(1.01 + ASK_AGAIN_S)
    table.tick(1.02 + 2 * ASK_AGAIN_S)
    assert take_effects(table) == 2 * [SendHello(0, 0, 7, again=True)]
    peer.on_inbound(b"c1", "", hello(again=True), 1.0)
    take_effects(peer)
    peer.tick(1.0)
    assert take_effects(peer) == [SendHello(0, 0, 7)]
    table.on_inbound(b"c2", "", hello(), 1.1)
    assert table.on_inbound(b"c2", "", DRAINED, 1.1) == DECODE
    table.tick(100.0)
    assert lost_in(table) == []


def test_a_peer_is_lost_soon_after_its_connection_has_ended() -> None:
    table = peer_table()
    make_ready(table)
    assert table.on_closed(b"unknown", 1.0) is None
    assert table.on_closed(b"c1", 1.0) == DECODE
    table.tick(1.0)
    assert table.next_tick == 1.0 + ASK_AGAIN_S
    table.tick(0.99 + CLOSED_GRACE_S)
    assert lost_in(table) == []
    take_effects(table)
    table.tick(1.0 + CLOSED_GRACE_S)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "its connection has ended"), SendHello(0, 1, 7)]


def test_a_peer_that_connects_again_at_once_is_not_lost() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c2", "", hello(dial=1), 1.0)
    assert table.on_closed(b"c1", 1.0) is None, "it had been replaced"
    table.on_closed(b"c2", 2.0)
    table.on_inbound(b"c3", "", hello(dial=2), 2.0)
    table.tick(100.0)
    assert lost_in(table) == []


def test_a_silent_interpreter_costs_no_connection() -> None:
    """Nothing arrives from the peer but libzmq's own pings, of which this table does not learn."""
    table = peer_table()
    make_ready(table)
    for now in range(1, 200):
        table.tick(float(now))
    assert lost_in(table) == []


def test_a_peer_that_never_connects_is_lost_in_the_end() -> None:
    """It may take longer than libzmq may be silent: its interpreter may be busy, in which case libzmq still answers."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.tick(0.0)
    reply(table, LEADER, welcome(), 0.0)
    take_effects(table)
    table.tick(LIMITS.connect_back_s - 0.1)
    assert lost_in(table) == []
    table.tick(LIMITS.connect_back_s)
    assert lost_in(table) == [Lost(DECODE, 7, 0, "it has not connected to prefill-0/0 within 80 s")]


def test_a_rank_that_the_engine_cannot_reach_is_connected_anew() -> None:
    table = peer_table()
    make_ready(table)
    table.on_unreachable(DECODE, "the engine's connection broke", 1.0)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "the engine's connection broke")]
    table.on_unreachable(DECODE, "again", 1.0)
    assert take_effects(table) == []
    table.tick(1.0)
    assert take_effects(table) == [SendHello(0, 1, 7)]


def test_a_peer_is_connected_anew_also_before_it_is_ready() -> None:
    """It may have connected to an engine that has been replaced since."""
    table = peer_table()
    table.start_anew(DECODE, "another engine", 0.0)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.start_anew(DECODE, "another engine", 0.0)
    table.tick(0.0)
    assert SendHello(0, 0, 0) in take_effects(table), "it cannot have connected"
    table.on_inbound(b"c1", "", hello(), 0.5)
    take_effects(table)
    table.start_anew(DECODE, "another engine", 1.0)
    reply(table, LEADER, welcome(), 1.0)
    assert table.link(DECODE) is None, "the welcome is of the generation before"
    table.tick(1.0)
    assert SendHello(0, 1, 7) in take_effects(table)
    reply(table, LEADER, welcome(generation=1), 1.5)
    assert table.link(DECODE) is not None
    take_effects(table)
    table.start_anew(DECODE, "another engine", 2.0)
    assert take_effects(table) == [Lost(DECODE, 7, 1, "another engine")]


def test_a_process_that_has_ended_is_lost_at_once() -> None:
    table = peer_table()
    make_ready(table)
    table.on_ended(DECODE, 6, 1.0)
    assert take_effects(table) == []
    assert table.on_inbound(b"c1", "", DRAINED, 1.0) == DECODE
    table.on_ended(DECODE, 7, 1.0)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "its process has ended")]
    assert table.on_inbound(b"c1", "", DRAINED, 1.0) is None, "what it sent before is read late"
    answer = take_reply(table)
    assert isinstance(answer, Reject)
    assert answer.hello_first
    table.on_ended(DECODE, 7, 1.0)
    assert take_effects(table) == []


def test_two_idle_instances_stay_connected() -> None:
    """All pairs of leaders and other ranks, for longer than the heartbeat timeout."""
    network = {rank.identity.address: rank for name in ("prefill-0", "decode-0") for rank in instance_of_two(name)}
    dialled: dict[tuple[str, int], str] = {}
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
                lost += deliver(network, dialled, address, rank, float(now))
    assert lost == []
    assert all(rank.instances[name].ready for rank in network.values() for name in rank.instances)


def instance_of_two(name: str) -> list[PeerTable]:
    ports = {"prefill-0": 7000, "decode-0": 8000}
    addresses = [f"tcp://127.0.0.1:{ports[name] + rank}" for rank in range(2)]
    tables = []
    for rank, address in enumerate(addresses):
        epoch = ports[name] + rank
        me = Identity(name, rank, 2, epoch, "m", "", b"t", address, leader=rank == 0)

        def accept_hello(
            message: Hello, members: Callable[[], tuple[Member, ...]], rank: int = rank, epoch: int = epoch
        ) -> Welcome:
            return welcome(name, rank, epoch, members(), generation=message.generation)

        leader = None if rank == 0 else addresses[0]
        tables.append(
            PeerTable(
                me,
                leader=leader,
                own_key=None,
                accept_hello=accept_hello,
                validate_welcome=lambda _: (2, frozenset({0, 1})),
                limits=LIMITS,
            )
        )
    return tables


def deliver(
    network: dict[str, PeerTable], dialled: dict[tuple[str, int], str], address: str, rank: PeerTable, now: float
) -> list[PeerEffect]:
    """Deliver a rank's messages to the other ranks and return its `Lost` effects."""
    lost: list[PeerEffect] = []
    while rank.effects:
        match rank.effects.popleft():
            case Connect(dial, to):
                dialled[address, dial] = to
            case SendHello(dial, generation, peer_epoch, _):
                me = rank.identity
                fields = {"address": address, "generation": generation, "dial": dial, "peer_epoch": peer_epoch}
                greeting = hello(me.instance, me.rank, me.epoch, **fields)
                network[dialled[address, dial]].on_inbound(f"{address} {dial}".encode(), "", greeting, now)
            case ReplyOn(connection, message):
                to, _, dial_there = connection.decode().partition(" ")
                network[to].on_reply(int(dial_there), decode(encode(message)), now)
            case Lost() as effect:
                lost.append(effect)
    return lost


def ready_pair() -> PeerTable:
    """A table that is connected to both ranks of `decode-0`, as they are to it."""
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    reply(table, SECOND, welcome(rank=1, epoch=8), 0.0)
    table.on_inbound(b"c1", "", hello(), 0.0)
    table.on_inbound(b"c2", "", hello(rank=1, epoch=8), 0.0)
    take_effects(table)
    return table


def test_hellos_are_renewed_and_seldom_while_all_ranks_are_ready() -> None:
    table, sent = ready_pair(), []
    for now in range(1, 50):
        table.tick(float(now))
        sent += [(now, *effect) for effect in take_effects(table)]
    first, second = Renew(epoch=7), Renew(epoch=8)
    assert sent == [(5, 0, first), (5, 1, second), (44, 1, second), (45, 0, first)]


def test_a_leader_is_asked_at_once_and_often_while_a_rank_of_it_is_lost() -> None:
    table = ready_pair()
    table.tick(5.0)
    take_effects(table)
    table.on_unreachable(PeerRank("decode-0", 1), "the link is down", 6.0)
    sent = []
    for now in range(6, 18):
        table.tick(float(now))
        sent += [(now, effect.dial) for effect in take_effects(table) if isinstance(effect, SendTo)]
    assert sent == [(6, 0), (10, 0), (14, 0)]


def test_a_renewed_hello_is_answered_while_the_answer_is_the_same() -> None:
    table = peer_table(num_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"c0", "", hello("prefill-0", 1, epoch=3, address=SECOND), 0.0)
    table.on_inbound(b"c1", "", Renew(), 0.0)
    take_effects(table)
    table.on_inbound(b"c1", "", Renew(), 0.0)
    found = take_reply(table)
    assert isinstance(found, Reject)
    assert found.hello_first  # no hello has come on this connection
    table.on_inbound(b"c1", "", hello(), 0.0)
    assert isinstance(take_reply(table), Welcome)
    table.on_inbound(b"c1", "", Renew(), 1.0)
    assert take_reply(table) == Renew()
    table.on_inbound(b"c0", "", hello("prefill-0", 1, epoch=3, address=SECOND), 1.0)  # as before
    take_effects(table)
    table.on_inbound(b"c1", "", Renew(), 1.0)
    assert take_reply(table) == Renew()
    table.on_closed(b"c0", 2.0)
    table.on_inbound(b"c3", "", hello("prefill-0", 1, epoch=4, address=SECOND), 3.0)  # another process has taken its place
    take_effects(table)
    table.on_inbound(b"c1", "", Renew(), 3.0)
    found = take_reply(table)
    assert isinstance(found, Reject)
    assert found.hello_first
    table.on_inbound(b"c1", "", hello(), 3.1)
    found = take_reply(table)
    assert isinstance(found, Welcome)
    assert Member(1, SECOND, 4) in found.members


def test_a_rank_that_has_answered_no_hello_may_renew_its_own_and_leave() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"c1", "", hello(), 0.0)
    assert isinstance(take_reply(table), Welcome)
    assert table.link(DECODE) is None
    table.on_inbound(b"c1", "", Renew(), 1.0)
    assert take_effects(table) == [ReplyOn(b"c1", Renew())]
    assert table.on_closed(b"c1", 2.0) == DECODE
    assert take_effects(table) == []


def test_a_rank_that_this_one_does_not_connect_to_may_renew_its_hello() -> None:
    table = peer_table(peer_ranks=2)
    table.add_peer("decode-0", LEADER, None, 0.0)
    table.on_inbound(b"c1", "", hello(rank=1), 0.0)
    assert isinstance(take_reply(table), Welcome)
    take_effects(table)
    table.on_inbound(b"c1", "", Renew(), 1.0)
    assert take_effects(table) == [ReplyOn(b"c1", Renew())]


def test_a_renewal_that_is_rejected_is_followed_by_a_hello() -> None:
    table = peer_table()
    make_ready(table)
    table.tick(5.0)
    assert take_effects(table) == [SendTo(0, Renew(epoch=7))]
    reply(table, LEADER, Renew(), 5.0)
    reply(table, LEADER, Reject(field="members", reason="changed", hello_first=True), 5.1)
    table.tick(5.1)
    assert take_effects(table) == [SendHello(0, 0, 7)]


def test_a_renewal_confirms_a_peer_whose_connection_had_ended() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c2", "", hello(dial=1), 0.5)
    table.on_closed(b"c1", 1.0)
    table.on_inbound(b"c2", "", Renew(), 1.1)
    table.tick(9.0)
    assert not any(isinstance(effect, Lost) for effect in take_effects(table))


def test_a_goodbye_ends_the_connection_at_once_as_announced() -> None:
    table = peer_table()
    make_ready(table)
    assert table.on_inbound(b"c1", "", Goodbye(reason="done"), 1.0) is None
    assert take_effects(table) == [Lost(DECODE, 7, 0, "closed: done", expected=True)]
    table.tick(1.1)
    assert take_effects(table) == []
    table.tick(1.0 + LIMITS.hello_retry_s)
    assert take_effects(table) == [SendHello(0, 1, 7)]


def test_a_connection_that_one_side_gave_up_ends_on_both_sides_and_is_renewed() -> None:
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c2", "", hello(generation=1, peer_epoch=EPOCH), 1.0)
    assert Lost(DECODE, 7, 0, "the peer has given the connection up") in take_effects(table)
    table.tick(1.0)
    assert take_effects(table) == [SendHello(0, 1, 7)]
    reply(table, LEADER, welcome(), 1.0)
    assert table.link(DECODE) is None, "this answers an earlier hello, whose loans are void"
    reply(table, LEADER, welcome(generation=1), 1.0)
    table.on_inbound(b"c2", "", hello(generation=1, peer_epoch=EPOCH), 1.5)
    assert lost_in(table) == []


def test_generations_that_count_for_an_earlier_process_end_nothing() -> None:
    """The peer has given up the process before this one, several times. This one must not be lost for that."""
    table = peer_table()
    make_ready(table)
    table.on_inbound(b"c1", "", hello(generation=3, peer_epoch=99), 1.0)
    accepted = take_reply(table)
    assert isinstance(accepted, Welcome)
    assert accepted.generation == 0
    assert table.link(DECODE) is not None


def test_a_peer_that_was_given_up_and_started_anew_is_ready_and_stays_so() -> None:
    """Killed, given up, and restarted at the same address."""
    table = peer_table()
    make_ready(table)
    table.on_closed(b"c1", 1.0)
    table.tick(2.0)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "its connection has ended"), SendHello(0, 1, 7)]
    reply(table, LEADER, welcome(epoch=8, generation=0), 9.0)  # the new process counts from 0
    table.tick(9.0)
    assert take_effects(table) == [SendHello(0, 0, 8)], "it takes nothing that follows a hello for the earlier one"
    reply(table, LEADER, welcome(epoch=8), 9.0)
    assert take_effects(table) == [Ready(DECODE, 8, welcome(epoch=8))]
    table.on_inbound(b"c2", "", hello(epoch=8), 9.1)
    table.on_inbound(b"c2", "", hello(epoch=8, peer_epoch=EPOCH), 10.0)
    table.tick(14.0)
    effects = take_effects(table)
    assert not any(isinstance(effect, Lost) for effect in effects)
    assert SendTo(0, Renew(epoch=8)) in effects
    assert table.link(DECODE) is not None


def test_a_welcome_with_other_loans_starts_a_new_connection() -> None:
    """The peer has given the connection up and holds earlier loans for void."""
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(lending=Lending(512, 1)), 0.0)
    take_effects(table)
    reply(table, LEADER, welcome(lending=Lending(512, 1)), 0.5)
    assert take_effects(table) == []
    reply(table, LEADER, welcome(lending=Lending(512, 1 << 40)), 1.0)
    assert take_effects(table) == [Lost(DECODE, 7, 0, "the peer has started a new connection")]
    table.tick(1.0)
    assert take_effects(table) == [SendHello(0, 1, 7)]
    reply(table, LEADER, welcome(lending=Lending(512, 2), generation=1), 1.1)
    assert [type(effect) for effect in take_effects(table)] == [Ready]


def test_slots_lent_later_end_no_connection_without_loans() -> None:
    table = peer_table()
    table.add_peer("decode-0", LEADER, None, 0.0)
    reply(table, LEADER, welcome(), 0.0)
    take_effects(table)
    for first in (1, 2):
        reply(table, LEADER, welcome(lending=Lending(512, first)), 1.0)
    assert take_effects(table) == []
    assert table.link(DECODE) is not None


def test_a_goodbye_of_an_older_epoch_is_ignored() -> None:
    table = peer_table()
    make_ready(table, epoch=6)
    link = table.link(DECODE)
    assert link is not None
    link.epoch = 7
    table.on_inbound(b"c1", "", Goodbye(reason="old"), 1.0)
    assert take_effects(table) == []
    assert table.instances["decode-0"].ready


def test_a_silent_leader_of_this_instance_is_not_reported_as_lost() -> None:
    table = peer_table(num_ranks=2, rank=1, leader=SECOND)
    table.join(0.0)
    table.tick(0.0)
    reply(table, SECOND, welcome("prefill-0", 0, 3), 0.0)
    reply(table, SECOND, Reject(field="connection", reason="send hello first", hello_first=True), 1.0)
    assert lost_in(table) == []
    table.tick(1.0)
    assert SendHello(0, 0, 3) in take_effects(table)
    reply(table, SECOND, welcome("prefill-0", 0, 4), 1.0)
    assert lost_in(table) == [], "started anew"


def test_close_sends_goodbye_to_every_peer_that_has_answered() -> None:
    table = peer_table()
    make_ready(table)
    table.add_peer("decode-1", SECOND, None, 0.0)
    take_effects(table)
    table.close("the manager was closed")
    assert take_effects(table) == [SendTo(0, Goodbye(reason="the manager was closed"))]
    peer_table().join(0.0)
    assert peer_table().next_tick == NEVER


def test_invalid_limits_are_refused() -> None:
    seconds: Any
    for seconds in (0, -1.0, float("nan"), "1", True, None):
        with pytest.raises(ConfigError, match="heartbeat_s: expected more than 0 and at most 1000000 seconds, found"):
            ConnectionLimits(heartbeat_s=seconds)
        with pytest.raises(ConfigError, match="retry_s: expected more than 0 seconds, found"):
            Limits(retry_s=seconds)
    with pytest.raises(ConfigError, match="heartbeat_timeout_s: expected more than 0 and at most 1000000 seconds, found inf"):
        ConnectionLimits(heartbeat_timeout_s=NEVER)
    assert ConnectionLimits(forget_s=NEVER).forget_s == NEVER


def test_nothing_is_kept_of_ranks_whose_instances_come_and_go() -> None:
    table = peer_table()
    for number in range(1000):
        name, address = f"decode-{number}", f"tcp://10.0.1.1:{number + 1}"
        table.add_peer(name, address, None, 0.0)
        assert table.link(PeerRank(name, 0)) is None
        table.remove_peer(name, "it was removed")
        take_effects(table)
    gc.collect()
    assert sum(isinstance(each, PeerConnection) for each in gc.get_objects()) < 200
