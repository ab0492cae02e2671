"""Protocol bugs reported in the field, replayed against an engine with faults.

The tests check when a row may be reused, and which side learns which error.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from disagg import Pages, RequestTimeout, new_request_id
from disagg.backends.base import RemotePeer, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.core.leases import LeaseState
from disagg.runtime import paths
from disagg.testing import reference
from disagg.testing.faults import BackendFaults, FaultyBackend, MessageFaults, inject, mistreat
from disagg.testing.reference import PageList
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Rank, Side, cluster, receive, send

PAGES = PageList((0, 1, 2))
PAGES_OF_SENDER = Pages(np.arange(5, dtype=np.int32))


@pytest.fixture(params=["local", "nixl", "mooncake"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine, for tests of its own statuses and writes; a test runs two or three instances of it in this process."""
    if request.param in ENGINES:
        require_engine(*ENGINES[request.param])
    return str(request.param)


def settings(engine: str, **faults: Any) -> dict[str, Any]:
    """With faults, writes are posted when the test calls `post_delayed`."""
    delayed = inject(engine, BackendFaults(delay_s=(3600.0, 3600.0), **faults))
    return {"backend": delayed if faults else engine, "pack_below": 0}


def faulty_engine(rank: Rank) -> FaultyBackend:
    engine = rank.manager.backend
    assert isinstance(engine, FaultyBackend)
    return engine


class PendingWork:
    """A ready event with the interface of a CUDA event."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        until(self.query)


def test_pages_of_an_aborted_request_are_held_until_its_writes_have_ended(engine: str) -> None:
    """Case 29: the receiver aborts while writes are pending; its lease holds the written pages."""
    with cluster(Side(tp=2), Side(page=8, num_pages=16), settings=settings(engine, delay=1.0)) as instances:
        request, pool = new_request_id(), instances.decode[0].pools[0][0].view(np.uint8)
        for rank in instances.prefill:
            reference.fill(instances.model, rank.spec, rank.pools, PageList((0, 1, 2, 3, 4)), num_tokens=20)
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
        until(lambda: all(faulty_engine(rank).num_delayed for rank in instances.prefill))  # else they post nothing any more
        receiver.abort("client gone")
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        assert not event.lease.released
        assert (pool == reference.CANARY).all(), "nothing is written yet"
        released = threading.Event()
        event.lease.on_release(released.set)
        faulty_engine(instances.prefill[0]).post_delayed()
        assert not released.wait(0.2), "the other writer's writes are pending"
        faulty_engine(instances.prefill[1]).post_delayed()
        assert released.wait(DEADLINE_S)
        assert (pool != reference.CANARY).any(), "the writes ended before the pages were released"
        pool[...] = reference.CANARY
        assert all(not sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
        time.sleep(0.3)
        assert (pool == reference.CANARY).all(), "nothing is written after the release"


def test_the_aborts_of_two_ranks_are_both_acknowledged() -> None:
    """Case 30: the shared writer's acknowledgement releases the rows of both ranks."""
    with cluster(Side(), Side(tp=2), settings=settings("local")) as instances:
        request = new_request_id()
        receivers = [receive(rank, request, PageList((0, 1, 2, 3, 4)), need=(0, 20)) for rank in instances.decode]
        sender = instances.prefill[0].manager.sender(request, peer="decode-0")
        until(lambda: sender.needed("kv") == (0, 20))
        for receiver in receivers:
            receiver.abort(f"rank {receiver.session.destination_group} aborts")  # type: ignore[union-attr]
        events = [receiver.wait(timeout_s=DEADLINE_S) for receiver in receivers]
        until(lambda: all(event.lease.released for event in events))
        sender.finish()
        assert "aborts" in str(sender.wait(timeout_s=DEADLINE_S).error)


