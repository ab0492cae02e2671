"""The thread that moves bytes: waits for ready events, binds rows to addresses, posts copies or packs them into the peer's
ring, polls them to their end, and unpacks what has arrived in this side's rings.

It takes jobs and reports what became of each; it knows neither messages nor requests.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from disagg.backends.abilities import PreparedSpans, SpanWriter
from disagg.backends.base import Backend, Op, Transfer, TransferStatus
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import DisaggError, RemoteProtocolError
from disagg.core.spans import SpanBatch
from disagg.transfer.jobs import (
    QUICK_NBYTES,
    Begun,
    BoundTransfer,
    Job,
    PendingWork,
    Report,
    Settled,
    SlotFilled,
    Unpack,
    Unpacked,
)
from disagg.transfer.staging import SlotPool

logger = logging.getLogger(__name__)
T = TypeVar("T")
MIN_SLEEP_S = 20e-6
MAX_SLEEP_S = 500e-6
UNSETTLED_POLL_S = 0.05
MOST_AT_ONCE = 8
"""Slots unpacked before anyone is told: telling costs both sides as much as several slots' copies."""
QUICK_ROWS = 256
LONG_NBYTES = 16 << 20
"""What an engine that computes addresses is given at once, from which on its receiver is told that copying has begun."""
CANCELLED = "the attempt ended before everything was sent"
SLOW_SLOT_S = 0.25
"""How long a packed write may take before a spare stands in for its slot, so that its peer does not hold up the others."""


@dataclass
class _Slot:
    """A packed write under way: from a local slot, or from where the pieces lie, into a slot of the peer's ring; or from a
    local slot to where its bytes belong. First `packing`, where that goes on by itself, then the `transfer`.
    """

    local: int | None
    filled: SlotFilled | None
    started_at: float
    packing: PendingWork | None
    transfer: Transfer | None = None
    replaced: bool = False


@dataclass
class _Unpacking:
    """A slot that is being scattered."""

    unpack: Unpack
    passing: PendingWork
    started_at: float


@dataclass
class _Active:
    """A job that was bound: what it has in flight, and how much of its streams has been packed."""

    job: Job
    report: Settled
    bound: BoundTransfer
    started_at: float
    posted: bool = False
    direct: Transfer | None = None
    slots: list[_Slot] = field(default_factory=list)
    filled: list[SlotFilled] = field(default_factory=list)  # written, and not told yet
    source_offset: int = 0
    offset: int = 0
    error: str = ""
    told_unsettled: bool = False

    @property
    def packing(self) -> bool:
        return (self.packing_at_source or self.offset < self.bound.ring_nbytes) and not self.error

    @property
    def packing_at_source(self) -> bool:
        return self.bound.source is not None and self.source_offset < self.bound.source.total and not self.error

    def in_flight(self) -> bool:
        return self.direct is not None or bool(self.slots)


