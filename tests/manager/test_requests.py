"""How requests end: bad input, aborts, deadlines, events, and what becomes of rows."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from disagg import (
    LayoutError,
    LocalProtocolError,
    Pages,
    PeerUnreachable,
    RequestAborted,
    RequestTimeout,
    Slot,
    combine,
    new_request_id,
)
from disagg.core.leases import LeaseState
from disagg.testing import reference
from disagg.testing.reference import PageList
from tests.support.cluster import DEADLINE_S, Cluster, Side, clear, cluster, receive, send, wait_by_polling


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with cluster(Side(tp=2), Side(tp=1, page=8, num_pages=16)) as both:
        yield both


def untouched(made: Cluster) -> bool:
    return all((t.view(np.uint8) == reference.CANARY).all() for r in made.decode for ts in r.pools.values() for t in ts)


class Gate:
    """A ready event that passes when it is told to."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def query(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        self._open.wait()

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize(
    ("ids", "first_token", "message"),
    [
        ((0, 1, 16), 0, "token 16 lies in page 16, outside the pool of 16 pages"),
        ((0, 1), 0, "needed token 16 has no page; 2 pages of 8 tokens are listed, from token 0 on"),
        ((0, -1, 2), 0, "token 8 lies in page -1, outside the pool"),
        ((0, 3, 3), 0, "page 3 is listed twice for needed tokens"),
        ((1, 2), 8, "needed token 0 has no page"),
    ],
)
def test_rows_that_cannot_take_what_is_needed_are_refused_at_once(
    made: Cluster, ids: tuple[int, ...], first_token: int, message: str
) -> None:
    """Case 32: nothing is reserved, nothing is written."""
    with pytest.raises(LayoutError, match=message):
        receive(made.decode[0], new_request_id(), PageList(ids, first_token), need=(0, 20))
    assert untouched(made)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 1, 2, 3, 32), "token 16 lies in page 32, outside the pool of 32 pages"),
        ((0, 1, 2, 3), "needed token 16 has no page"),
    ],
)
def test_source_rows_that_do_not_hold_what_was_sent_fail_the_request_on_both_sides(
    made: Cluster, ids: tuple[int, ...], message: str
) -> None:
    """The first cause reaches the receiver; nothing was written."""
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    bad, good = send(made.prefill[0], request, PageList(ids), 20), send(made.prefill[1], request, PageList((4, 5, 6, 7, 8)), 20)
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert not event.ok
    assert message in str(event.error)
    assert message in str(bad.wait(timeout_s=DEADLINE_S).error)
    assert not good.wait(timeout_s=DEADLINE_S).ok
    assert event.lease.released
    clear(made.decode[0].pools)


def test_a_component_that_is_not_sent_fails_the_request(made: Cluster) -> None:
    """Cases 22 and 24: an end without the data is never a success."""
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
    silent = made.prefill[1].manager.sender(request, peer="decode-0")
    silent.finish()
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert not event.ok
    assert "prefill-0/1 finished without component 'kv': tokens [0, 20) of layer 0 (3 layers incomplete)" in str(event.error)
    clear(made.decode[0].pools)


def test_tokens_and_layers_left_out_are_named(made: Cluster) -> None:
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    for rank in made.prefill:
        sender = rank.manager.sender(request, peer="decode-0")
        rows = {"kv": Pages(np.arange(5))}
        sender.send(rows, tokens=(0, 12))
        sender.send(rows, tokens=(12, 20), layers=[0, 2])
        sender.finish()
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert "tokens [12, 20) of layer 1 (1 layers incomplete)" in str(event.error)
    clear(made.decode[0].pools)


def test_sending_by_layer_groups(made: Cluster) -> None:
    request, pages = new_request_id(), PageList((9, 3, 1))
    listed = [made.pages(rank, 20) for rank in made.prefill]
    receiver = receive(made.decode[0], request, pages, need=(0, 20))
    for rank, source in zip(made.prefill, listed, strict=True):
        reference.fill(made.model, rank.spec, rank.pools, source, num_tokens=20)
        sender = rank.manager.sender(request, peer="decode-0")
        for layers in ([1], [0, 2]):
            sender.send({"kv": Pages(np.array(source.ids))}, tokens=(0, 20), layers=layers)
        sender.finish()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    wanted = reference.expected(made.model, made.decode[0].spec, pages, num_tokens=20, need=(0, 20))
    assert reference.first_difference(wanted, made.decode[0].pools) is None
    clear(made.decode[0].pools)


