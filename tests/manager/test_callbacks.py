"""Callbacks of the server, which run in the manager's threads: whatever they raise concerns at most their request."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from disagg import Pages, new_request_id
from disagg.testing.reference import PageList
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

PAGES = PageList((0, 1, 2))
PAGES_OF_SENDER = PageList((0, 1, 2, 3, 4))
RAISED = [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit]


class Failing:
    """A ready event that raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def query(self) -> bool:
        raise self._error

    def synchronize(self) -> None:
        raise self._error


class Undecided(Failing):
    """A ready event whose answer raises when it is used."""

    def query(self) -> bool:
        return self  # type: ignore[return-value]

    def __bool__(self) -> bool:
        raise self._error


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("event_type", [Failing, Undecided])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_an_event_that_raises_fails_its_request_only(
    error: type[BaseException], event_type: type[Failing], verify: str
) -> None:
    with cluster(Side(), Side(page=8), settings={"verify": verify}) as instances:
        refused = receive(instances.decode[0], new_request_id(), PAGES, need=(0, 20), ready=event_type(error))
        found = refused.wait(timeout_s=DEADLINE_S)
        assert f"the event of the rows failed: {error.__name__}" in str(found.error)
        assert found.lease.released
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))
        sender = instances.prefill[0].manager.sender(request, peer="decode-0")
        sender.finish({"kv": Pages(np.arange(5))}, ready=event_type(error))
        assert error.__name__ in str(sender.wait(timeout_s=DEADLINE_S).error)
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert all(event.ok for event in instances.transfer(20))


@pytest.mark.parametrize("error", RAISED)
def test_a_release_callback_that_raises_ends_nothing(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    with cluster(Side(), Side(page=8)) as instances:
        request, released = new_request_id(), threading.Event()
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20))

        def register(_: float) -> None:
            assert receiver.session is not None
            receiver.session.lease.on_release(fail)
            receiver.session.lease.on_release(released.set)

        instances.decode[0].manager._runtime.command(register)
        send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert released.wait(DEADLINE_S), "the other callbacks are called"
        assert f"{error.__name__}" in caplog.text
        assert all(event.ok for event in instances.transfer(20))