class TransferWorker:
    """One supervised thread over one backend. `on_reports` is called in it when there is something to report; `on_death` if
    it fails.

    Whoever hands over work calls `attend` next: what is quick is done there and then, in the caller's thread, unless this
    one is at it; a request of a few pages wakes no thread that way. With `calls_turns` everything is quick, and the caller
    looks after it by `turn`, until it has better to do and says so by `take_over`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        slots: SlotPool | None,
        calls_turns: bool = False,
        on_reports: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._span_writer = backend if isinstance(backend, SpanWriter) else None
        self._slots = slots
        self._calls_turns = calls_turns
        self._on_reports = on_reports
        self._reports: deque[Report] = deque()
        self._on_death = on_death
        self._new: deque[Job] = deque()
        self._unpacks: deque[Unpack] = deque()
        self._unpacking: deque[_Unpacking] = deque()
        self._waiting: list[_Active] = []
        self._active: list[_Active] = []
        self._turning = threading.Lock()
        self._wake = _native.Alarm()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"disagg-transfers-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_reports(self) -> bool:
        """Whether there is something to report; from any thread."""
        return bool(self._reports)

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
        if self._calls_turns:
            self.turn()
        else:
            self._do_what_is_quick()
            self.take_over()
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _do_what_is_quick(self) -> None:
        if not self._is_quick() or not self._turning.acquire(blocking=False):
            return
        try:
            self._unpack_some()
            for active in self._take_new():
                if active.bound.is_quick:
                    self._advance(active)
            self._drop_ended()
        finally:
            self._turning.release()

    def turn(self) -> bool:
        """Get on with what there is in the caller's thread, unless this one is at it; whether anything has changed."""
        if not self._has_work() or not self._turning.acquire(blocking=False):
            return False
        try:
            return self._turn() > 0
        finally:
            self._turning.release()

    def signs(self) -> tuple[list[_native.Completion], bool]:
        """What says that work under way is done, and whether that is so of all of it."""
        work: list[Any] = [unpacking.passing for unpacking in tuple(self._unpacking)]
        for active in tuple(self._active):
            if active.told_unsettled:
                continue  # nobody expects its end
            work += (slot.packing or slot.transfer for slot in active.slots)
            if active.direct is not None:
                work.append(active.direct)
        found = [getattr(each, "sign", None) for each in work]
        signs = [sign for sign in found if sign is not None]
        return signs, len(signs) == len(found) and not self._waiting

    def take_over(self) -> None:
        """Have the thread see to what there is."""
        if self._has_work():
            self._wake.set()

    def _has_work(self) -> bool:
        return bool(self._new or self._unpacks or self._waiting or self._active or self._unpacking)

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
        _native.enlist_thread()
        try:
            self._loop()
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("transfer thread died")
            self._on_death(error)

    def _loop(self) -> None:
        sleep_s = MIN_SLEEP_S
        while not self._stopping:
            with self._turning:
                busy = self._turn()
            told = bool(self._reports)
            if told:
                self._on_reports()
            over = told and self._calls_turns  # who calls for turns is awake now, and says so before it sleeps again
            if busy and not over:
                sleep_s = MIN_SLEEP_S
                continue
            if self._is_under_way() and not over:
                sleep_s = min(sleep_s * 2, MAX_SLEEP_S)
                _native.sleep(sleep_s)
                continue
            if self._wake.wait(self._idle_s()) and self._is_under_way():  # begun by whoever handed it over
                sleep_s = MIN_SLEEP_S

    def _is_under_way(self) -> bool:
        """Whether something goes on that is to be looked at again soon."""
        if self._waiting or self._unpacking:
            return True
        return any(active.in_flight() and not active.told_unsettled for active in self._active)

    def _turn(self) -> int:
        """Unpack, begin and advance what there is; how much has changed. One thread at a time."""
        changed = self._unpack_some() + len(self._take_new())
        for active in self._active:
            changed += self._advance(active)
        self._drop_ended()
        return changed

    def _idle_s(self) -> float:
        return UNSETTLED_POLL_S if self._active else math.inf

    def _unpack_some(self) -> int:
        """Scatter slots that have arrived, not more than are soon to be given back; how many were begun or done."""
        count = min(len(self._unpacks), MOST_AT_ONCE)
        for _ in range(count):
            unpack, started = self._unpacks.popleft(), time.perf_counter()
            try:
                passing = _scatter(unpack)
            except DisaggError as error:
                self._end_unpack(unpack, started, str(error))
                continue
            if passing is None:
                self._end_unpack(unpack, started)
            else:
                self._unpacking.append(_Unpacking(unpack, passing, started))
        while self._unpacking:
            first, problem = self._unpacking[0], ""
            try:
                if not first.passing.query():
                    break
            except DisaggError as error:
                problem = str(error)
            self._unpacking.popleft()
            self._end_unpack(first.unpack, first.started_at, problem)
            count += 1
        return count

    def _end_unpack(self, unpack: Unpack, started: float, error: str = "") -> None:
        self._reports.append(Unpacked(unpack.token, unpack.nbytes, error, time.perf_counter() - started))

    def _take_new(self) -> list[_Active]:
        """Bind every new job, and begin those whose event has passed; these."""
        bound, self._waiting = self._waiting, []
        while self._new:
            active = self._bind(self._new.popleft())
            if active is not None:
                bound.append(active)
        begun = []
        for active in bound:
            passed = self._has_passed(active)
            if passed:
                active.started_at = time.perf_counter()
                begun.append(active)
            elif passed is not None:
                self._waiting.append(active)
        self._active += begun
        return begun

    def _has_passed(self, active: _Active) -> bool | None:
        """Whether a job need not wait for its event any more; `None` where that has failed, and the job with it."""
        ready = active.job.ready
        if ready is None or active.job.cancelled():
            return True
        return self._attempt(lambda: bool(ready.query()), active.report)

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
            assert self._span_writer is not None
            assert prepared is not None
            transfer = self._span_writer.submit_spans(prepared, copies)
        _count_post(report, started, copies.total_nbytes, pieces=len(copies))
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
            if bound.prepared is not None and bound.nbytes >= LONG_NBYTES and not active.error:
                self._reports.append(Begun(active.job.ticket, getattr(active.direct, "sign", None)))
        return 1

    def _drop_ended(self) -> None:
        if self._active:
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
        wanted = self._told_at_once(active.job)
        left = -(-(active.bound.ring_nbytes - active.offset) // ring.ring.slot_nbytes)
        if ring.num_free < min(wanted, left):
            return 0
        packed = 0
        while packed < wanted and self._pack_one(active):
            packed += 1
        return packed

    def _told_at_once(self, job: Job) -> int:
        """How many slots are packed, and written, before their receiver is told, where so many are left."""
        assert job.ring is not None
        assert self._slots is not None
        return min(self._slots.at_once, max(1, job.ring.ring.num_slots // 2))

    def _fail_if_cancelled(self, active: _Active) -> bool:
        if active.job.cancelled():
            active.error = active.error or CANCELLED
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
        slot = _Slot(local, None, started, None)
        try:
            stream.gather(offset, nbytes, local)
            active.report.pack_s += time.perf_counter() - started
            slot.transfer = self._post(active.job, stream.copies(offset, nbytes, local), active.report)
        except DisaggError as error:
            self._fail_slot(active, slot, error)
            return False
        active.report.source_packed += nbytes
        active.source_offset += nbytes
        active.slots.append(slot)
        return True

    def _pack_one(self, active: _Active) -> bool:
        """Gather the next bytes of a stream into a slot; `False` where none are left, or no slot is free."""
        if not active.packing or self._fail_if_cancelled(active):
            return False
        ring, stream = active.job.ring, active.bound.stream
        assert ring is not None
        assert stream is not None
        assert self._slots is not None
        listed = active.bound.listed
        local = self._slots.take() if listed is None else None
        if local is None and listed is None:
            return False
        remote = ring.take()
        if remote is None:
            self._give_back(local)
            return False
        number, sequence = remote
        started = time.perf_counter()
        nbytes = min(ring.ring.slot_nbytes, self._slots.slot_nbytes, stream.total - active.offset)
        filled = SlotFilled(active.job.ticket, ring.ring.address, number, sequence, active.bound.parts, active.offset, nbytes)
        slot = _Slot(local, filled, started, None)
        try:
            if local is None:
                slot.transfer = self._post_pieces(active, ring.ring.slot(number), nbytes)
            else:
                slot.packing = stream.gather(active.offset, nbytes, local)
                if slot.packing is None:
                    slot.transfer = self._post_slot(active, slot)
        except DisaggError as error:
            self._fail_slot(active, slot, error)
            return False
        active.offset += nbytes
        active.slots.append(slot)
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
        _count_post(report, started, nbytes)
        report.packed += nbytes
        return transfer

    def _fail_slot(self, active: _Active, slot: _Slot, error: DisaggError) -> None:
        """A slot could not be packed or posted, so nothing more of its job is."""
        self._drop_slot(active, slot, error)
        if not active.in_flight():
            self._finish(active)

    def _drop_slot(self, active: _Active, slot: _Slot, error: Exception | None = None) -> None:
        """Nothing was written from a slot, nor will be: both sides' slots are free again."""
        if error is not None:
            active.error = active.error or str(error)
        self._give_back(slot.local, replaced=slot.replaced)
        if slot.filled is not None:
            assert active.job.ring is not None
            active.job.ring.credit(slot.filled.slot, slot.filled.sequence)

    def _post_slot(self, active: _Active, packed: _Slot) -> Transfer:
        """Write a slot that is packed into one of the ring."""
        ring, local, filled = active.job.ring, packed.local, packed.filled
        assert ring is not None
        assert local is not None
        assert filled is not None
        slot, nbytes = filled.slot, filled.nbytes
        started = time.perf_counter()
        active.report.pack_s += started - packed.started_at
        active.report.packed += nbytes
        transfer = self._backend.submit(Op.WRITE, active.job.peer, _one(local, ring.ring.slot(slot), nbytes))
        _count_post(active.report, started, nbytes)
        return transfer

    def _poll(self, active: _Active) -> int:
        """Take what has settled; report the job once nothing is left. How much has settled."""
        if not active.in_flight():
            return 0
        settled = 0
        if active.direct is not None and self._take_status(active, active.direct):
            active.direct = None
            settled += 1
        slots, active.slots, packing = active.slots, [], False
        for slot in slots:
            packing = packing or (slot.packing is not None and not self._has_packed(active, slot))
            if packing:
                active.slots.append(slot)
            elif slot.transfer is None:
                settled += 1
            elif not self._take_status(active, slot.transfer):
                assert self._slots is not None
                if slot.local is not None and not slot.replaced and time.perf_counter() - slot.started_at > SLOW_SLOT_S:
                    slot.replaced = self._slots.replace()
                active.slots.append(slot)
            else:
                self._settle_slot(active, slot, slot.transfer)
                settled += 1
        if active.filled and (not active.slots or active.error or len(active.filled) >= self._told_at_once(active.job)):
            self._reports += active.filled
            active.filled.clear()
        if not active.in_flight() and not active.packing:
            self._finish(active)
        return settled

    def _has_packed(self, active: _Active, slot: _Slot) -> bool:
        """Whether a slot is packed, and so posted, or dropped where nothing is to be posted any more."""
        assert slot.packing is not None
        try:
            if not slot.packing.query():
                return False
            slot.packing = None
            if active.job.cancelled():
                active.error = active.error or CANCELLED
            if active.error:
                self._drop_slot(active, slot)
            else:
                slot.transfer = self._post_slot(active, slot)
        except DisaggError as error:
            slot.packing = None
            self._drop_slot(active, slot, error)
        return True

    def _settle_slot(self, active: _Active, slot: _Slot, transfer: Transfer) -> None:
        """The engine has let go of a slot: its receiver is to be told, where it was written."""
        if transfer.poll() is not TransferStatus.DONE:
            self._drop_slot(active, slot)
            return
        self._give_back(slot.local, replaced=slot.replaced)
        if slot.filled is not None:
            active.filled.append(slot.filled)

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


def _count_post(report: Settled, started: float, nbytes: int, *, pieces: int = 1) -> None:
    report.post_s += time.perf_counter() - started
    report.nbytes += nbytes
    report.pieces += pieces


def _one(source: int, destination: int, nbytes: int) -> CopyBatch:
    return CopyBatch(*([value] for value in (source, destination, nbytes)))  # type: ignore[arg-type]


def _scatter(unpack: Unpack) -> PendingWork | None:
    """As `PackedStream.scatter`. Raises `RemoteProtocolError` where the stream does not have what is said to be in the slot."""
    stream = unpack.stream()
    if not 0 <= unpack.offset < unpack.offset + unpack.nbytes <= stream.total:
        found = f"[{unpack.offset}, +{unpack.nbytes})"
        raise RemoteProtocolError(f"packed stream of {stream.total} bytes: expected a range of it, found {found}")
    return stream.scatter(unpack.offset, unpack.nbytes, unpack.address)
