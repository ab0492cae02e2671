"""Which jobs the submitting thread runs itself."""

from __future__ import annotations

from typing import Any, cast

import pytest

from disagg.backends.local import LocalBackend
from disagg.core.errors import LayoutError
from disagg.transfer.jobs import Job, Settled
from disagg.transfer.worker import MAX_INLINE_JOBS, SMALL_NUM_ROWS, TransferWorker


def bind() -> Any:
    raise LayoutError("bound")


def job(number: int, *, num_rows: int = 1) -> Job:
    return Job(number, cast("Any", None), bind, lambda: False, None, None, num_rows=num_rows)


@pytest.fixture
def worker() -> TransferWorker:
    """A worker whose thread has not started."""
    return TransferWorker(
        cast("Any", LocalBackend), name="x", slots=None, on_reports=lambda: None, on_death=lambda error: pytest.fail(str(error))
    )


@pytest.mark.parametrize(
    ("num_jobs", "num_rows", "inline"),
    [(1, 1, True), (MAX_INLINE_JOBS, SMALL_NUM_ROWS, True), (MAX_INLINE_JOBS + 1, 1, False), (1, SMALL_NUM_ROWS + 1, False)],
)
def test_few_small_jobs_run_in_the_thread_that_submits_them(
    worker: TransferWorker, num_jobs: int, num_rows: int, *, inline: bool
) -> None:
    for number in range(num_jobs):
        worker.submit(job(number, num_rows=num_rows))
    reports = worker.run_small()
    assert [(type(report), cast("Settled", report).error) for report in reports] == [(Settled, "bound")] * num_jobs * inline
    assert worker.depth == num_jobs * (not inline)
