"""Binds rows to addresses, waits for ready events, posts or packs copies, polls them, and unpacks filled slots."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from disagg.backends.base import Backend, Transfer
from disagg.core import _native
from disagg.core.thread_log import ThreadLog
from disagg.transfer.active_job import ActiveJob, attempt
from disagg.transfer.jobs import CANCELLED, Job, PendingWork, Report, Settled, Unpack
from disagg.transfer.staging import SlotPool
from disagg.transfer.unpacking import Unpacker

logger = ThreadLog(__name__)

MIN_SLEEP_S = 20e-6
MAX_SLEEP_S = 500e-6
UNSETTLED_POLL_S = 0.05
MAX_CALLER_JOBS = 16
"""More are left to the worker's thread: a request may have been sent in thousands of chunks before its reserve."""


class TransferWorker:
    """One supervised thread over one backend. It calls `on_reports` when there is something to report, and `on_death` if it
    fails.

    With `caller_steps` the submitting thread advances every job itself, by `take_reports` and `step`, and calls `wake`
    before it does something else.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        slots: SlotPool | None,
        caller_steps: bool = False,
        on_reports: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._caller_steps = caller_steps
        self._on_reports = on_reports
        self._on_death = on_death
        self._reports: deque[Report] = deque()
        self._unpacker = Unpacker(self._reports)
        self._new: deque[Job] = deque()
        self._waiting: list[ActiveJob] = []  # for their events
        self._active: list[ActiveJob] = []
        self._stepping = threading.Lock()
        self._alarm = _native.Alarm()
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=f"disagg-transfers-{name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._alarm.set()
        self.thread.join(timeout_s)

    # -- any thread --------------------------------------------------------------------------------------------------

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    @property
    def depth(self) -> int:
        return len(self._new) + len(self._waiting) + len(self._active)

    def completions(self) -> tuple[list[_native.Completion], bool]:
        """What native code can poll of the work under way, and whether that is all of it."""
        work: list[PendingWork | Transfer | None] = list(self._unpacker.under_way)
        for active in tuple(self._active):
            if not active.is_unsettled:
                work += active.under_way()
        found = [None if each is None else each.completion for each in work]
        completions: list[_native.Completion] = [completion for completion in found if completion is not None]
        return completions, len(completions) == len(found) and not self._waiting

    # -- the control thread ------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """The job begins with the next `take_reports`."""
        self._new.append(job)

    def unpack(self, slots: Iterable[Unpack]) -> None:
        """Unpacking begins with the next `take_reports`."""
        self._unpacker.add(slots)

    def take_reports(self) -> list[Report]:
        """Also begins new work."""
        if self._caller_steps and len(self._new) <= MAX_CALLER_JOBS:
            self.step()
        else:
            self.wake()
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def step(self) -> bool:
        """Does nothing while the worker's thread advances jobs. Returns whether anything has changed."""
        if not self._has_work() or not self._stepping.acquire(blocking=False):
            return False
        try:
            return self._step() > 0
        finally:
            self._stepping.release()

    def wake(self) -> None:
        if self._has_work():
            self._alarm.set()

    def _has_work(self) -> bool:
        unpacker = self._unpacker
        return bool(self._new or self._waiting or self._active or unpacker.waiting or unpacker.scattering)

    # -- the worker's thread -----------------------------------------------------------------------------------------

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
            with self._stepping:
                busy = self._step()
            reported = bool(self._reports)
            if reported:
                self._on_reports()
            caller_awake = reported and self._caller_steps  # it calls `wake` before it sleeps again
            if busy and not caller_awake:
                sleep_s = MIN_SLEEP_S
                continue
            if self._is_under_way() and not caller_awake:
                sleep_s = min(sleep_s * 2, MAX_SLEEP_S)
                _native.sleep(sleep_s)
                continue
            if self._alarm.wait(UNSETTLED_POLL_S if self._active else math.inf) and self._is_under_way():
                sleep_s = MIN_SLEEP_S

    def _is_under_way(self) -> bool:
        if self._waiting or self._unpacker.scattering:
            return True
        return any(active.in_flight() and not active.is_unsettled for active in self._active)

    # -- holding the lock --------------------------------------------------------------------------------------------

    def _step(self) -> int:
        changed = self._unpacker.step() + self._begin_new()
        for active in self._active:
            changed += active.step()
        self._drop_ended()
        return changed

    def _begin_new(self) -> int:
        bound, self._waiting = self._waiting, []
        while self._new:
            active = self._bind(self._new.popleft())
            if active is not None:
                bound.append(active)
        num_active = len(self._active)
        for active in bound:
            ready = active.is_ready()
            if ready:
                active.started_at = time.perf_counter()
                self._active.append(active)
            elif ready is not None:
                self._waiting.append(active)
        return len(self._active) - num_active

    def _bind(self, job: Job) -> ActiveJob | None:
        report = Settled(ticket=job.ticket)
        if job.cancelled():
            report.error = CANCELLED
            self._reports.append(report)
            return None
        started = time.perf_counter()
        bound = attempt(job.bind, job, report, self._reports)
        if bound is None:
            return None
        report.phases.bind_s = time.perf_counter() - started
        return ActiveJob(job, bound, backend=self._backend, slots=self._slots, report=report, reports=self._reports)

    def _drop_ended(self) -> None:
        for active in [each for each in self._active if each.has_ended]:
            active.close()
            self._active.remove(active)
