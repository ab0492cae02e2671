"""Callbacks of the server, which run in the manager's threads: whatever they raise concerns at most their request, and they may
close the manager.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from disagg import DisaggError, LocalProtocolError, Pages, new_request_id
from disagg.backends.base import Fence, RemotePeer
from disagg.backends.local import LocalBackend, LocalPeer
from disagg.machine.processes import ProcessWatch
from disagg.testing.reference import PageList
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send
from tests.support.inside import depth, in_control_thread
from tests.support.inside import threads as threads_of

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
        until(lambda: receiver.lease.released)
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

        in_control_thread(instances.decode[0].manager, register)
        send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert released.wait(DEADLINE_S), "the other callbacks are called"
        assert f"{error.__name__}" in caplog.text
        assert all(event.ok for event in instances.transfer(20))


@pytest.mark.parametrize("error", RAISED)
def test_a_command_that_raises_ends_nothing(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: float) -> None:
        raise error

    with cluster(Side(), Side(page=8)) as instances:
        reported: list[DisaggError] = []
        instances.decode[0].manager._runtime.commands.put(fail, reported.append)
        instances.decode[0].manager._runtime.commands.put(fail)
        assert all(event.ok for event in instances.transfer(20))
        assert [error.__name__ in str(each) for each in reported] == [True]
        assert "a command of the control thread failed" in caplog.text
        assert instances.decode[0].manager.health().ok


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("name", ["disagg.requests", ""])
def test_a_log_handler_that_raises_fails_no_request(error: type[BaseException], name: str) -> None:
    """At the logger of requests, or at the root: then the fault cannot be logged either."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread().name.startswith("disagg-"):
                seen.append(record.name)
                raise error

    seen: list[str] = []
    requests, parent, handler = logging.getLogger("disagg.requests"), logging.getLogger(name), Broken()
    before = requests.level
    with cluster(Side(), Side(page=8)) as instances:
        requests.setLevel(logging.INFO)
        parent.addHandler(handler)
        try:
            for _ in range(2):
                assert all(event.ok for event in instances.transfer(20))
            for rank in (*instances.prefill, *instances.decode):
                assert rank.manager.health().ok
        finally:
            parent.removeHandler(handler)
            requests.setLevel(before)
    assert "disagg.requests" in seen


class Raising(LocalBackend):
    """The server's own engine, which raises `error` once when it connects, and always when it fences."""

    error: type[BaseException] = KeyboardInterrupt
    left = 1

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> LocalPeer:
        if Raising.left:
            Raising.left -= 1
            raise self.error
        return super().connect(endpoint, epoch=epoch, process=process)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        raise self.error


@pytest.mark.parametrize("error", RAISED)
def test_an_engine_that_raises_costs_one_attempt_of_one_peer(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Raising, "error", error)
    monkeypatch.setattr(Raising, "left", 1)
    with cluster(Side(), Side(), settings={"backend": Raising}) as instances:
        assert all(event.ok for event in instances.transfer(20))
        assert Raising.left == 0
        assert error.__name__ in caplog.text
        instances.prefill.pop().manager.close()
        manager = instances.decode[0].manager
        until(lambda: depth(manager, "fences") == 1)
        until(lambda: f"fencing prefill-0/0: {error.__name__}" in caplog.text)
        assert manager.health().ok


