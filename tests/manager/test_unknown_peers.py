"""Peers that nobody configured, requests that do not know their peer yet, and receivers that need nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from disagg import ConnectionLimits, KVManager, ModelId, Pages, new_request_id
from disagg.core.errors import Cause, ConfigError, LocalProtocolError, PeerUnreachable, RequestTimeout
from disagg.protocol.types import Event, PeerRank
from disagg.runtime import directory
from disagg.runtime.health import unready
from disagg.runtime.keys import KeyPair
from disagg.testing import reference
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import KVModel, PageList
from harness.ports import free_ports
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, FAST_LINKS, Cluster, Rank, Side, cluster, start_side
from tests.support.inside import depth, in_control_thread

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
SHORT = dataclasses.replace(FAST_LINKS, forget_s=0.5)
TOKENS = 20


def rows_of(rank: Rank, num_tokens: int = TOKENS) -> dict[str, Pages]:
    return {"kv": Pages(np.arange(reference.pages_needed(rank.spec, num_tokens=num_tokens), dtype=np.int32))}


@contextmanager
def strangers(prefill: Side, decode: Side, **settings: Any) -> Iterator[Cluster]:
    """Two instances that do not know each other. Prefill admits whom it does not know."""
    instances = Cluster(MODEL)
    try:
        instances.prefill = start_side(MODEL, prefill, "prefill-0", num_layers=2, settings={"admit": "any", **settings})
        instances.decode = start_side(MODEL, decode, "decode-0", num_layers=2)
        yield instances
    finally:
        for rank in instances.prefill + instances.decode:
            rank.manager.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_receive_that_ends_before_its_peer_is_ready_fails_the_send(is_late: bool) -> None:
    """It is no success, and the next attempt gets the offer of any."""
    with strangers(Side(), Side()) as instances:
        prefill, decode = instances.prefill[0], instances.decode[0]
        request = new_request_id()
        address = prefill.manager.address
        first = None if is_late else prefill.manager.sender(request, attempt=None, deadline_s=DEADLINE_S)
        more: dict[str, Any] = {"peer": "prefill-0", "address": address, "rows": rows_of(decode), "need": {"kv": (0, TOKENS)}}
        receiver = decode.manager.receiver(request, **more)
        receiver.abort("client left")
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        decode.manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        if first is None:
            until(lambda: depth(prefill.manager, "parked_reserves") == 1)
            first = prefill.manager.sender(request, attempt=None, deadline_s=DEADLINE_S)
        event = first.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        assert "client left" in str(event.error)
        until(lambda: event.lease.released)
        second = decode.manager.receiver(request, attempt=1, deadline_s=DEADLINE_S, **more)
        offer(prefill, request, attempt=None)
        assert second.wait(timeout_s=DEADLINE_S).ok


def test_what_a_request_needs_is_read_at_the_call() -> None:
    """Also if its peer is not known yet: a server may use the same mapping, and the same ranges, for its next request."""
    with strangers(Side(), Side()) as instances:
        prefill, decode = instances.prefill[0], instances.decode[0]
        request, need = new_request_id(), {"kv": [0, TOKENS]}
        offer(prefill, request)
        given: Any = {
            "rows": rows_of(decode),
            "need": MappingProxyType(need),
            "address": prefill.manager.address,
            "deadline_s": DEADLINE_S,
        }
        receiver = decode.manager.receiver(request, peer="prefill-0", **given)
        need["kv"][1] = 1
        del need["kv"]
        assert receiver.wait().ok
        assert receiver.need == {"kv": (0, TOKENS)}
        pages = PageList(tuple(rows_of(decode)["kv"].ids.tolist()), 0)
        expected = reference.expected(MODEL, decode.spec, pages, num_tokens=TOKENS, need=(0, TOKENS))
        assert reference.first_difference(expected, decode.pools) is None


def offer(rank: Rank, request: bytes, **more: Any) -> Any:
    """Fill the first pages of a prefill rank and send them to whoever wants them."""
    pages = PageList(tuple(rows_of(rank)["kv"].ids.tolist()), 0)
    reference.fill(MODEL, rank.spec, rank.pools, pages, num_tokens=TOKENS)
    sender = rank.manager.sender(request, **{"attempt": None, "deadline_s": DEADLINE_S, **more})
    sender.finish(rows_of(rank), payload=b"first")
    return sender


def want(rank: Rank, request: bytes, address: str | None, **more: Any) -> Any:
    return rank.manager.receiver(
        request,
        peer="prefill-0",
        address=address,
        rows=rows_of(rank),
        need={"kv": (0, TOKENS)},
        **{"deadline_s": DEADLINE_S, **more},
    )


def check(rank: Rank) -> None:
    """Every byte of a decode rank is right."""
    pages = PageList(tuple(rows_of(rank)["kv"].ids.tolist()), 0)
    wanted = reference.expected(MODEL, rank.spec, pages, num_tokens=TOKENS, need=(0, TOKENS))
    assert reference.first_difference(wanted, rank.pools) is None


@pytest.mark.parametrize(
    "sides", [(Side(tp=2), Side(page=8)), (Side(), Side(tp=2)), (Side(tp=2, stages=((0,), (1,))), Side(tp=2))]
)
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_prefill_learns_who_decodes_from_its_reservation(first: str, sides: tuple[Side, Side]) -> None:
    """Prefill knows neither the peer nor the attempt, and decode has only the address."""
    with strangers(*sides) as instances:
        request, address = new_request_id(), instances.prefill[0].manager.address
        senders = []
        if first == "sender":
            senders = [offer(rank, request) for rank in instances.prefill]
        receivers = [want(rank, request, address, attempt=3) for rank in instances.decode]
        if first == "receiver":
            until(lambda: instances.prefill[0].manager.peer("decode-0").state == "ready")
            senders = [offer(rank, request) for rank in instances.prefill]
        events: list[Event] = [handle.wait(timeout_s=DEADLINE_S) for handle in [*receivers, *senders]]
        assert [event.error for event in events] == [None] * len(events)
        for rank in instances.decode:
            check(rank)
        assert {(handle.peer, handle.key.attempt) for handle in senders} == {("decode-0", 3)}
        assert all(handle.lease.released for handle in [*receivers, *senders])


def test_ranks_that_write_to_nobody_end_as_well() -> None:
    """Prefill has one head on four ranks, so for one layer three of them have nothing to write."""
    model = KVModel(num_kv_heads=1, dims={"k": 8, "v": 6}, dtype="uint16")
    prefill = start_side(model, Side(tp=4), "prefill-0", num_layers=1, settings={"admit": "any"})
    decode = start_side(model, Side(), "decode-0", num_layers=1)
    try:
        request = new_request_id()
        senders = [rank.manager.sender(request, deadline_s=DEADLINE_S) for rank in prefill]
        for rank, sender in zip(prefill, senders, strict=True):
            sender.finish(rows_of(rank))
        (receiver,) = [want(rank, request, prefill[0].manager.address) for rank in decode]
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
    finally:
        for rank in prefill + decode:
            rank.manager.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_receiver_that_declines_releases_prefills_rows(known: bool) -> None:
    with strangers(Side(tp=2), Side(tp=2)) as instances:
        address = instances.prefill[0].manager.address
        if known:
            assert [want(rank, b"first-request-id", address) for rank in instances.decode]
            assert all(offer(rank, b"first-request-id").wait(timeout_s=DEADLINE_S).ok for rank in instances.prefill)
        request = new_request_id()
        senders = [offer(rank, request) for rank in instances.prefill]
        for rank in instances.decode:
            rank.manager.decline(request, peer="prefill-0", address=address)
        assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
        assert all(sender.lease.released for sender in senders)


def test_prefill_sees_that_a_request_is_still_wanted() -> None:
    """Of a rank that has no rows for it yet. Each rank of prefill that holds rows is told, also one that writes nothing."""
    with strangers(Side(tp=2), Side()) as instances:
        request, address = new_request_id(), instances.prefill[0].manager.address
        senders = [offer(rank, request) for rank in instances.prefill]
        assert [sender.wanted_at for sender in senders] == [None, None]
        asked_at = time.monotonic()
        (decode,) = instances.decode
        decode.manager.want(request, peer="prefill-0", address=address)
        until(lambda: all(sender.wanted_at is not None for sender in senders))
        assert all(asked_at < sender.wanted_at < time.monotonic() for sender in senders)
        assert want(decode, request, address).wait(timeout_s=DEADLINE_S).ok
        assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)


def test_a_receiver_that_ends_before_its_peer_is_known_releases_prefills_rows() -> None:
    with strangers(Side(tp=2), Side(tp=2)) as instances:
        request, address = new_request_id(), instances.prefill[0].manager.address
        senders = [offer(rank, request) for rank in instances.prefill]
        for rank in instances.decode:
            want(rank, request, address).abort("the client has left")
        for sender in senders:
            assert not isinstance(sender.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
            assert sender.lease.released


def test_a_receiver_of_an_unknown_name_is_refused_at_once() -> None:
    """Also where whoever connects is admitted: only a sender learns its peer from a reservation."""
    with strangers(Side(), Side()) as instances:
        rank = instances.prefill[0]
        for call in (
            lambda: rank.manager.receiver(new_request_id(), peer="decod-0", rows=rows_of(rank), need={"kv": (0, TOKENS)}),
            lambda: rank.manager.decline(new_request_id(), peer="decod-0"),
        ):
            with pytest.raises(PeerUnreachable, match="peer 'decod-0' is not ready: it is not configured; add_peer"):
                call()
        assert depth(rank.manager, "waiting_for_peers") == 0
        request = new_request_id()
        sender = offer(rank, request, peer="decode-0", attempt=0)
        receiver = want(instances.decode[0], request, rank.manager.address)
        assert sender.wait(timeout_s=DEADLINE_S).ok
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert rank.manager.peer("decode-0").state == "ready"
        back = rank.manager.receiver(new_request_id(), peer="decode-0", rows={}, need={"kv": (0, 0)}, deadline_s=0.1)
        assert back.peer == "decode-0"


def test_a_peer_that_is_not_admitted_is_told_so() -> None:
    asked: list[tuple[str, str, str]] = []

    def admit(name: str, address: str, public_key: str) -> bool:
        asked.append((name, address, public_key))
        if len(asked) == 1:
            raise SystemExit("of the server's own function")
        return False

    with strangers(Side(), Side(), admit=admit) as instances:
        decode, prefill = instances.decode[0].manager, instances.prefill[0].manager
        first = want(instances.decode[0], new_request_id(), prefill.address)
        until(lambda: "is not configured at prefill-0/0" in decode.peer("prefill-0").reason)
        first.abort("the refusal has arrived")
        first.wait(timeout_s=DEADLINE_S)
        receiver = want(instances.decode[0], new_request_id(), prefill.address, deadline_s=0.2)
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert event.error is not None
        assert event.error.cause is Cause.DEADLINE
        assert "is not configured at prefill-0/0" in str(event.error)
        assert asked[0] == ("decode-0", decode.address, "")
        assert prefill.peer("decode-0").state == "unknown"
        assert prefill.health().ok
        assert receiver.lease.released


def forget_soon(manager: KVManager, peer: str) -> None:
    """Have a connected peer be forgotten soon after it is gone. Before, a handshake may take longer than that."""
    table = manager._runtime.peers
    table._limits = SHORT
    until(lambda: table.instances[peer].forget_at < time.monotonic() + 2 * SHORT.forget_s)


def test_an_admitted_peer_is_forgotten_once_it_has_been_away() -> None:
    with strangers(Side(), Side()) as instances:
        decode, prefill = instances.decode[0].manager, instances.prefill[0].manager
        decode.add_peer("prefill-0", address=prefill.address)
        decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        until(lambda: prefill.peer("decode-0").state == "ready")
        forget_soon(prefill, "decode-0")
        decode.close()
        until(lambda: prefill.peer("decode-0").state == "unknown")
        until(lambda: prefill._runtime.handshake.agreement("decode-0") is None)
        prefill._runtime.peers._limits = FAST_LINKS
        again = start_side(MODEL, Side(), "decode-0", num_layers=2)
        try:
            request = new_request_id()
            receiver = want(again[0], request, prefill.address)
            assert offer(instances.prefill[0], request).wait(timeout_s=DEADLINE_S).ok
            assert receiver.wait(timeout_s=DEADLINE_S).ok
        finally:
            again[0].manager.close()


def test_a_peer_of_a_request_is_forgotten_once_it_has_been_away() -> None:
    keys, other = KeyPair.generate(), KeyPair.generate()
    settings = {"keys": keys, "admit": "keys", "peer_keys": {"any decode": other.public}}
    decode = start_side(MODEL, Side(), "decode-0", num_layers=2, settings={"keys": other})
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2, settings=settings)
    try:
        request, manager = new_request_id(), decode[0].manager
        receiver = want(decode[0], request, prefill[0].manager.address, public_key=keys.public)
        assert offer(prefill[0], request).wait(timeout_s=DEADLINE_S).ok
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        forget_soon(manager, "prefill-0")
        prefill[0].manager.close()
        until(lambda: manager.peer("prefill-0").state == "unknown")
        assert manager.health().peers == {}
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


@pytest.mark.parametrize("with_key", [True, False])
def test_whoever_has_a_key_is_admitted(with_key: bool) -> None:
    keys, other = KeyPair.generate(), KeyPair.generate()
    settings = {"keys": keys, "admit": "keys", "peer_keys": {"any decode": other.public} if with_key else {}}
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2, settings=settings)
    decode = start_side(MODEL, Side(), "decode-7", num_layers=2, settings={"keys": other})
    try:
        decode[0].manager.add_peer("prefill-0", address=prefill[0].manager.address, public_key=keys.public)
        if with_key:
            decode[0].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
            until(lambda: prefill[0].manager.peer("decode-7").state == "ready")
        else:
            with pytest.raises(PeerUnreachable):
                decode[0].manager.wait_ready("prefill-0", timeout_s=1.0)
            assert prefill[0].manager.peer("decode-7").state == "unknown"
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


def test_a_removed_peer_is_refused_and_its_requests_fail() -> None:
    with cluster(Side(), Side()) as instances:
        decode, prefill = instances.decode[0].manager, instances.prefill[0].manager
        open_request = decode.receiver(
            new_request_id(), peer="prefill-0", rows=rows_of(instances.decode[0]), need={"kv": (0, TOKENS)}
        )
        decode.remove_peer("prefill-0")
        event = open_request.wait(timeout_s=DEADLINE_S)
        assert event.error is not None
        assert event.error.cause is Cause.PEER_LOST
        until(lambda: decode.peer("prefill-0").state == "unknown")
        until(lambda: decode._runtime.handshake.agreement("prefill-0") is None)
        until(lambda: decode.peer("prefill-0").reason == "it is not configured; add_peer() it, or give its address")
        with pytest.raises(PeerUnreachable, match="not configured"):
            decode.receiver(new_request_id(), peer="prefill-0", rows={})
        decode.remove_peer("prefill-0")
        until(lambda: prefill.peer("decode-0").state != "ready")
        decode.add_peer("prefill-0", address=prefill.address)
        decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)


def test_a_peer_that_was_just_removed_is_added_again_by_the_address_of_a_request() -> None:
    """Also before the control thread has removed it."""
    with strangers(Side(), Side()) as made:
        (prefill,), (decode,) = made.prefill, made.decode
        for _ in range(5):
            request = new_request_id()
            sender = offer(prefill, request)
            receiver = want(decode, request, prefill.manager.address)
            assert receiver.wait(timeout_s=DEADLINE_S).ok
            assert sender.wait(timeout_s=DEADLINE_S).ok
            decode.manager.remove_peer("prefill-0")


@contextmanager
def silent_listener() -> Iterator[str]:
    """An address at which somebody listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_requests_of_a_peer_that_is_gone_fail_at_once() -> None:
    """Its host says that nobody listens. Without that they would wait for ever. The peer is forgotten, also by a decline."""
    (port,) = free_ports(1)
    with strangers(Side(), Side()) as instances:
        (decode,) = instances.decode
        where: Any = {"peer": "prefill-0", "address": f"tcp://127.0.0.1:{port}"}
        requests = [decode.manager.receiver(new_request_id(), rows={}, deadline_s=None, **where) for _ in range(2)]
        decode.manager.decline(new_request_id(), **where)
        for request in requests:
            event = request.wait(timeout_s=DEADLINE_S)
            assert isinstance(event.error, PeerUnreachable)
            assert f"was removed: nobody listens at tcp://127.0.0.1:{port}" in str(event.error)
            assert event.lease.released
        until(lambda: decode.manager.peer("prefill-0").state == "unknown")


