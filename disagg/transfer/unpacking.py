"""Scatters slots that peers have filled into the rows where their bytes belong."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from disagg.core.errors import DisaggError, RemoteProtocolError
from disagg.transfer.jobs import PendingWork, Report, Unpack, Unpacked

MAX_PER_STEP = 8
"""Slots scattered before any is reported: a report costs both sides as much as copying several slots."""


@dataclass
class _Scattering:
    unpack: Unpack
    work: PendingWork
    started_at: float


class Unpacker:
    """`scattering` are the slots that a GPU works on. One thread at a time calls `step`; any may call the rest."""

    def __init__(self, reports: deque[Report]) -> None:
        self._reports = reports
        self.waiting: deque[Unpack] = deque()
        self.scattering: deque[_Scattering] = deque()

    def add(self, slots: Iterable[Unpack]) -> None:
        self.waiting.extend(slots)

    @property
    def under_way(self) -> list[PendingWork]:
        return [scattering.work for scattering in tuple(self.scattering)]

    def step(self) -> int:
        """Scatter slots in order. Returns how many changed."""
        changed = min(len(self.waiting), MAX_PER_STEP)
        for _ in range(changed):
            unpack, started_at = self.waiting.popleft(), time.perf_counter()
            try:
                work = scatter(unpack)
            except Exception as error:  # noqa: BLE001 (what a peer says fails its request only, whatever is raised over it)
                self._report(unpack, started_at, str(error) if isinstance(error, DisaggError) else repr(error))
                continue
            if work is None:
                self._report(unpack, started_at)
            else:
                self.scattering.append(_Scattering(unpack, work, started_at))
        while self.scattering:
            first, problem = self.scattering[0], ""
            try:
                if not first.work.query():
                    break
            except DisaggError as error:
                problem = str(error)
            self.scattering.popleft()
            self._report(first.unpack, first.started_at, problem)
            changed += 1
        return changed

    def _report(self, unpack: Unpack, started_at: float, error: str = "") -> None:
        self._reports.append(Unpacked(unpack.token, unpack.nbytes, error, time.perf_counter() - started_at))


def scatter(unpack: Unpack) -> PendingWork | None:
    """Raises `RemoteProtocolError` if the slot claims bytes that its stream does not have."""
    stream = unpack.stream()
    if not 0 <= unpack.offset < unpack.offset + unpack.nbytes <= stream.total:
        found = f"[{unpack.offset}, +{unpack.nbytes})"
        raise RemoteProtocolError(f"packed stream of {stream.total} bytes: expected a range of it, found {found}")
    return stream.scatter(unpack.offset, unpack.nbytes, unpack.address)
