"""Compares sent with received bytes, by checksums that writers and receivers compute of their own rows."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from disagg.core import _native
from disagg.core.errors import Cause, DisaggError, RequestAborted, VerificationFailed
from disagg.core.events import ReadyEvent
from disagg.core.thread_log import ThreadLog
from disagg.layout.agreement import LocalRank
from disagg.layout.checksums import (
    ChecksumFunction,
    ChecksumPlan,
    Checksums,
    Words,
    check_listed,
    checksum_rows,
    difference,
    page_range,
)
from disagg.protocol.messages import PartialChecksums
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import StartTransfer, StartVerify, Ticket
from disagg.runtime.accounting import Stats
from disagg.runtime.handshake import RemoteRank
from disagg.runtime.paths import reserved_rows

logger = ThreadLog(__name__)

T = TypeVar("T")

READY_POLL_S = 0.0005
MAX_THREADS = 4


def checksum_sent(
    plans: Mapping[str, ChecksumPlan], start: StartTransfer, digest: ChecksumFunction
) -> tuple[PartialChecksums, ...]:
    """The checksums of a chunk. Raises `LayoutError` for rows outside the pools, and for a reserve of too few pages."""
    found = []
    for written in start.written:
        plan, rows = plans.get(written.component), start.chunk.rows.get(written.component)
        if plan is None or rows is None:
            continue
        check_listed(plan, reserved_rows(start, written.component), start.reserve.need[written.component])
        sums = checksum_rows(
            plan,
            rows,
            need=start.reserve.need[written.component],
            tokens=(written.start, written.stop),
            layers=written.layers,
            num_threads=_num_threads(),
            digest=digest,
        )
        found.append(PartialChecksums(written.component, *(_encode(column) for column in (sums.by_layer, sums.by_page))))
    return tuple(found)


def verify_rows(plans: Mapping[str, ChecksumPlan], start: StartVerify, digest: ChecksumFunction) -> None:
    """Raises `VerificationFailed`, naming component, layer and page, if rows differ from the writers' checksums."""
    for name in sorted(start.rows.keys() & start.need.keys() & plans.keys()):
        plan, rows, need = plans[name], start.rows[name], start.need[name]
        pages = page_range(plan, need)
        expected = Checksums.zero(plan, pages)
        for writer, parts in start.sums.items():
            for part in (part for part in parts if part.component == name):
                _add(expected.by_layer, part.by_layer, f"component {name!r}, {writer}")
                _add(expected.by_page, part.by_page, f"component {name!r}, {writer}")
        found = checksum_rows(plan, rows, need=need, tokens=need, layers=None, num_threads=_num_threads(), digest=digest)
        differs = difference(plan, rows, pages, expected=expected, found=found)
        if differs:
            raise VerificationFailed(differs)


def _add(total: Words, column: bytes, what: str) -> None:
    if len(column) != total.nbytes:
        raise VerificationFailed(f"{what}: expected {len(total)} checksums, found {len(column)} bytes")
    total += np.frombuffer(column, dtype="<u8")


def _encode(column: Words) -> bytes:
    return column.astype("<u8").tobytes()


@functools.cache
def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


class _Job(NamedTuple):
    run: Callable[[], None]
    fail: Callable[[DisaggError], None]
    ready: ReadyEvent | None
    wanted: Callable[[], bool]

    def has_passed(self) -> bool:
        return self.ready is None or bool(self.ready.query())


