"""Names, refusals and wrong addresses: who may use a name, what is said, and that others are not harmed."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg import ConfigError, KVManager, ModelId, Pages, PeerUnreachable, Topology, new_request_id
from disagg.backends.local import LocalBackend, LocalPeer
from disagg.core.errors import PeerIncompatible
from disagg.machine.processes import ProcessWatch
from disagg.protocol.peer_effects import ConnectionLimits, SendHello, Undecided
from disagg.runtime import dispatch
from disagg.state import paged
from harness.ports import free_ports
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import manager, until
from tests.support.cluster import DEADLINE_S
from tests.support.inside import num_losses, num_rejected_hellos

QUICK = ConnectionLimits(
    hello_retry_s=0.02, max_hello_retry_s=0.1, heartbeat_s=0.1, heartbeat_timeout_s=DEADLINE_S, refused_retry_s=0.3
)

NUM_REFUSED = 6
"""Hellos that are refused until a peer is known to be asked again and again."""


def opened(stack: ExitStack, name: str, **settings: Any) -> KVManager:
    return stack.enter_context(manager(name=name, connection_limits=QUICK, **settings))


def problem(of: KVManager, peer: str) -> str:
    found = of.health().peers.get(peer)
    return found.problem if found is not None else ""


def test_peers_given_at_construction_are_known_before_anything_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        prefill = opened(stack, "prefill", listen="tcp://127.0.0.1:0", peers={"decode": "tcp://127.0.0.1:9"})
        decode = opened(stack, "decode", peers={"prefill": prefill.address})
        until(lambda: "decode" in prefill._runtime.peers.instances)
        prefill.add_peer("decode", address=decode.address)
        for one, other in ((prefill, "decode"), (decode, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        assert "not configured" not in caplog.text
        assert num_rejected_hellos(prefill) == 0


def test_a_peer_whose_address_has_just_changed_is_not_ready() -> None:
    """Also before the control thread has seen the change."""
    with ExitStack() as stack:
        prefill = opened(stack, "prefill")
        decode = opened(stack, "decode", peers={"prefill": prefill.address})
        prefill.add_peer("decode", address=decode.address)
        prefill.wait_ready("decode", timeout_s=DEADLINE_S)
        for _ in range(10):
            prefill.add_peer("decode", address=decode.address)
            assert prefill.peer("decode").state == "ready", "nothing has changed"
            prefill.add_peer("decode", address="tcp://127.0.0.1:9")
            assert prefill.peer("decode").state == "connecting"
            with pytest.raises(PeerUnreachable, match=r"is not ready after 0\.01 s"):
                prefill.wait_ready("decode", timeout_s=0.01)
            prefill.add_peer("decode", address=decode.address)
            prefill.wait_ready("decode", timeout_s=DEADLINE_S)


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_a_second_process_of_one_name_is_refused_until_the_first_has_ended(backend: str) -> None:
    if backend in ENGINES:
        require_engine(*ENGINES[backend])
    with ExitStack() as stack:
        prefill = opened(stack, "prefill", backend=backend)
        first = opened(stack, "decode", backend=backend)
        prefill.add_peer("decode", address=first.address)
        first.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "decode"), (first, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        second = opened(stack, "decode", backend=backend)
        second.add_peer("prefill", address=prefill.address)
        until(lambda: "another process has the name decode/0" in problem(second, "prefill"))
        losses = num_losses(prefill)["decode"]
        with pytest.raises(PeerUnreachable, match="another process has the name"):
            second.wait_ready("prefill", timeout_s=0.5)
        assert prefill.health().peers["decode"].ready
        assert first.health().peers["prefill"].ready
        assert num_losses(prefill)["decode"] == losses, "nothing flaps"
        first.close()
        prefill.add_peer("decode", address=second.address)
        for one, other in ((prefill, "decode"), (second, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)


def test_a_wrong_advertise_harms_its_owner_only() -> None:
    """A rank announces the address of a healthy peer."""
    with ExitStack() as stack:
        prefill = opened(stack, "prefill")
        healthy = opened(stack, "healthy")
        wrong = opened(stack, "wrong")
        prefill.add_peer("wrong", address=healthy.address)
        prefill.add_peer("healthy", address=healthy.address)
        for each in (healthy, wrong):
            each.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "healthy"), (healthy, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        with pytest.raises(PeerUnreachable, match=r"healthy/0 is at tcp://.*, where prefill/0 expects wrong/0"):
            prefill.wait_ready("wrong", timeout_s=DEADLINE_S)
        assert prefill.health().peers["healthy"].ready


@pytest.mark.parametrize("backend", ["local", "cma"])
def test_a_second_name_for_the_address_of_a_peer_harms_no_request(backend: str) -> None:
    """A stale entry whose address is used again, for instance. The connection by the wrong name is opened last."""
    pools = [np.full((2, 8, 4, 2, 8), byte, dtype=np.uint8) for byte in (1, 2)]
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                KVManager(
                    name=name,
                    components=[paged.gqa({0: (pool[0], pool[1])}, axes="nhd", num_kv_heads=2, topology=Topology())],
                    model=ModelId("m"),
                    backend=backend,
                    connection_limits=QUICK,
                )
            )
            for name, pool in zip(("prefill", "decode"), pools, strict=True)
        )
        prefill.add_peer("decode", address=decode.address)
        decode.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "decode"), (decode, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        for one, address in ((prefill, decode.address), (decode, prefill.address)):
            one.add_peer("stale", address=address)
            with pytest.raises(PeerUnreachable, match="stale/0"):
                one.wait_ready("stale", timeout_s=DEADLINE_S)
        request = new_request_id()
        receiver = decode.receiver(
            request, peer="prefill", rows={"kv": Pages(np.array([3]))}, need={"kv": (0, 4)}, deadline_s=DEADLINE_S
        )
        prefill.sender(request, peer="decode").finish({"kv": Pages(np.array([5]))})
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert event is not None
        assert event.ok, event.error
        assert (pools[1][:, 3] == 1).all()


def test_waiting_ends_at_once_where_one_side_has_refused_for_good() -> None:
    with ExitStack() as stack:
        prefill, decode = opened(stack, "prefill"), opened(stack, "decode", model=ModelId("another"))
        prefill.add_peer("decode", address=decode.address)
        decode.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "decode"), (decode, "prefill")):
            with pytest.raises(PeerUnreachable, match=r"cannot become ready: .*model: "):
                one.wait_ready(other, timeout_s=3600.0)


def test_a_goodbye_is_no_loss() -> None:
    with ExitStack() as stack:
        prefill, decode = opened(stack, "prefill", admit="any"), opened(stack, "decode")
        decode.add_peer("prefill", address=prefill.address)
        for one, other in ((decode, "prefill"), (prefill, "decode")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        prefill.close()
        until(lambda: decode.peer("prefill").state != "ready")
        assert sum(num_losses(decode).values()) == 0


class OtherRelease(LocalBackend):
    """An engine that reaches no peer of another release."""

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> LocalPeer:
        raise PeerIncompatible("expected the peer's release to be 2, as here, found 1")


def test_requests_to_a_peer_with_an_incompatible_engine_fail_at_once() -> None:
    with ExitStack() as stack:
        prefill, decode = opened(stack, "prefill", admit="any"), opened(stack, "decode", backend=OtherRelease)
        receiver = decode.receiver(
            new_request_id(), peer="prefill", address=prefill.address, rows={"kv": [1]}, need={"kv": (0, 4)}, deadline_s=None
        )
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert event is not None
        assert f"cannot become ready: {prefill.address}: expected the peer's release to be 2" in str(event.error)
        until(lambda: decode.peer("prefill").state == "refused")  # not while decode tries once more


def test_a_peer_that_is_refused_for_good_is_logged_once_on_each_side(caplog: pytest.LogCaptureFixture) -> None:
    """The manager keeps asking it, because another process may replace it."""
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        there = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        prefill = opened(stack, "prefill", peers={"decode": there})
        decode = opened(stack, "decode", model=ModelId("another"), listen=there, peers={"prefill": prefill.address})
        for each in (prefill, decode):
            until(lambda each=each: num_rejected_hellos(each) >= NUM_REFUSED)
        assert sorted(record.getMessage() for record in caplog.records) == [
            "decode/0: rejected a hello: model: 'm' at prefill/0, 'another' at decode/0",
            "prefill/0: rejected a hello: model: 'another' at decode/0, 'm' at prefill/0",
        ]


def test_a_peer_that_refuses_this_rank_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that has lasted. Here its name is another one, so it says no hello, and only its own log would have it."""
    monkeypatch.setattr(dispatch, "REFUSED_S", 0.3)
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        decode = opened(stack, "decode-1")
        opened(stack, "prefill", peers={"decode": decode.address})
        until(lambda: f"prefill/0: peer 'decode' at {decode.address} cannot be used: decode-1/0 is at" in caplog.text)


