"""Workers that come and go under load."""

from __future__ import annotations

import pytest

from harness.xpyd import run


@pytest.mark.chaos
def test_no_request_is_lost_while_workers_come_and_go() -> None:
    summary = run(seconds=20.0, backend="cma")
    assert summary.ok, str(summary)
    assert summary.events["killed"] + summary.events["closed"] > 0, str(summary)
    assert len({decode for _, decode in summary.pairs}) > 1, str(summary)
