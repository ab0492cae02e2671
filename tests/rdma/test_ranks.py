"""Prefill and decode ranks over verbs: every byte is compared, and packets are counted on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg.protocol.peer_state import ConnectionLimits
from tests.state.test_hybrid import hybrid
from tests.state.test_hybrid_managers import DECODE
from tests.support.instances import InstanceSpec
from tests.support.rdma import assert_sent, device_names, sent_packets
from tests.support.servers import servers

ENGINES = ("mooncake", "nixl")
CASES = [(InstanceSpec(tp=2), dataclasses.replace(DECODE, tp=1), 0), (InstanceSpec(tp=1), DECODE, 1 << 20)]
"""Both sides and the setting `pack_below`: direct from TP 2 to TP 1, and packed back."""


def settings(engine: str) -> dict[str, Any]:
    """Arguments of managers. The guest is slow: its peers may be silent for long."""
    patient = ConnectionLimits(hello_retry_s=0.2, heartbeat_s=1.0, heartbeat_timeout_s=60.0)
    return {"backend": engine, "require": "rdma", "devices": device_names(engine), "connection_limits": patient}


@pytest.mark.parametrize(("source", "destination", "pack_below"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_state_arrives(engine: str, source: InstanceSpec, destination: InstanceSpec, pack_below: int) -> None:
    """Full attention, recurrent state, window (pages to rings) and index keys, from TP 2 to TP 1 and back, in chunks."""
    with servers(hybrid(), source, destination, settings={**settings(engine), "pack_below": pack_below}) as made:
        since = sent_packets(engine)
        for num_tokens, chunks, prefix in ((13, (), 0), (17, (4, 9), 0), (23, (8,), 5)):
            made.scene.close(made.transfer(num_tokens, chunks=chunks, prefix=prefix))
        assert_sent(engine, 3 * len(hybrid()), since=since)
        assert {manager.backend.transport for manager in made.prefill} == {"rdma"}
