"""Peers that reach this rank while this rank does not reach them: a wrong `advertise`, or a firewall."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg import ConnectionLimits, new_request_id
from disagg.backends.base import Fence
from disagg.core.errors import RequestTimeout
from disagg.protocol.messages import Borrow
from disagg.protocol.types import PeerRank
from disagg.testing.reference import KVModel
from tests.manager.test_other_hosts import Unprovable
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, FAST_LINKS, Rank, Side, start_side
from tests.support.inside import depth, in_control_thread

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
LINKS = dataclasses.replace(FAST_LINKS, forget_s=0.5)
NOBODY = "tcp://127.0.0.1:9"


@contextmanager
def ranks(*advertised: str | None, links: ConnectionLimits = LINKS, **more: Any) -> Iterator[list[Rank]]:
    """A prefill rank that admits everybody, and a decode rank for each address that is advertised (`None`: its own). `more` are
    settings of all of them.
    """
    everybody = {"admit": "any", "connection_limits": LINKS, **more}
    started = start_side(MODEL, Side(), "prefill-0", num_layers=2, settings=everybody)
    try:
        for number, advertise in enumerate(advertised):
            settings = {"advertise": advertise, "connection_limits": links, **more}
            started += start_side(MODEL, Side(), f"decode-{number}", num_layers=2, settings=settings)
            started[-1].manager.add_peer("prefill-0", address=started[0].manager.address)
            started[-1].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        yield started
    finally:
        for rank in started:
            rank.manager.close()


def want(rank: Rank, request: bytes, **more: Any) -> Any:
    rows = {"kv": [0, 1]}
    return rank.manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, 8)}, **more)


def reserved(prefill: Rank) -> bool:
    return depth(prefill.manager, "parked_reserves") == 1


def forget(prefill: Rank, name: str, how: str) -> None:
    """Have prefill forget a peer: by a call, or since it has been away."""
    if how == "removed":
        prefill.manager.remove_peer(name)
    until(lambda: prefill.manager.peer(name).state == "unknown")


@pytest.mark.parametrize("ended_by", ["deadline", "abort", "removed", "away"])
def test_source_rows_come_back_though_their_reader_was_never_connected(ended_by: str) -> None:
    with ranks(NOBODY) as (prefill, decode):
        request = new_request_id()
        receiver = want(decode, request)
        until(lambda: reserved(prefill))
        sender = prefill.manager.sender(request, deadline_s=0.5 if ended_by == "deadline" else None)
        sender.finish({"kv": [0, 1]})
        until(lambda: depth(prefill.manager, "early_transfers") == 1)
        if ended_by == "deadline":
            assert isinstance(sender.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
        elif ended_by == "abort":
            receiver.abort("the client is gone")
        else:
            decode.manager.close()
            forget(prefill, "decode-0", ended_by)
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        until(lambda: sender.lease.released)
        assert depth(prefill.manager, "early_transfers") == 0
        decode.manager.close()
        forget(prefill, "decode-0", "removed")
        until(lambda: not prefill.manager._runtime.sessions.sends.sessions)


def test_rows_come_back_from_a_peer_that_was_never_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill does not reach decode, and cannot know decode's memory. The engine proves nothing about it."""
    with ranks(NOBODY, links=dataclasses.replace(LINKS, heartbeat_timeout_s=0.5)) as (_, decode):
        monkeypatch.setattr(decode.manager._runtime.backend, "fence", lambda *_, **__: Fence.UNKNOWN)
        receiver = want(decode, new_request_id())
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        until(lambda: event.lease.released)


def test_a_writer_that_is_not_connected_borrows_no_slots() -> None:
    """The loss of its connection would not end the loans: there is none."""
    with ranks(NOBODY, backend=Unprovable) as (prefill, decode):
        wish = Borrow(wanted=4, seen=0)
        in_control_thread(decode.manager, lambda _: decode.manager._runtime.dispatch.send(PeerRank("prefill-0", 0), wish))
        want(decode, new_request_id())
        until(lambda: reserved(prefill))  # by the same connection
        assert prefill.manager._runtime.sessions.lender.num_lent == 0


def test_a_transfer_that_begins_as_its_peer_is_removed_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both happen in one turn of the control thread, and the engine proves nothing about the peer."""
    with ranks(None) as (prefill, decode):
        prefill.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        runtime, request = prefill.manager._runtime, new_request_id()
        monkeypatch.setattr(runtime.backend, "fence", lambda *_, **__: Fence.UNKNOWN)
        want(decode, request)
        until(lambda: reserved(prefill))
        sender = prefill.manager.sender(request, deadline_s=None)
        until(lambda: sender.needed("kv") is not None)
        monkeypatch.setattr(runtime.peers, "_admits", None)  # it does not come back
        is_asleep = threading.Event()

        def sleep(_: float) -> None:
            is_asleep.set()
            time.sleep(0.2)

        runtime.command(sleep)
        assert is_asleep.wait(DEADLINE_S)
        sender.finish({"kv": [0, 1]})
        prefill.manager.remove_peer("decode-0")
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        until(lambda: sender.lease.released)
        assert runtime.transfers.num_unconnected == 0


def test_a_peer_that_is_lost_while_a_receiver_is_opened_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agreement was known in the server's thread, and nothing is reserved at it in the control thread."""
    with ranks(None) as (prefill, decode):
        runtime = decode.manager._runtime
        opened = runtime.open

        def open_late(*arguments: Any, **more: Any) -> None:
            prefill.manager.close()
            until(lambda: decode.manager.peer("prefill-0").state != "ready")
            opened(*arguments, **more)

        monkeypatch.setattr(runtime, "open", open_late)
        receiver = want(decode, new_request_id(), deadline_s=0.5)
        assert isinstance(receiver.wait(timeout_s=DEADLINE_S).error, RequestTimeout)
        assert receiver.lease.released


def test_a_reserve_of_a_forgotten_peer_does_not_fail_the_request_of_another() -> None:
    with ranks(NOBODY, None) as (prefill, gone, decode):
        request = new_request_id()
        want(gone, request)
        until(lambda: reserved(prefill))
        gone.manager._runtime.loop._stopping = True  # it ends without a word
        time.sleep(0.1)
        gone.manager.close()
        forget(prefill, "decode-0", "removed")
        until(lambda: not reserved(prefill))
        receiver = want(decode, request, deadline_s=DEADLINE_S)
        until(lambda: reserved(prefill))
        sender = prefill.manager.sender(request, deadline_s=DEADLINE_S)
        sender.finish({"kv": [0, 1]})
        assert sender.wait(timeout_s=DEADLINE_S).ok
        assert receiver.wait(timeout_s=DEADLINE_S).ok
