"""The payload that servers of different kinds exchange."""

from __future__ import annotations

import msgspec
import pytest

from disagg import RemoteProtocolError
from disagg.integrations.handoff import BEGINNING, DIGEST_NBYTES, VERSION, Payload, beginnings, prompt_digest


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


@pytest.mark.parametrize("num_tokens", [0, 63, 64, 65, 200, 256])
def test_beginnings_have_the_digests_of_their_prompts(num_tokens: int) -> None:
    """Also if an item begins within them."""

    def beside(stop: int) -> list[tuple[str, str]]:
        return [("item", "100 20 cat")] if stop > 100 else []

    tokens = [number * 7 % 250 for number in range(num_tokens)]
    found = list(beginnings(tokens, beside))
    assert [stop for stop, _ in found] == list(range(BEGINNING, num_tokens + 1, BEGINNING))
    assert [digest for _, digest in found] == [prompt_digest(tokens[:stop], beside(stop)) for stop, _ in found]
    payload = Payload(
        engine="e",
        num_tokens=num_tokens,
        prompt=prompt_digest(tokens, beside(num_tokens)),
        beginnings=b"".join(bytes.fromhex(digest) for _, digest in found),
    )
    for stop in (*range(0, num_tokens, BEGINNING), num_tokens):
        expected = prompt_digest(tokens[:stop], beside(stop)) if stop else payload.prompt
        assert Payload.decode(payload.encode()).digest(stop) == expected


def test_a_part_without_a_digest_is_that_of_another_prompt() -> None:
    tokens = list(range(200))
    digests = [bytes.fromhex(digest) for _, digest in beginnings(tokens)]
    assert {len(each) for each in digests} == {DIGEST_NBYTES}
    payload = Payload(engine="e", num_tokens=200, prompt=prompt_digest(tokens), beginnings=b"".join(digests[:2]))
    for stop in (1, 65, 130, 192, 199):
        with pytest.raises(RemoteProtocolError, match="expected the state of this request's prompt"):
            payload.check(payload.digest(stop), prompt_digest(tokens[:stop]))
