"""Damaged inputs for everything that reads a peer's bytes, and for a live control port."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.endpoint import decode_endpoint
from disagg.core.errors import RemoteProtocolError
from disagg.layout.agreement import decode_placements
from disagg.protocol.messages import decode, encode
from disagg.protocol.peer_effects import SendHello
from disagg.runtime.keys import KeyPair
from harness.fuzz import engines, runs
from harness.fuzz.attacked import AttackedRank, attack
from harness.fuzz.engines import introduce
from harness.fuzz.port import bombard, overload
from harness.fuzz.runs import SHARES, Bounds, Result, accepts, fuzz
from harness.fuzz.targets import Finding, Target, targets
from tests.manager.test_keys import introduce as introduce_with_keys
from tests.manager.test_keys import start
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S
from tests.support.inside import num_refused_frames, num_rejected_hellos

TARGETS = targets()


@pytest.mark.parametrize("name", SHARES)
def test_damaged_inputs_are_refused_as_documented(name: str) -> None:
    """A short `python -m harness.fuzz`."""
    result = fuzz(name, range(1000), seed=20)
    assert result.inputs == 1000
    assert 0 < result.accepted < 1000


@pytest.mark.parametrize("name", SHARES)
@given(data=st.data())
def test_any_bytes_are_refused_as_documented(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    valid = data.draw(st.sampled_from(list(target.valid)))
    cut = data.draw(st.integers(0, len(valid)))
    given_bytes = valid[:cut] + data.draw(st.binary(max_size=40)) + valid[cut + data.draw(st.integers(0, 8)) :]
    accepts(target, given_bytes)


def test_a_finding_names_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> None:
        if len(data) != len(b"valid"):
            raise KeyError("unexpected")

    monkeypatch.setattr(runs, "targets", lambda: {"x": Target([b"valid"], read, (RemoteProtocolError,))})
    with pytest.raises(Finding, match=r"x:\d+ of seed 3, \d+ bytes: KeyError"):
        fuzz("x", range(100), seed=3)
    monkeypatch.setattr(runs, "targets", lambda: {"x": Target([b""], read, (RemoteProtocolError,))})
    with pytest.raises(KeyError):
        fuzz("x", range(100), seed=3)


def test_text_that_is_not_utf_8_is_refused_as_a_protocol_error() -> None:
    """Regression: msgspec raises `UnicodeDecodeError`, which in a welcome ended the control thread."""
    for reader in (lambda data: decode_endpoint("local", data), decode_placements):
        with pytest.raises(RemoteProtocolError):
            reader(b"\x93\xa2\xff\xff\xc4\x00\x90")


# ------------------------------------------------------------------------------------------------------- the live port


def test_damaged_messages_of_an_accepted_peer_change_nothing() -> None:
    """Case 39: damaged messages of every type, over connections with and without an accepted hello."""
    result = bombard(4000, seed=5)
    assert (result.inputs, result.accepted) == (4000, 4)


def test_a_rank_is_connected_again_after_costly_messages() -> None:
    result = overload(6, engine="nixl", seed=5)
    assert result.inputs == 6
    assert 0 < result.accepted <= 6
    assert result.crashes == 0
    assert result.silence_ms > 0


def test_costly_messages_cost_a_bounded_amount_of_memory() -> None:
    result = overload(12, engine="nixl", seed=1)
    assert result.grown_mib < Bounds.grown_mib


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_damaged_endpoints_of_an_engine_are_refused(engine: str) -> None:
    """Damaged descriptors, some cut short and some of another engine, inside valid welcomes."""
    result = introduce(100, engine=engine, seed=6)
    assert result.inputs == 100
    assert 0 < result.accepted < 100
    assert result.crashes == 0


def test_a_crash_of_an_engine_is_counted_and_its_endpoints_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[AttackedRank] = []

    class Noted(AttackedRank):
        def __init__(self, engine: str, peer: str) -> None:
            super().__init__(engine, peer)
            ranks.append(self)

    damaged = engines.damaged_endpoint

    def crash_at_the_third(*arguments: Any) -> bytes:
        endpoint = damaged(*arguments)
        if len(ranks) == 1 and next(count) == 3:
            os.kill(ranks[0].pid, signal.SIGSEGV)
        return endpoint

    count = itertools.count(1)
    monkeypatch.setattr(engines, "AttackedRank", Noted)
    monkeypatch.setattr(engines, "damaged_endpoint", crash_at_the_third)
    result = introduce(6, engine="mooncake", seed=5, crashes_in=tmp_path)
    assert (result.inputs, result.crashes, len(ranks)) == (6, 1, 2)
    assert {path.name.rpartition("-")[0] for path in tmp_path.iterdir()} == {"mooncake-1-signal-SIGSEGV"}
    assert Bounds().exceeded(result) == ["endpoint, mooncake: crashed 1 times"]


def test_the_end_of_the_attacked_rank_is_a_finding() -> None:
    with attack("local") as (rank, _, _):
        assert rank.check()["ok"]
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(Finding, match="does not answer: signal SIGKILL"):
            rank.check()


def test_bounds_name_what_exceeds_them() -> None:
    result = Result("costly", 10, 10, 1.0, 1.0, grown_mib=600.0, silence_ms=2500.0)
    assert Bounds().exceeded(result) == [
        "costly: memory grew by 600 MiB, expected 512 at most",
        "costly: silent for 2.5 s, expected 1.0 at most",
    ]
    assert not Bounds(grown_mib=601.0, silence_s=2.6).exceeded(result)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


@pytest.mark.parametrize("keys", [False, True])
def test_garbage_on_the_port_is_refused_counted_and_logged(keys: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage before, within and after the ZMTP greeting, with and without keys."""
    caplog.set_level(logging.WARNING)
    rng = random.Random(6)
    prefill = start("prefill-0", KeyPair.generate() if keys else None)
    try:
        manager = prefill[0].manager
        port = int(manager.address.rpartition(":")[2])
        lines = [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), rng.randbytes(500), GREETING[:20] + rng.randbytes(80)]
        lines += [GREETING + rng.randbytes(100) for _ in range(10)]
        lines += [GREETING + b"\x04\xff\xff\xff\xff\xff\xff\xff\xff" + rng.randbytes(50), GREETING + b"\x06" + bytes(8)]
        for line in lines:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(line)
        until(lambda: num_refused_frames(manager) >= 5)
        assert manager.health().ok
        until(lambda: any("refused a connection to tcp://127.0.0.1" in record.getMessage() for record in caplog.records))
    finally:
        prefill[0].manager.close()