class Calling:
    """A ready event that calls a function when it is first asked, and then has passed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_called = False

    def query(self) -> bool:
        if not self._is_called:
            self._is_called = True
            self._call()
        return True

    def synchronize(self) -> None:
        raise AssertionError("the manager must not block on a ready event")


def descriptors() -> Counter[str]:
    """How many descriptors of each kind this process has."""
    gc.collect()
    found = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the directory itself
            found[re.sub(r"\d+", "N", str(descriptor.readlink()))] += 1
    return found


PLACES = [("rows", "local"), ("release", "local"), ("release", "cma")]
PLACES += [("chunk", "local"), ("chunk", "nixl"), ("release", "mooncake")]


@pytest.mark.parametrize(("place", "engine"), PLACES)
def test_a_callback_may_close_its_manager(place: str, engine: str) -> None:
    """In the control thread (`release`, `rows`) and in the transfer thread (`chunk`)."""
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    with cluster(Side(), Side(page=8), settings={"backend": engine}) as instances:
        assert all(event.ok for event in instances.transfer(20))
    before = descriptors()  # with those that an engine opens once for the process
    with cluster(Side(), Side(page=8), settings={"backend": engine}) as instances:
        ranks = {"release": instances.decode, "rows": instances.decode, "chunk": instances.prefill}[place]
        manager, returned = ranks[0].manager, threading.Event()
        threads = threads_of(manager)

        def close() -> None:
            assert threading.current_thread() in threads
            manager.close()
            manager.close()
            returned.set()

        request = new_request_id()
        rows = Calling(close) if place == "rows" else None
        sender = instances.prefill[0].manager.sender(request, peer="decode-0")
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20), ready=rows)
        sender.finish({"kv": Pages(np.arange(5))}, ready=Calling(close) if place == "chunk" else None)
        if place == "release":
            receiver.wait(timeout_s=DEADLINE_S)
            held = receive(instances.decode[0], new_request_id(), PAGES, need=(0, 20))
            until(lambda: held.session is not None)
            held.session.lease.on_release(close)  # type: ignore[union-attr]
            held.abort("the test ends it")
        assert returned.wait(DEADLINE_S)
        manager.close()
        assert manager.health().problem == "the manager was closed"
        assert not manager.backend.is_open  # type: ignore[attr-defined]
        assert not any(thread.is_alive() for thread in threads)
        with pytest.raises(LocalProtocolError, match="the manager has ended: the manager was closed"):
            manager.add_peer("other", address="tcp://127.0.0.1:1")
        receiver.wait(timeout_s=DEADLINE_S)
        if place != "rows":  # decode has perhaps ended before it reserved: a sender waits for its return
            sender.wait(timeout_s=DEADLINE_S)
        ranks.clear()
    assert descriptors() == before


def test_a_callback_cannot_wait_for_its_manager() -> None:
    """Nothing would end meanwhile, in any request."""
    with cluster(Side(), Side(page=8)) as instances:
        decode, found, done = instances.decode[0], list[str](), threading.Event()
        other = receive(decode, new_request_id(), PageList((3, 4, 5)), need=(0, 20))
        receiver = receive(decode, request := new_request_id(), PAGES, need=(0, 20))

        def wait(_: object) -> None:
            for call in (
                other.wait,
                lambda: decode.manager.wait_ready("prefill-0", timeout_s=1.0),
                lambda: decode.manager.drain(timeout_s=1.0),
            ):
                with pytest.raises(LocalProtocolError, match="expected another thread, found a callback") as refused:
                    call()
                found.append(str(refused.value).partition(":")[0])
            assert receiver.wait().ok  # it has ended
            done.set()

        receiver.on_end(wait)
        send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
        assert done.wait(DEADLINE_S)
        assert found == ["wait", "wait_ready", "drain"]
        other.abort("the test is over")
        assert not other.wait(timeout_s=DEADLINE_S).ok


def test_a_late_release_callback_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(Side(), Side(page=8)) as instances:
        receiver = receive(instances.decode[0], request := new_request_id(), PAGES, need=(0, 20))
        send(instances.prefill[0], request, PAGES_OF_SENDER, 20)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        receiver.lease.on_release(lambda: 1 / 0)
    assert "a release callback failed" in caplog.text


def test_a_manager_that_closes_in_the_background_does_not_count_as_closed() -> None:
    go_on = threading.Event()

    class Slow(LocalBackend):
        """An engine that takes long to close."""

        def close(self) -> None:
            assert go_on.wait(DEADLINE_S)
            super().close()

    with cluster(Side(), Side(page=8), settings={"backend": Slow}) as instances:
        manager, returned, closed = instances.decode[0].manager, threading.Event(), threading.Event()

        def close(_: float) -> None:
            manager.close()
            returned.set()

        def wait_for_it() -> None:
            manager.close()
            closed.set()

        in_control_thread(manager, close)
        assert returned.wait(DEADLINE_S)
        assert manager.health().problem == "the manager is closing"
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert not closed.wait(0.2)
        go_on.set()
        thread.join(DEADLINE_S)
        assert closed.is_set()
        assert manager.health().problem == "the manager was closed"
        assert not manager.backend.is_open  # type: ignore[attr-defined]
        instances.decode.clear()
