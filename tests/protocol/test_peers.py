"""Handshakes, membership and liveness, without sockets and without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import pytest

from disagg.core.errors import ConfigError, LayoutError, RemoteProtocolError
from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    Busy,
    Drained,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
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

LEADER, SECOND = "tcp://10.0.0.1:80", "tcp://10.0.0.1:8000"
LIMITS = ConnectionLimits(hello_retry_s=1.0, max_hello_retry_s=4.0, heartbeat_s=5.0, heartbeat_timeout_s=20.0)
DRAINED = Drained(request_id=bytes(16), attempt=0, nonce=1)


def hello(instance: str = "decode-0", rank: int = 0, epoch: int = 7, **more: object) -> Hello:
    fields = {"version": PROTOCOL_VERSION, "model": "m", "revision": "", "table": b"t", **more}
    return Hello(instance=instance, rank=rank, epoch=epoch, **fields)  # type: ignore[arg-type]


def welcome(
    instance: str = "decode-0",
    rank: int = 0,
    epoch: int = 7,
    members: tuple[Member, ...] = (),
    *,
    version: int = PROTOCOL_VERSION,
    generation: int = 0,
    ring: RingGrant | None = None,
) -> Welcome:
    return Welcome(
        version=version,
        instance=instance,
        rank=rank,
        epoch=epoch,
        model="m",
        revision="",
        table=b"t",
        plans=b"",
        members=members,
        placements=b"",
        backend="local",
        endpoint=b"",
        generation=generation,
        ring=ring,
    )


def links(
    *, num_ranks: int = 1, rank: int = 0, leader: str | None = None, peer_ranks: int = 1, own_key: str | None = None
) -> PeerTable:
    """One rank of `prefill-0`; every peer has `peer_ranks` ranks; a table of `b"bad"` is refused."""

    def accept_hello(said: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
        if said.table == b"bad":
            raise LayoutError("axis 'kv_head': 4 here, 8 at the peer")
        return welcome("prefill-0", rank, 1, members())

    def validate_welcome(said: Welcome) -> int:
        if said.table == b"bad":
            raise LayoutError("no")
        if said.version != PROTOCOL_VERSION:
            raise RemoteProtocolError("protocol version")
        return peer_ranks

    me = Identity(
        instance="prefill-0",
        rank=rank,
        num_ranks=num_ranks,
        epoch=1,
        model="m",
        revision="",
        table=b"t",
        address=f"tcp://127.0.0.1:{7000 + rank}",
        leader=leader is None,
    )
    return PeerTable(
        me, leader=leader, own_key=own_key, accept_hello=accept_hello, validate_welcome=validate_welcome, limits=LIMITS
    )


def taken(made: PeerTable) -> list[PeerEffect]:
    effects = list(made.effects)
    made.effects.clear()
    return effects


def ready(made: PeerTable, *, epoch: int = 7, now: float = 0.0) -> None:
    """Peer `decode-0` of one rank is known and has answered."""
    made.add_peer("decode-0", LEADER, None, now)
    made.tick(now)
    made.on_reply(LEADER, welcome(epoch=epoch), now)
    taken(made)


def answer(made: PeerTable) -> Message:
    """The one answer given."""
    (effect,) = [e for e in taken(made) if isinstance(e, ReplyOn)]
    return effect.message


def test_a_configured_peer_is_dialled_and_greeted_ever_more_slowly() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, "key", 0.0)
    assert taken(made) == [Connect(LEADER, "key")]
    times = []
    for now in range(20):
        made.tick(float(now))
        times += [now for effect in taken(made) if isinstance(effect, SendHello)]
    assert times == [0, 1, 3, 7, 11, 15, 19]
    assert made.next_tick() == 23.0
    assert "no answer yet" in made.instances["decode-0"].problem


def test_a_connection_on_which_nobody_answers_is_opened_anew() -> None:
    made = links(num_ranks=2, rank=1, leader=SECOND, own_key="own")
    made.add_peer("decode-0", LEADER, "key", 0.0)
    made.join(0.0)
    taken(made)
    for now in range(8):
        made.tick(float(now))
        assert all(isinstance(effect, SendHello) for effect in taken(made))
    made.on_reply(LEADER, Busy(reason="wait", retry_after_s=1.0), 8.0)
    for now in range(8, 13):
        made.tick(float(now))
    effects = taken(made)
    assert effects.count(Disconnect(SECOND)) == effects.count(Connect(SECOND, "own")) == 1
    assert Disconnect(LEADER) not in effects, "there somebody answers"
    for now in range(13, 40):
        made.tick(float(now))
    assert Connect(LEADER, "key") in taken(made)


def test_adding_a_peer_again_changes_nothing_and_another_address_replaces_it() -> None:
    made = links()
    ready(made)
    made.add_peer("decode-0", LEADER, None, 1.0)
    assert taken(made) == []
    made.add_peer("decode-0", SECOND, None, 1.0)
    lost, hang_up, dial = taken(made)
    assert lost == Lost(PeerRank("decode-0", 0), 7, "its address was changed")
    assert (hang_up, dial) == (Disconnect(LEADER), Connect(SECOND, None))
    assert made.link(PeerRank("decode-0", 0)) is None


def test_a_restarted_peer_that_says_hello_before_its_new_address_is_known_stays_let_in() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"old", "", hello(epoch=7), 0.0)
    taken(made)
    made.on_inbound(b"new", "", hello(epoch=8), 1.0)
    assert isinstance(answer(made), Welcome)
    made.add_peer("decode-0", SECOND, None, 2.0)
    taken(made)
    assert made.on_inbound(b"new", "", DRAINED, 3.0) == PeerRank("decode-0", 0)
    assert made.effects == deque()
    made.add_peer("decode-0", LEADER, "another key", 4.0)
    taken(made)
    assert made.on_inbound(b"new", "", DRAINED, 5.0) is None
    assert isinstance(said := answer(made), Reject)
    assert said.hello_first


def test_a_peer_that_lives_on_under_another_address_says_hello_again() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"live", "", hello(epoch=7), 0.0)
    taken(made)
    made.add_peer("decode-0", SECOND, None, 1.0)
    taken(made)
    assert made.on_inbound(b"live", "", DRAINED, 2.0) is None
    assert isinstance(said := answer(made), Reject)
    assert said.hello_first


def test_the_leader_names_the_other_ranks_and_each_address_is_its_own() -> None:
    """Case 45: `10.0.0.1:80` and `10.0.0.1:8000` are two ranks."""
    made = links(peer_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.tick(0.0)
    made.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    assert [e for e in taken(made) if isinstance(e, Connect)] == [Connect(LEADER, None), Connect(SECOND, None)]
    assert made.instances["decode-0"].problem == f"{SECOND}: no answer yet"
    assert made.instances["decode-0"].ready is False
    made.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    assert made.instances["decode-0"].problem == "not all of its ranks are known", "no link waits"
    first, second = made.link(PeerRank("decode-0", 0)), made.link(PeerRank("decode-0", 1))
    assert first is not None
    assert second is not None
    assert (first.address, second.address) == (LEADER, SECOND)


def test_a_rank_that_its_leader_no_longer_names_is_hung_up_on() -> None:
    made = links(peer_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    made.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    taken(made)
    other = "tcp://10.0.0.2:9"
    made.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, other, 9))), 1.0)
    effects = taken(made)
    assert Lost(PeerRank("decode-0", 1), 8, "its leader names another address") in effects
    assert Disconnect(SECOND) in effects
    assert Connect(other, None) in effects


@pytest.mark.parametrize("said", [welcome("decode-9"), welcome(rank=3)])
def test_whoever_answers_must_be_who_was_dialled(said: Welcome) -> None:
    made = links(peer_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    taken(made)
    made.on_reply(SECOND, said, 0.0)
    assert not any(isinstance(effect, Ready) for effect in taken(made))
    assert "answers as" in made.instances["decode-0"].problem


def test_a_refused_welcome_says_why_and_is_tried_again() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.tick(0.0)
    taken(made)
    made.on_reply(LEADER, welcome(version=99), 0.0)
    assert "protocol version" in made.instances["decode-0"].problem
    made.tick(2.0)
    assert SendHello(LEADER) in taken(made)
    made.on_reply(LEADER, welcome(), 2.0)
    assert made.instances["decode-0"].ready


def test_a_rejection_and_a_wait_are_shown_as_the_problem() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.tick(0.0)
    made.on_reply(LEADER, Reject(field="model", reason="model: 'a' there"), 0.1)
    assert "model: 'a' there" in made.instances["decode-0"].problem
    made.on_reply(LEADER, Busy(reason="1 of 2 ranks have joined", retry_after_s=0.5), 0.1)
    assert "1 of 2 ranks have joined" in made.instances["decode-0"].problem
    assert made.next_tick() == pytest.approx(0.6)
    made.on_reply("tcp://nobody:1", welcome(), 0.1)
    made.on_reply(LEADER, Heartbeat(epoch=7), 0.1)
    assert not made.instances["decode-0"].ready


def test_a_rank_that_answers_with_another_epoch_has_restarted() -> None:
    made = links()
    ready(made)
    made.on_reply(LEADER, welcome(epoch=8), 1.0)
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "restarted"), Ready(PeerRank("decode-0", 0), 8, welcome(epoch=8))]
    made.on_reply(LEADER, welcome(epoch=8), 2.0)
    assert taken(made) == []


def test_a_hello_with_another_epoch_ends_the_old_generation_and_greets_at_once() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"c1", "", hello(epoch=7), 1.0)
    assert isinstance(answer(made), Welcome)
    made.on_inbound(b"c2", "", hello(epoch=9), 2.0)
    effects = taken(made)
    assert Lost(PeerRank("decode-0", 0), 7, "restarted") in effects
    made.tick(2.0)
    assert SendHello(LEADER) in taken(made)
    assert made.on_inbound(b"c1", "", DRAINED, 2.0) is None, "the old connection no longer counts"
    assert made.on_inbound(b"c2", "", DRAINED, 2.0) == PeerRank("decode-0", 0)


def test_nothing_counts_before_a_hello_was_accepted() -> None:
    made = links()
    ready(made)
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) is None
    said = answer(made)
    assert isinstance(said, Reject)
    assert said.hello_first
    made.on_inbound(b"c1", "", hello(table=b"bad"), 0.0)
    said = answer(made)
    assert isinstance(said, Reject)
    assert (said.field, said.reason) == ("layout", "axis 'kv_head': 4 here, 8 at the peer")
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) is None


@pytest.mark.parametrize(
    ("said", "user", "reason"),
    [
        (hello("stranger"), "", "peer 'stranger' is not configured at prefill-0/0"),
        (hello(version=99), "", f"protocol version: 99 at decode-0/0, {PROTOCOL_VERSION} at prefill-0/0"),
        (hello(), "other key", "configured with another public key at prefill-0/0"),
        (hello("prefill-0", 1, address=SECOND), "", "rank 1 of 1"),
    ],
)
def test_hellos_that_are_rejected_say_why(said: Hello, user: str, reason: str) -> None:
    made = links()
    made.add_peer("decode-0", LEADER, "key" if user else None, 0.0)
    taken(made)
    made.on_inbound(b"c1", user, said, 0.0)
    found = answer(made)
    assert isinstance(found, Reject)
    assert reason in found.reason


def test_a_hello_with_the_configured_key_is_welcome() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, "key", 0.0)
    taken(made)
    made.on_inbound(b"c1", "key", hello(), 0.0)
    assert isinstance(answer(made), Welcome)


def test_a_connection_that_was_forgotten_by_the_peer_is_greeted_again() -> None:
    made = links()
    ready(made)
    made.on_reply(LEADER, Reject(field="connection", reason="send hello first", hello_first=True), 3.0)
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "the peer does not know this connection any more")]
    made.tick(3.0)
    assert taken(made) == [SendHello(LEADER, 1)]


def test_silence_ends_a_connection_and_any_message_is_a_sign_of_life() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"c1", "", hello(), 0.0)
    taken(made)
    for now in (10.0, 25.0):
        assert made.on_inbound(b"c1", "", Heartbeat(epoch=7), now) is None
        made.tick(now)
        assert not any(isinstance(effect, Lost) for effect in taken(made))
    made.tick(44.9)
    assert not any(isinstance(effect, Lost) for effect in taken(made))
    made.tick(45.0)
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "silent for 20.0 s")]
    made.tick(45.0)
    assert taken(made) == [SendHello(LEADER, 1)]


def test_two_instances_with_nothing_to_say_stay_connected() -> None:
    """Leaders and others, in all pairs, for longer than silence is borne."""
    network = {rank.identity.address: rank for name in ("prefill-0", "decode-0") for rank in instance_of_two(name)}
    for address, rank in network.items():
        other = "decode-0" if rank.identity.instance == "prefill-0" else "prefill-0"
        leader = next(a for a, found in network.items() if found.identity.instance == other and found.identity.leader)
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
    made = []
    for rank, address in enumerate(addresses):
        me = Identity(name, rank, 2, 1, "m", "", b"t", address, leader=rank == 0)

        def accept_hello(said: Hello, members: Callable[[], tuple[Member, ...]], rank: int = rank) -> Welcome:
            return welcome(name, rank, 1, members(), generation=said.generation)

        leader = None if rank == 0 else addresses[0]
        made.append(
            PeerTable(me, leader=leader, own_key=None, accept_hello=accept_hello, validate_welcome=lambda _: 2, limits=LIMITS)
        )
    return made


def deliver(network: dict[str, PeerTable], address: str, rank: PeerTable, now: float) -> list[PeerEffect]:
    """Carry what a rank says to the others; what it has lost."""
    lost: list[PeerEffect] = []
    while rank.effects:
        match rank.effects.popleft():
            case SendHello(to, generation, dial):
                me = rank.identity
                said = hello(me.instance, me.rank, me.epoch, address=address, generation=generation, dial=dial)
                network[to].on_inbound(f"{address} {to}".encode(), "", said, now)
            case SendTo(to, message):
                network[to].on_inbound(f"{address} {to}".encode(), "", decode(encode(message)), now)
            case ReplyOn(connection, message):
                to, _, here = connection.decode().partition(" ")
                network[to].on_reply(here, decode(encode(message)), now)
            case Lost() as effect:
                lost.append(effect)
    return lost


def test_heartbeats_go_to_every_rank_and_leaders_are_greeted_instead() -> None:
    made = links(peer_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_reply(LEADER, welcome(members=(Member(0, LEADER, 7), Member(1, SECOND, 8))), 0.0)
    made.on_reply(SECOND, welcome(rank=1, epoch=8), 0.0)
    taken(made)
    assert made.next_tick() == 5.0
    made.tick(5.0)
    assert taken(made) == [SendHello(LEADER), SendTo(SECOND, Heartbeat(epoch=1))]


def test_a_goodbye_ends_the_connection_at_once_and_is_no_alarm() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"c1", "", hello(), 0.0)
    taken(made)
    assert made.on_inbound(b"c1", "", Goodbye(reason="done"), 1.0) is None
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "closed: done", announced=True)]
    made.tick(1.1)
    assert taken(made) == []
    made.tick(1.0 + LIMITS.hello_retry_s)
    assert taken(made) == [SendHello(LEADER, 1)]


def test_a_connection_that_one_side_gave_up_ends_on_both_sides_and_then_is_one_again() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"c1", "", hello(), 0.0)
    taken(made)
    made.on_inbound(b"c2", "", hello(generation=1), 1.0)
    assert Lost(PeerRank("decode-0", 0), 7, "the peer has given the connection up", renewed=True) in taken(made)
    made.tick(1.0)
    assert taken(made) == [SendHello(LEADER, 1)]
    made.on_reply(LEADER, welcome(), 1.0)
    assert made.link(PeerRank("decode-0", 0)) is None, "the answer to a hello before it; its ring is not the one granted last"
    made.on_reply(LEADER, welcome(generation=1), 1.0)
    made.on_inbound(b"c2", "", hello(generation=1), 1.5)
    assert not any(isinstance(effect, Lost) for effect in taken(made))
    made.on_inbound(b"c3", "", hello(epoch=8), 2.0)
    assert Lost(PeerRank("decode-0", 0), 7, "restarted") in taken(made)
    made.tick(2.0)
    assert taken(made) == [SendHello(LEADER, 0)], "a new process counts from the beginning"


def test_a_peer_that_grants_another_ring_has_begun_the_connection_anew() -> None:
    """Both sides must mean the same ring: what lies in the other one is somebody else's bytes, or old."""
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8)), 0.0)
    taken(made)
    made.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8)), 0.5)
    assert taken(made) == []
    made.on_reply(LEADER, welcome(ring=RingGrant(4096, 512, 8, 1 << 40)), 1.0)
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "the peer has started a new connection")]
    made.tick(1.0)
    assert taken(made) == [SendHello(LEADER, 1)]
    made.on_reply(LEADER, welcome(ring=RingGrant(8192, 512, 8), generation=1), 1.1)
    assert [type(effect) for effect in taken(made)] == [Ready]


