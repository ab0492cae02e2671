"""Several devices on each side: every transfer is shared over all of them."""

from __future__ import annotations

import pytest

from disagg import new_request_id
from harness.rdma.link import RdmaLink
from tests.support.rdma import MTU
from tests.support.rdma_pair import HALF, NBYTES_PER_TOKEN, PATIENCE_S, TOKENS, begin, pair, send_first_half, send_second_half


@pytest.mark.parametrize(("engine", "rails"), [("mooncake", 2), ("nixl", 2)])
def test_both_devices_carry_a_share_of_a_request(engine: str, link: RdmaLink) -> None:
    """Each sends at least a quarter of the packets that the bytes need."""
    with pair("decode", engine, link) as (own, start_peer):
        decode = start_peer()
        before = [device.sent_packets for device in link.side(0)]
        request = new_request_id()
        decode.pipe.send((request, 0))
        assert begin("prefill", own, request, 0).wait(timeout_s=PATIENCE_S).ok
        assert decode.pipe.recv() == (True, 0)
        sent = [device.sent_packets - since for device, since in zip(link.side(0), before, strict=True)]
        assert min(sent) >= TOKENS * NBYTES_PER_TOKEN // MTU // 4, sent


@pytest.mark.parametrize(("engine", "rails"), [("mooncake", 2)])
def test_a_device_that_goes_down_costs_no_request(engine: str, link: RdmaLink) -> None:
    """The other device carries the second half of a request, and the next request. With NIXL, UCX ends the process."""
    with pair("decode", engine, link) as (own, start_peer):
        decode = start_peer()
        sender = send_first_half(own, link, decode.pipe)
        up, down = link.side(0)
        link.take_down(down)
        before = up.sent_packets
        send_second_half(own, sender)
        assert sender.wait(timeout_s=PATIENCE_S).ok
        assert decode.pipe.recv() == (True, 0)
        request = new_request_id()
        decode.pipe.send((request, 1))
        assert begin("prefill", own, request, 1).wait(timeout_s=PATIENCE_S).ok
        assert decode.pipe.recv() == (True, 0)
        assert up.sent_packets - before >= (HALF + TOKENS) * NBYTES_PER_TOKEN // MTU
