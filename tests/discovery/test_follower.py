"""Peers that come and go in a source, at real managers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import pytest

from disagg import DiscoveryError, KVManager
from disagg.discovery import Found, PeerFollower
from disagg.runtime.keys import KeyPair

DEADLINE_S = 30.0
Start = Callable[..., KVManager]


class Listed:
    """A source whose instances the test sets; `None` means that it does not answer."""

    def __init__(self) -> None:
        self.instances: Mapping[str, Found] | None = {}

    def find(self) -> Mapping[str, Found]:
        if self.instances is None:
            raise DiscoveryError("nobody answers")
        return self.instances


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def test_a_peer_that_leaves_the_source_is_removed_only_after_it_has_ended(start: Start) -> None:
    decode, prefill, source = start("decode-0"), start("prefill-0", admit="any"), Listed()
    follower = PeerFollower(decode, source)
    follower.update()
    assert decode.peer("prefill-0").state == "unknown"

    source.instances = {"prefill-0": Found(prefill.address), "decode-0": Found(decode.address)}  # also itself
    follower.update()
    decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)
    assert decode.health().peers.keys() == {"prefill-0"}

    source.instances = {}
    follower.update()
    assert decode.peer("prefill-0").state == "ready"
    source.instances = None
    with pytest.raises(DiscoveryError):
        follower.update()
    prefill.close()
    until(lambda: decode.peer("prefill-0").state != "ready")
    source.instances = {}
    follower.update()
    until(lambda: decode.peer("prefill-0").state == "unknown")


def test_an_instance_at_a_new_address_replaces_the_old_one(start: Start) -> None:
    decode, old, source = start("decode-0"), start("prefill-0", admit="any"), Listed()
    follower = PeerFollower(decode, source)
    source.instances = {"prefill-0": Found(old.address)}
    follower.update()
    decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)
    old.close()
    new = start("prefill-0", admit="any")
    source.instances = {"prefill-0": Found(new.address)}
    follower.update()
    until(lambda: new.peer("decode-0").state == "ready" and decode.peer("prefill-0").state == "ready")


def test_configured_peers_stay_as_they_are(start: Start) -> None:
    prefill = start("prefill-0", admit="any")
    decode, source = start("decode-0", peers={"prefill-0": prefill.address}), Listed()
    source.instances = {"prefill-0": Found("tcp://127.0.0.1:9")}
    follower = PeerFollower(decode, source, keep=("prefill-0",))
    follower.update()
    decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)


def test_a_peer_without_a_key_is_refused_and_named(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    own, other = KeyPair.generate(), KeyPair.generate()
    decode, source = start("decode-0", keys=own), Listed()
    prefill = start("prefill-0", keys=other, peers={"decode-0": decode.address}, peer_keys={"decode-0": own.public})
    follower = PeerFollower(decode, source)
    source.instances = {"prefill-0": Found(prefill.address)}
    with caplog.at_level(logging.WARNING):
        follower.update()
    assert "the peer's public key is needed" in caplog.text
    assert decode.peer("prefill-0").state == "unknown"
    source.instances = {"prefill-0": Found(prefill.address, other.public)}
    follower.update()
    decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)


def test_the_thread_ends_with_the_manager_and_outlives_a_silent_source(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    decode, prefill, source = start("decode-0"), start("prefill-0", admit="any"), Listed()
    source.instances = None
    with caplog.at_level(logging.INFO), PeerFollower(decode, source, interval_s=0.01):
        until(lambda: "nobody answers" in caplog.text)
        source.instances = {"prefill-0": 5}  # type: ignore[dict-item]
        until(lambda: "AttributeError" in caplog.text)
        source.instances = {"prefill-0": Found(prefill.address)}
        decode_is_ready = lambda: decode.peer("prefill-0").state == "ready"  # noqa: E731
        until(decode_is_ready)
        decode.close()
        source.instances = {"prefill-1": Found("tcp://127.0.0.1:9")}
        until(lambda: "discovery ends" in caplog.text)
