"""Which jobs the submitting thread advances itself."""

from __future__ import annotations

from typing import Any, cast

import pytest

from disagg.backends.local import LocalBackend
from disagg.core.errors import LayoutError
from disagg.transfer.jobs import Job, Settled
from disagg.transfer.worker import MAX_CALLER_JOBS, TransferWorker


def bind() -> Any:
    raise LayoutError("bound")


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
