"""Threads that wait without the interpreter, and others that let them have it when there is work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from disagg.core import _native

PATIENCE_S = 60.0


@pytest.fixture
def stubborn() -> Iterator[None]:
    """A thread keeps the interpreter until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


Wait = Callable[[_native.Flag, _native.Alarm], object]
WAITS: dict[str, Wait] = {
    "linger": lambda sign, _: _native.busy_poll(PATIENCE_S, signs=[sign]),
    "sleep": lambda *_: _native.sleep(1e-3),
    "alarm": lambda _, alarm: alarm.wait(PATIENCE_S),
    "alarm, in vain": lambda *_: _native.Alarm().wait(1e-3),
}


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_thread_that_has_work_goes_on_though_another_asks_again_and_again(wait: Wait) -> None:
    sign, alarm, done = _native.Flag(), _native.Alarm(), list[bool]()

    def work() -> None:
        _native.enlist_thread()
        for _ in range(3):
            wait(sign, alarm)
            alarm.set()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    _native.yield_gil()
    sign.set()
    alarm.set()
    deadline = time.monotonic() + PATIENCE_S
    while len(done) < 3 and time.monotonic() < deadline:
        _native.yield_gil()
    assert len(done) == 3
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_descriptors_end_a_wait() -> None:
    descriptor = os.eventfd(0)
    watched = np.array([descriptor], np.int32)
    assert not _native.busy_poll(0.0, watched, [])
    assert not _native.is_readable(descriptor)
    os.eventfd_write(descriptor, 1)
    assert _native.busy_poll(PATIENCE_S, watched, [])
    assert _native.is_readable(descriptor)
    _native.sleep(PATIENCE_S, watched)
    os.close(descriptor)


def test_an_alarm_that_was_set_before_is_heard_once() -> None:
    alarm = _native.Alarm()
    alarm.set()
    alarm.set()
    assert alarm.wait(PATIENCE_S)
    assert not alarm.wait(0.0)
    assert not alarm.wait(-1.0)


@pytest.mark.parametrize("sign", [None, 3, "sign"])
def test_what_is_no_sign_is_refused(sign: object) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        _native.busy_poll(0.0, signs=[sign])  # type: ignore[list-item]


def test_packets_leave_at_once_or_not_at_all() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.send(-1, b"packet")
