"""The thread that moves bytes: waits for ready events, binds rows to addresses, posts copies or packs them into the peer's
ring, polls them to their end, and unpacks what has arrived in this side's rings.

It takes jobs and reports what became of each; it knows neither messages nor requests.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from disagg.backends.base import (
    Backend,
    Op,
    PreparedSpans,
    Preparing,
    Progressive,
    RemotePeer,
    SpanWriter,
    Transfer,
    TransferStatus,
)
from disagg.copies import Addresses, CopyBatch
from disagg.errors import DisaggError, RemoteProtocolError
from disagg.spans import SpanBatch
from disagg.staging import RemoteRing, SlotPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_SLEEP_S = 20e-6
MAX_SLEEP_S = 500e-6
IDLE_PROGRESS_S = 1e-3
UNSETTLED_POLL_S = 0.05
MOST_AT_ONCE = 8
"""Slots packed or unpacked before anyone is told, and never more than half a ring: telling costs both sides as much as
several slots' copies, and the other half keeps the other side busy.
"""
QUICK_ROWS = 256
QUICK_NBYTES = 1 << 20
"""What is bound, and what is posted or unpacked, in the thread that hands it over; more is left to the worker's own."""
SLOW_SLOT_S = 0.25
"""How long a packed write may take before a spare stands in for its slot, so that its peer does not hold up the others."""


