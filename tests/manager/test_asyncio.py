"""Requests that tasks await: who gets the event, and what cancelling a task does."""

from __future__ import annotations

import asyncio
import gc
import logging
import select
import weakref
from typing import Any

import pytest

from disagg import KVManager, LocalProtocolError, new_request_id
from disagg.protocol.timers import MIN_STALE
from disagg.requests import Receiver, RequestHandle
from disagg.testing.reference import PageList
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, receive, send
from tests.support.inside import depth, open_handles

PAGES = PageList((0, 1, 2))
PAGES_OF_SENDER = PageList((0, 1, 2, 3, 4))


def start(instances: Cluster, request: bytes, *, pages: PageList = PAGES, **more: Any) -> Receiver:
    """A receive that no sender serves yet."""
    return receive(instances.decode[0], request, pages, need=(0, 20), **more)


def serve(instances: Cluster, request: bytes) -> None:
    for rank in instances.prefill:
        send(rank, request, PAGES_OF_SENDER, 20)


async def await_(handle: RequestHandle) -> Any:
    return await handle


async def soon(condition: Any) -> None:
    """Wait for a condition of another thread, while the loop's tasks run."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def no_events(instances: Cluster) -> None:
    for rank in (*instances.prefill, *instances.decode):
        rank.manager.events()


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR)
    return caplog


def test_an_awaited_event_is_not_in_the_queue(instances: Cluster) -> None:
    manager, request, other = instances.decode[0].manager, new_request_id(), new_request_id()

    async def server() -> Any:
        receiver = start(instances, request, tag="mine")
        task = asyncio.create_task(await_(receiver))
        await asyncio.sleep(0)  # the task awaits before the request ends
        serve(instances, request)
        return await task

    event = asyncio.run(server())
    assert (event.ok, event.tag, event.payload) == (True, "mine", b"token")
    assert event.lease.released
    assert depth(manager, "events") == 0
    assert not select.select([manager.fileno()], [], [], 0)[0]
    assert manager.events() == []
    start(instances, other).abort("nobody awaits it")
    until(lambda: depth(manager, "events") == 1)
    assert [each.key.request_id for each in manager.events()] == [other]


def test_an_await_takes_an_event_that_is_in_the_queue(instances: Cluster) -> None:
    manager, request, other = instances.decode[0].manager, new_request_id(), new_request_id()

    async def server() -> list[Any]:
        receiver = start(instances, request)
        serve(instances, request)
        await soon(lambda: depth(manager, "events") == 1)
        first = await receiver
        assert depth(manager, "events") == 0
        assert not select.select([manager.fileno()], [], [], 0)[0]
        return [first, await receiver, receiver.poll(), receiver.wait(timeout_s=0)]

    events = asyncio.run(server())
    assert events == [events[0]] * 4
    assert manager.events() == []
    late = start(instances, other)
    late.abort("to end it")
    (event,) = wait_for_events(manager)
    assert asyncio.run(await_(late)) is event, "an event that `events` has returned can be awaited as well"
    assert manager.events() == []


def wait_for_events(manager: KVManager) -> list[Any]:
    until(lambda: depth(manager, "events") > 0)
    return manager.events()


def test_poll_and_wait_leave_the_event_in_the_queue(instances: Cluster) -> None:
    manager, receiver = instances.decode[0].manager, start(instances, new_request_id())
    receiver.abort("to end it")
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert receiver.poll() is event
    assert manager.events() == [event]


def test_many_awaited_requests_leave_nothing_behind(instances: Cluster) -> None:
    """Of 1,000 requests, of which a part is cancelled, the queue and the table keep nothing, and the process keeps the tags and
    leases of the few whose timers were not swept yet.
    """

    class Tag:
        pass

    manager = instances.decode[0].manager
    kept: list[weakref.ref[Any]] = []
    deepest = 0

    async def client(number: int) -> None:
        nonlocal deepest
        pages = PageList(tuple(range(3 * (number % 5), 3 * (number % 5) + 3)))
        receiver = start(instances, new_request_id(), pages=pages, tag=Tag())
        kept.extend((weakref.ref(receiver.tag), weakref.ref(receiver.lease)))
        task = asyncio.create_task(await_(receiver))
        await asyncio.sleep(0)
        if number % 3:
            receiver.abort("to end it")
            assert not (await task).ok
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        released, loop = asyncio.Event(), asyncio.get_running_loop()
        receiver.lease.on_release(lambda: loop.call_soon_threadsafe(released.set))
        await asyncio.wait_for(released.wait(), DEADLINE_S)
        deepest = max(deepest, depth(manager, "events"))

    async def server() -> None:
        for first in range(0, 1000, 5):
            await asyncio.gather(*map(client, range(first, first + 5)))

    asyncio.run(server())
    assert deepest == 0
    assert open_handles(manager) == []
    gc.collect()
    until(lambda: sum(each() is not None for each in kept) < 4 * MIN_STALE)


@pytest.mark.parametrize("has_session", [False, True])
def test_cancelling_the_task_aborts_the_request(
    instances: Cluster, nothing_logged: pytest.LogCaptureFixture, has_session: bool
) -> None:
    """A client leaves, before the request has a session and while it waits for its sender."""
    manager = instances.decode[0].manager

    async def server() -> Receiver:
        receiver = start(instances, new_request_id())
        task = asyncio.create_task(await_(receiver))
        await asyncio.sleep(0)
        if has_session:
            await soon(lambda: receiver.session is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return receiver

    receiver = asyncio.run(server())
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert "the task that awaited it was cancelled" in str(event.error)
    until(lambda: receiver.lease.released)
    assert manager.events() == []
    assert not nothing_logged.records


def test_a_task_that_is_cancelled_before_it_waits_aborts_as_well(instances: Cluster) -> None:
    """`cancel` takes effect where the task waits first: at its request."""

    async def server() -> Receiver:
        receiver = start(instances, new_request_id())

        async def client() -> None:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await receiver

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(client())
        return receiver

    receiver = asyncio.run(server())
    assert "the task that awaited it was cancelled" in str(receiver.wait(timeout_s=DEADLINE_S).error)


def test_cancelling_after_the_end_changes_nothing(instances: Cluster, nothing_logged: pytest.LogCaptureFixture) -> None:
    request = new_request_id()

    async def server() -> Receiver:
        receiver = start(instances, request)
        task = asyncio.create_task(await_(receiver))
        await asyncio.sleep(0)
        serve(instances, request)
        receiver.wait(timeout_s=DEADLINE_S)  # the loop does not run meanwhile, so the task has not got its event
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return receiver

    receiver = asyncio.run(server())
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert event.ok
    assert event.lease.released
    assert instances.decode[0].manager.events() == []
    assert not nothing_logged.records


def test_a_request_ends_with_the_last_task_that_awaits_it(instances: Cluster) -> None:
    """Neither one of two tasks nor a timeout around `asyncio.shield` ends it."""
    request = new_request_id()

    async def server() -> list[Any]:
        receiver = start(instances, request)
        leaving, staying = (asyncio.create_task(await_(receiver)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        shielded = asyncio.ensure_future(receiver)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(shielded), 0.02)
        serve(instances, request)
        return [await staying, await shielded]

    first, second = asyncio.run(server())
    assert first is second
    assert first.ok


def test_the_calls_of_asyncio_that_take_a_request(instances: Cluster) -> None:
    manager, first, second = instances.decode[0].manager, new_request_id(), new_request_id()

    async def server() -> list[Any]:
        one, other = start(instances, first), start(instances, second, pages=PageList((3, 4, 5)))
        with pytest.raises(TypeError):
            await asyncio.create_task(one)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(one), 0.02)
        serve(instances, first)
        serve(instances, second)
        return [*await asyncio.gather(one, other), await asyncio.wait_for(one, DEADLINE_S), await asyncio.ensure_future(other)]

    events = asyncio.run(server())
    assert [event.ok for event in events] == [True] * 4
    assert manager.events() == []


def test_a_timeout_aborts_the_request_and_poll_has_its_event(instances: Cluster) -> None:
    async def server() -> Receiver:
        receiver = start(instances, new_request_id())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver, 0.02)
        await soon(receiver.poll)
        return receiver

    receiver = asyncio.run(server())
    event = receiver.poll()
    assert event is not None
    assert "the task that awaited it was cancelled" in str(event.error)
    assert instances.decode[0].manager.events() == []


def test_a_loop_that_closes_before_the_event(instances: Cluster, nothing_logged: pytest.LogCaptureFixture) -> None:
    """The task is neither cancelled nor woken. The request ends as if nobody waited, and nothing is logged."""
    manager, receiver = instances.decode[0].manager, start(instances, new_request_id())
    loop = asyncio.new_event_loop()
    task = loop.create_task(await_(receiver))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    receiver.abort("to end it")
    called: list[Any] = []
    event = receiver.wait(timeout_s=DEADLINE_S)
    receiver.on_end(called.append)
    until(lambda: called == [event])
    assert "to end it" in str(event.error)
    assert not task.done()
    assert manager.events() == []
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert not nothing_logged.records


def test_awaiting_in_a_forked_child_is_refused(instances: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = start(instances, new_request_id())
    monkeypatch.setattr(instances.decode[0].manager._runtime.lifetime, "inherited", "a forked child cannot use it")
    with pytest.raises(LocalProtocolError, match="a forked child"):
        asyncio.run(await_(receiver))
