"""A rank is killed or cut off while bytes are under way over verbs: no wrong byte, and rows come back or are quarantined."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

import pytest

from disagg import new_request_id
from disagg.core.leases import LeaseState
from disagg.requests import Sender
from harness.rdma.link import RdmaLink
from tests.support.cluster import Rank
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
    wait_until,
    wrong_bytes,
)

ENGINES = (("mooncake", 1), ("nixl", 1))
CUT_OFF_S = 10.0
"""Deadline of a request whose packets vanish."""


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_a_writer_that_dies_in_mid_write(engine: str, link: RdmaLink) -> None:
    since = link.sent_packets
    with pair("prefill", engine, link, kill_at=2) as (own, start_peer):
        writer = start_peer()
        requests = [new_request_id() for _ in range(3)]
        receivers = [begin("decode", own, requests[0], 0)]
        writer.pipe.send((requests[0], 0))
        assert receivers[0].wait(timeout_s=PATIENCE_S).ok
        assert writer.pipe.recv() == (True, 0)
        assert wrong_bytes(own, (0,), partial=0) == 0
        receivers.append(begin("decode", own, requests[1], 1))
        writer.pipe.send((requests[1], 1))
        event = receivers[1].wait(timeout_s=PATIENCE_S)
        assert not event.ok
        state = proved_or_quarantined(event.lease)
        writer.process.join(PATIENCE_S)
        assert writer.process.exitcode == -signal.SIGKILL
        assert wrong_bytes(own, (0,), partial=1) == 0
        start_peer().pipe.send((requests[2], 2))
        receivers.append(begin("decode", own, requests[2], 2))
        assert receivers[2].wait(timeout_s=PATIENCE_S).ok
        assert wrong_bytes(own, (0, 2), partial=1) == 0
        assert sum(own.manager.health().quarantined.values()) == (state is LeaseState.QUARANTINED)
    assert link.sent_packets - since >= 2 * TOKENS * NBYTES_PER_TOKEN // MTU


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_a_reader_that_dies_while_half_of_the_bytes_are_under_way(engine: str, link: RdmaLink) -> None:
    """Half of the tokens have landed. The packets of the others are lost, so that they are under way when the reader dies."""
    with pair("decode", engine, link) as (own, start_peer):
        reader = start_peer()
        sender = send_half(own, link, reader.pipe)
        reader.process.kill()
        reader.process.join(PATIENCE_S)
        link.mend()
        event = sender.wait(timeout_s=PATIENCE_S)
        assert not event.ok
        state = proved_or_quarantined(event.lease)
        check_next_request(own, start_peer().pipe)
        assert sum(own.manager.health().quarantined.values()) == (state is LeaseState.QUARANTINED)


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_a_link_that_is_cut_while_half_of_the_bytes_are_under_way(engine: str, link: RdmaLink) -> None:
    """The peer lives, but no packet of its device arrives any more until after the request's deadline."""
    with pair("decode", engine, link) as (own, start_peer):
        reader = start_peer()
        sender = send_half(own, link, reader.pipe, deadline_s=CUT_OFF_S)
        event = sender.wait(timeout_s=PATIENCE_S)
        assert not event.ok
        assert reader.pipe.recv() == (False, 0)
        link.mend()
        state = proved_or_quarantined(event.lease)
        check_next_request(own, reader.pipe)
        assert sum(own.manager.health().quarantined.values()) == (state is LeaseState.QUARANTINED)


def send_half(own: Rank, link: RdmaLink, pipe: Connection, *, deadline_s: float = PATIENCE_S) -> Sender:
    """Send request 0: bytes of its first half have landed, and packets of its second half are lost when this returns."""
    sender = send_first_half(own, link, pipe, deadline_s=deadline_s)
    link.lose(100)
    send_second_half(own, sender)
    wait_until(lambda: link.lost_packets > 0)
    return sender