def test_a_ring_that_becomes_free_later_ends_no_connection_that_does_without() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_reply(LEADER, welcome(), 0.0)
    taken(made)
    for address in (4096, 8192):
        made.on_reply(LEADER, welcome(ring=RingGrant(address, 512, 8)), 1.0)
    assert taken(made) == []
    assert made.link(PeerRank("decode-0", 0)) is not None


def test_a_goodbye_of_an_older_epoch_ends_nothing() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_inbound(b"c1", "", hello(epoch=6), 0.0)
    made.on_reply(LEADER, welcome(epoch=7), 0.0)
    taken(made)
    made.on_inbound(b"c1", "", Goodbye(reason="old"), 1.0)
    assert taken(made) == []
    assert made.instances["decode-0"].ready


def test_a_rank_that_cannot_be_used_is_greeted_again_later() -> None:
    made = links()
    ready(made)
    made.refuse(PeerRank("decode-0", 0), "memory contradicts layouts", 1.0)
    made.refuse(PeerRank("decode-0", 1), "unknown", 1.0)
    assert "memory contradicts layouts" in made.instances["decode-0"].problem
    made.tick(1.0)
    assert taken(made) == []
    made.tick(5.0)
    assert taken(made) == [SendHello(LEADER)]
    made.on_reply(LEADER, welcome(), 5.0)
    assert taken(made) == [Ready(PeerRank("decode-0", 0), 7, welcome())]


