"""One bound job: what it has in flight, from its first post to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from disagg.backends.abilities import SpanWriter
from disagg.backends.base import Backend, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.core.errors import DisaggError
from disagg.core.thread_log import ThreadLog
from disagg.transfer.jobs import CANCELLED, BoundTransfer, Job, PendingWork, Report, Settled
from disagg.transfer.packed_write import PackedWrite
from disagg.transfer.staging import SlotPool

logger = ThreadLog(__name__)

T = TypeVar("T")


class ActiveJob:
    def __init__(
        self,
        job: Job,
        bound: BoundTransfer,
        *,
        backend: Backend,
        slots: SlotPool | None,
        report: Settled,
        reports: deque[Report],
    ) -> None:
        self.job = job
        self.bound = bound
        self.is_unsettled = False
        self.started_at = time.perf_counter()
        self._backend = backend
        self._report = report
        self._reports = reports
        self._posted = False
        self._told_unsettled = self._told_end = False
        self._direct: Transfer | None = None
        self._packed: PackedWrite | None = None
        if bound.stream is not None:
            assert job.loans is not None
            assert slots is not None
            self._packed = PackedWrite(
                job, bound, backend=backend, loans=job.loans, slots=slots, report=report, reports=reports
            )

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()
        if self._direct is not None:  # over, by another proof: the engine may know by now
            self._poll_transfer(self._direct)

    def in_flight(self) -> bool:
        return self._direct is not None or (self._packed is not None and self._packed.in_flight())

    @property
    def has_ended(self) -> bool:
        if self._told_unsettled and self.job.is_over():
            return True
        return self._posted and self._has_packed and not self.in_flight()

    @property
    def _has_packed(self) -> bool:
        return self._packed is None or self._packed.is_complete

    def under_way(self) -> list[PendingWork | Transfer | None]:
        waiting: list[PendingWork | Transfer | None] = list(self._packed.under_way) if self._packed is not None else []
        if self._direct is not None:
            waiting.append(self._direct)
        return waiting

    def is_ready(self) -> bool | None:
        """`None` if its event failed, which has ended the job."""
        ready = self.job.ready
        if ready is None or self.job.cancelled():
            return True
        return attempt(lambda: bool(ready.query()), self.job, self._report, self._reports)

    def step(self) -> int:
        posted = self._post_direct()
        if not self._has_packed:
            self._end_if_cancelled()
        packed = self._pack()
        return posted + packed + self._poll()

    def _post_direct(self) -> int:
        if self._posted:
            return 0
        self._posted = True
        if self._end_if_cancelled():
            return 1
        if len(self.bound.direct) or self._has_packed:
            self._direct = attempt(self._submit, self.job, self._report, self._reports)
        return 1

    def _submit(self) -> Transfer:
        copies, started = self.bound.direct, time.perf_counter()
        if isinstance(copies, CopyBatch):
            transfer = self._backend.submit(self.job.peer, copies)
        else:
            assert isinstance(self._backend, SpanWriter)
            assert self.bound.prepared is not None
            transfer = self._backend.submit_spans(self.bound.prepared, copies)
        self._report.count_post(time.perf_counter() - started, copies.total_nbytes, pieces=len(copies))
        return transfer

    def _pack(self) -> int:
        if self._packed is None or self._packed.is_complete:
            return 0
        packed = self._packed.pack()
        if self._report.error and not self.in_flight():
            self._end()
        return packed

    def _end_if_cancelled(self) -> bool:
        """Whether the job has an error by now; it has ended if nothing is in flight."""
        if self.job.cancelled():
            self._report.error = self._report.error or CANCELLED
            if not self.in_flight():
                self._end()
        return self._report.error != ""

    def _poll(self) -> int:
        """A failed job ends once nothing reads its rows. Returns how many transfers have settled."""
        if not self.in_flight():
            return 0
        settled = 0
        if self._direct is not None and self._poll_transfer(self._direct).settled:
            self._direct = None
            settled += 1
        if self._packed is not None:
            settled += self._packed.poll(self._poll_transfer)
        if self._reads_rows():
            self._report_unsettled()
        elif self._has_packed and (self._report.error or not self.in_flight()):
            self._end()
        return settled

    def _reads_rows(self) -> bool:
        return self._direct is not None or (self._packed is not None and self._packed.reads_rows())

    def _report_unsettled(self) -> None:
        """The engine does not know whether it still reads the rows. Reported once."""
        if self.is_unsettled and not self._told_unsettled:
            self._told_unsettled = True
            self._reports.append(Settled(ticket=self.job.ticket, error=self._report.error, unsettled=True))

    def _poll_transfer(self, transfer: Transfer) -> TransferStatus:
        """An engine that raises leaves the transfer unsettled."""
        try:
            status, error = transfer.poll(), transfer.error
        except Exception as raised:  # noqa: BLE001 (of an engine that breaks its contract: other jobs go on)
            status, error = TransferStatus.UNSETTLED, f"{type(raised).__name__}: {raised}"
        if status in (TransferStatus.FAILED, TransferStatus.UNSETTLED):
            self._report.error = self._report.error or error or "the transfer failed"
        if status is TransferStatus.UNSETTLED:
            self.is_unsettled = True
        elif status.settled:
            try:
                transfer.close()
            except Exception:
                logger.exception("a settled transfer could not be closed")
        return status

    def _end(self) -> None:
        if self._told_end:
            return
        self._told_end = True
        phases = self._report.phases
        phases.wire_s = max(0.0, time.perf_counter() - self.started_at - phases.pack_s - phases.post_s)
        self._report.ended_at = time.monotonic()
        self._reports.append(self._report)


def attempt(run: Callable[[], T], job: Job, report: Settled, reports: deque[Report]) -> T | None:
    """`None` after an error of any kind, which ends this job only."""
    try:
        return run()
    except DisaggError as error:
        report.fail(error, job.peer)
    except BaseException as error:  # the server's own event may raise SystemExit
        logger.exception("a transfer could not be posted")
        report.error = f"{type(error).__name__}: {error}"
    reports.append(report)
    return None