def test_requests_of_a_peer_that_was_ready_fail_at_once_when_it_is_gone() -> None:
    with strangers(Side(), Side()) as instances:
        request, address = new_request_id(), instances.prefill[0].manager.address
        first = want(instances.decode[0], request, address)
        offer(instances.prefill[0], request)
        assert first.wait(timeout_s=DEADLINE_S).ok
        instances.prefill[0].manager.close()
        late = want(instances.decode[0], new_request_id(), address, deadline_s=None)
        assert not late.wait(timeout_s=DEADLINE_S).ok


def test_a_request_that_names_a_new_address_of_a_peer_is_served_there() -> None:
    """The peer was not ready at the earlier one, which says nothing."""
    with strangers(Side(), Side()) as instances, silent_listener() as nowhere:
        (prefill,), (decode,) = instances.prefill, instances.decode
        first = decode.manager.receiver(new_request_id(), peer="prefill-0", address=nowhere, rows={}, deadline_s=None)
        until(lambda: "no answer yet" in decode.manager.peer("prefill-0").reason)
        request = new_request_id()
        second = want(decode, request, prefill.manager.address)
        offer(prefill, request)
        assert second.wait(timeout_s=DEADLINE_S).ok
        first.abort("the client has left")


def test_the_number_of_peers_that_requests_name_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_ADMITTED", 2)
    with strangers(Side(), Side()) as instances, silent_listener() as nowhere:
        (decode,) = instances.decode

        def ask(name: str) -> Any:
            return decode.manager.receiver(new_request_id(), peer=name, address=nowhere, rows={}, deadline_s=None)

        waiting = [ask("prefill-0"), ask("prefill-1"), ask("prefill-1")]
        with pytest.raises(PeerUnreachable, match="2 instances that are not configured for good are known"):
            ask("prefill-2")
        until(lambda: set(decode.manager.health().peers) == {"prefill-0", "prefill-1"})
        for each in waiting:
            each.abort("the client has left")