def test_an_absent_peer_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        prefill = opened(stack, "prefill", peers={"decode": "tcp://127.0.0.1:9"})
        until(lambda: "peer 'decode' does not answer at tcp://127.0.0.1:9" in caplog.text)
        until(lambda: "hellos sent" in problem(prefill, "decode"))
        assert caplog.text.count("does not answer") == 1


def test_a_table_that_differs_from_those_of_connected_ranks_waits_for_their_end() -> None:
    """An instance whose ranks show different layouts must not cost the ranks that are connected."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, "prefill"), opened(stack, "decode")
        prefill.add_peer("decode", address=decode.address)
        decode.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "decode"), (decode, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        handshake = prefill._runtime.handshake
        hello = decode._runtime.handshake.hello(SendHello(0), leader=None)
        another = msgspec.structs.replace(hello, table=b"another table")
        with pytest.raises(Undecided, match="ranks 0 of 'decode' are connected with another layout table"):
            handshake.accept_hello(another, tuple)
        assert prefill.health().peers["decode"].ready


def test_the_own_address_is_refused_as_a_peers_and_harms_no_peer() -> None:
    """However it is spelled, wherever it is given, and the leader's address on other ranks as well."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, "prefill"), opened(stack, "decode")
        prefill.add_peer("decode", address=decode.address)
        decode.add_peer("prefill", address=prefill.address)
        for one, other in ((prefill, "decode"), (decode, "prefill")):
            one.wait_ready(other, timeout_s=DEADLINE_S)
        again = decode.address.replace("127.0.0.1", "localhost")
        for name in ("prefill", "other"):
            for address in (decode.address, again):
                expected = (
                    f"peer '{name}': expected the address of another instance, found '{address}', which is this one's own"
                )
                with pytest.raises(ConfigError, match=expected):
                    decode.add_peer(name, address=address)
        with pytest.raises(ConfigError, match="which is this one's own"):
            decode.receiver(new_request_id(), peer="other", address=again, rows={})
        with pytest.raises(ConfigError, match="which is this one's own"):
            decode.decline(new_request_id(), peer="other", address=again)
        assert decode.peer("other").state == "unknown"
        assert decode.peer("prefill").state == "ready"
        there = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        with pytest.raises(ConfigError, match="which is this one's own"):
            manager(name="third", listen=there, peers={"fourth": there})
        with pytest.raises(ConfigError, match="which is this one's own"):
            manager(name="third", listen=there.replace("127.0.0.1", "*"), advertise="tcp://10.1.1.1:0", peers={"fourth": there})