def test_a_connection_speaks_for_one_rank_and_a_rank_has_one_connection() -> None:
    made = links(peer_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    made.on_inbound(b"c1", "", hello(rank=0), 0.0)
    made.on_inbound(b"c1", "", hello(rank=1), 0.0)
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    made.on_inbound(b"c2", "", hello(rank=0), 0.0)
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    made.on_inbound(b"c2", "", hello(rank=1), 0.0)
    assert made.on_inbound(b"c2", "", DRAINED, 0.0) == PeerRank("decode-0", 1)
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) is None


def test_removing_a_peer_forgets_its_connections() -> None:
    made = links()
    ready(made)
    made.on_inbound(b"c1", "", hello(), 0.0)
    taken(made)
    made.remove_peer("decode-0", "removed")
    assert taken(made) == [Lost(PeerRank("decode-0", 0), 7, "removed"), Disconnect(LEADER)]
    assert made.on_inbound(b"c1", "", DRAINED, 0.0) is None
    assert made.link(PeerRank("decode-0", 0)) is None
    assert made.next_tick() == float("inf")


def test_the_leader_answers_for_its_instance_once_all_ranks_have_joined() -> None:
    made = links(num_ranks=2)
    made.add_peer("decode-0", LEADER, None, 0.0)
    taken(made)
    made.on_inbound(b"c1", "", hello(), 0.0)
    said = answer(made)
    assert isinstance(said, Busy)
    assert said.reason == "1 of 2 ranks of 'prefill-0' have joined"
    made.on_inbound(b"c2", "", hello("prefill-0", 1, 5, address=SECOND), 0.0)
    assert isinstance(answer(made), Welcome)
    made.on_inbound(b"c1", "", hello(), 0.0)
    said = answer(made)
    assert isinstance(said, Welcome)
    assert [member.address for member in said.members] == ["tcp://127.0.0.1:7000", SECOND]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello("prefill-0", 2, address=SECOND), "rank 2 of 2"),
        (hello("prefill-0", 0, address=SECOND), "rank 0 of 2"),
        (hello("prefill-0", 1), "at None cannot join"),
        (hello("prefill-0", 1, address=SECOND, table=b"other"), "declares other layouts or another topology"),
    ],
)
def test_siblings_that_cannot_join_are_told_why(said: Hello, reason: str) -> None:
    made = links(num_ranks=2)
    made.on_inbound(b"c1", "", said, 0.0)
    found = answer(made)
    assert isinstance(found, Reject)
    assert reason in found.reason