def test_a_receiver_that_waits_for_its_peer_fails_when_that_is_removed_or_refuses() -> None:
    with strangers(Side(), Side()) as instances, silent_listener() as nowhere:
        decode = instances.decode[0].manager
        gone = want(instances.decode[0], new_request_id(), nowhere)
        assert decode.peer("prefill-0").state == "connecting"
        assert not gone.lease.released
        decode.remove_peer("prefill-0")
        event = gone.wait(timeout_s=DEADLINE_S)
        assert isinstance(event.error, PeerUnreachable)
        assert "was removed" in str(event.error)
        assert gone.lease.released
        aborted = want(instances.decode[0], new_request_id(), nowhere)
        other = decode.receiver(new_request_id(), peer="prefill-0", rows={}, deadline_s=0.2)
        aborted.abort("the client is gone")
        assert "the client is gone" in str(aborted.wait(timeout_s=DEADLINE_S).error)
        late = other.wait(timeout_s=DEADLINE_S).error
        assert late is not None
        assert (late.cause, "did not become ready in time" in str(late)) == (Cause.DEADLINE, True)
        decode.remove_peer("prefill-0")  # only declines wait for it
        until(lambda: depth(decode, "waiting_for_peers") == 0)


def test_what_shows_only_when_the_peer_is_known_fails_the_request() -> None:
    with strangers(Side(), Side()) as instances:
        receiver = want(instances.decode[0], new_request_id(), instances.prefill[0].manager.address, group=5)
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert isinstance(event.error, LocalProtocolError)
        assert "group of peer 'prefill-0': expected 0 to 0, found 5" in str(event.error)