def test_rows_of_an_unsettled_transfer_are_quarantined_until_it_settles(engine: str) -> None:
    """Case 31: the engine reports a transfer as unsettled and completes it later."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine, unsettle=1.0)) as instances:
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))
        sender = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        here = receiver.wait(timeout_s=DEADLINE_S)
        assert "injected fault: not settled" in str(here.error)
        assert instances.prefill[0].manager.health().quarantined == {"injected fault: not settled": 1}
        until(lambda: here.lease.state is LeaseState.QUARANTINED)
        assert instances.decode[0].manager.health().quarantined == {"no proof that prefill-0/0 stopped writing": 1}
        faulty_engine(instances.prefill[0]).post_delayed()
        there = sender.wait(timeout_s=DEADLINE_S)
        assert "injected fault: not settled" in str(there.error)
        until(lambda: here.lease.released and there.lease.released)
        assert not instances.decode[0].manager.health().quarantined


def test_a_request_of_an_expired_sender_fails_with_the_senders_reason() -> None:
    """Case 33: the sender's deadline passes before the receiver reserves; nothing is read."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings("local")) as instances:
        request = new_request_id()
        late = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20, deadline_s=0.05)
        assert isinstance(late.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
        event = receive(instances.decode[0], request, PAGES, need=(0, 20)).wait(timeout_s=DEADLINE_S)
        assert "the deadline passed; 0 of 1 ranks of 'decode-0' reserved" in str(event.error)
        until(lambda: event.lease.released)


def test_messages_that_arrived_before_the_deadline_check_count() -> None:
    """Case 42: the final message waits in the socket while the control thread is busy past the deadline."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings("local")) as instances:
        request, runtime = new_request_id(), instances.decode[0].manager._runtime
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))
        sender = instances.prefill[0].manager.sender(request, peer="decode-0")
        until(lambda: sender.needed("kv") == (0, 20))
        busy, channel = threading.Event(), runtime.channel

        def hold_past_the_deadline(_: float) -> None:
            busy.set()
            until(lambda: channel._router_descriptor in dict(channel._epoll.poll(0)))
            session = receiver.session
            assert session is not None
            session.deadline = time.monotonic()
            runtime.sessions._timers.arm(session)

        runtime.command(hold_past_the_deadline)
        assert busy.wait(DEADLINE_S)
        sender.finish({"kv": PAGES_OF_SENDER})
        assert receiver.wait(timeout_s=DEADLINE_S).ok


def test_requests_end_although_the_outcome_is_lost() -> None:
    """Case 38, the last message: lost outcomes are resent."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings("local")) as instances:
        channel = mistreat(instances.decode[0].manager, MessageFaults(lose=1.0, kinds=frozenset(("outcome",)), at_most=2))
        assert all(event.ok for event in instances.transfer(20))
        assert channel.counts["lose"] == 2


def test_nothing_is_written_before_the_receivers_kernels_are_done(engine: str) -> None:
    """Case 35: the receiver reserves its pages only after the ready event."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as instances:
        request, done = new_request_id(), PendingWork()
        pool = instances.decode[0].pools[0][0].view(np.uint8)
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20), ready=done)
        sender = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        time.sleep(0.2)
        assert sender.needed("kv") is None
        assert (pool == reference.CANARY).all()
        done.is_done = True
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert sender.wait(timeout_s=DEADLINE_S).ok


class FailedWork(PendingWork):
    """A ready event of a lost CUDA context."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_failed_ready_event_ends_its_request_only(side: str, verify: str) -> None:
    with cluster(Side(), Side(page=8, num_pages=16), settings={**settings("local"), "verify": verify}) as instances:
        request, rank = new_request_id(), instances.prefill[0]
        ready_events = {side: FailedWork()}
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20), ready=ready_events.get("decode"))
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": PAGES_OF_SENDER}, tokens=(0, 20), ready=ready_events.get("prefill"))
        sender.finish()
        event = (sender if side == "prefill" else receiver).wait(timeout_s=DEADLINE_S)
        assert "RuntimeError: CUDA error: an illegal memory access" in str(event.error)
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        assert (instances.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        assert all(event.ok for event in instances.transfer(20))


class RaisingTransfer:
    """A transfer whose method `broken` raises; the engine's own is in `inner`."""

    completion = None

    def __init__(self, inner: Transfer, broken: str) -> None:
        self._inner, self._broken = inner, broken

    @property
    def error(self) -> str | None:
        return self._inner.error

    def poll(self) -> TransferStatus:
        if self._broken == "poll":
            raise ZeroDivisionError("a fault of the engine")
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()
        if self._broken == "close":
            raise ZeroDivisionError("a fault of the engine")


@pytest.mark.parametrize("packed", [False, True], ids=["direct", "packed"])
@pytest.mark.parametrize("broken", ["submit", "poll", "close"])
def test_an_engine_that_raises_costs_its_request_only(broken: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a status it is not known that a write has ended, so its rows stay."""
    options = {"backend": inject("local", BackendFaults()), "pack_below": 1 << 20 if packed else 0}
    with cluster(Side(), Side(page=8, num_pages=16), settings=options) as instances:
        backend, request = instances.prefill[0].manager.backend, new_request_id()
        submit = backend.submit

        def break_once(peer: RemotePeer, copies: CopyBatch) -> Any:
            monkeypatch.undo()
            if broken == "submit":
                raise ZeroDivisionError("a fault of the engine")
            return RaisingTransfer(submit(peer, copies), broken)

        monkeypatch.setattr(backend, "submit", break_once)
        receiver = receive(instances.decode[0], request, PageList((9, 10, 11)), need=(0, 20))
        sender = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20, deadline_s=2.0)
        received, sent = (each.wait(timeout_s=DEADLINE_S) for each in (receiver, sender))
        assert received.ok == sent.ok == (broken == "close")
        assert received.lease.released == sent.lease.released == (broken != "poll")
        if broken != "close":
            assert "a fault of the engine" in str(received.error)
        other = new_request_id()
        receiver = receive(instances.decode[0], other, PAGES, need=(0, 20))
        assert send(instances.prefill[0], other, PageList((0, 1, 2, 3, 4)), 20).wait(timeout_s=DEADLINE_S).ok
        assert receiver.wait(timeout_s=DEADLINE_S).ok


def test_rows_are_bound_before_their_ready_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong rows fail early, and after the event only the engine's call is left."""
    done = PendingWork()
    with cluster(Side(), Side(page=8, num_pages=16), settings={"backend": "local"}) as instances:
        bound = threading.Event()
        bind = paths.bind_outgoing

        def recording(*args: Any, **kwargs: Any) -> Any:
            bound.set()
            return bind(*args, **kwargs)

        monkeypatch.setattr("disagg.runtime.transfers.bind_outgoing", recording)
        rank, (wrong, right) = instances.prefill[0], [new_request_id() for _ in range(2)]
        rows = {wrong: Pages(np.array([0, 1, 2, 3, rank.spec.num_pages])), right: PAGES_OF_SENDER}
        destination = {wrong: PageList((3, 4, 5)), right: PAGES}
        receivers = {each: receive(instances.decode[0], each, destination[each], need=(0, 20)) for each in rows}
        senders = {each: rank.manager.sender(each, peer="decode-0") for each in rows}
        for each, sender in senders.items():
            sender.finish({"kv": rows[each]}, ready=done)
        assert "outside the pool" in str(senders[wrong].wait(timeout_s=DEADLINE_S).error)
        assert bound.wait(DEADLINE_S)
        assert receivers[right].poll() is None
        assert (instances.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        done.is_done = True
        assert receivers[right].wait(timeout_s=DEADLINE_S).ok


def test_nothing_is_read_before_the_senders_kernels_are_done(engine: str) -> None:
    """Case 36: the receiver gets the pages' content at the time of the ready event."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as instances:
        request, done, rank = new_request_id(), PendingWork(), instances.prefill[0]
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": PAGES_OF_SENDER}, tokens=(0, 20), ready=done)
        sender.finish()
        time.sleep(0.2)
        assert (instances.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        reference.fill(instances.model, rank.spec, rank.pools, PageList((0, 1, 2, 3, 4)), num_tokens=20)
        done.is_done = True
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        wanted = reference.expected(instances.model, instances.decode[0].spec, PAGES, num_tokens=20, need=(0, 20))
        assert reference.first_difference(wanted, instances.decode[0].pools) is None
