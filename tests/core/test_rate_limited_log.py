"""Warnings that peers can cause are logged at a bounded rate."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from disagg.core import rate_limited_log
from disagg.core.rate_limited_log import MAX_REMEMBERED, WARNINGS_PER_S, RateLimitedLog

BURST = WARNINGS_PER_S * 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, in seconds, that the log sees."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rate_limited_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_flood_is_cut_and_counted(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger("tests.rate"))
    for number in range(10_000):
        log.warning("refused %d", number)
    assert len(caplog.records) == BURST
    clock.now += 1.0
    caplog.clear()
    for number in range(10_000):
        log.warning("refused %d", number)
    assert len(caplog.records) == WARNINGS_PER_S + 1
    assert caplog.records[1].getMessage() == f"{10_000 - BURST:.0f} earlier warnings were dropped"


def test_the_same_warning_is_logged_once_in_a_while(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger("tests.rate"), repeat_s=60.0)
    for _ in range(5):
        log.warning("rejected a hello of %s", "decode-0/0")
        clock.now += 10.0
    log.warning("rejected a hello of %s", "decode-1/0")
    assert len(caplog.records) == 2
    clock.now += 60.0
    log.warning("rejected a hello of %s", "decode-0/0")
    assert len(caplog.records) == 3
    for number in range(10 * MAX_REMEMBERED):
        log.warning("rejected a hello of %s", number)
    assert len(log._logged_at) == MAX_REMEMBERED


def test_a_warning_whose_cause_may_pass_is_logged_once_it_lasts(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    log = RateLimitedLog(logging.getLogger("tests.lasting"), repeat_s=60.0)
    for now in (100.0, 101.0, 102.9, 200.0, 202.0):  # two starts: the cause passes each time
        clock.now = now
        log.warning("rejected %s", "decode", after_s=3.0)
    assert caplog.messages == []
    for now in (203.5, 204.0):
        clock.now = now
        log.warning("rejected %s", "decode", after_s=3.0)
    assert caplog.messages == ["rejected decode"]