@contextmanager
def asking(address: str, data: bytes, **keys: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A connection to the port on which a message was sent."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            for name, value in keys.items():
                setattr(dealer, name, value)
            dealer.connect(address)
            with suppress(zmq.Again):  # the connection may have been refused already: libzmq then has nowhere to send it
                dealer.send(data, zmq.NOBLOCK)
            yield dealer
    finally:
        context.term()


def request(address: str, data: bytes, **keys: bytes) -> bytes:
    """Send a message to the port and return its answer."""
    with asking(address, data, **keys) as dealer:
        assert dealer.poll(int(DEADLINE_S * 1000)), "no answer"
        return dealer.recv()


def test_rejected_peers_get_no_welcome_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Without a key, with an unknown key, under another peer's name, and with a replayed message of another peer.

    Only a welcome carries engine descriptors, and none of these peers gets one.
    """
    caplog.set_level(logging.WARNING)
    mine, theirs, third, unknown = (KeyPair.generate() for _ in range(4))
    prefill, decode_ranks = start("prefill-0", mine), start("decode-0", theirs)
    try:
        introduce_with_keys(prefill, decode_ranks, decode_key=theirs.public, prefill_key=mine.public)
        manager = prefill[0].manager
        manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        rejected_before = num_rejected_hellos(manager)  # the peer may have said hello before it was configured
        manager.add_peer("decode-1", address="tcp://127.0.0.1:9", public_key=third.public)
        captured = encode(decode_ranks[0].manager._runtime.handshake.hello(SendHello(0), leader=None))

        def curve(pair: KeyPair) -> dict[str, bytes]:
            return {
                "curve_serverkey": mine.public.encode(),
                "curve_publickey": pair.public.encode(),
                "curve_secretkey": pair.secret.encode(),
            }

        def logged(text: str) -> bool:
            return any(text in record.getMessage() for record in caplog.records)

        refused = num_refused_frames(manager)
        with asking(manager.address, captured) as dealer:
            until(lambda: num_refused_frames(manager) > refused)
            assert not dealer.poll(300), "answered a client without a key"
        with asking(manager.address, captured, **curve(unknown)) as dealer:
            until(lambda: logged(f"its public key {unknown.public} is not known"))
            assert not dealer.poll(300), "answered a client with an unknown key"
        refusal = decode(request(manager.address, captured, **curve(third)))
        assert "peer 'decode-0' is configured with another public key" in getattr(refusal, "reason", "")
        reserve = request(manager.address, TARGETS["live"].valid[4], **curve(third))
        assert "send hello first" in getattr(decode(reserve), "reason", "")
        assert manager.health().peers["decode-0"].ready
        assert logged("rejected a hello: peer 'decode-0' is configured with another public key")
        assert logged("refused a connection to")
        assert num_rejected_hellos(manager) == rejected_before + 1
    finally:
        for rank in (*prefill, *decode_ranks):
            rank.manager.close()
