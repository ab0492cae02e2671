"""One job's packed stream on its way through slots of the peer's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from disagg.backends.base import Backend, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.transfer.jobs import CANCELLED, BoundTransfer, Broken, Job, PendingWork, Report, Settled, SlotFilled, SlotsWanted
from disagg.transfer.staging import Loans, SlotPool

SLOW_SLOT_S = 0.25
"""A slower write has its staging buffer replaced by a spare, so that one slow peer does not hold up the others. If its job
was cancelled, the job ends.
"""


@dataclass
class _SlotWrite:
    """`local` is the staging buffer, or `None` if the engine gathers the pieces itself, or the buffer was given back early.
    Asynchronous `packing` runs before `transfer`.
    """

    local: int | None
    remote: int
    filled: SlotFilled
    started_at: float
    packing: PendingWork | None = None
    transfer: Transfer | None = None
    replaced: bool = False


class PackedWrite:
    """Packs a job's stream into staging buffers, writes them into lent slots, and reports these as filled.

    Once `report` has an error, nothing more is packed or reported, and buffers are given back at once: slots that the
    engine still writes from them are never unpacked.
    """

    def __init__(
        self,
        job: Job,
        bound: BoundTransfer,
        *,
        backend: Backend,
        loans: Loans,
        slots: SlotPool,
        report: Settled,
        reports: deque[Report],
    ) -> None:
        assert bound.stream is not None
        self._job = job
        self._bound = bound
        self._stream = bound.stream
        self._gathers_here = bound.gathered is None
        self._backend = backend
        self._loans = loans
        self._slots = slots
        self._report = report
        self._reports = reports
        self._offset = 0
        self._packed_at = 0.0
        self._writes: list[_SlotWrite] = []
        self._filled: list[SlotFilled] = []  # written and not reported yet
        self._slot_nbytes = min(loans.slot_nbytes, slots.slot_nbytes)
        self._has_asked = False
        self._demand: int | None = None  # slots that `loans` expects it to take

    @property
    def is_complete(self) -> bool:
        """Everything has been packed, or nothing more will be."""
        return self._offset >= self._stream.total or self._report.error != ""

    def in_flight(self) -> bool:
        return bool(self._writes)

    def reads_rows(self) -> bool:
        """An engine that gathers the pieces itself reads rows until a write ends."""
        return any(write.packing is not None or not self._gathers_here for write in self._writes)

    @property
    def under_way(self) -> list[PendingWork | Transfer | None]:
        return [write.packing or write.transfer for write in tuple(self._writes)]

    def pack(self) -> int:
        """Fill up to a batch of slots. Returns how many. If there are too few, also for others, asks once for more: it may have
        taken those that others have asked for.
        """
        if self._demand is None:
            self._demand = -(-self._stream.total // self._slot_nbytes)
            self._loans.want(self._demand)
        packed = 0
        while packed < self._slots.batch and self._pack_slot():
            packed += 1
        if self._loans.wanted and not self._has_asked and not self._report.error:
            self._has_asked = True
            self._reports.append(SlotsWanted(self._job.ticket))
        return packed

    def close(self) -> None:
        self._loans.want(-(self._demand or 0))
        self._demand = 0

    def _pack_slot(self) -> bool:
        """`False` if nothing is left, or no buffer or slot is free."""
        if self._job.cancelled():
            self._report.error = self._report.error or CANCELLED
        if self.is_complete:
            return False
        local = self._slots.take() if self._gathers_here else None
        if local is None and self._gathers_here:
            return False
        loan = self._loans.take()
        if loan is None:
            if local is not None:
                self._slots.give_back(local)
            return False
        self._demand = (self._demand or 0) - 1
        number, remote = loan
        nbytes = min(self._slot_nbytes, self._stream.total - self._offset)
        filled = SlotFilled(self._job.ticket, number, self._bound.parts, self._offset, nbytes)
        write = _SlotWrite(local, remote, filled, time.perf_counter())
        try:
            if local is None:
                write.transfer = self._post_gathered(remote, nbytes)
            else:
                write.packing = self._stream.gather(self._offset, nbytes, local)
                if write.packing is None:
                    write.transfer = self._post(write)
        except Exception as error:  # noqa: BLE001 (other jobs go on, whatever the engine raises)
            self._drop(write, error)
            return False
        self._offset += nbytes
        self._writes.append(write)
        return True

    def _post_gathered(self, address: int, nbytes: int) -> Transfer:
        assert self._bound.gathered is not None
        started = time.perf_counter()
        copies = CopyBatch.of_columns(*self._bound.gathered.copies(self._offset, nbytes, address))
        transfer = self._backend.submit(self._job.peer, copies)
        self._report.count_post(time.perf_counter() - started, nbytes)
        self._report.packed += nbytes
        return transfer

    def _post(self, write: _SlotWrite) -> Transfer:
        assert write.local is not None
        filled = write.filled
        started = time.perf_counter()
        packed_s = started - max(write.started_at, self._packed_at)  # slots may be packed at the same time
        self._report.phases.pack_s += packed_s
        self._packed_at = started
        self._report.packed += filled.nbytes
        copies = CopyBatch.one(write.local, write.remote, filled.nbytes)
        transfer = self._backend.submit(self._job.peer, copies)
        self._report.count_post(time.perf_counter() - started, filled.nbytes)
        return transfer

    def poll(self, poll_transfer: Callable[[Transfer], TransferStatus]) -> int:
        """Report filled slots once there are enough. Returns how many settled. `poll_transfer` records a transfer's error
        in the report. An unsettled write keeps only its loan: the slot may still be written.
        """
        writes, self._writes, settled = self._writes, [], 0
        packing = False
        for write in writes:
            packing = packing or (write.packing is not None and not self._finish_packing(write))
            if packing:
                self._writes.append(write)
            elif write.transfer is None:
                settled += 1
            elif (status := poll_transfer(write.transfer)).settled:
                self._settle(write, status)
                settled += 1
            elif status is TransferStatus.UNSETTLED and self._gathers_here:
                self._reports.append(Broken(self._job.ticket, self._job.peer, self._report.error))
                self._give_back(write)
                settled += 1
            else:
                self._keep(write)
        if self._filled and (not self._writes or self._report.error or len(self._filled) >= self._slots.batch):
            self._reports += self._filled
            self._filled.clear()
        return settled

    def _keep(self, write: _SlotWrite) -> None:
        self._writes.append(write)
        if self._report.error:
            self._give_back(write)
        elif not write.replaced and time.perf_counter() - write.started_at > SLOW_SLOT_S:
            if self._job.cancelled():
                self._report.error = CANCELLED
            elif write.local is not None:
                write.replaced = self._slots.replace()

    def _finish_packing(self, write: _SlotWrite) -> bool:
        """Whether packing has ended. The slot is then posted or dropped."""
        assert write.packing is not None
        try:
            if not write.packing.query():
                return False
            write.packing = None
            if self._job.cancelled():
                self._report.error = self._report.error or CANCELLED
            if self._report.error:
                self._drop(write)
            else:
                write.transfer = self._post(write)
        except Exception as error:  # noqa: BLE001 (as above)
            write.packing = None
            self._drop(write, error)
        return True

    def _settle(self, write: _SlotWrite, status: TransferStatus) -> None:
        if status is TransferStatus.DONE and not self._report.error:
            self._give_back(write)
            self._loans.written(write.filled.loan)
            self._filled.append(write.filled)
        else:
            self._drop(write)

    def _drop(self, write: _SlotWrite, error: Exception | None = None) -> None:
        """Nothing is written to the slot any more."""
        if error is not None:
            self._report.fail(error, self._job.peer)
        self._give_back(write)
        self._loans.put_back(write.filled.loan, write.remote)

    def _give_back(self, write: _SlotWrite) -> None:
        if write.local is not None:
            self._slots.give_back(write.local, replaced=write.replaced)
            write.local = None
