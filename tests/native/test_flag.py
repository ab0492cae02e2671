"""Flags that threads linger for, without the interpreter."""

from __future__ import annotations

import threading

from disagg.core import _native


def test_everyone_who_lingers_sees_a_flag_that_is_set() -> None:
    flag, found = _native.Flag(), list[bool]()
    threads = [threading.Thread(target=lambda: found.append(flag.busy_poll(60.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not flag.busy_poll(1e-3)
    flag.yield_to_waiter()  # to nobody who could go on: it gives up
    assert not found
    flag.set()
    flag.yield_to_waiter()
    for thread in threads:
        thread.join(60.0)
    assert found == [True] * 3
    assert flag.busy_poll(0.0)
    flag.yield_to_waiter()
