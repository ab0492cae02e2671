"""How requests end: missing data, aborts, deadlines, and events."""

from __future__ import annotations

import itertools
import pickle
import select
import subprocess
import sys
import threading

import numpy as np
import pytest

from disagg import (
    DisaggError,
    LocalProtocolError,
    Pages,
    RequestAborted,
    RequestTimeout,
    combine,
    new_request_id,
)
from disagg.core import errors
from disagg.core.errors import Cause
from disagg.core.leases import LeaseState
from disagg.runtime.loop import READY_POLL_S
from disagg.testing import reference
from disagg.testing.reference import PageList
from disagg.transfer.pool_memory import PoolMemory
from tests.manager.conftest import untouched
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, receive, send, wait_by_polling
from tests.support.inside import count_busy_polls


class Gate:
    """A ready event that the test opens."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def query(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        self._open.wait()

    def open(self) -> None:
        self._open.set()


def test_a_component_that_is_not_sent_fails_the_request(instances: Cluster) -> None:
    """Cases 22 and 24: a request without all its data never succeeds."""
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
    silent = instances.prefill[1].manager.sender(request, peer="decode-0")
    silent.finish()
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert not event.ok
    assert "prefill-0/1 finished without component 'kv': tokens [0, 20) of layer 0 (3 layers incomplete)" in str(event.error)


def test_the_error_names_missing_tokens_and_layers(instances: Cluster) -> None:
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    for rank in instances.prefill:
        sender = rank.manager.sender(request, peer="decode-0")
        rows = {"kv": Pages(np.arange(5))}
        sender.send(rows, tokens=(0, 12))
        sender.send(rows, tokens=(12, 20), layers=[0, 2])
        sender.finish()
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert "tokens [12, 20) of layer 1 (1 layers incomplete)" in str(event.error)


def test_a_request_may_be_sent_by_layer_groups(instances: Cluster) -> None:
    request, pages = new_request_id(), PageList((9, 3, 1))
    listed = [instances.pages(rank, 20) for rank in instances.prefill]
    receiver = receive(instances.decode[0], request, pages, need=(0, 20))
    for rank, source in zip(instances.prefill, listed, strict=True):
        reference.fill(instances.model, rank.spec, rank.pools, source, num_tokens=20)
        sender = rank.manager.sender(request, peer="decode-0")
        for layers in ([1], [0, 2]):
            sender.send({"kv": Pages(np.array(source.ids))}, tokens=(0, 20), layers=layers)
        sender.finish()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    wanted = reference.expected(instances.model, instances.decode[0].spec, pages, num_tokens=20, need=(0, 20))
    assert reference.first_difference(wanted, instances.decode[0].pools) is None


def test_a_duplicate_request_is_refused_and_the_first_continues(instances: Cluster) -> None:
    """Case 37."""
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match="this attempt is under way; use a new attempt number"):
        receive(instances.decode[0], request, PageList((3, 4, 5)), need=(0, 20))
    senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
    until(lambda: receiver.place not in instances.decode[0].manager._runtime.requests._places)
    again = receive(instances.decode[0], request, PageList((3, 4, 5)), need=(0, 20)).wait(timeout_s=DEADLINE_S)
    assert "already received" in str(again.error)
    assert again.lease.released


def test_another_attempt_of_the_same_request_is_another_transfer(instances: Cluster) -> None:
    request = new_request_id()
    for attempt in (0, 1):
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20), attempt=attempt)
        for rank in instances.prefill:
            send(rank, request, PageList((0, 1, 2, 3, 4)), 20, attempt=attempt)
        assert receiver.wait(timeout_s=DEADLINE_S).ok


def test_prefill_rejects_a_request_before_or_after_it_was_reserved(instances: Cluster) -> None:
    """Case 34: prefill sends the failure and its reason to decode at once."""
    for reserve_first in (True, False):
        request = new_request_id()
        steps = [lambda r=request: receive(instances.decode[0], r, PageList((0, 1, 2)), need=(0, 20))]
        receiver = steps[0]() if reserve_first else None
        for rank in instances.prefill:
            rank.manager.sender(request, peer="decode-0").abort("prompt too long")
        receiver = receiver or steps[0]()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert isinstance(event.error, RequestAborted)
        assert "prompt too long" in str(event.error)
        until(lambda lease=event.lease: lease.released)
    assert untouched(instances)


def test_prefill_learns_the_reason_of_decodes_abort(instances: Cluster) -> None:
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    senders = [rank.manager.sender(request, peer="decode-0") for rank in instances.prefill]
    receiver.abort("client gone")
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert str(event.error) == "client gone"
    for sender in senders:
        sender.finish()
        assert "client gone" in str(sender.wait(timeout_s=DEADLINE_S).error)
    released = threading.Event()
    event.lease.on_release(released.set)
    assert released.wait(DEADLINE_S)


def test_deadlines_hold_while_the_control_thread_always_has_commands(instances: Cluster) -> None:
    runtime = instances.decode[0].manager._runtime

    def again(_: float) -> None:
        if not stop.is_set():
            runtime.command(again)

    stop = threading.Event()
    runtime.command(again)
    try:
        for page in (0, 3, 6):  # after the first, no timer is armed from before the load
            pages = PageList((page, page + 1, page + 2))
            receiver = receive(instances.decode[0], new_request_id(), pages, need=(0, 20), deadline_s=0.1)
            assert isinstance(receiver.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
    finally:
        stop.set()


def test_the_deadline_of_an_unserved_request_names_the_silent_ranks(instances: Cluster) -> None:
    receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20), deadline_s=0.1)
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert isinstance(event.error, RequestTimeout)
    assert "prefill-0/0, prefill-0/1" in str(event.error)
    sender = instances.prefill[0].manager.sender(new_request_id(), peer="decode-0", deadline_s=0.1)
    failure = sender.wait(timeout_s=DEADLINE_S)
    assert "0 of 1 ranks of 'decode-0' reserved" in str(failure.error)
    assert failure.lease.state is LeaseState.RELEASED


def test_rows_are_read_and_reserved_only_after_their_ready_events(instances: Cluster) -> None:
    """Cases 35 and 36: bytes move only after the ready events of both sides."""
    request, source, sink = new_request_id(), [instances.pages(rank, 20) for rank in instances.prefill], PageList((0, 1, 2))
    sink_ready, source_ready = Gate(), Gate()
    receiver = receive(instances.decode[0], request, sink, need=(0, 20), ready=sink_ready)
    senders = []
    for rank, pages in zip(instances.prefill, source, strict=True):
        sender = rank.manager.sender(request, peer="decode-0")
        assert sender.needed("kv") is None
        sender.send({"kv": Pages(np.array(pages.ids))}, tokens=(0, 20), ready=source_ready)
        sender.finish()
        senders.append(sender)
    assert receiver.poll() is None
    assert all(sender.needed("kv") is None for sender in senders)
    sink_ready.open()
    while any(sender.needed("kv") is None for sender in senders):
        assert receiver.poll() is None
    assert senders[0].needed("kv") == (0, 20)
    assert untouched(instances)
    for rank, pages in zip(instances.prefill, source, strict=True):
        reference.fill(instances.model, rank.spec, rank.pools, pages, num_tokens=20)
    source_ready.open()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    wanted = reference.expected(instances.model, instances.decode[0].spec, sink, num_tokens=20, need=(0, 20))
    assert reference.first_difference(wanted, instances.decode[0].pools) is None


class AfterQueries:
    """A ready event that passes at its 200th query. At each query it records the number of busy polls so far."""

    def __init__(self, polls: list[float]) -> None:
        self._polls = polls
        self.num_polls: list[int] = []

    def query(self) -> bool:
        self.num_polls.append(len(self._polls))
        return len(self.num_polls) == 200


def test_rows_that_are_not_ready_leave_the_interpreter_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pools on a GPU the control thread does not sleep. Between two queries it polls without the GIL, for at most 0.5 ms,
    except where a message or a command has come.
    """
    monkeypatch.setattr(PoolMemory, "spin_s", 60.0)
    with cluster(Side(), Side(page=8)) as instances:
        polls = count_busy_polls(instances.decode[0].manager)
        request, ready = new_request_id(), AfterQueries(polls)
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20), ready=ready)
        send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
    between = polls[ready.num_polls[0] : ready.num_polls[-1]]
    assert max(between, default=0.0) <= READY_POLL_S
    assert len(between) > 100


