"""The payload that servers of different kinds exchange."""

from __future__ import annotations

import msgspec
import pytest

from disagg import RemoteProtocolError
from disagg.integrations.handoff import VERSION, Payload, prompt_digest


def test_payload_of_a_newer_minor_version_is_read() -> None:
    """Golden, so that servers with different versions of this library agree."""
    golden = {"engine": "vllm 0.32.0", "num_tokens": 7, "first_token": 5, "native": [], "prompt": "p", "whole_prompt": "w"}
    golden |= {"version": 1}
    payload = Payload(engine="vllm 0.32.0", num_tokens=7, first_token=5, prompt="p", whole_prompt="w")
    assert msgspec.msgpack.decode(payload.encode()) == golden | {"beginnings": b""}
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


def test_digests_are_golden() -> None:
    """Servers with different versions of this library compare them."""
    assert prompt_digest([1, 2, 3]) == "abccad42d03c940bc2b249bf5a4e1e3d"
    assert prompt_digest(iter([1, 2, 3]), [("salt", "x")]) == "3c21b4734c911bca2ed55d06fc838744"


def test_what_cannot_be_compared_is_not_taken() -> None:
    payload = Payload(engine="vllm 0.32.0", num_tokens=3, prompt=prompt_digest([1, 2]))
    payload.check(payload.prompt, prompt_digest([1, 2]))
    with pytest.raises(RemoteProtocolError, match="expected the state of this request's prompt, found that of other tokens"):
        payload.check(payload.prompt, prompt_digest([1, 2], [("adapter", "a")]))
    with pytest.raises(RemoteProtocolError, match=r"expected the digest of a prompt, found none from vllm 0\.32\.0"):
        payload.check(payload.whole_prompt, "")
