"""Early completion of transfers that go on by themselves, like kernels: no GPU is needed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from disagg import new_request_id
from disagg.backends.base import Transfer, TransferStatus
from disagg.core import _native
from disagg.core.errors import RequestAborted, RequestTimeout
from disagg.core.rows import Pages
from disagg.core.spans import SpanBatch
from disagg.protocol.messages import MAX_PAYLOAD_NBYTES, Complete, CopyBegun, EarlyComplete, Message, decode
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Limits
from disagg.runtime import early_completion
from disagg.runtime.channel import Channel
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import PageList
from disagg.transfer import active_job
from disagg.transfer.pool_memory import PoolMemory
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Rank, Side, clear, cluster, receive, send
from tests.support.host_kernels import SIDES, HostSpans, Spans


class ThreadTransfer:
    """A transfer that another thread carries out. Its completion is set once it is done, and never if it fails."""

    def __init__(self, copy: Callable[[], Transfer], *, fails: bool, wait: Callable[[], object]) -> None:
        self.status, self.error = TransferStatus.PENDING, "the GPU has fallen off the bus" if fails else None
        self.completion = _native.Flag()
        self._copy, self._fails, self._wait = copy, fails, wait
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        self._wait()
        if self._fails:
            self.status = TransferStatus.FAILED
            return
        self._copy()
        self.status = TransferStatus.DONE
        self.completion.set()

    def poll(self) -> TransferStatus:
        return self.status

    def close(self) -> None:
        assert self.status is not TransferStatus.PENDING


class SpansWithCompletion(Spans):
    """Transfers that go on by themselves, like a kernel, and have a completion."""

    fails = False
    holds: ClassVar[list[threading.Event]] = []
    """Each of the next transfers waits for one of these events."""
    wait = staticmethod(functools.partial(time.sleep, 1e-3))
    """What the others do first."""

    def submit_spans(self, prepared: HostSpans, batch: SpanBatch) -> Transfer:
        wait: Callable[[], object] = SpansWithCompletion.wait
        if SpansWithCompletion.holds:
            wait = functools.partial(SpansWithCompletion.holds.pop(0).wait, DEADLINE_S)
        copy = functools.partial(super().submit_spans, prepared, batch)
        return ThreadTransfer(copy, fails=SpansWithCompletion.fails, wait=wait)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages sent about the progress of copies. Every transfer counts as long, and threads busy-poll."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    monkeypatch.setattr(active_job, "LONG_NBYTES", 0)
    found: list[Message] = []
    send = Channel.send

    def noting(self: Channel, dial: int, data: bytes) -> bool:
        message = decode(data)
        if isinstance(message, CopyBegun | EarlyComplete | Complete):
            found.append(message)
        return send(self, dial, data)

    monkeypatch.setattr(Channel, "send", noting)
    return found


@pytest.fixture
def announced(reports: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer ends before the early completion of each has been sent, for which the server must call `finish` first."""
    submit, submitted = SpansWithCompletion.submit_spans, list[SpanBatch]()

    def noting(self: SpansWithCompletion, prepared: HostSpans, batch: SpanBatch) -> Transfer:
        submitted.append(batch)
        return submit(self, prepared, batch)

    def all_announced() -> bool:
        return sum(isinstance(report, EarlyComplete) for report in reports) >= len(submitted)

    monkeypatch.setattr(SpansWithCompletion, "submit_spans", noting)
    monkeypatch.setattr(SpansWithCompletion, "wait", lambda: until(all_announced))


@pytest.mark.usefixtures("announced")
@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_a_receiver_sees_the_completion_of_the_last_copy(
    prefill: Side, decode: Side, reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_completion, "SPIN_S", DEADLINE_S)  # long enough for a slow machine
    patient = Limits(retry_s=DEADLINE_S, max_retry_s=DEADLINE_S)
    with cluster(prefill, decode, settings={"backend": SpansWithCompletion, "limits": patient}) as made:
        for _ in range(3):
            events = made.transfer(61, first_token=5)
            assert all(event.ok for event in events), [event.error for event in events]
            assert all(event.payload == b"token" for event in events)
    assert any(isinstance(report, EarlyComplete) for report in reports)
    assert not any(isinstance(report, Complete) for report in reports)


def without_repetitions() -> dict[str, Any]:
    """Settings of managers that send nothing by the clock: no repeated message, no heartbeat."""
    never = 10 * DEADLINE_S
    limits, links = (
        Limits(retry_s=never, max_retry_s=never),
        ConnectionLimits(heartbeat_s=never, heartbeat_timeout_s=10 * never),
    )
    return {"backend": SpansWithCompletion, "limits": limits, "connection_limits": links}