def rank_of_two(rank: int, leader: str | None = None, *, tp: int = 2, **more: Any) -> KVManager:
    side = Side(tp=tp)
    topology = side.topology.at(rank)
    kv = side.component(MODEL, topology, reference.allocate(MODEL, side.rank(topology, num_layers=2)))
    given: dict[str, Any] = {"model": ModelId("toy"), "backend": "local", "admit": "any"}
    return KVManager(name="prefill-0", topology=topology, components=[kv], leader=leader, **given, **more)


@pytest.mark.parametrize(
    ("leader", "problem"), [("refuses", "declares other layouts or another topology"), ("never was there", "no answer yet")]
)
def test_a_rank_that_cannot_join_its_leader_says_so(caplog: pytest.LogCaptureFixture, leader: str, problem: str) -> None:
    with rank_of_two(0) as first:
        if leader == "never was there":
            first.close()
        with rank_of_two(1, first.address, tp=2 if leader == "never was there" else 4) as second:
            until(lambda: problem in unready(second._runtime))
            assert "it has not joined its leader" in unready(second._runtime)
    assert ("refused it" in caplog.text) is (leader == "refuses")


def test_a_rank_whose_leader_has_gone_says_so() -> None:
    first = rank_of_two(0)
    with rank_of_two(1, first.address, connection_limits=ConnectionLimits(heartbeat_s=0.1)) as second:
        until(lambda: unready(second._runtime) == "")
        first.close()
        until(lambda: "it has not joined its leader" in unready(second._runtime))
        until(lambda: "no answer yet" in unready(second._runtime))


