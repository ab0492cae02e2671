"""Which jobs the submitting thread advances itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.backends.base import TransferStatus
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.core.errors import LayoutError
from disagg.transfer.jobs import BoundTransfer, Job, Settled
from disagg.transfer.worker import MAX_CALLER_JOBS, TransferWorker


def bind() -> Any:
    raise LayoutError("bound")


class Unsettled(LocalTransfer):
    """A write of which the engine never learns more."""

    def __init__(self) -> None:
        self.polls = 0
        self.status = TransferStatus.UNSETTLED
        self.error: str | None = "the engine was closed"

    def poll(self) -> TransferStatus:
        self.polls += 1
        return self.status


def test_an_unsettled_job_ends_once_another_proof_ends_it() -> None:
    """It would be polled for as long as the process lives."""
    copies, transfer, is_over = CopyBatch.one(0, 0, 1), Unsettled(), [False]
    backend: Any = SimpleNamespace(submit=lambda *_: transfer)
    worker = TransferWorker(
        backend,
        name="x",
        slots=None,
        caller_steps=True,
        on_reports=lambda: None,
        on_death=lambda error: pytest.fail(str(error)),
    )
    peer: Any = None
    worker.submit(Job(1, peer, lambda: BoundTransfer(copies), lambda: False, is_over=lambda: is_over[0]))
    (report,) = worker.take_reports()
    assert cast("Settled", report).unsettled
    assert (worker.take_reports(), worker.depth) == ([], 1)
    is_over[0] = True
    assert (worker.take_reports(), worker.depth) == ([], 0)
    before = transfer.polls
    worker.take_reports()
    assert transfer.polls == before


@pytest.mark.parametrize(
    ("caller_steps", "num_jobs"), [(True, 1), (True, MAX_CALLER_JOBS), (True, MAX_CALLER_JOBS + 1), (False, 1)]
)
def test_a_thread_that_steps_begins_a_few_jobs_itself_and_leaves_many_to_the_worker(
    num_jobs: int, *, caller_steps: bool
) -> None:
    worker = TransferWorker(  # whose thread has not started
        cast("Any", LocalBackend),
        name="x",
        slots=None,
        caller_steps=caller_steps,
        on_reports=lambda: None,
        on_death=lambda error: pytest.fail(str(error)),
    )
    for number in range(num_jobs):
        worker.submit(Job(number, cast("Any", None), bind, lambda: False))
    begins = caller_steps and num_jobs <= MAX_CALLER_JOBS
    reports = worker.take_reports()
    assert [(type(report), cast("Settled", report).error) for report in reports] == [(Settled, "bound")] * num_jobs * begins
    assert worker.depth == num_jobs * (not begins)
