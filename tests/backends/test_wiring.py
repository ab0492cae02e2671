"""Managers with engines and packers that compute addresses. The reference implementation replaces the kernels: no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from disagg import new_request_id
from disagg.backends.base import Op, RemotePeer, StagingShape, Transfer, TransferStatus
from disagg.backends.cuda.work_list import ShapeTable, encode_shapes, encode_work_list, work_list_nbytes
from disagg.backends.local import LocalBackend
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendError, ConfigError
from disagg.core.leases import Lease
from disagg.core.memory import Device, MemoryRegion
from disagg.core.rows import Pages
from disagg.core.spans import SpanBatch, SpanShape
from disagg.protocol.messages import MAX_PAYLOAD_NBYTES, Complete, CopyBegun, EarlyComplete, Message, decode
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Event, Limits, RequestKey
from disagg.requests import RequestHandle
from disagg.runtime import early_completion
from disagg.runtime.channel import Channel
from disagg.testing.faults import MessageFaults, mistreat
from disagg.transfer import active_job
from disagg.transfer.pool_memory import GPU_STAGING, SPIN_S, GpuPacker, PoolMemory
from harness.reference_kernels import SpanLaunch, span_pieces
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, ask_again_and_again, clear, cluster, receive, send

TILE = 256
HND = "page kv_head token dim"
SIDES = [
    (Side(tp=2), Side(tp=1, page=16)),
    (Side(tp=1, axes=HND), Side(tp=4, page=8)),
    (Side(tp=2, pp=2, stages=((0,), (1, 2))), Side(tp=2, axes=HND)),
]


@dataclass(frozen=True, eq=False)
class HostSpans:
    """Span classes, and optionally a work list over them, as words in host memory."""

    table: ShapeTable
    words: Any = None
    work_list: _native.WorkList | None = None
    peer: RemotePeer | None = None

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes

    @classmethod
    def of(cls, shapes: Sequence[SpanShape], peer: RemotePeer | None = None) -> HostSpans:
        return cls(encode_shapes(shapes, lambda addresses, _nbytes, _side: addresses), peer=peer)

    def upload(self, batch: SpanBatch) -> HostSpans:
        words = np.zeros(work_list_nbytes(batch) // 8 + 1, np.uint64)
        encode_work_list(batch, self.table, tile=TILE, out=words)
        return HostSpans(self.table, words, batch.core, self.peer)

    def pieces(self, low: int, high: int, **linear: int) -> CopyBatch:
        assert self.work_list is not None
        launch = SpanLaunch(self.words, self.table.words, *self.work_list.tiles(low, high), TILE, low, high, **linear)
        rows = [(p.source, p.destination, p.nbytes) for p in span_pieces(launch) if p.nbytes]
        return CopyBatch(*np.array(rows, np.uint64).reshape(-1, 3).T)


@dataclass
class DelayedCopies:
    """Copies that the second call of `query` makes."""

    copies: CopyBatch
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        if HostMover.problem:
            raise BackendError(HostMover.problem)
        if self.asked == 2:
            columns = (column.tolist() for column in (self.copies.source, self.copies.destination, self.copies.nbytes))
            for source, destination, nbytes in zip(*columns, strict=True):
                ctypes.memmove(destination, source, nbytes)
            HostMover.moved += self.copies.total_nbytes
        return self.asked > 1


class HostMover:
    """`GpuMover` in host memory."""

    moved = held = 0
    problem = ""

    def prepare(self, shapes: Sequence[SpanShape]) -> HostSpans:
        return HostSpans.of(shapes)

    def upload(self, shapes: HostSpans, batch: SpanBatch) -> HostSpans:
        HostMover.held += 1
        return shapes.upload(batch)

    def gather(self, work_list: HostSpans, offset: int, nbytes: int, address: int) -> DelayedCopies:
        return DelayedCopies(work_list.pieces(offset, offset + nbytes, linear_destination=address))

    def scatter(self, work_list: HostSpans, offset: int, nbytes: int, address: int) -> DelayedCopies:
        return DelayedCopies(work_list.pieces(offset, offset + nbytes, linear_source=address))

    def release(self, work_list: HostSpans) -> None:
        HostMover.held -= 1


class Spans(LocalBackend):
    """A backend that accepts span classes and rejects addresses."""

    posted = 0

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> HostSpans:
        assert op is Op.WRITE
        return HostSpans.of(shapes, peer)

    def submit_spans(self, prepared: HostSpans, batch: SpanBatch) -> Transfer:
        assert batch.shapes is prepared.shapes
        assert prepared.peer is not None
        Spans.posted += 1
        copies = prepared.upload(batch).pieces(0, batch.total_nbytes) if len(batch) else CopyBatch.concatenate([])
        return super().submit(Op.WRITE, prepared.peer, copies)

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Any:
        raise AssertionError("addresses were computed on the host")


class ThreadTransfer:
    """A transfer that another thread carries out. Its completion is set once it is done, and never if it fails."""

    def __init__(self, copy: Callable[[], Transfer], *, fails: bool, hold: threading.Event | None) -> None:
        self.status, self.error = TransferStatus.PENDING, "the GPU has fallen off the bus" if fails else None
        self.sign = _native.Flag()
        self._copy, self._fails, self._hold = copy, fails, hold
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        if self._hold is None:
            time.sleep(1e-3)
        else:
            self._hold.wait(DEADLINE_S)
        if self._fails:
            self.status = TransferStatus.FAILED
            return
        self._copy()
        self.status = TransferStatus.DONE
        self.sign.set()

    def poll(self) -> TransferStatus:
        return self.status

    def close(self) -> None:
        assert self.status is not TransferStatus.PENDING


class SpansWithCompletion(Spans):
    """Transfers that go on by themselves, like a kernel, and have a completion."""

    fails = False
    holds: ClassVar[list[threading.Event]] = []
    """Each of the next transfers waits for one of these events."""

    def submit_spans(self, prepared: HostSpans, batch: SpanBatch) -> Transfer:
        hold = SpansWithCompletion.holds.pop(0) if SpansWithCompletion.holds else None
        return ThreadTransfer(
            functools.partial(super().submit_spans, prepared, batch), fails=SpansWithCompletion.fails, hold=hold
        )


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages sent about the progress of copies. Every transfer counts as long, and threads busy-poll."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    monkeypatch.setattr(active_job, "LONG_NBYTES", 0)
    found: list[Message] = []
    send = Channel.send

    def noting(self: Channel, address: str, data: bytes) -> bool:
        message = decode(data)
        if isinstance(message, CopyBegun | EarlyComplete | Complete):
            found.append(message)
        return send(self, address, data)

    monkeypatch.setattr(Channel, "send", noting)
    return found


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


def test_early_completion_waits_until_one_copy_is_left(reports: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies are pending when the server calls `finish`; then the first of them ends."""
    first, second = threading.Event(), threading.Event()
    monkeypatch.setattr(SpansWithCompletion, "holds", [first, second])
    monkeypatch.setattr(early_completion, "SPIN_S", DEADLINE_S)
    never = 10 * DEADLINE_S
    limits, links = (
        Limits(retry_s=never, max_retry_s=never),
        ConnectionLimits(heartbeat_s=never, heartbeat_timeout_s=10 * never),
    )
    settings = {"backend": SpansWithCompletion, "limits": limits, "connection_limits": links}
    with cluster(Side(), Side(), settings=settings) as made:
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