class ChecksumWorker:
    """One supervised thread, which starts with its first job and calls `on_death` if it fails."""

    def __init__(self, *, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._on_death = on_death
        self._jobs: deque[_Job | None] = deque()
        self._wake = _native.Alarm()
        self.thread = threading.Thread(target=self._run, name=f"disagg-checksums-{name}", daemon=True)
        self._started = False

    def submit(
        self,
        run: Callable[[], T],
        done: Callable[[T | None, DisaggError | None], None],
        *,
        ready: ReadyEvent | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `run` once `ready` has passed, if it is still `wanted`, then `done` with its result or its error. Only one
        thread may call this.
        """
        if not self._started:
            try:
                self.thread.start()
            except RuntimeError as error:  # no more threads; the next job tries again
                done(None, _uncomputed(f"there is no thread to compute them with: {error}"))
                return
            self._started = True
        self._jobs.append(_Job(lambda: done(*_attempt(run)), lambda error: done(None, error), ready, wanted))
        self._wake.set()

    @property
    def depth(self) -> int:
        return len(self._jobs)

    def stop(self, timeout_s: float) -> None:
        self._jobs.append(None)
        self._wake.set()
        if self._started:
            self.thread.join(timeout_s)

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            while (job := self._next()) is not None:
                if not job.wanted():
                    continue
                passed, error = _attempt(job.has_passed)
                if error is not None:
                    job.fail(error)
                elif passed:
                    job.run()
                else:
                    self._jobs.append(job)  # others first
                    self._wake.wait(READY_POLL_S)
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("checksum thread died")
            self._on_death(error)

    def _next(self) -> _Job | None:
        while not self._jobs:
            self._wake.wait(math.inf)
        return self._jobs.popleft()


def _attempt(run: Callable[[], T]) -> tuple[T | None, DisaggError | None]:
    try:
        return run(), None
    except DisaggError as error:
        return None, error
    except BaseException as error:  # ends one request only, also SystemExit of the server's event
        logger.exception("a checksum failed")
        return None, _uncomputed(f"{type(error).__name__}: {error}")


def _uncomputed(why: str) -> RequestAborted:
    return RequestAborted(f"checksums could not be computed: {why}", cause=Cause.TRANSFER)


@dataclass
class _Pending:
    """`packed` and `took` are there once the chunk's transfer has settled."""

    packed: int | None = None
    took: tuple[float, ...] = ()
    sums: tuple[PartialChecksums, ...] | None = None
    error: str = ""


class Verification:
    """Only the control thread calls it. `command` runs a function there."""

    def __init__(
        self,
        *,
        name: str,
        sessions: Sessions,
        local: LocalRank,
        digest: ChecksumFunction,
        stats: Stats,
        command: Callable[[Callable[[float], None]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._sessions = sessions
        self._local = local
        self._digest = digest
        self._stats = stats
        self._command = command
        self._pending: dict[Ticket, _Pending] = {}
        self.worker = ChecksumWorker(name=name, on_death=on_death)

    def start(self, rank: RemoteRank, start: StartTransfer) -> None:
        ticket = start.ticket
        if start.reserve.verify == "off":
            return
        self._pending[ticket] = _Pending()
        self.worker.submit(
            lambda: checksum_sent(rank.checksum_plans(), start, self._digest),
            lambda sums, error: self._command(lambda now: self._take_sums(ticket, sums, error, now)),
            ready=start.chunk.ready,
            wanted=lambda: ticket in self._pending,
        )

    def verify(self, start: StartVerify) -> None:
        self.worker.submit(
            lambda: verify_rows(self._local.checksum_plans, start, self._digest),
            lambda _, error: self._command(lambda now: self._take_verified(start, error, now)),
        )

    def settled(self, ticket: Ticket, *, packed: int, took: tuple[float, ...], error: str, now: float) -> bool:
        """Returns whether the protocol gets the end of this transfer from here, together with its checksums."""
        if error:
            self._pending.pop(ticket, None)
        pending = self._pending.get(ticket)
        if pending is None:
            return False
        pending.packed, pending.took = packed, took
        self._report(ticket, pending, now)
        return True

    def _take_sums(
        self, ticket: Ticket, sums: tuple[PartialChecksums, ...] | None, error: DisaggError | None, now: float
    ) -> None:
        pending = self._pending.get(ticket)
        if pending is not None:
            pending.sums, pending.error = sums, str(error or "")
            self._report(ticket, pending, now)

    def _take_verified(self, start: StartVerify, error: DisaggError | None, now: float) -> None:
        self._stats.verified += 1
        self._stats.mismatches += isinstance(error, VerificationFailed)
        self._sessions.receives.verified(start.peer, start.key, now, error=error)

    def _report(self, ticket: Ticket, pending: _Pending, now: float) -> None:
        if pending.packed is None or not (pending.sums is not None or pending.error):
            return
        del self._pending[ticket]
        self._sessions.sends.settled(
            ticket, now=now, error=pending.error, packed=pending.packed, sums=pending.sums or (), took=pending.took
        )