def test_early_completion_waits_until_one_copy_is_left(reports: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies are pending when the server calls `finish`; then the first of them ends."""
    first, second = threading.Event(), threading.Event()
    monkeypatch.setattr(SpansWithCompletion, "holds", [first, second])
    monkeypatch.setattr(early_completion, "SPIN_S", DEADLINE_S)
    with cluster(Side(), Side(), settings=without_repetitions()) as made:
        request, pages = new_request_id(), [made.pages(rank, 61) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[1], need=(0, 61))
        sender = made.prefill[0].manager.sender(request, peer="decode-0", deadline_s=DEADLINE_S)
        rows = {"kv": Pages(np.array(pages[0].ids, np.int32), 0)}
        for tokens in ((0, 29), (29, 61)):
            sender.send(rows, tokens=tokens)
        until(lambda: len(reports) == 2)
        sender.finish()
        first.set()
        until(lambda: any(isinstance(report, EarlyComplete) for report in reports))
        assert receiver.poll() is None
        loops = [rank.manager._runtime.loop for rank in (*made.prefill, *made.decode)]
        until(lambda: all(time.monotonic() > each._awake_until for each in loops))  # only the completion page is polled now
        second.set()
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, sender))
    assert [type(report) for report in reports] == [CopyBegun, CopyBegun, EarlyComplete]


@pytest.mark.usefixtures("announced")
def test_a_receiver_that_may_have_stopped_polling_gets_a_final_complete(
    reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_completion, "SPIN_S", 0.0)
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion}) as made:
        assert all(event.ok for event in made.transfer(61))
    assert any(isinstance(report, EarlyComplete) for report in reports)
    assert any(isinstance(report, Complete) for report in reports)


@pytest.mark.usefixtures("announced")
def test_an_early_completion_of_a_failed_copy_does_not_complete_the_request(
    reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpansWithCompletion, "fails", True)
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion}) as made:
        events = made.transfer(61)
        assert not any(event.ok for event in events)
        assert all("fallen off the bus" in str(event.error) for event in events)
        assert any(isinstance(report, EarlyComplete) for report in reports)
        assert not any(isinstance(report, Complete) for report in reports)
        monkeypatch.setattr(SpansWithCompletion, "fails", False)
        assert all(event.ok for event in made.transfer(61))


@pytest.mark.usefixtures("announced")
def test_early_completion_works_for_messages_too_long_for_a_local_socket(
    reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload longer than a packet travels over TCP, and no request waits for a retry."""
    monkeypatch.setattr(early_completion, "SPIN_S", DEADLINE_S)
    limits = Limits(retry_s=2 * DEADLINE_S, max_retry_s=2 * DEADLINE_S)
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion, "limits": limits}) as made:
        for _ in range(3):
            assert [event.ok for event in made.transfer(61, payload=bytes(MAX_PAYLOAD_NBYTES))] == [True, True]
    assert any(isinstance(report, EarlyComplete) for report in reports)
    assert not any(isinstance(report, Complete) for report in reports)


def expire(rank: Rank) -> None:
    """Have the deadline of a rank's requests pass now."""
    runtime = rank.manager._runtime
    runtime.commands.put(lambda now: runtime.sessions.tick(now + DEADLINE_S))


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_ends_before_its_completion_flag_is_set(
    side: str, how: str, reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side that ends it gets an error, and rows return only after the copy; the other side may succeed."""
    going = threading.Event()
    monkeypatch.setattr(SpansWithCompletion, "holds", [going])
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion}) as made:
        request, pages = new_request_id(), [made.pages(rank, 61) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[1], need=(0, 61))
        sender = send(made.prefill[0], request, pages[0], 61)
        until(lambda: any(isinstance(report, EarlyComplete) for report in reports))
        if how == "abort":
            (sender if side == "prefill" else receiver).abort("enough")
        else:
            expire(made.prefill[0] if side == "prefill" else made.decode[0])
        first = (sender if side == "prefill" else receiver).wait(timeout_s=DEADLINE_S)
        assert not first.ok
        assert isinstance(first.error, RequestAborted if how == "abort" else RequestTimeout)
        assert not first.lease.released
        going.set()
        events = [handle.wait(timeout_s=DEADLINE_S) for handle in (sender, receiver)]
        assert not (events[0].ok and not events[1].ok)
        until(lambda: all(event.lease.released for event in events))
        for rank in made.decode:
            clear(rank.pools)
        assert all(event.ok for event in made.transfer(61))


def test_a_completion_is_reported_before_the_control_thread_sleeps(
    reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's completion flag is set while the thread handles another request's end for longer than it busy-polls."""
    first, second = threading.Event(), threading.Event()
    monkeypatch.setattr(SpansWithCompletion, "holds", [first, second])
    with cluster(Side(), Side(), settings=without_repetitions()) as made:
        source, sink = made.prefill[0], made.decode[0]
        end = sink.manager._runtime.requests.end

        def busy(ended: Any) -> None:
            end(ended)
            second.set()
            time.sleep(0.05)

        monkeypatch.setattr(sink.manager._runtime.requests, "end", busy)
        requests = [new_request_id() for _ in range(2)]
        ids = made.pages(sink, 64).ids
        pages = [PageList(ids[: len(ids) // 2]), PageList(ids[len(ids) // 2 :])]
        receivers = [receive(sink, request, each, need=(0, 29)) for request, each in zip(requests, pages, strict=True)]
        senders = [send(source, request, made.pages(source, 29), 29) for request in requests]
        until(lambda: sum(isinstance(report, EarlyComplete) for report in reports) == 2)
        first.set()
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (*receivers, *senders))


@pytest.mark.usefixtures("reports")
def test_early_completion_with_lost_doubled_and_delayed_messages() -> None:
    with cluster(Side(tp=2), Side(), settings={"backend": SpansWithCompletion, "limits": Limits(retry_s=0.02)}) as made:
        for seed, rank in enumerate(made.prefill + made.decode):
            mistreat(rank.manager, MessageFaults(seed=seed, lose=0.2, double=0.2, delay=0.3, delay_s=(0.0, 0.02)))
        for _ in range(10):
            events = made.transfer(61)
            assert all(event.ok for event in events), [event.error for event in events]
