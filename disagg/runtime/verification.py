"""Compares what was sent with what has arrived: the writer sums its rows, the receiver its own, in a thread of their own."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from disagg.core import _native
from disagg.core.errors import DisaggError, VerificationFailed
from disagg.core.events import ReadyEvent
from disagg.layout.checksums import ChecksumFunction, ChecksumPlan, Checksums, Words, checksum_rows, difference, page_range
from disagg.protocol.messages import PartialChecksums, Verify
from disagg.protocol.types import RequestKey, StartTransfer, StartVerify

logger = logging.getLogger(__name__)

READY_POLL_S = 0.0005
MAX_THREADS = 4
"""Of the processor's, for one sum."""


def checksum_sent(
    plans: Mapping[str, ChecksumPlan], start: StartTransfer, digest: ChecksumFunction
) -> tuple[PartialChecksums, ...]:
    """What a writer says of one chunk. Raises `LayoutError` for rows that are none of its pools."""
    found = []
    for written in start.written:
        plan, rows = plans.get(written.component), start.chunk.rows.get(written.component)
        if plan is None or rows is None:
            continue
        sums = checksum_rows(
            plan,
            rows,
            need=start.reserve.need[written.component],
            tokens=(written.start, written.stop),
            layers=written.layers,
            sample=_sample(start.ticket.key, start.reserve.verify),
            num_threads=_num_threads(),
            digest=digest,
        )
        found.append(PartialChecksums(written.component, *(_encode(column) for column in (sums.by_layer, sums.by_page))))
    return tuple(found)


def verify_rows(plans: Mapping[str, ChecksumPlan], start: StartVerify, digest: ChecksumFunction) -> None:
    """Raises `VerificationFailed`, naming component, layer and page, where the rows do not hold what the writers summed."""
    sample = _sample(start.key, start.verify)
    for name in sorted(start.rows.keys() & start.need.keys() & plans.keys()):
        plan, rows, need = plans[name], start.rows[name], start.need[name]
        pages = page_range(plan, need, sample=sample)
        expected = Checksums.zero(plan, pages)
        for writer, parts in start.sums.items():
            for part in (part for part in parts if part.component == name):
                _add(expected.by_layer, part.by_layer, f"component {name!r}, {writer}")
                _add(expected.by_page, part.by_page, f"component {name!r}, {writer}")
        found = checksum_rows(
            plan, rows, need=need, tokens=need, layers=None, sample=sample, num_threads=_num_threads(), digest=digest
        )
        differs = difference(plan, rows, pages, expected=expected, found=found)
        if differs:
            raise VerificationFailed(differs)


def _add(total: Words, column: bytes, what: str) -> None:
    if len(column) != total.nbytes:
        raise VerificationFailed(f"{what}: expected {len(total)} sums, found {len(column)} bytes")
    total += np.frombuffer(column, dtype="<u8")


def _sample(key: RequestKey, verify: Verify) -> bytes | None:
    """What chooses the pages of an attempt; `None`: all of them."""
    return key.request_id + key.attempt.to_bytes(4, "little") if verify == "sample" else None


def _encode(column: Words) -> bytes:
    return column.astype("<u8").tobytes()


@functools.cache
def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


Summed = Callable[[Hashable, Any, DisaggError | None], None]
"""What is told of a sum: whose it is, the sum, and the error where there is none."""


class _Job(NamedTuple):
    token: Hashable
    run: Callable[[], Any]
    ready: ReadyEvent | None
    wanted: Callable[[], bool]


class ChecksumWorker:
    """One supervised thread that sums; it begins with its first job. `on_summed` and `on_death` are called in it."""

    def __init__(self, *, name: str, on_summed: Summed, on_death: Callable[[BaseException], None]) -> None:
        self._on_summed, self._on_death = on_summed, on_death
        self._jobs: deque[_Job | None] = deque()
        self._wake = _native.Alarm()
        self._thread = threading.Thread(target=self._run, name=f"disagg-sums-{name}", daemon=True)
        self._started = False

    def submit(
        self,
        token: Hashable,
        run: Callable[[], Any],
        *,
        ready: ReadyEvent | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have `run` called once `ready` has passed, for as long as it is `wanted`; to be called by one thread only."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._jobs.append(_Job(token, run, ready, wanted))
        self._wake.set()

    @property
    def depth(self) -> int:
        """Jobs that nobody has begun."""
        return len(self._jobs)

    def stop(self, timeout_s: float) -> None:
        """Take no more and end."""
        self._jobs.append(None)
        self._wake.set()
        if self._started:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            while (job := self._next()) is not None:
                if not job.wanted():
                    continue
                passed, error = (True, None) if job.ready is None else self._attempt(job.ready.query)
                if error is not None:
                    self._on_summed(job.token, None, error)
                elif passed:
                    self._on_summed(job.token, *self._attempt(job.run))
                else:
                    self._jobs.append(job)  # others first
                    self._wake.wait(READY_POLL_S)
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("sum thread died")
            self._on_death(error)

    def _next(self) -> _Job | None:
        while not self._jobs:
            self._wake.wait(math.inf)
        return self._jobs.popleft()

    @staticmethod
    def _attempt(run: Callable[[], Any]) -> tuple[Any, DisaggError | None]:
        try:
            return run(), None
        except DisaggError as error:
            return None, error
        except Exception as error:  # one request's error ends that request only
            logger.exception("a sum failed")
            return None, VerificationFailed(f"{type(error).__name__}: {error}")
