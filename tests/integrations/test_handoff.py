"""The payload that servers of different kinds exchange."""

from __future__ import annotations

import msgspec
import pytest

from disagg import RemoteProtocolError
from disagg.integrations.handoff import VERSION, Payload


def test_payload_of_a_newer_minor_version_is_read() -> None:
    """Golden, so that servers with different versions of this library agree."""
    golden = {"engine": "vllm 0.32.0", "num_tokens": 7, "first_token": 5, "native": [], "prompt": "", "version": 1}
    payload = Payload(engine="vllm 0.32.0", num_tokens=7, first_token=5)
    assert msgspec.msgpack.decode(payload.encode()) == golden
    assert Payload.decode(msgspec.msgpack.encode({**golden, "a field of later": [1]})) == payload
    assert Payload.decode(msgspec.msgpack.encode({"engine": "e", "num_tokens": 1, "version": 1})).first_token is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"rubbish", "payload of 7 bytes"),
        (b"", "payload of 0 bytes"),
        (msgspec.msgpack.encode({"engine": "e"}), "num_tokens"),
        (Payload(engine="e", num_tokens=1, version=VERSION + 1).encode(), "expected version 1, found 2 of e"),
    ],
)
def test_other_payloads_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        Payload.decode(data)
