"""Requests that end while a thread fails or the manager ends: each is reported once, and proofs are kept."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from disagg import KVManager, LocalProtocolError, ModelId, Pages, Topology, new_request_id
from disagg.core.leases import LeaseState
from disagg.protocol.types import ReleaseLease
from disagg.runtime.metrics_server import MetricsServer
from disagg.state import paged
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import PageList
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, clear, cluster, receive, send
from tests.support.inside import in_control_thread


def test_rows_of_quiescent_writers_are_released_although_the_thread_fails() -> None:
    """The queue of effects holds the release when the control thread fails."""
    with cluster(Side(), Side()) as instances:
        manager = instances.decode[0].manager
        receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 12))
        runtime = manager._runtime

        def release_and_fail(_: float) -> None:
            assert receiver.session is not None
            runtime.sessions.effects.append(ReleaseLease(receiver.session.lease))
            runtime.loop.fail("transfer", ZeroDivisionError())

        runtime.command(release_and_fail)
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert "the transfer thread died: ZeroDivisionError" in str(event.error)
        assert event.lease.state is LeaseState.RELEASED
        manager.close()
        instances.decode.clear()


def test_an_ended_attempt_cannot_be_used_again_while_its_rows_are_leased() -> None:
    with cluster(Side(), Side()) as instances:
        manager, request = instances.decode[0].manager, new_request_id()
        mistreat(manager, MessageFaults(lose=1.0, kinds=frozenset(("abort",))))  # so the writer does not acknowledge
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 12))
        with pytest.raises(LocalProtocolError, match="this attempt is under way; use a new attempt number"):
            receive(instances.decode[0], request, PageList((3, 4, 5)), need=(0, 12))
        until(lambda: receiver.session is not None)
        receiver.abort("client gone")
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert not receiver.lease.released
        with pytest.raises(LocalProtocolError, match="this attempt was already used; use a new attempt number"):
            receive(instances.decode[0], request, PageList((3, 4, 5)), need=(0, 12))
        assert manager.health().ok


def test_no_receiver_takes_rows_that_were_read_after_abort() -> None:
    """The server uses the rows again at once. The control thread is busy: it hears of the copy before it hears of the abort."""
    with cluster(Side(), Side()) as instances:
        rank, request, pages, rows = instances.prefill[0], new_request_id(), PageList((0, 1, 2)), Rows()
        receiver = receive(instances.decode[0], request, pages, need=(0, 12))
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": Pages(pages.ids)}, tokens=(0, 12), ready=rows)
        sender.finish()
        until(lambda: rows.is_asked)
        is_busy, go_on = threading.Event(), threading.Event()

        def be_busy(_: float) -> None:
            is_busy.set()
            go_on.wait(DEADLINE_S)

        rank.manager._runtime.command(be_busy)
        assert is_busy.wait(DEADLINE_S)
        sender.abort("the rows are those of another request from now on")
        clear(rank.pools)
        rows.are_there = True
        until(lambda: rank.manager._runtime.worker.has_reports)
        go_on.set()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert "the rows are those of another request" in str(event.error)
        until(lambda: sender.lease.released and receiver.lease.released)


class Rows:
    """A ready event that passes once `are_there`."""

    is_asked = are_there = False

    def query(self) -> bool:
        self.is_asked = True
        return self.are_there

    def synchronize(self) -> None:
        raise AssertionError


def test_two_threads_that_end_a_request_report_it_once() -> None:
    with cluster(Side(), Side()) as instances:
        manager = instances.decode[0].manager
        for page in range(20):
            receive(instances.decode[0], new_request_id(), PageList((page,)), need=(0, 4))
        barrier = threading.Barrier(4)

        def end() -> None:
            barrier.wait()
            manager._runtime.requests.fail_all("the test ends it")

        threads = [threading.Thread(target=end) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        events = manager.events()
        assert len(events) == len({event.key for event in events}) == 20


def test_a_request_that_ended_before_its_session_opened_is_not_opened_later() -> None:
    with cluster(Side(), Side()) as instances:
        manager = instances.decode[0].manager
        busy, go_on = threading.Event(), threading.Event()

        def hold(_: float) -> None:
            busy.set()
            go_on.wait(DEADLINE_S)

        in_control_thread(manager, hold)
        assert busy.wait(DEADLINE_S)
        receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 12))
        manager._runtime.requests.fail_all("the test ends it")
        go_on.set()
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert all(event.ok for event in instances.transfer(12))
        assert receiver.session is None
        assert manager.health().ok


def test_a_manager_that_cannot_serve_metrics_closes_its_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(MetricsServer, "__init__", fail)
    cache = np.zeros((2, 4, 4, 2, 16), np.float16)
    kv = paged.gqa({0: (cache[0], cache[1])}, axes="page token kv_head dim", num_kv_heads=2, topology=Topology())
    address = "tcp://127.0.0.1:0"
    with pytest.raises(RuntimeError, match="can't start new thread"):
        KVManager(
            name="p", topology=Topology(), components=[kv], model=ModelId("m"), backend="local", listen=address, metrics_port=0
        )
    monkeypatch.undo()
    with KVManager(
        name="p", topology=Topology(), components=[kv], model=ModelId("m"), backend="local", metrics_port=0
    ) as manager:
        assert manager.health().ok


def test_a_channel_can_be_interposed_only_once() -> None:
    with cluster(Side(), Side()) as instances:
        manager = instances.decode[0].manager
        mistreat(manager, MessageFaults())
        with pytest.raises(LocalProtocolError, match="interpose"):
            mistreat(manager, MessageFaults())


def test_a_writer_that_reports_slots_of_an_unknown_attempt_gets_its_outcome() -> None:
    """The outcome of an ended attempt was lost; the writer's report brings it before the deadline."""
    with cluster(Side(tp=2), Side(page=8), settings={"pack_below": 1 << 20}) as instances:
        mistreat(instances.decode[0].manager, MessageFaults(lose=1.0, kinds=frozenset(("outcome", "abort")), at_most=2))
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)


def test_what_arrived_before_the_deadline_counts_although_the_control_thread_stood_still() -> None:
    """A command waits when it goes on, and commands go before messages."""
    with cluster(Side(), Side()) as instances:
        (prefill,), (decode,) = instances.prefill, instances.decode
        request, stands, goes_on = new_request_id(), threading.Event(), threading.Event()
        sender = prefill.manager.sender(request, peer=None)
        pages = {"kv": Pages(np.arange(3))}
        receiver = decode.manager.receiver(request, peer="prefill-0", rows=pages, need={"kv": (0, 12)}, deadline_s=1.0)
        until(lambda: sender.readers is not None)

        def stand_still(_: float) -> None:
            stands.set()
            goes_on.wait(DEADLINE_S)

        decode.manager._runtime.command(stand_still)
        stands.wait(DEADLINE_S)
        sender.finish(pages)
        time.sleep(1.2)  # past the deadline
        decode.manager._runtime.command(lambda _: None)
        goes_on.set()
        assert receiver.wait(timeout_s=DEADLINE_S).ok