def test_a_peer_that_is_let_in_does_not_speak_for_a_rank_of_this_instance() -> None:
    """It would be named to every other peer in that rank's place."""
    made = links(num_ranks=2, own_key="own")
    made.on_inbound(b"c1", "decode-0's", hello("prefill-0", 1, address=SECOND), 0.0)
    found = answer(made)
    assert isinstance(found, Reject)
    assert found.reason == "rank 1 of 'prefill-0' has another public key than prefill-0/0"
    assert list(made.members) == [0]
    made.on_inbound(b"c2", "own", hello("prefill-0", 1, address=SECOND), 0.0)
    assert isinstance(answer(made), Welcome)
    assert list(made.members) == [0, 1]


def test_a_rank_reports_to_its_leader_and_goes_on_reporting() -> None:
    made = links(num_ranks=2, rank=1, leader="tcp://127.0.0.1:7000", own_key="key")
    made.join(0.0)
    assert taken(made) == [Connect("tcp://127.0.0.1:7000", "key")]
    made.tick(0.0)
    assert taken(made) == [SendHello("tcp://127.0.0.1:7000")]
    made.on_reply("tcp://127.0.0.1:7000", welcome("prefill-0", 0, 3), 0.0)
    made.tick(5.0)
    assert taken(made) == [SendHello("tcp://127.0.0.1:7000")]
    made.tick(20.0)
    made.tick(20.0)
    assert taken(made) == [SendHello("tcp://127.0.0.1:7000", 1)], "a silent leader is greeted again, and is no peer to lose"
    made.on_inbound(b"c1", "key", hello("prefill-0", 0, address=SECOND), 0.0)
    found = answer(made)
    assert isinstance(found, Reject)
    assert "prefill-0/1 is not the leader" in found.reason


