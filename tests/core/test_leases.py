"""Leases: released once, by proof; quarantined with a reason until then."""

from __future__ import annotations

import threading

import pytest

from disagg.core.errors import LocalProtocolError
from disagg.core.leases import Lease, LeaseState, quarantine, release


def test_a_new_lease_is_held_without_a_reason() -> None:
    lease = Lease()
    assert (lease.state, lease.released, lease.reason) == (LeaseState.HELD, False, "")


def test_callbacks_run_once_in_order_or_at_once_after_release() -> None:
    lease, called = Lease(), list[int]()
    for number in range(3):
        lease.on_release(lambda number=number: called.append(number))  # type: ignore[misc]
    assert called == []
    release(lease)
    release(lease)
    assert called == [0, 1, 2]
    assert lease.released
    lease.on_release(lambda: called.append(3))
    assert called == [0, 1, 2, 3]


def test_only_functions_are_called_on_release() -> None:
    lease = Lease()
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="on_release: expected a function, found None"):
            lease.on_release(None)  # type: ignore[arg-type]
        release(lease)


def test_quarantine_keeps_its_first_reason_until_release() -> None:
    lease = Lease()
    quarantine(lease, "first")
    quarantine(lease, "second")
    assert (lease.state, lease.reason) == lease.status == (LeaseState.QUARANTINED, "first")
    release(lease)
    assert (lease.state, lease.reason) == (LeaseState.RELEASED, "")


def test_a_released_lease_cannot_be_quarantined() -> None:
    lease = Lease()
    release(lease)
    quarantine(lease, "late")
    assert (lease.state, lease.reason) == (LeaseState.RELEASED, "")


def test_a_callback_may_use_the_lease() -> None:
    lease, called = Lease(), list[LeaseState]()
    lease.on_release(lambda: lease.on_release(lambda: called.append(lease.state)))
    release(lease)
    assert called == [LeaseState.RELEASED]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_callback_that_raises_is_logged_and_the_others_run(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    lease, called = Lease(), list[str]()
    lease.on_release(fail)
    lease.on_release(lambda: called.append("second"))
    release(lease)
    assert called == ["second"]
    assert error.__name__ in caplog.text


def test_concurrent_releases_run_callbacks_once() -> None:
    for _ in range(50):
        lease, called, gate = Lease(), list[int](), threading.Barrier(4)
        lease.on_release(lambda called=called: called.append(1))  # type: ignore[misc]

        def release_together(lease: Lease = lease, gate: threading.Barrier = gate) -> None:
            gate.wait()
            release(lease)

        threads = [threading.Thread(target=release_together) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert called == [1]