def test_an_abort_without_a_reason_ends_copies_that_wait_for_an_event(instances: Cluster) -> None:
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    senders = [rank.manager.sender(request, peer="decode-0") for rank in instances.prefill]
    for sender in senders:
        sender.send({"kv": Pages(np.arange(5))}, tokens=(0, 20), ready=Gate())
    until(lambda: all(sender.needed("kv") == (0, 20) for sender in senders))
    for sender in senders:
        sender.abort("")
    events = [handle.wait(timeout_s=DEADLINE_S) for handle in (receiver, *senders)]
    assert not any(event.ok for event in events)
    until(lambda: all(event.lease.released for event in events))


def test_the_file_descriptor_becomes_readable_with_an_event(instances: Cluster) -> None:
    manager = instances.decode[0].manager
    manager.events()
    assert not select.select([manager.fileno()], [], [], 0)[0]
    request = new_request_id()
    receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20), tag="mine")
    for rank in instances.prefill:
        send(rank, request, PageList((0, 1, 2, 3, 4)), 20)
    assert select.select([manager.fileno()], [], [], DEADLINE_S)[0]
    (event,) = manager.events()
    assert (event.tag, event.ok, event.payload) == ("mine", True, b"token")
    assert manager.events() == []


def test_two_threads_that_ask_for_events_get_each_of_them_once() -> None:
    with cluster(Side(), Side(page=8)) as instances:
        manager, found, has_ended = instances.prefill[0].manager, list[list[bytes]](), threading.Event()

        def take() -> None:
            own: list[bytes] = []
            while not has_ended.is_set():
                own += [event.key.request_id for event in manager.events()]
            found.append(own + [event.key.request_id for event in manager.events()])

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=take) for _ in range(2)]
            for thread in threads:
                thread.start()
            asked = [new_request_id() for _ in range(1000)]
            handles = [manager.sender(request, peer="decode-0") for request in asked]
            for handle in handles:
                handle.abort("the test ends it")
            for handle in handles:
                handle.wait(timeout_s=DEADLINE_S)
            has_ended.set()
            for thread in threads:
                thread.join()
        finally:
            has_ended.set()
            sys.setswitchinterval(interval)
        assert sorted(itertools.chain(*found)) == sorted(asked)