def test_closing_says_goodbye_to_everyone_who_answered() -> None:
    made = links()
    ready(made)
    made.add_peer("decode-1", SECOND, None, 0.0)
    taken(made)
    made.close("the manager was closed")
    assert taken(made) == [SendTo(LEADER, Goodbye(reason="the manager was closed"))]
    links().join(0.0)


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="heartbeat_s: expected more than 0, found 0"):
        ConnectionLimits(heartbeat_s=0)


def test_a_hello_from_a_connection_that_was_hung_up_does_not_take_the_place_of_a_later_one() -> None:
    """Under load it is read late: the newer connection would be forgotten, and everything that is under way with it."""
    made = links()
    ready(made)
    made.on_inbound(b"c2", "", msgspec.structs.replace(hello(epoch=7), dial=2), 1.0)
    assert isinstance(answer(made), Welcome)
    made.on_inbound(b"c1", "", msgspec.structs.replace(hello(epoch=7), dial=1), 1.1)
    assert taken(made) == []
    assert made.on_inbound(b"c2", "", Heartbeat(epoch=7), 1.2) is None
    assert taken(made) == [], "the later connection is still known"
    made.on_inbound(b"c3", "", msgspec.structs.replace(hello(epoch=7), dial=3), 1.3)
    assert isinstance(answer(made), Welcome)
    made.on_inbound(b"c4", "", hello(epoch=8), 1.4)
    assert any(isinstance(effect, ReplyOn) and isinstance(effect.message, Welcome) for effect in taken(made)), "a new process"


def test_each_connection_is_numbered_as_it_is_dialled() -> None:
    made = links()
    made.add_peer("decode-0", LEADER, None, 0.0)
    dials = []
    for now in range(200):
        made.tick(float(now))
        dials += [effect.dial for effect in taken(made) if isinstance(effect, SendHello)]
    assert dials == sorted(dials)
    assert dials[:4] == [0] * 4
    assert dials[-1] > 0