class ReadyEvent(Protocol):
    """What a caller gives to say when its kernels are done with memory; a torch or CUDA event is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class PackedStream(Protocol):
    """One side's bytes of a request, in an order that both sides know. Ranges are inside `total`."""

    @property
    def total(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...

    def gather(self, offset: int, nbytes: int, staging_address: int, /) -> None:
        """Pack the bytes `[offset, offset + nbytes)` into a slot; done on return."""

    def scatter(self, offset: int, nbytes: int, staging_address: int, /) -> None:
        """Unpack a slot into the bytes `[offset, offset + nbytes)`; done on return."""


class ListedStream(PackedStream, Protocol):
    """A stream that can say which copies packing it takes."""

    def copies(self, offset: int, nbytes: int, staging_address: int, /) -> tuple[Addresses, Addresses, Addresses]:
        """Sources, destinations and lengths of what `gather` would copy."""


class SourcePacked(Protocol):
    """Bytes of a request that are packed in the order in which they lie at their destination, and written right there."""

    @property
    def total(self) -> int: ...

    def gather(self, offset: int, nbytes: int, staging_address: int, /) -> None:
        """Pack the bytes `[offset, offset + nbytes)` into a slot; done on return."""

    def copies(self, offset: int, nbytes: int, staging_address: int, /) -> CopyBatch:
        """From the slot to where these bytes belong."""


@dataclass(frozen=True)
class Bound:
    """What a job comes to: pieces that go one by one, over `prepared` span classes where those are given; a stream that is
    packed at the source alone; and one that goes packed through the peer's ring, `parts` of which say what is in it.
    `listed` is that one, where the engine is to collect its pieces from where they lie.
    """

    direct: CopyBatch | SpanBatch
    stream: PackedStream
    parts: Any = ()
    prepared: PreparedSpans | None = None
    source: SourcePacked | None = None
    listed: ListedStream | None = None

    @property
    def nbytes(self) -> int:
        return self.direct.total_nbytes + self.stream.total + (self.source.total if self.source is not None else 0)


@dataclass(frozen=True)
class Job:
    """Copies to make: `bind` gives them once `ready` has passed, and may raise; nothing is posted after `cancelled()`.
    `num_rows`: so many page ids and slots there are to bind.
    """

    ticket: Hashable
    peer: RemotePeer
    bind: Callable[[], Bound]
    cancelled: Callable[[], bool]
    ready: ReadyEvent | None = None
    ring: RemoteRing | None = None
    num_rows: int = 0


@dataclass(frozen=True)
class Unpack:
    """A slot of this side's ring to be scattered: `nbytes` of `stream()`, from `offset` on, lie at `address`."""

    token: Any
    stream: Callable[[], PackedStream]
    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SlotFilled:
    """Report: a slot of the peer's ring at address `ring` holds `nbytes` of the job's stream, from `offset` on."""

    ticket: Hashable
    ring: int
    slot: int
    sequence: int
    parts: Any
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Unpacked:
    """Report: a slot was scattered, or could not be."""

    token: Any
    nbytes: int
    error: str
    seconds: float


@dataclass
class Settled:
    """Report: what became of a job. `unsettled`: the engine cannot tell yet; another report follows when it can. Of `nbytes`,
    `packed` went through the peer's ring, `source_packed` were packed here alone.
    """

    ticket: Hashable
    error: str = ""
    unsettled: bool = False
    nbytes: int = 0
    packed: int = 0
    source_packed: int = 0
    pieces: int = 0
    bind_s: float = 0.0
    pack_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0


Report = Settled | SlotFilled | Unpacked


@dataclass
class _Slot:
    """A packed write under way: from a local slot, or from where the pieces lie, into a slot of the peer's ring; or from a
    local slot to where its bytes belong.
    """

    transfer: Transfer
    local: int | None
    filled: SlotFilled | None
    posted_at: float
    replaced: bool = False


@dataclass
class _Active:
    """A job that was bound: what it has in flight, and how much of its streams has been packed."""

    job: Job
    report: Settled
    bound: Bound
    started_at: float
    posted: bool = False
    direct: Transfer | None = None
    slots: list[_Slot] = field(default_factory=list)
    source_offset: int = 0
    offset: int = 0
    error: str = ""
    told_unsettled: bool = False

    @property
    def packing(self) -> bool:
        return (self.packing_at_source or self.offset < self.bound.stream.total) and not self.error

    @property
    def packing_at_source(self) -> bool:
        return self.bound.source is not None and self.source_offset < self.bound.source.total and not self.error

    def in_flight(self) -> bool:
        return self.direct is not None or bool(self.slots)


class TransferWorker:
    """One supervised thread over one backend. `on_reports` is called in it when there is something to report; `on_death` if
    it fails.

    Whoever hands over work calls `attend` next: what is quick is done there and then, in the caller's thread, unless this
    one is at it; a request of a few pages wakes no thread that way.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        slots: SlotPool | None,
        on_reports: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._progressive = backend if isinstance(backend, Progressive) else None
        self._preparing = backend if isinstance(backend, Preparing) else None
        self._slots = slots
        self._on_reports = on_reports
        self._reports: deque[Report] = deque()
        self._on_death = on_death
        self._new: deque[Job] = deque()
        self._unpacks: deque[Unpack] = deque()
        self._waiting: list[Job] = []
        self._active: list[_Active] = []
        self._turning = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"disagg-transfers-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Jobs that have not settled."""
        return len(self._new) + len(self._waiting) + len(self._active)

    def submit(self, job: Job) -> None:
        """Take a job, for the next `attend`."""
        self._new.append(job)

    def unpack(self, slots: Iterable[Unpack]) -> None:
        """Take slots that have arrived, for the next `attend`."""
        self._unpacks.extend(slots)

    def attend(self) -> list[Report]:
        """Do at once what is quick of what was handed over, have the thread see to the rest, and take the reports so far; in
        one thread, always the same.
        """
        if self._is_quick() and self._turning.acquire(blocking=False):
            try:
                self._unpack_some()
                for active in self._take_new():
                    if active.bound.nbytes <= QUICK_NBYTES:
                        self._advance(active)
                self._drop_ended()
            finally:
                self._turning.release()
        if self._new or self._unpacks or self._waiting or self._active:
            self._wake.set()
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _is_quick(self) -> bool:
        """Whether binding the new jobs and unpacking what has arrived does not hold up the caller."""
        if not (self._new or self._unpacks):
            return False
        quick = all(job.num_rows <= QUICK_ROWS for job in tuple(self._new))
        return quick and sum(unpack.nbytes for unpack in tuple(self._unpacks)) <= QUICK_NBYTES

    def stop(self, timeout_s: float) -> bool:
        """Take no more and end; whether the thread has ended in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("transfer thread died")
            self._on_death(error)

    def _loop(self) -> None:
        sleep_s = MIN_SLEEP_S
        while True:
            self._wake.clear()
            if self._stopping:  # looked at after the clear, or the wake that says so could be lost
                return
            with self._turning:
                busy = self._turn()
            if self._reports:
                self._on_reports()
            sleep_s = MIN_SLEEP_S if busy else min(sleep_s * 2, MAX_SLEEP_S)
            if busy:
                continue
            if self._waiting or any(a.in_flight() and not a.told_unsettled for a in self._active):
                time.sleep(sleep_s)
                continue
            self._wake.wait(self._idle_s())
            if self._progressive is not None:
                self._progressive.progress()

    def _turn(self) -> int:
        """Unpack, begin and advance what there is; how much has changed. One thread at a time."""
        unpacked, begun = self._unpack_some(), len(self._take_new())
        advanced = sum(self._advance(active) for active in self._active)
        self._drop_ended()
        return unpacked + begun + advanced

    def _idle_s(self) -> float | None:
        if self._progressive is not None:
            return IDLE_PROGRESS_S
        return UNSETTLED_POLL_S if self._active else None

    def _unpack_some(self) -> int:
        """Scatter slots that have arrived, not more than are soon to be given back; how many."""
        count = min(len(self._unpacks), MOST_AT_ONCE)
        for _ in range(count):
            unpack = self._unpacks.popleft()
            started, error = time.perf_counter(), ""
            try:
                _scatter(unpack)
            except DisaggError as problem:
                error = str(problem)
            self._reports.append(Unpacked(unpack.token, unpack.nbytes, error, time.perf_counter() - started))
        return count

    def _take_new(self) -> list[_Active]:
        """Bind every job whose event has passed; those for which that was possible."""
        jobs, self._waiting = self._waiting, []
        while self._new:
            jobs.append(self._new.popleft())
        begun = []
        for job in jobs:
            if job.ready is not None and not job.cancelled() and not job.ready.query():
                self._waiting.append(job)
            elif (active := self._bind(job)) is not None:
                begun.append(active)
        self._active += begun
        return begun

    def _bind(self, job: Job) -> _Active | None:
        report = Settled(job.ticket)
        if job.cancelled():
            report.error = "the attempt ended before anything was posted"
            self._reports.append(report)
            return None
        started = time.perf_counter()
        bound = self._attempt(job.bind, report)
        if bound is None:
            return None
        bound_at = time.perf_counter()
        report.bind_s = bound_at - started
        return _Active(job, report, bound, bound_at)

    def _attempt(self, run: Callable[[], T], report: Settled) -> T | None:
        """What `run` gives, or `None`: one request's error ends that request only."""
        try:
            return run()
        except DisaggError as error:
            report.error = str(error)
        except Exception as error:
            logger.exception("a transfer could not be posted")
            report.error = f"{type(error).__name__}: {error}"
        self._reports.append(report)
        return None

    def _post(
        self, job: Job, copies: CopyBatch | SpanBatch, report: Settled, prepared: PreparedSpans | None = None
    ) -> Transfer:
        started = time.perf_counter()
        if isinstance(copies, CopyBatch):
            transfer = self._backend.submit(Op.WRITE, job.peer, copies)
        else:
            assert isinstance(self._backend, SpanWriter)
            assert prepared is not None
            transfer = self._backend.submit_spans(prepared, copies)
        report.post_s += time.perf_counter() - started
        report.nbytes += copies.total_nbytes
        report.pieces += len(copies)
        return transfer

    def _advance(self, active: _Active) -> int:
        """Post what goes directly, pack what there is room for, and see what has settled; how much has changed."""
        posted = self._post_direct(active)
        return posted + self._pack(active) + self._poll(active)

    def _post_direct(self, active: _Active) -> int:
        if active.posted:
            return 0
        active.posted = True
        bound = active.bound
        if self._fail_if_cancelled(active):
            return 1
        if len(bound.direct) or not active.packing:
            post = functools.partial(self._post, active.job, bound.direct, active.report, bound.prepared)
            active.direct = self._attempt(post, active.report)
            active.error = active.report.error
        return 1

    def _drop_ended(self) -> None:
        self._active = [active for active in self._active if not active.posted or active.packing or active.in_flight()]

    def _pack(self, active: _Active) -> int:
        """Pack at the source; then fill slots of the peer's ring once there are enough to be worth telling of. How many."""
        if not active.packing:
            return 0
        if self._fail_if_cancelled(active):
            return 0
        if active.packing_at_source:
            return sum(itertools.takewhile(bool, (self._pack_one_at_source(active) for _ in range(MOST_AT_ONCE))))
        ring = active.job.ring
        assert ring is not None
        wanted = min(MOST_AT_ONCE, max(1, ring.ring.num_slots // 2))
        left = -(-(active.bound.stream.total - active.offset) // ring.ring.slot_nbytes)
        if ring.num_free < min(wanted, left):
            return 0
        packed = 0
        while packed < wanted and self._pack_one(active):
            packed += 1
        return packed

    def _fail_if_cancelled(self, active: _Active) -> bool:
        if active.job.cancelled():
            active.error = active.error or "the attempt ended before everything was sent"
            if not active.in_flight():
                self._finish(active)
        return bool(active.error)

    def _pack_one_at_source(self, active: _Active) -> bool:
        """Gather the next bytes into a slot and post them to where they belong; `False` as for `_pack_one`."""
        if not active.packing_at_source or self._fail_if_cancelled(active):
            return False
        stream = active.bound.source
        assert stream is not None
        assert self._slots is not None
        local = self._slots.take()
        if local is None:
            return False
        started, offset = time.perf_counter(), active.source_offset
        nbytes = min(self._slots.slot_nbytes, stream.total - offset)
        try:
            stream.gather(offset, nbytes, local)
            active.report.pack_s += time.perf_counter() - started
            transfer = self._post(active.job, stream.copies(offset, nbytes, local), active.report)
        except DisaggError as error:
            self._fail_slot(active, local, error)
            return False
        active.report.source_packed += nbytes
        active.source_offset += nbytes
        active.slots.append(_Slot(transfer, local, None, started))
        return True

    def _fail_slot(self, active: _Active, local: int | None, error: DisaggError) -> None:
        """What was packed could not be posted."""
        self._give_back(local)
        active.error = str(error)
        if not active.in_flight():
            self._finish(active)

    def _pack_one(self, active: _Active) -> bool:
        """Gather the next bytes of a stream into a slot and post it; `False` where none are left, or no slot is free."""
        if not active.packing or self._fail_if_cancelled(active):
            return False
        ring, stream = active.job.ring, active.bound.stream
        assert ring is not None
        assert self._slots is not None
        listed = active.bound.listed
        local = self._slots.take() if listed is None else None
        if local is None and listed is None:
            return False
        remote = ring.take()
        if remote is None:
            self._give_back(local)
            return False
        slot, sequence = remote
        started = time.perf_counter()
        nbytes = min(ring.ring.slot_nbytes, self._slots.slot_nbytes, stream.total - active.offset)
        try:
            if local is None:
                transfer = self._post_pieces(active, ring.ring.slot(slot), nbytes)
            else:
                stream.gather(active.offset, nbytes, local)
                active.report.pack_s += time.perf_counter() - started
                transfer = self._post_slot(active, ring, slot, local, nbytes)
            active.report.packed += nbytes
        except DisaggError as error:
            self._fail_slot(active, local, error)
            return False
        filled = SlotFilled(active.job.ticket, ring.ring.address, slot, sequence, active.bound.parts, active.offset, nbytes)
        active.offset += nbytes
        active.slots.append(_Slot(transfer, local, filled, started))
        return True

    def _give_back(self, local: int | None, *, replaced: bool = False) -> None:
        if local is not None:
            assert self._slots is not None
            self._slots.give_back(local, replaced=replaced)

    def _post_pieces(self, active: _Active, address: int, nbytes: int) -> Transfer:
        """Have the engine collect the next pieces of a stream into a slot of the ring: one post, as of a packed slot."""
        listed, report = active.bound.listed, active.report
        assert listed is not None
        started = time.perf_counter()
        transfer = self._backend.submit(
            Op.WRITE, active.job.peer, CopyBatch.of_columns(*listed.copies(active.offset, nbytes, address))
        )
        report.post_s += time.perf_counter() - started
        report.nbytes += nbytes
        report.pieces += 1
        return transfer

    def _post_slot(self, active: _Active, ring: RemoteRing, slot: int, local: int, nbytes: int) -> Transfer:
        """Write a local slot into one of the ring; whole ones are prepared once, where the engine can."""
        started = time.perf_counter()
        if self._preparing is None or nbytes != ring.ring.slot_nbytes:
            transfer = self._backend.submit(Op.WRITE, active.job.peer, _one(local, ring.ring.slot(slot), nbytes))
        else:
            prepared = ring.prepared.get((local, slot))
            if prepared is None:
                copies = _one(local, ring.ring.slot(slot), nbytes)
                prepared = ring.prepared[local, slot] = self._preparing.prepare(Op.WRITE, active.job.peer, copies)
            transfer = prepared.post()
        active.report.post_s += time.perf_counter() - started
        active.report.nbytes += nbytes
        active.report.pieces += 1
        return transfer

    def _poll(self, active: _Active) -> int:
        """Take what has settled; report the job once nothing is left. How much has settled."""
        if not active.in_flight():
            return 0
        settled = 0
        if active.direct is not None and self._take_status(active, active.direct):
            active.direct = None
            settled += 1
        left = []
        for slot in active.slots:
            assert self._slots is not None
            if not self._take_status(active, slot.transfer):
                if slot.local is not None and not slot.replaced and time.perf_counter() - slot.posted_at > SLOW_SLOT_S:
                    slot.replaced = self._slots.replace()
                left.append(slot)
                continue
            self._give_back(slot.local, replaced=slot.replaced)
            settled += 1
            if slot.filled is None:
                continue
            assert active.job.ring is not None
            if slot.transfer.poll() is TransferStatus.DONE:
                self._reports.append(slot.filled)
            else:
                active.job.ring.credit(slot.filled.slot, slot.filled.sequence)
        active.slots = left
        if not active.in_flight() and not active.packing:
            self._finish(active)
        return settled

    def _take_status(self, active: _Active, transfer: Transfer) -> bool:
        """Whether a transfer has settled; its error becomes the job's."""
        status = transfer.poll()
        if status is TransferStatus.PENDING:
            return False
        if status is not TransferStatus.DONE:
            active.error = active.error or transfer.error or "the transfer failed"
        if status is TransferStatus.UNSETTLED:
            if not active.told_unsettled:
                active.told_unsettled = True
                self._reports.append(Settled(active.job.ticket, error=active.error, unsettled=True))
            return False
        transfer.close()
        return True

    def _finish(self, active: _Active) -> None:
        active.report.error = active.error
        active.report.wire_s = time.perf_counter() - active.started_at
        self._reports.append(active.report)


def _one(source: int, destination: int, nbytes: int) -> CopyBatch:
    return CopyBatch(*([value] for value in (source, destination, nbytes)))  # type: ignore[arg-type]


def _scatter(unpack: Unpack) -> None:
    """Raises `RemoteProtocolError` where the stream does not have what is said to be in the slot."""
    stream = unpack.stream()
    if not 0 <= unpack.offset < unpack.offset + unpack.nbytes <= stream.total:
        found = f"[{unpack.offset}, +{unpack.nbytes})"
        raise RemoteProtocolError(f"packed stream of {stream.total} bytes: expected a range of it, found {found}")
    stream.scatter(unpack.offset, unpack.nbytes, unpack.address)