def test_an_error_of_one_request_fails_only_that_request(instances: Cluster) -> None:
    """Case 44."""
    bad, good = new_request_id(), new_request_id()
    failing = receive(instances.decode[0], bad, PageList((0, 1, 2)), need=(0, 20))
    passing = receive(instances.decode[0], good, PageList((3, 4, 5)), need=(0, 20))
    for rank in instances.prefill:
        send(rank, bad, PageList((0, 1, 2, 3, 99)), 20)
        send(rank, good, PageList((0, 1, 2, 3, 4)), 20)
    assert passing.wait(timeout_s=DEADLINE_S).ok
    assert not failing.wait(timeout_s=DEADLINE_S).ok


def test_combine_returns_the_first_failure_of_all_ranks(instances: Cluster) -> None:
    """Case 43: combining needs no collective."""
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
    events = [handle.wait(timeout_s=DEADLINE_S) for handle in (receiver, *senders)]
    assert combine(events) is None
    lost = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
    lost.abort("client gone")
    failed = lost.wait(timeout_s=DEADLINE_S)
    assert combine([*events, failed]) is failed.error
    with pytest.raises(LocalProtocolError, match="combine: expected an event of each rank, found none"):
        combine([])


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DisaggError)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_an_event_can_be_sent_to_another_process(kind: type[DisaggError]) -> None:
    """Ranks of an instance are processes: what they tell each other of a request is its error."""
    sent = kind("rank 1: nothing came")
    if kind is RequestAborted:
        sent = RequestAborted("rank 1: nothing came", cause=Cause.PEER_LOST)
    received = pickle.loads(pickle.dumps(sent))
    assert (type(received), str(received), received.cause) == (type(sent), str(sent), sent.cause)