def test_a_rank_is_told_its_leader_later() -> None:
    first, second = (Side(tp=2).topology.at(rank) for rank in range(2))
    managers = []
    try:
        for topology in (first, second):
            spec = Side(tp=2).rank(topology, num_layers=2)
            pools = reference.allocate(MODEL, spec)
            kv = Side(tp=2).component(MODEL, topology, pools)
            managers.append(
                KVManager(
                    name="prefill-0", topology=topology, components=[kv], model=ModelId("toy"), backend="local", admit="any"
                )
            )
        decode = start_side(MODEL, Side(), "decode-0", num_layers=2, settings={"admit": "any"})
        managers.append(decode[0].manager)
        with pytest.raises(ConfigError, match="is the leader, or knows it"):
            managers[0].set_leader("tcp://127.0.0.1:9")
        with pytest.raises(ConfigError, match="expected tcp://host:port"):
            managers[1].set_leader("nonsense")
        decode[0].manager.add_peer("prefill-0", address=managers[0].address)
        until(lambda: "1 of 2 ranks of 'prefill-0' have joined" in decode[0].manager.peer("prefill-0").reason)
        with pytest.raises(PeerUnreachable, match="1 of 2 ranks of 'prefill-0' have joined"):
            decode[0].manager.wait_ready("prefill-0", timeout_s=0.5)
        for open_request in (
            lambda: managers[1].sender(new_request_id()),
            lambda: managers[1].receiver(new_request_id(), peer="decode-0", address=decode[0].manager.address, rows={}),
            lambda: managers[1].decline(new_request_id(), peer="decode-0", address=decode[0].manager.address),
        ):
            with pytest.raises(LocalProtocolError, match=r"rank 1 of 'prefill-0' has no leader: pass leader="):
                open_request()
        assert "does not know its leader" in unready(managers[1]._runtime)
        managers[1].set_leader(managers[0].address)
        until(lambda: unready(managers[1]._runtime) == "")
        managers[1].sender(new_request_id()).abort("it is not needed")
        decode[0].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        with pytest.raises(ConfigError, match="is the leader, or knows it"):
            managers[1].set_leader(managers[0].address)
    finally:
        for each in managers:
            each.close()


