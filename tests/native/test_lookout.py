"""A thread that looks for work without the interpreter, and others that let it have that again."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from disagg import _core

PATIENCE_S = 60.0
NOTHING = np.empty(0, np.int32)


@pytest.fixture
def stubborn() -> Iterator[None]:
    """A thread keeps the interpreter until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def until(is_over: Callable[[], object], lookout: _core.Lookout) -> bool:
    """Asks again and again, keeping the interpreter but for giving way."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_over() and time.monotonic() < deadline:
        lookout.give_way()
    return bool(is_over())


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("sleeps", [False, True])
def test_a_thread_that_has_found_something_goes_on_though_another_asks_again_and_again(sleeps: bool) -> None:
    lookout, sign, done = _core.Lookout(), _core.Flag(), list[bool]()

    def look() -> None:
        if sleeps:
            lookout.sleep(1e-3, NOTHING)
            done.append(True)
        else:
            done.append(lookout.linger(PATIENCE_S, NOTHING, [sign]))
        lookout.linger(0.0, NOTHING, [])  # nothing more to do

    thread = threading.Thread(target=look)
    thread.start()
    lookout.give_way()  # it has no work yet
    sign.set()
    assert until(lambda: done, lookout)
    assert done == [True]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_descriptors_end_a_wait() -> None:
    lookout, descriptor = _core.Lookout(), os.eventfd(0)
    watched = np.array([descriptor], np.int32)
    assert not lookout.linger(0.0, watched, [])
    assert not _core.is_readable(descriptor)
    os.eventfd_write(descriptor, 1)
    assert lookout.linger(PATIENCE_S, watched, [])
    assert _core.is_readable(descriptor)
    lookout.sleep(PATIENCE_S, watched)
    os.close(descriptor)


@pytest.mark.parametrize("sign", [None, 3, "sign"])
def test_what_is_no_sign_is_refused(sign: object) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        _core.Lookout().linger(0.0, NOTHING, [sign])  # type: ignore[list-item]


def test_packets_leave_at_once_or_not_at_all() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.send(-1, b"packet")