def test_a_receiver_that_may_have_stopped_polling_gets_a_final_complete(
    reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_completion, "SPIN_S", 0.0)
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion}) as made:
        assert all(event.ok for event in made.transfer(61))
    assert any(isinstance(report, EarlyComplete) for report in reports)
    assert any(isinstance(report, Complete) for report in reports)


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


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_ends_before_its_completion_flag_is_set(
    side: str, how: str, reports: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side that ends it gets an error, and rows return only after the copy; the other side may succeed."""
    going = threading.Event()
    monkeypatch.setattr(SpansWithCompletion, "holds", [going])
    deadlines = {each: 0.3 if how == "deadline" and each == side else DEADLINE_S for each in ("prefill", "decode")}
    with cluster(Side(), Side(), settings={"backend": SpansWithCompletion}) as made:
        request, pages = new_request_id(), [made.pages(rank, 61) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[1], need=(0, 61), deadline_s=deadlines["decode"])
        sender = send(made.prefill[0], request, pages[0], 61, deadline_s=deadlines["prefill"])
        until(lambda: any(isinstance(report, EarlyComplete) for report in reports))
        if how == "abort":
            (sender if side == "prefill" else receiver).abort("enough")
        first = (sender if side == "prefill" else receiver).wait(timeout_s=DEADLINE_S)
        assert not first.ok
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
    never = 10 * DEADLINE_S
    limits, links = (
        Limits(retry_s=never, max_retry_s=never),
        ConnectionLimits(heartbeat_s=never, heartbeat_timeout_s=10 * never),
    )
    settings = {"backend": SpansWithCompletion, "limits": limits, "connection_limits": links}
    with cluster(Side(), Side(), settings=settings) as made:
        source, sink = made.prefill[0], made.decode[0]
        end = sink.manager._runtime.requests.end

        def busy(ended: Any) -> None:
            end(ended)
            second.set()
            time.sleep(0.05)

        monkeypatch.setattr(sink.manager._runtime.requests, "end", busy)
        requests = [new_request_id() for _ in range(2)]
        receivers = [receive(sink, request, made.pages(sink, 29), need=(0, 29)) for request in requests]
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


class Packing(LocalBackend):
    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=1000, num_slots=3, num_rings=8)


@pytest.mark.parametrize("spin_s", [0.0, 5e-3])
@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_an_engine_that_computes_addresses(prefill: Side, decode: Side, spin_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolMemory, "spin_s", spin_s)
    before = Spans.posted
    with cluster(prefill, decode, settings={"backend": Spans}) as made:
        for first_token, num_tokens in ((0, 37), (5, 61)):
            events = made.transfer(num_tokens, first_token=first_token, chunks=(num_tokens // 2,))
            assert all(event.ok for event in events), [event.error for event in events]
    assert Spans.posted > before


@pytest.mark.parametrize("by_events", [False, True])
def test_a_server_that_polls_does_not_delay_other_threads(by_events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads that busy-poll; `tests/manager/test_requests.py` tests threads that sleep."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    with cluster(Side(), Side(), settings={"backend": Spans}) as made:
        assert all(event.ok for event in ask_again_and_again(made, by_events=by_events))


@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_packing_by_kernels(prefill: Side, decode: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of 1,000 bytes cut pieces at any byte; threads busy-poll, as for pools on a GPU."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    before = HostMover.moved
    with cluster(prefill, decode, settings={"backend": Packing}, num_layers=3) as made:
        events = made.transfer(61, first_token=5, chunks=(30,))
        assert all(event.ok for event in events), [event.error for event in events]
    assert HostMover.moved > before


def test_packing_gives_back_its_gpu_buffers_when_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Immediately, without garbage collection, and even if the server keeps its handles."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    with cluster(Side(tp=2), Side(), settings={"backend": Packing}) as made:
        gc.collect()
        monkeypatch.setattr(HostMover, "held", 0)
        gc.disable()
        try:
            request = new_request_id()
            receiver = receive(made.decode[0], request, made.pages(made.decode[0], 61), need=(0, 61))
            senders = [send(rank, request, made.pages(rank, 61), 61) for rank in made.prefill]
            assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
            until(lambda: HostMover.held == 0)
        finally:
            gc.enable()


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_kernel_that_fails_ends_its_request(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written and nothing hangs; the next request succeeds through the same slots."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    begin = getattr(HostMover, kernel)

    def failing(*arguments: Any) -> DelayedCopies:
        monkeypatch.setattr(HostMover, "problem", "the GPU has fallen off the bus")
        work: DelayedCopies = begin(*arguments)
        return work

    with cluster(Side(), Side(), settings={"backend": Packing}) as made, monkeypatch.context() as patch:
        patch.setattr(HostMover, kernel, failing)
        request, pages = new_request_id(), [made.pages(rank, 61) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[1], need=(0, 61))
        sender = send(made.prefill[0], request, pages[0], 61)
        ends = receiver.wait(timeout_s=DEADLINE_S), sender.wait(timeout_s=DEADLINE_S)
        assert not any(event.ok for event in ends)
        assert any("fallen off the bus" in str(event.error) for event in ends)
        patch.undo()
        monkeypatch.setattr(HostMover, "problem", "")
        assert all(event.ok for event in made.transfer(61))


def test_waiting_threads_wake_when_copying_begins_and_when_it_ends() -> None:
    handle = RequestHandle(cast("Any", SimpleNamespace(spin_s=1e-3)), RequestKey(b"0" * 16, 0), "prefill", None)
    ended: list[Event] = []
    threads = [threading.Thread(target=lambda: ended.append(handle.wait(timeout_s=DEADLINE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    handle.begin()
    handle.begin()
    with pytest.raises(TimeoutError, match="not ended within"):
        handle.wait(timeout_s=0.02)
    assert not ended
    event = Event(handle.key, "prefill", "receive", ok=True, payload=b"", error=None, lease=Lease(), tag=None)
    handle.begin()
    handle.end(event)
    handle.wake()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ended == [event] * 3
    assert handle.wait(timeout_s=0) is event


def test_staging_depends_on_the_device_of_the_pools() -> None:
    gpu = [MemoryRegion(4096, 64, Device("cuda", 1)), MemoryRegion(8192, 64, Device("cuda", 1))]
    host = [MemoryRegion(1 << 20, 64)]
    shape = StagingShape(pack_below=100)
    assert PoolMemory(host).staging(shape) is shape
    assert (PoolMemory(host).spin_s, PoolMemory(gpu).spin_s) == (0.0, SPIN_S)
    assert PoolMemory(host).allocate_on_device(64) is None
    assert PoolMemory(host).packer(()) is None
    assert PoolMemory(gpu).staging(shape) == GPU_STAGING
    assert PoolMemory(gpu).staging(StagingShape()).pack_below == 0
    assert PoolMemory(gpu + host).staging(shape).pack_below == 0
    assert PoolMemory(gpu + host).packer(()) is None
    assert PoolMemory(gpu).staging(shape, pack_below=7) == dataclasses.replace(GPU_STAGING, pack_below=7)
    with pytest.raises(ConfigError, match="pools on several devices"):
        PoolMemory(gpu + host).staging(shape, pack_below=7)


def test_checksums_run_on_the_device_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.arange(64, dtype=np.uint8)
    base = content.ctypes.data
    memory = PoolMemory([MemoryRegion(base, 64), MemoryRegion(4096, 64, Device("cuda", 3))])
    asked: list[int] = []
    monkeypatch.setattr(memory, "mover", lambda ordinal: SimpleNamespace(digest=lambda *_, **__: asked.insert(0, ordinal)))
    runs = np.array([[0, 0, 0, 0, 2]])
    what: dict[str, Any] = {"row_stride": 8, "token_stride": 4, "itemsize": 1, "seed": 1}
    found = memory.digest(np.array([0]), np.array([base], np.uint64), runs, ((4, 1, 0),), **what)
    assert found == _native.digest(np.array([0]), np.array([base], np.uint64), runs, ((4, 1, 0),), **what)
    assert not asked
    assert memory.digest(np.array([0]), np.array([4100], np.uint64), runs, (), **what) is None
    assert asked == [3]