def test_an_asyncio_server_awaits_requests() -> None:
    async def serve(instances: Cluster) -> list[Event]:
        request = new_request_id()
        with want(instances.decode[0], request, instances.prefill[0].manager.address, label="cmpl-7") as receiver:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(wait_for(receiver)), 0.05)
            sender = offer(instances.prefill[0], request)
            return [await receiver, await sender, await receiver]

    async def wait_for(handle: Any) -> Event:
        event: Event = await handle
        return event

    with strangers(Side(), Side()) as instances:
        assert all(event.ok for event in asyncio.run(serve(instances)))


def test_an_exception_in_the_block_aborts_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with strangers(Side(), Side()) as instances:
        sender = instances.prefill[0].manager.sender(new_request_id(), deadline_s=None, label="cmpl-7")
        with pytest.raises(ZeroDivisionError), sender:
            raise ZeroDivisionError
        event = sender.wait(timeout_s=DEADLINE_S)
        assert "ZeroDivisionError" in str(event.error)
        assert sender.lease.released
        assert any("label=cmpl-7" in record.message for record in caplog.records)
        called: list[Event] = []
        sender.on_end(called.append)
        sender.on_end(lambda event: event.key.missing)  # type: ignore[attr-defined]
        until(lambda: called == [event])


def test_what_a_peer_writes_with_is_said_again_on_a_new_connection() -> None:
    """What libzmq has sent on one before the hello is lost."""
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2, settings={"admit": "any", "backend": "auto"})
    decode = start_side(MODEL, Side(), "decode-0", num_layers=2, settings={"backend": "auto"})
    try:
        mistreat(decode[0].manager, MessageFaults(lose=1.0, kinds=frozenset(("writing",)), at_most=1))
        offer(prefill[0], request := new_request_id())
        assert want(decode[0], request, prefill[0].manager.address).wait(timeout_s=DEADLINE_S).ok
        runtime, peer = prefill[0].manager._runtime, PeerRank("decode-0", 0)
        connected: Any = runtime.handshake.rank(peer)
        assert not connected.engine.writer

        def end(now: float) -> None:
            accepted = runtime.peers._inbound.of(peer)
            assert accepted is not None
            runtime.peers.on_closed(accepted.connection, now)

        in_control_thread(prefill[0].manager, end)
        until(lambda: bool(connected.engine.writer))
        assert runtime.handshake.rank(peer) is connected
    finally:
        for rank in prefill + decode:
            rank.manager.close()


@pytest.mark.parametrize("call", ["decline", "want"])
def test_a_group_that_a_peer_does_not_have_is_refused(call: str) -> None:
    with cluster(Side(), Side()) as instances:
        manager = instances.decode[0].manager
        tell = getattr(manager, call)
        tell(new_request_id(), peer="prefill-0")
        with pytest.raises(LocalProtocolError, match=r"group of peer 'prefill-0': expected .* found 1"):
            tell(new_request_id(), peer="prefill-0", group=1)
