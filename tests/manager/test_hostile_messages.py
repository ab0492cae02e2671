"""An accepted peer that breaks the protocol, and a stranger: what they cost the others, and what they leave behind."""

from __future__ import annotations

import resource
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from disagg import KVManager, Pages, new_request_id
from disagg.protocol.messages import (
    MAX_HELLO_NBYTES,
    Abort,
    Complete,
    Drained,
    Message,
    Outcome,
    Reserve,
    encode,
    pack_rows,
)
from disagg.protocol.types import PeerRank
from tests.manager.test_metrics import scrape
from tests.manager.test_peers import INVALID, MODEL, until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send, start_side
from tests.support.inside import num_refused_messages, num_rejected_hellos

STRANGER = "stranger-with-a-name-of-its-own"


def forged(request: bytes) -> list[Message]:
    """Messages about a request of others."""
    about: dict[str, Any] = {"request_id": request, "attempt": 0, "nonce": 1}
    return [Abort(**about, reason="forged"), Complete(**about), Drained(**about), Outcome(**about, ok=False, reason="forged")]


def send_raw(sender: KVManager, to: PeerRank, messages: list[bytes]) -> None:
    """Send bytes to a peer, on the connection whose hello it has accepted."""
    runtime = sender._runtime

    def run(_: float) -> None:
        link = runtime.peers.link(to)
        assert link is not None
        for data in messages:
            runtime.channel.send(link.dial, data)

    runtime.command(run)


def test_invalid_and_forged_messages_of_an_accepted_peer_cost_no_other_peers_request() -> None:
    with cluster(Side(), Side(page=8), settings={"verify": "full"}) as instances:
        (hostile,) = start_side(MODEL, Side(page=8), "hostile", num_layers=3)
        (prefill,), (decode,) = instances.prefill, instances.decode
        try:
            for each in (prefill, decode):
                each.manager.add_peer("hostile", address=hostile.manager.address)
            victims = {"prefill-0": prefill, "decode-0": decode}
            for name, rank in victims.items():
                hostile.manager.add_peer(name, address=rank.manager.address)
            for name in victims:
                hostile.manager.wait_ready(name, timeout_s=DEADLINE_S)
            for _ in range(5):
                request = new_request_id()
                receiver = receive(decode, request, instances.pages(decode, 20), need=(0, 20))
                until(lambda receiver=receiver: receiver.session is not None)
                for name in victims:
                    send_raw(hostile.manager, PeerRank(name, 0), [*INVALID, *map(encode, forged(request))])
                until(lambda: all(num_refused_messages(rank.manager) for rank in victims.values()))
                sender = send(prefill, request, instances.pages(prefill, 20), 20)
                assert receiver.wait(timeout_s=DEADLINE_S).ok
                assert sender.wait(timeout_s=DEADLINE_S).ok
            assert all(rank.manager.health().ok for rank in victims.values())
        finally:
            hostile.manager.close()


@pytest.mark.parametrize("log2_tokens", [29, 40])
def test_a_reserve_that_needs_more_than_it_lists_costs_no_memory_for_checksums(log2_tokens: int) -> None:
    with cluster(Side(), Side(page=8)) as instances:
        (prefill,), (decode,) = instances.prefill, instances.decode
        request = new_request_id()
        sender = send(prefill, request, instances.pages(prefill, 20), 20)
        rows, need = {"kv": pack_rows(Pages(np.arange(3)))}, {"kv": (0, 1 << log2_tokens)}
        about: dict[str, Any] = {"request_id": request, "attempt": 0, "nonce": 7, "source_group": 0, "destination_group": 0}
        data = encode(Reserve(**about, rows=rows, need=need, verify="full"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        send_raw(decode.manager, PeerRank("prefill-0", 0), [data])
        event = sender.wait(timeout_s=DEADLINE_S)
        assert "pages, 3 are listed" in str(event.error)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_strangers_large_message_is_refused_unread(caplog: pytest.LogCaptureFixture) -> None:
    """Reading it takes a second."""
    with cluster(Side(), Side(page=8)) as instances, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        (prefill,) = instances.prefill
        stranger.linger = 0
        stranger.connect(prefill.manager.address)
        stranger.send(msgspec.msgpack.encode({"type": "reserve", "x": [{}] * (MAX_HELLO_NBYTES + 1)}))
        until(lambda: num_refused_messages(prefill.manager))
    assert f"expected {MAX_HELLO_NBYTES} at most" in caplog.text


def test_a_reserve_without_rows_of_a_component_ends_with_the_reason() -> None:
    with cluster(Side(), Side(page=8), settings={"verify": "full"}) as instances:
        (prefill,), (decode,) = instances.prefill, instances.decode
        request = new_request_id()
        sender = send(prefill, request, instances.pages(prefill, 20), 20)
        about: dict[str, Any] = {"request_id": request, "attempt": 0, "nonce": 7, "source_group": 0, "destination_group": 0}
        data = encode(Reserve(**about, rows={}, need={"kv": (0, 20)}, verify="full"))
        send_raw(decode.manager, PeerRank("prefill-0", 0), [data])
        event = sender.wait(timeout_s=DEADLINE_S)
        assert "component 'kv' is needed, but the receiver reserved no rows for it" in str(event.error)


def test_a_stranger_adds_no_label_to_the_metrics() -> None:
    with cluster(Side(), Side(page=8), settings={"metrics_port": 0}) as instances:
        (stranger,) = start_side(MODEL, Side(page=8), STRANGER, num_layers=3)
        (prefill,) = instances.prefill
        try:
            stranger.manager.add_peer("prefill-0", address=prefill.manager.address)
            until(lambda: num_rejected_hellos(prefill.manager))
            found = scrape(prefill.manager)
            assert found["disagg_refusals_total", (("what", "hello"),)]
            assert not any(STRANGER in value for _, labels in found for _, value in labels)
        finally:
            stranger.manager.close()
