"""Slots that a killed writer held over verbs come back with the end of this rank's engine."""

from __future__ import annotations

import os
import signal

import pytest

from disagg import new_request_id
from disagg.backends.base import StagingShape
from disagg.protocol.types import PeerRank
from disagg.runtime.connections import RENEW_AGAIN_S
from harness.rdma.link import RdmaLink
from tests.support.rdma_pair import PACKED_BELOW, PATIENCE_S, begin, pair, wait_until, wrong_bytes

ENGINES = (("mooncake", 1), ("nixl", 1))
SLOTS = StagingShape(pack_below=PACKED_BELOW, slot_nbytes=1 << 16, window=4, num_lent=4, spares=4, at_once=1)
PREFILL = PeerRank("prefill-0", 0)


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_a_rank_whose_slots_are_lost_goes_on(engine: str, link: RdmaLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.backends.nixl.backend.machine_identity", lambda: "another than the peer's")
    with pair("prefill", engine, link, slots=SLOTS) as (own, start_peer):
        runtime = own.manager._runtime
        lender, done = runtime.sessions.lender, []

        def lend_three(_: float) -> None:
            lender._lend(lender._accounts[PREFILL], 3)

        for number in range(3):
            writer, request = start_peer(), new_request_id()
            receiver = begin("decode", own, request, number)
            writer.pipe.send((request, number))
            assert receiver.wait(timeout_s=PATIENCE_S).ok
            assert writer.pipe.recv() == (True, 0)
            done.append(number)
            assert wrong_bytes(own, tuple(done), partial=0) == 0
            assert lender._accounts[PREFILL].newest > lender._accounts[PREFILL].first, "slots were lent"
            wait_until(lambda: lender.num_lent == 0)
            assert writer.process.pid is not None
            os.kill(writer.process.pid, signal.SIGSTOP)  # it would give slots back
            runtime.command(lend_three)
            wait_until(lambda: lender.num_lent == 3)
            writer.process.kill()
            writer.process.join(PATIENCE_S)
            wait_until(lambda number=number: runtime.connections.num_renewals == number + 1)  # type: ignore[misc]
            wait_until(lambda: lender.num_lost == 0)
            wait_until(lambda: runtime.connections._renew_again_s == RENEW_AGAIN_S)  # it has seen that this helped
