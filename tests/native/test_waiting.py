"""Waits without the GIL, the signals that end them, and threads that yield the GIL to others with work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from disagg.core import _native

TIMEOUT_S = 60.0


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread holds the GIL until it releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


Wait = Callable[[_native.Flag, _native.Alarm], object]
WAITS: dict[str, Wait] = {
    "busy_poll": lambda flag, _: _native.busy_poll(TIMEOUT_S, completions=[flag]),
    "sleep": lambda *_: _native.sleep(1e-3),
    "alarm": lambda _, alarm: alarm.wait(TIMEOUT_S),
    "alarm that is never set": lambda *_: _native.Alarm().wait(1e-3),
}


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_polling_yields_the_gil_to_a_thread_with_work(wait: Wait) -> None:
    flag, alarm, done = _native.Flag(), _native.Alarm(), list[bool]()

    def work() -> None:
        _native.enlist_thread()
        for _ in range(3):
            wait(flag, alarm)
            alarm.set()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    _native.yield_gil()
    flag.set()
    alarm.set()
    deadline = time.monotonic() + TIMEOUT_S
    while len(done) < 3 and time.monotonic() < deadline:
        _native.yield_gil()
    assert len(done) == 3
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_descriptors_end_a_wait() -> None:
    descriptor = os.eventfd(0)
    watched = np.array([descriptor], np.int32)
    assert not _native.busy_poll(0.0, watched, [])
    assert not _native.is_readable(descriptor)
    os.eventfd_write(descriptor, 1)
    assert _native.busy_poll(TIMEOUT_S, watched, [])
    assert _native.is_readable(descriptor)
    assert not _native.Alarm().wait(TIMEOUT_S, watched)
    os.close(descriptor)


def test_an_alarm_set_before_the_wait_ends_one_wait() -> None:
    alarm = _native.Alarm()
    alarm.set()
    alarm.set()
    assert alarm.wait(TIMEOUT_S)
    assert not alarm.wait(0.0)
    assert not alarm.wait(-1.0)


@pytest.mark.parametrize("other", [None, 3, "flag", np.zeros(1, np.uint64)], ids=["none", "int", "str", "array"])
def test_other_objects_are_not_completions(other: Any) -> None:
    with pytest.raises(TypeError, match="completions: expected only Flag"):
        _native.busy_poll(0.0, completions=[other])
    with pytest.raises(TypeError, match=r"expected a CudaQueue|incompatible function arguments"):
        _native.CudaEvent(other, 1)


def test_all_waiters_see_a_flag_that_is_set() -> None:
    flag, found = _native.Flag(), list[bool]()
    threads = [threading.Thread(target=lambda: found.append(flag.busy_poll(TIMEOUT_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not flag.busy_poll(1e-3)
    flag.yield_to_waiter()  # no waiter can leave yet, so this gives up
    assert not found
    flag.set()
    flag.yield_to_waiter()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [True] * 3
    assert flag.busy_poll(0.0)
    flag.yield_to_waiter()