def test_a_duplicate_request_is_refused_and_the_first_goes_on(made: Cluster) -> None:
    """Case 37."""
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    with pytest.raises(LocalProtocolError, match="this attempt is under way; use a new attempt number"):
        receive(made.decode[0], request, PageList((3, 4, 5)), need=(0, 20))
    senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in made.prefill]
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    assert all(sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
    again = receive(made.decode[0], request, PageList((3, 4, 5)), need=(0, 20)).wait(timeout_s=DEADLINE_S)
    assert "already received" in str(again.error)
    assert again.lease.released
    clear(made.decode[0].pools)


def test_another_attempt_of_the_same_request_is_another_transfer(made: Cluster) -> None:
    request = new_request_id()
    for attempt in (0, 1):
        receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20), attempt=attempt)
        for rank in made.prefill:
            send(rank, request, PageList((0, 1, 2, 3, 4)), 20, attempt=attempt)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
    clear(made.decode[0].pools)


def test_prefill_rejects_a_request_before_and_after_it_was_reserved(made: Cluster) -> None:
    """Case 34: the failure is pushed to decode at once, with its reason."""
    for reserve_first in (True, False):
        request = new_request_id()
        steps = [lambda r=request: receive(made.decode[0], r, PageList((0, 1, 2)), need=(0, 20))]
        receiver = steps[0]() if reserve_first else None
        for rank in made.prefill:
            rank.manager.sender(request, peer="decode-0").abort("prompt too long")
        receiver = receiver or steps[0]()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert isinstance(event.error, RequestAborted)
        assert "prompt too long" in str(event.error)
    assert untouched(made)


def test_decode_aborts_and_prefill_hears_why(made: Cluster) -> None:
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    senders = [rank.manager.sender(request, peer="decode-0") for rank in made.prefill]
    receiver.abort("client gone")
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert str(event.error) == "client gone"
    for sender in senders:
        sender.finish()
        assert "client gone" in str(sender.wait(timeout_s=DEADLINE_S).error)
    released = threading.Event()
    event.lease.on_release(released.set)
    assert released.wait(DEADLINE_S)


def test_a_deadline_counts_where_there_is_always_something_else_to_do(made: Cluster) -> None:
    runtime = made.decode[0].manager._runtime

    def again(_: float) -> None:
        if not over:
            runtime.command(again)

    over: list[bool] = []
    runtime.command(again)
    try:
        for _ in range(3):  # what was known to be due before is past after the first
            receiver = receive(made.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20), deadline_s=0.1)
            assert isinstance(receiver.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
    finally:
        over.append(True)


def test_a_deadline_ends_a_request_nobody_serves_and_names_who_is_silent(made: Cluster) -> None:
    receiver = receive(made.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20), deadline_s=0.1)
    event = receiver.wait(timeout_s=DEADLINE_S)
    assert isinstance(event.error, RequestTimeout)
    assert "prefill-0/0, prefill-0/1" in str(event.error)
    sender = made.prefill[0].manager.sender(new_request_id(), peer="decode-0", deadline_s=0.1)
    failure = sender.wait(timeout_s=DEADLINE_S)
    assert "0 of 1 ranks of 'decode-0' reserved" in str(failure.error)
    assert failure.lease.state is LeaseState.RELEASED


def test_rows_are_read_and_reserved_only_after_their_ready_events(made: Cluster) -> None:
    """Cases 35 and 36: bytes move after the event, whichever side gives one."""
    request, source, sink = new_request_id(), [made.pages(rank, 20) for rank in made.prefill], PageList((0, 1, 2))
    taken, given = Gate(), Gate()
    receiver = receive(made.decode[0], request, sink, need=(0, 20), ready=taken)
    senders = []
    for rank, pages in zip(made.prefill, source, strict=True):
        sender = rank.manager.sender(request, peer="decode-0")
        assert sender.needed("kv") is None
        sender.send({"kv": Pages(np.array(pages.ids))}, tokens=(0, 20), ready=given)
        sender.finish()
        senders.append(sender)
    assert receiver.poll() is None
    assert all(sender.needed("kv") is None for sender in senders)
    taken.open()
    while any(sender.needed("kv") is None for sender in senders):
        assert receiver.poll() is None
    assert senders[0].needed("kv") == (0, 20)
    assert untouched(made)
    for rank, pages in zip(made.prefill, source, strict=True):
        reference.fill(made.model, rank.spec, rank.pools, pages, num_tokens=20)
    given.open()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    wanted = reference.expected(made.model, made.decode[0].spec, sink, num_tokens=20, need=(0, 20))
    assert reference.first_difference(wanted, made.decode[0].pools) is None
    clear(made.decode[0].pools)


