"""Protocol reports of the field, replayed against an engine with faults: when may a row be used again, and who is told what."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from disagg import Pages, RequestTimeout, new_request_id
from disagg.core.leases import LeaseState
from disagg.runtime import paths as packing
from disagg.testing import reference
from disagg.testing.faults import BackendFaults, MessageFaults, inject, mistreat
from disagg.testing.reference import PageList
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

PAGES = PageList((0, 1, 2))
PAGES_OF_SENDER = Pages(np.arange(5, dtype=np.int32))


@pytest.fixture(params=["local", "nixl", "mooncake"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in turn, two or three of them in this process."""
    if request.param in ENGINES:
        require_engine(*ENGINES[request.param])
    return str(request.param)


def settings(engine: str, **faults: Any) -> dict[str, Any]:
    return {"backend": inject(engine, BackendFaults(**faults)) if faults else engine, "pack_below": 0}


class PendingWork:
    """What a kernel's event looks like."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        until(self.query)


def test_pages_of_an_aborted_request_are_kept_until_its_writes_have_ended(engine: str) -> None:
    """Case 29: the writes were under way when the receiver gave up; what they hit is still the receiver's."""
    with cluster(Side(tp=2), Side(page=8, num_pages=16), settings=settings(engine, delay=1.0, delay_s=(2.0, 2.1))) as made:
        request, pool = new_request_id(), made.decode[0].pools[0][0].view(np.uint8)
        for rank in made.prefill:
            reference.fill(made.model, rank.spec, rank.pools, PageList((0, 1, 2, 3, 4)), num_tokens=20)
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in made.prefill]
        until(lambda: all(rank.manager._runtime.worker.depth for rank in made.prefill))
        receiver.abort("client gone")
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        assert not event.lease.released
        assert (pool == reference.CANARY).all(), "nothing has landed yet"
        released = threading.Event()
        event.lease.on_release(released.set)
        assert released.wait(DEADLINE_S)
        assert (pool != reference.CANARY).any(), "it has landed, before the pages were given back"
        pool[...] = reference.CANARY
        assert all(not sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
        time.sleep(0.3)
        assert (pool == reference.CANARY).all(), "and nothing after"


def test_each_of_two_ranks_that_abort_is_acknowledged(engine: str) -> None:
    """Case 30: both get their rows back, by the word of the writer that they share."""
    with cluster(Side(), Side(tp=2), settings=settings(engine)) as made:
        request = new_request_id()
        receivers = [receive(rank, request, PageList((0, 1, 2, 3, 4)), need=(0, 20)) for rank in made.decode]
        sender = made.prefill[0].manager.sender(request, peer="decode-0")
        until(lambda: sender.needed("kv") == (0, 20))
        for receiver in receivers:
            receiver.abort(f"rank {receiver.session.destination_group} has had enough")  # type: ignore[union-attr]
        events = [receiver.wait(timeout_s=DEADLINE_S) for receiver in receivers]
        until(lambda: all(event.lease.released for event in events))
        sender.finish()
        assert "has had enough" in str(sender.wait(timeout_s=DEADLINE_S).error)


def test_what_the_engine_cannot_tell_is_quarantined_and_comes_back_when_it_can(engine: str) -> None:
    """Case 31: the engine gives up on a transfer, and completes it later."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine, unsettle=1.0, delay_s=(3.0, 3.1))) as made:
        request = new_request_id()
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20))
        sender = send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        here = receiver.wait(timeout_s=DEADLINE_S)
        assert "injected fault: not settled" in str(here.error)
        assert made.prefill[0].manager.health().quarantined == {"injected fault: not settled": 1}
        until(lambda: here.lease.state is LeaseState.QUARANTINED)
        assert made.decode[0].manager.health().quarantined == {"no proof that prefill-0/0 stopped writing": 1}
        there = sender.wait(timeout_s=DEADLINE_S)
        assert "injected fault: not settled" in str(there.error)
        until(lambda: here.lease.released and there.lease.released)
        assert not made.decode[0].manager.health().quarantined


def test_a_request_whose_sender_has_given_it_up_fails_with_that_reason(engine: str) -> None:
    """Case 33: the source's time is over when the receiver comes; nothing is read."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as made:
        request = new_request_id()
        late = send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20, deadline_s=0.05)
        assert isinstance(late.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
        event = receive(made.decode[0], request, PAGES, need=(0, 20)).wait(timeout_s=DEADLINE_S)
        assert "the deadline passed; 0 of 1 ranks of 'decode-0' reserved" in str(event.error)
        until(lambda: event.lease.released)


def test_what_has_arrived_before_the_deadline_was_judged_counts(engine: str) -> None:
    """Case 42: the last word lies in the socket while the control thread is busy past the deadline."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as made:
        request, runtime = new_request_id(), made.decode[0].manager._runtime
        over = time.monotonic() + 3.0
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20), deadline_s=3.0)
        sender = made.prefill[0].manager.sender(request, peer="decode-0")
        until(lambda: sender.needed("kv") == (0, 20))
        busy, go_on = threading.Event(), threading.Event()

        def hold(_: float) -> None:
            busy.set()
            go_on.wait(DEADLINE_S)

        runtime.command(hold)
        assert busy.wait(DEADLINE_S)
        sender.send({"kv": PAGES_OF_SENDER}, tokens=(0, 20))
        sender.finish()
        until(lambda: made.prefill[0].manager.stats.transfers == 1)
        time.sleep(over + 0.2 - time.monotonic())  # past the deadline; the last word was said before it
        go_on.set()
        assert receiver.wait(timeout_s=DEADLINE_S).ok


def test_a_network_that_loses_the_outcome_leaves_no_request_behind(engine: str) -> None:
    """Case 38, the last message: it is said again until it is heard."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as made:
        lost = mistreat(made.decode[0].manager, MessageFaults(lose=1.0, kinds=frozenset(("outcome",)), at_most=2))
        assert all(event.ok for event in made.transfer(20))
        assert lost.counts["lose"] == 2


def test_nothing_arrives_before_the_receivers_own_kernels_are_done(engine: str) -> None:
    """Case 35: the pages are offered to nobody until the event has passed."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as made:
        request, done = new_request_id(), PendingWork()
        pool = made.decode[0].pools[0][0].view(np.uint8)
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20), ready=done)
        sender = send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        time.sleep(0.2)
        assert sender.needed("kv") is None
        assert (pool == reference.CANARY).all()
        done.passed = True
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert sender.wait(timeout_s=DEADLINE_S).ok


class Broken(PendingWork):
    """The event of a context that is lost."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_an_event_that_fails_ends_its_request_only(who: str, verify: str, engine: str) -> None:
    with cluster(Side(), Side(page=8, num_pages=16), settings={**settings(engine), "verify": verify}) as made:
        request, rank = new_request_id(), made.prefill[0]
        given = {who: Broken()}
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20), ready=given.get("decode"))
        sender = rank.manager.sender(request, peer="decode-0", deadline_s=2.0)
        sender.send({"kv": PAGES_OF_SENDER}, tokens=(0, 20), ready=given.get("prefill"))
        sender.finish()
        event = (sender if who == "prefill" else receiver).wait(timeout_s=DEADLINE_S)
        assert "RuntimeError: CUDA error: an illegal memory access" in str(event.error)
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        assert (made.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        assert all(event.ok for event in made.transfer(20))


def test_rows_are_bound_before_their_event_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is wrong with them is said then, and only the engine is left to call when it has."""
    done = PendingWork()
    with cluster(Side(), Side(page=8, num_pages=16), settings={"backend": "local"}) as made:
        bound = threading.Event()
        bind = packing.bind_outgoing

        def noting(*given: Any, **more: Any) -> Any:
            bound.set()
            return bind(*given, **more)

        monkeypatch.setattr("disagg.runtime.transfers.bind_outgoing", noting)
        rank, (wrong, right) = made.prefill[0], [new_request_id() for _ in range(2)]
        rows = {wrong: Pages(np.array([0, 1, 2, 3, rank.spec.num_pages])), right: PAGES_OF_SENDER}
        taken = {wrong: PageList((3, 4, 5)), right: PAGES}
        receivers = {each: receive(made.decode[0], each, taken[each], need=(0, 20)) for each in rows}
        senders = {each: rank.manager.sender(each, peer="decode-0") for each in rows}
        for each, sender in senders.items():
            sender.finish({"kv": rows[each]}, ready=done)
        assert "outside the pool" in str(senders[wrong].wait(timeout_s=DEADLINE_S).error)
        assert bound.wait(DEADLINE_S)
        assert receivers[right].poll() is None
        assert (made.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        done.passed = True
        assert receivers[right].wait(timeout_s=DEADLINE_S).ok


def test_nothing_is_read_before_the_senders_own_kernels_are_done(engine: str) -> None:
    """Case 36: what the pages hold when the event passes is what arrives."""
    with cluster(Side(), Side(page=8, num_pages=16), settings=settings(engine)) as made:
        request, done, rank = new_request_id(), PendingWork(), made.prefill[0]
        receiver = receive(made.decode[0], request, PAGES, need=(0, 20))
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": PAGES_OF_SENDER}, tokens=(0, 20), ready=done)
        sender.finish()
        time.sleep(0.2)
        assert (made.decode[0].pools[0][0].view(np.uint8) == reference.CANARY).all()
        reference.fill(made.model, rank.spec, rank.pools, PageList((0, 1, 2, 3, 4)), num_tokens=20)
        done.passed = True
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        wanted = reference.expected(made.model, made.decode[0].spec, PAGES, num_tokens=20, need=(0, 20))
        assert reference.first_difference(wanted, made.decode[0].pools) is None