def test_an_attempt_that_has_ended_cannot_be_used_again(instances: Cluster) -> None:
    """While the manager still has it, that is an error of the call; afterwards one of the request."""
    request, reader = new_request_id(), instances.decode[0]
    receiver = receive(reader, request, PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match="this attempt is under way; use a new attempt number"):
        receive(reader, request, PageList((3, 4, 5)), need=(0, 20))
    for rank in instances.prefill:
        send(rank, request, PageList((0, 1, 2, 3, 4)), 20)
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    until(lambda: [event.tag for event in reader.manager.events()])
    event = receive(reader, request, PageList((0, 1, 2)), need=(0, 20)).wait(timeout_s=DEADLINE_S)
    assert event.error is not None
    assert event.error.cause is Cause.INVALID
    assert "this attempt was already received from 'prefill-0'; use a new attempt number" in str(event.error)


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_server_that_polls_in_a_loop_does_not_block_its_manager(backend: str, verify: str) -> None:
    """Polling must yield the GIL: no thread switch interrupts the loop here, so requests would never end."""
    with cluster(Side(tp=2), Side(page=8), settings={"backend": backend, "verify": verify}) as instances:
        assert all(event.ok for event in instances.transfer(37))
        for by_events in (False, True):
            assert all(event.ok for event in wait_by_polling(instances, by_events=by_events))


def test_finish_starts_the_copies_although_its_thread_goes_on_computing() -> None:
    """No thread switch interrupts this one, which releases the GIL nowhere else. `finish` gives the manager 1 ms, which may be
    too short on a loaded machine; without it not one request of a hundred would be sent.
    """
    with cluster(Side(), Side(page=8), settings={"backend": "cma"}) as instances:
        assert all(event.ok for event in instances.transfer(20))
        interval, rank = sys.getswitchinterval(), instances.prefill[0]
        for _ in range(100):
            request = new_request_id()
            pages = [instances.pages(each, 20) for each in (instances.decode[0], rank)]
            receiver = receive(instances.decode[0], request, pages[0], need=(0, 20))
            sender = rank.manager.sender(request, peer="decode-0")
            until(lambda sender=sender: sender.needed("kv") is not None)
            sys.setswitchinterval(1000.0)
            try:
                sender.finish({"kv": Pages(np.array(pages[1].ids, dtype=np.int32))})
                session = sender.session
                is_finished = session is not None and session.finished
            finally:
                sys.setswitchinterval(interval)
            assert receiver.wait(timeout_s=DEADLINE_S).ok
            assert sender.wait(timeout_s=DEADLINE_S).ok
            if is_finished:
                return
        raise AssertionError("the control thread never had the GIL during finish()")


LEFT_OPEN = """
import sys
from disagg.testing.reference import KVModel
from tests.support.cluster import Cluster, Side, introduce, start_side

model = KVModel(num_kv_heads=4, dims={"k": 8, "v": 8})
names, settings = ("prefill-0", "decode-0"), {"backend": sys.argv[1], "verify": "full"}
instances = Cluster(model, *(start_side(model, Side(), name, num_layers=2, settings=settings) for name in names))
introduce(instances.prefill, instances.decode)
for rank, name in zip((*instances.decode, *instances.prefill), names):
    rank.manager.wait_ready(name, timeout_s=20)
assert all(event.ok for event in instances.transfer(37))
"""


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
def test_a_process_may_exit_with_an_open_manager(backend: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, backend], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