def test_events_are_announced_by_a_file_descriptor(made: Cluster) -> None:
    manager = made.decode[0].manager
    manager.events()
    assert not select.select([manager.fileno()], [], [], 0)[0]
    request = new_request_id()
    receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20), tag="mine")
    for rank in made.prefill:
        send(rank, request, PageList((0, 1, 2, 3, 4)), 20)
    assert select.select([manager.fileno()], [], [], DEADLINE_S)[0]
    (event,) = manager.events()
    assert (event.tag, event.ok, event.payload) == ("mine", True, b"token")
    assert manager.events() == []
    clear(made.decode[0].pools)


def test_calls_that_make_no_sense_say_so(made: Cluster) -> None:
    manager, request = made.decode[0].manager, new_request_id()
    rows = {"kv": Pages(np.arange(3))}
    with pytest.raises(LocalProtocolError, match="no component 'ssm' was declared; there are kv"):
        manager.receiver(request, peer="prefill-0", rows={"ssm": Slot(1)}, need={"kv": (0, 20)})
    with pytest.raises(LocalProtocolError, match="rows of 'kv': expected Pages, found Slot"):
        manager.receiver(request, peer="prefill-0", rows={"kv": Slot(1)}, need={"kv": (0, 20)})
    with pytest.raises(LocalProtocolError, match="need of 'kv': expected integers"):
        manager.receiver(request, peer="prefill-0", rows=rows)
    with pytest.raises(LocalProtocolError, match="need: no component 'window'"):
        manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, 20), "window": (0, 1)})
    with pytest.raises(LocalProtocolError, match="component 'kv' is needed, but no rows"):
        manager.receiver(request, peer="prefill-0", rows={}, need={"kv": (0, 20)})
    with pytest.raises(LocalProtocolError, match="group of peer 'prefill-0': expected 0 to 0, found 1"):
        manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, 20)}, group=1)
    with pytest.raises(LocalProtocolError, match="request id: expected 16 bytes"):
        manager.receiver(b"short", peer="prefill-0", rows=rows, need={"kv": (0, 20)})
    with pytest.raises(PeerUnreachable, match="peer 'prefill-1' is not ready: it is not configured"):
        manager.receiver(request, peer="prefill-1", rows=rows, need={"kv": (0, 20)})
    sender = made.prefill[0].manager.sender(request, peer="decode-0")
    with pytest.raises(LocalProtocolError, match="payload: expected at most 65536 bytes, found 65537 bytes"):
        sender.finish(payload=bytes(65537))
    for tokens in ((4, 2), (-1, 2), (0, 2**41), (0, 1.5), (0, 1, 2), 7):
        with pytest.raises(LocalProtocolError, match="tokens: expected integers 0 <= start <= stop"):
            sender.send(rows, tokens=tokens)  # type: ignore[arg-type]
    for layers, found in (([-1], "0 to 2"), ([2**31], "0 to 2"), ([0.5], "layer ids")):
        with pytest.raises(LocalProtocolError, match=f"layers: expected (ids of )?{found}"):
            sender.send(rows, layers=layers)  # type: ignore[arg-type]
    sender.finish()
    with pytest.raises(LocalProtocolError, match="nothing can be sent after finish"):
        sender.send(rows, tokens=(0, 4))
    with pytest.raises(LocalProtocolError, match=r"finish\(\) was already called"):
        sender.finish()
    sender.abort("test over")


@pytest.mark.parametrize("attempt", [-1, 2**31, 1.0, "1"])
def test_attempts_that_are_none(made: Cluster, attempt: Any) -> None:
    with pytest.raises(LocalProtocolError, match="attempt: expected 0 to 2147483647, found"):
        made.prefill[0].manager.sender(new_request_id(), peer="decode-0", attempt=attempt)


@pytest.mark.parametrize("need", [(2**70, 2**70), (0, 2**41), (5, 4), (0.0, 4.0), (1, 2, 3), "ab", None])
def test_needs_that_are_none(made: Cluster, need: Any) -> None:
    rows = {"kv": Pages(np.arange(5))}
    with pytest.raises(LocalProtocolError, match="need of 'kv': expected integers 0 <= start <= stop <="):
        made.decode[0].manager.receiver(new_request_id(), peer="prefill-0", rows=rows, need={"kv": need})
    far = {"kv": Pages(np.arange(1), 2**41)}
    with pytest.raises(LocalProtocolError, match="rows of 'kv': expected a first token of 0 to"):
        made.decode[0].manager.receiver(new_request_id(), peer="prefill-0", rows=far, need={"kv": (5, 5)})