def test_the_leaders_address_is_refused_on_other_ranks() -> None:
    topology, leader = Topology(tp=2, tp_rank=1), f"tcp://127.0.0.1:{free_ports(1)[0]}"
    keys, values = np.zeros((2, 4, 4, 2, 8), np.float16)
    component = paged.gqa({0: (keys, values)}, axes="nhd", num_kv_heads=4, topology=topology)
    given: dict[str, Any] = {"name": "m", "components": [component], "model": ModelId("m"), "backend": "local"}
    with pytest.raises(ConfigError, match="which is this one's own"):
        KVManager(**given, leader=leader, peers={"other": leader})
    with KVManager(**given) as rank:
        rank.add_peer("other", address=leader)
        rank.remove_peer("other")
        rank.set_leader(leader)
        until(lambda: rank._runtime.peers.leader_address == leader)
        with pytest.raises(ConfigError, match="which is this one's own"):
            rank.add_peer("other", address=leader)


def test_names_may_be_of_a_subclass_of_str() -> None:
    """NumPy's own cannot be encoded in a message."""
    with ExitStack() as stack:
        one, other = (opened(stack, np.str_(name), model=ModelId(np.str_("toy"))) for name in ("one", "other"))
        one.add_peer(np.str_("other"), address=other.address)
        other.add_peer("one", address=one.address)
        one.wait_ready(np.str_("other"), timeout_s=DEADLINE_S)
