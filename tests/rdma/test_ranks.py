"""Prefill and decode ranks over verbs: every byte is compared, and packets are counted on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg.protocol.peer_effects import ConnectionLimits
from tests.state.test_hybrid import EXPERT_SIZES, hybrid
from tests.state.test_hybrid_managers import DECODE
from tests.support.instances import InstanceSpec
from tests.support.kinds import (
    Kind,
    adapter_kind,
    compressed_kind,
    gdn_kind,
    gqa_kind,
    index_kind,
    kda_kind,
    lightning_kind,
    mamba1_kind,
    mla_kind,
)
from tests.support.rdma import MTU, assert_sent, device_names, sent_packets
from tests.support.servers import servers

ENGINES = ("mooncake", "nixl")
CASES = [(InstanceSpec(tp=2), dataclasses.replace(DECODE, tp=1), 0), (InstanceSpec(tp=1), DECODE, 1 << 20)]
"""Both sides and the setting `pack_below`: direct from TP 2 to TP 1, and packed back."""
OTHER_CASES = [(InstanceSpec(tp=2), InstanceSpec(tp=1), 0), (InstanceSpec(tp=1), InstanceSpec(tp=2), 1 << 20)]


def others() -> list[Kind]:
    """The kinds that `hybrid` lacks, in one model of eight layers."""
    return [
        gqa_kind(num_kv_heads=4, scales=1, layers=(3, 7)),
        mla_kind(scales=2, layers=(0, 2)),
        index_kind(granule=2, name="pooled", layers=(1,)),
        compressed_kind(ratio=4, name="kv_4", layers=(4, 5)),
        gdn_kind(num_key_heads=4, num_value_heads=8, name="gdn", layers=(1, 6)),
        kda_kind(num_heads=8, name="kda", layers=(2,)),
        kda_kind(num_heads=4, separate=True, name="kda_separate", layers=(5,)),
        mamba1_kind(inner=16, name="mamba1", layers=(0,)),
        lightning_kind(num_heads=8, name="lightning", layers=(4,)),
        adapter_kind("w2_a", order="slot expert rank intermediate", sizes=EXPERT_SIZES, layers=(3, 6)),
    ]


def settings(engine: str) -> dict[str, Any]:
    """Arguments of managers. The guest is slow: its peers may be silent for long."""
    patient = ConnectionLimits(hello_retry_s=0.2, heartbeat_s=1.0, heartbeat_timeout_s=60.0)
    return {"backend": engine, "require": "rdma", "devices": device_names(engine), "connection_limits": patient}


@pytest.mark.parametrize(("source", "destination", "pack_below"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_state_arrives(engine: str, source: InstanceSpec, destination: InstanceSpec, pack_below: int) -> None:
    """Full attention, recurrent state, window (pages to rings) and index keys, from TP 2 to TP 1 and back, in chunks."""
    check_requests(engine, hybrid(), source, destination, pack_below=pack_below)


@pytest.mark.parametrize(("source", "destination", "pack_below"), OTHER_CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_other_kinds_of_state_arrive(engine: str, source: InstanceSpec, destination: InstanceSpec, pack_below: int) -> None:
    """Latents and block scales, pooled index keys, compressed tokens, five kinds of recurrent state, and adapters."""
    check_requests(engine, others(), source, destination, pack_below=pack_below)


def check_requests(engine: str, kinds: list[Kind], source: InstanceSpec, destination: InstanceSpec, *, pack_below: int) -> None:
    """Every byte of three requests must be right. The device must have sent as many packets as their bytes need and, of pieces
    that are not packed, one for each.
    """
    nbytes = num_pieces = 0
    with servers(kinds, source, destination, settings={**settings(engine), "pack_below": pack_below}) as made:
        since = sent_packets(engine)
        for num_tokens, chunks, prefix in ((13, (), 0), (17, (4, 9), 0), (23, (8,), 5)):
            request = made.transfer(num_tokens, chunks=chunks, prefix=prefix)
            moves = made.scene.moves(request)
            nbytes += sum(move.copies.total_nbytes for move in moves)
            num_pieces += sum(len(move.copies) for move in moves)
            made.scene.close(request)
        assert_sent(engine, -(-nbytes // MTU) if pack_below else num_pieces, since=since)
        assert {manager.backend.transport for manager in made.prefill} == {"rdma"}