def test_integers_of_numpy_are_as_good_as_any(made: Cluster) -> None:
    request, number = new_request_id(), np.int64
    sink: Any = made.decode[0].manager
    rows: Any = {"kv": Pages(np.arange(5), number(0))}  # type: ignore[arg-type]
    receiver = sink.receiver(
        request, peer="prefill-0", rows=rows, need={"kv": (number(0), number(20))}, group=number(0), attempt=number(3)
    )
    senders: list[Any] = []
    for rank in made.prefill:
        source: Any = rank.manager
        sender = source.sender(request, peer="decode-0", attempt=np.int32(3))
        sender.send(rows, tokens=(number(0), np.int32(8)), layers=np.arange(3))
        sender.finish(rows)
        senders.append(sender)
    assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
    clear(made.decode[0].pools)
    slot: Any = np.int32(3)
    assert (Slot(slot), type(Slot(slot).id)) == (Slot(3), int)


def test_a_message_that_cannot_be_encoded_ends_its_request_only(made: Cluster) -> None:
    """Whatever checks have let through."""
    rows, request = {"kv": Pages(np.arange(5))}, new_request_id()
    object.__setattr__(rows["kv"], "first_token", 2**80)
    receiver = made.decode[0].manager._runtime.sessions.receives
    opened = receiver.open

    def spoilt(*given: Any, **more: Any) -> Any:
        receiver.open = opened  # type: ignore[method-assign]
        return opened(*given, **{**more, "rows": rows})

    receiver.open = spoilt  # type: ignore[method-assign]
    handle = made.decode[0].manager.receiver(
        request, peer="prefill-0", rows={"kv": Pages(np.arange(5))}, need={"kv": (0, 20)}, deadline_s=0.3
    )
    assert isinstance(handle.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
    assert made.decode[0].manager.health().ok
    assert all(event.ok for event in made.transfer(20))


def test_one_requests_error_ends_that_request_only(made: Cluster) -> None:
    """Case 44."""
    bad, good = new_request_id(), new_request_id()
    failing = receive(made.decode[0], bad, PageList((0, 1, 2)), need=(0, 20))
    passing = receive(made.decode[0], good, PageList((3, 4, 5)), need=(0, 20))
    for rank in made.prefill:
        send(rank, bad, PageList((0, 1, 2, 3, 99)), 20)
        send(rank, good, PageList((0, 1, 2, 3, 4)), 20)
    assert passing.wait(timeout_s=DEADLINE_S).ok
    assert not failing.wait(timeout_s=DEADLINE_S).ok
    clear(made.decode[0].pools)


def test_events_of_several_ranks_are_combined_by_the_server(made: Cluster) -> None:
    """Case 43: no collective; the first failure counts."""
    request = new_request_id()
    receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in made.prefill]
    events = [handle.wait(timeout_s=DEADLINE_S) for handle in (receiver, *senders)]
    assert combine(events) is None
    lost = receive(made.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
    lost.abort("client gone")
    failed = lost.wait(timeout_s=DEADLINE_S)
    assert combine([*events, failed]) is failed.error
    clear(made.decode[0].pools)


def test_no_array_of_the_caller_changes(made: Cluster) -> None:
    """Case 20: the same list serves every peer."""
    request, ids = new_request_id(), np.arange(12, dtype=np.int32)
    before = ids.copy()
    rows = Pages(ids)
    receiver = made.decode[0].manager.receiver(request, peer="prefill-0", rows={"kv": rows}, need={"kv": (0, 20)})
    for rank in made.prefill:
        sender = rank.manager.sender(request, peer="decode-0")
        sender.send({"kv": rows}, tokens=(0, 20))
        sender.finish()
    assert receiver.wait(timeout_s=DEADLINE_S).ok
    assert (ids == before).all()
    assert (rows.ids == before).all()
    with pytest.raises(ValueError, match="read-only"):
        rows.ids[0] = 3
    clear(made.decode[0].pools)


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_server_that_asks_again_and_again_holds_up_nobody(backend: str, verify: str) -> None:
    """Without giving way to the threads of its manager it would keep the interpreter from them: for good, here."""
    with cluster(Side(tp=2), Side(page=8), settings={"backend": backend, "verify": verify}) as made:
        assert all(event.ok for event in made.transfer(37))
        for by_events in (False, True):
            assert all(event.ok for event in wait_by_polling(made, by_events=by_events))


LEFT_OPEN = """
import sys
from disagg.testing.reference import KVModel
from tests.support.cluster import Cluster, Side, introduce, start_side

model = KVModel(num_kv_heads=4, dims={"k": 8, "v": 8})
names, settings = ("prefill-0", "decode-0"), {"backend": sys.argv[1], "verify": "full"}
made = Cluster(model, *(start_side(model, Side(), name, num_layers=2, settings=settings) for name in names))
introduce(made.prefill, made.decode)
for rank, name in zip((*made.decode, *made.prefill), names):
    rank.manager.wait_ready(name, timeout_s=20)
assert all(event.ok for event in made.transfer(37))
"""


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
def test_a_server_may_end_with_a_manager_open(backend: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN, backend], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
