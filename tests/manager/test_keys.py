"""Control channels with CURVE keys: accepted and rejected connections."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from disagg import ConfigError
from disagg.runtime.keys import KeyPair
from disagg.testing.reference import KVModel
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Rank, Side, start_side

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
PREFILL, DECODE, STRANGER = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()


def start(name: str, keys: KeyPair | None, side: Side | None = None) -> list[Rank]:
    settings: dict[str, Any] = {} if keys is None else {"keys": keys}
    return start_side(MODEL, side or Side(), name, num_layers=2, settings=settings)


def introduce(prefill: list[Rank], decode: list[Rank], *, decode_key: str, prefill_key: str) -> None:
    for rank in prefill:
        rank.manager.add_peer("decode-0", address=decode[0].manager.address, public_key=decode_key)
    for rank in decode:
        rank.manager.add_peer("prefill-0", address=prefill[0].manager.address, public_key=prefill_key)


def close(*sides: list[Rank]) -> None:
    for side in sides:
        for rank in side:
            rank.manager.close()


def test_instances_with_each_others_keys_complete_requests() -> None:
    prefill, decode = start("prefill-0", PREFILL, Side(tp=2)), start("decode-0", DECODE)
    try:
        introduce(prefill, decode, decode_key=DECODE.public, prefill_key=PREFILL.public)
        for rank in prefill:
            rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        decode[0].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        assert all(event.ok for event in Cluster(MODEL, prefill, decode).transfer(20))
    finally:
        close(prefill, decode)


def test_a_peer_with_an_unexpected_key_never_becomes_ready() -> None:
    prefill, decode = start("prefill-0", PREFILL), start("decode-0", STRANGER)
    try:
        introduce(prefill, decode, decode_key=DECODE.public, prefill_key=PREFILL.public)
        with pytest.raises(Exception, match="no answer yet"):
            decode[0].manager.wait_ready("prefill-0", timeout_s=1.0)
        assert not prefill[0].manager.health().peers["decode-0"].ready
        assert prefill[0].manager.health().ok
    finally:
        close(prefill, decode)


def test_a_configured_key_is_rejected_under_another_instances_name() -> None:
    """An accepted peer sends a hello in another peer's name."""
    prefill, decode, other = start("prefill-0", PREFILL), start("decode-0", DECODE), start("decode-0", STRANGER)
    try:
        introduce(prefill, decode, decode_key=DECODE.public, prefill_key=PREFILL.public)
        prefill[0].manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        prefill[0].manager.add_peer("decode-1", address="tcp://127.0.0.1:9", public_key=STRANGER.public)
        other[0].manager.add_peer("prefill-0", address=prefill[0].manager.address, public_key=PREFILL.public)
        health = other[0].manager.health
        until(lambda: "prefill-0" in health().peers and "another public key" in health().peers["prefill-0"].problem)
        assert prefill[0].manager.health().peers["decode-0"].ready
    finally:
        close(prefill, decode, other)


def test_a_connection_without_a_key_gets_no_answer() -> None:
    prefill = start("prefill-0", PREFILL)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(prefill[0].manager.address)
            dealer.send(b"\xc1")
            assert not dealer.poll(500)
        assert prefill[0].manager.health().ok
    finally:
        context.term()
        close(prefill)


def test_adding_a_peer_without_its_key_is_refused_and_stops_no_thread() -> None:
    prefill = start("prefill-0", PREFILL)
    try:
        with pytest.raises(ConfigError, match="the peer's public key is needed"):
            prefill[0].manager.add_peer("decode-0", address="tcp://127.0.0.1:9")
        assert prefill[0].manager.health().ok
    finally:
        close(prefill)


@pytest.mark.parametrize("public", ["short", "x" * 41, '"' * 40, "ü" * 40, "#" * 40])
def test_invalid_keys_are_refused_and_secrets_are_not_printed(public: str) -> None:
    with pytest.raises(ConfigError, match="public key: expected a key of 40 Z85 characters or 64 hex digits"):
        KeyPair(public, PREFILL.secret)
    with pytest.raises(ConfigError, match="secret key: expected a key of 40 Z85 characters or 64 hex digits"):
        KeyPair(PREFILL.public, public)
    assert PREFILL.secret not in repr(PREFILL)
