"""Slot writes of which nobody can say whether they still arrive: the peer's connection is reported, however the job ends."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.backends.base import TransferStatus
from disagg.core.copies import CopyBatch
from disagg.transfer import packed_write
from disagg.transfer.active_job import ActiveJob
from disagg.transfer.jobs import Broken, Report, Settled


class Write:
    """A write of an engine whose connection breaks."""

    error, completion, status = "the connection broke", None, TransferStatus.PENDING

    def poll(self) -> TransferStatus:
        return self.status

    def close(self) -> None:
        pass


@pytest.mark.parametrize("also_direct", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_peer_is_reported(is_cancelled: bool, also_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the end of a cancelled job, and while the same job may still read rows."""
    monkeypatch.setattr(packed_write, "SLOW_SLOT_S", -1.0)  # a cancelled job ends at once
    writes: list[Write] = []
    cancelled: list[bool] = []
    free = deque((number, 4096 * number) for number in range(4))
    put_back: list[Any] = []

    def submit(*_: Any) -> Write:
        writes.append(Write())
        return writes[-1]

    loans = SimpleNamespace(
        slot_nbytes=1000, wanted=False, want=lambda _: None, take=free.popleft, put_back=lambda *slot: put_back.append(slot)
    )
    slots = SimpleNamespace(slot_nbytes=1000, batch=4, take=lambda: 1, give_back=lambda *_, **__: None, replace=lambda: None)
    job: Any = SimpleNamespace(ticket="ticket", peer="peer", loans=loans, ready=None, cancelled=lambda: bool(cancelled))
    stream = SimpleNamespace(total=4000, gather=lambda *_: None)
    direct: Any = CopyBatch.one(1, 2, 3) if also_direct else ()
    bound: Any = SimpleNamespace(stream=stream, parts=(), gathered=None, prepared=None, direct=direct)
    reports = deque[Report]()
    backend: Any = SimpleNamespace(submit=submit)
    active = ActiveJob(job, bound, backend=backend, slots=slots, report=Settled(ticket="ticket"), reports=reports)  # type: ignore[arg-type]
    active.step()
    assert len(writes) == 4 + also_direct
    if is_cancelled:
        cancelled.append(True)
        active.step()
    for write in writes:
        write.status = TransferStatus.UNSETTLED
    active.step()
    broken = [each for each in reports if isinstance(each, Broken)]
    assert broken
    assert all((each.ticket, each.peer) == (job.ticket, job.peer) for each in broken)
    assert not put_back
