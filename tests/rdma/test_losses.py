"""Devices that lose packets, or go down and up again while bytes are under way."""

from __future__ import annotations

import signal

import pytest

from disagg import new_request_id
from disagg.core.leases import LeaseState
from harness.rdma.link import RdmaLink
from tests.support.rdma import MTU
from tests.support.rdma_pair import (
    NBYTES_PER_TOKEN,
    PATIENCE_S,
    TOKENS,
    begin,
    check_next_request,
    pair,
    proved_or_quarantined,
    send_first_half,
    send_second_half,
)

ENGINES = (("mooncake", 1), ("nixl", 1))


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_lost_packets_are_sent_again(engine: str, link: RdmaLink) -> None:
    """3% of the packets are lost, acknowledgements among them."""
    with pair("decode", engine, link) as (own, start_peer):
        decode = start_peer()
        link.lose(3)
        before = link.sent_packets
        request = new_request_id()
        decode.pipe.send((request, 0))
        assert begin("prefill", own, request, 0).wait(timeout_s=PATIENCE_S).ok
        assert decode.pipe.recv() == (True, 0)
        assert link.lost_packets > 0
        assert link.sent_packets - before >= TOKENS * NBYTES_PER_TOKEN // MTU


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "rails"), [("nixl", 1)])
def test_the_only_device_of_the_peer_goes_down_and_up(engine: str, link: RdmaLink) -> None:
    """UCX ends the peer's process, and nothing proves that the bytes are at rest. The next peer on that device works."""
    with pair("decode", engine, link) as (own, start_peer):
        decode = start_peer()
        sender = send_first_half(own, link, decode.pipe)
        link.take_down(*link.side(1))
        send_second_half(own, sender)
        decode.process.join(PATIENCE_S)
        assert decode.process.exitcode == -signal.SIGABRT
        link.mend()
        event = sender.wait(timeout_s=PATIENCE_S)
        assert not event.ok
        assert proved_or_quarantined(event.lease) is LeaseState.QUARANTINED
        check_next_request(own, start_peer().pipe)
