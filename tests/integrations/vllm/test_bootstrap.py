"""The bootstrap server that MooncakeConnector's proxies ask, and the names that it gives."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import ParallelConfig

from disagg.core.errors import ConfigError
from disagg.integrations.handoff import HandOff, Place, transfer_id
from disagg.integrations.options import Options
from disagg.integrations.vllm import bootstrap
from disagg.integrations.vllm.bootstrap import Bootstrap, num_replicas
from harness.ports import free_ports

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
PLACES = (
    Place(remote_engine_id="prefill-0_dp1", remote_address="tcp://10.0.0.1:7000"),
    Place(remote_engine_id="a@tcp://b", remote_address="tcp://[fe80::1]:7000", remote_public_key=KEY, remote_window_page=528),
)


REFUSED = (
    *(
        b"{",
        b"[]",
        b"[" * 4000,
        b'{"dp_rank": 1}',
        b'{"a": ' + b"[" * 4000,
        b'{"dp_rank": 1, "engine_id": "%s"}' % (b"a" * 5000),
    ),
    *(
        b'{"dp_rank": %s, "engine_id": "other"}' % rank
        for rank in (b'"a"', b"0", b"-1", b"2", b"1024", b"1e999", b"NaN", b"true")
    ),
)


def replica(rank: int, *, local: bool = False) -> Any:
    """What the bootstrap server reads of vLLM's `ParallelConfig`."""
    return SimpleNamespace(
        data_parallel_index=rank,
        data_parallel_rank_local=0 if local else rank,
        data_parallel_master_ip="127.0.0.1",
        local_engines_only=local,
        elastic_ep_max_dp_size=2,
    )


def query(port: int, path: str = "/query", data: bytes | None = None) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_one_text(place: Place) -> None:
    assert Place.parse(str(place)) == place
    params = {"transfer_id": "xfer-1", "remote_engine_id": str(place), "remote_bootstrap_addr": "http://10.0.0.1:8998"}
    found = HandOff.of({"do_remote_prefill": True, "do_remote_decode": False, **params})
    assert found is not None
    assert msgspec.convert(found.params(), Place) == place
    assert found.request_id == transfer_id({"transfer_id": "xfer-1"})
    assert found.request_id != transfer_id({"transfer_id": "xfer-2"})
    assert len(found.request_id) == 16


@pytest.mark.parametrize("name", ["", "prefill-0", "prefill-0@10.0.0.1:7000", "None"])
def test_a_name_of_another_connector_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected NAME@tcp://HOST:PORT, found"):
        Place.parse(name)


def test_a_replica_of_this_host_asks_where_the_first_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM names the loopback address as that of a server whose replicas are all here. Another address stands for one that
    other hosts reach.
    """
    monkeypatch.setattr(bootstrap, "is_loopback", lambda host: host == "127.0.0.1")
    (port,) = free_ports(1)
    given = {"bootstrap_port": port, "listen": "tcp://127.0.0.2:0", "insecure": True, "trusted_network": True}
    options = Options.read(given, engine_id="prefill")
    first = Bootstrap.start(replica(0), options, "zero")
    assert first is not None
    try:
        assert Bootstrap.start(replica(1), options, "one") is None
        until = time.monotonic() + 30
        while first._replicas.keys() != {0, 1}:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        first.close()


def test_replicas_are_known_by_rank() -> None:
    """Whichever starts first. A replica that has been replaced has another name."""
    (port,) = free_ports(1)
    options = Options.read({"bootstrap_port": port}, engine_id="prefill")
    assert Bootstrap.start(replica(1), options, "one") is None
    first = Bootstrap.start(replica(0), options, "zero")
    assert first is not None
    try:
        until = time.monotonic() + 30
        while len(found := query(port)) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert {rank: entry["engine_id"] for rank, entry in found.items()} == {"0": "zero", "1": "one"}
        assert all(entry["worker_addr"] for entry in found.values())
        query(port, "/register", b'{"dp_rank": 1, "engine_id": "again"}')
        assert query(port)["1"]["engine_id"] == "again"
        for path, data in (("/", None), *(("/register", data) for data in REFUSED)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                query(port, path, data)
            assert refused.value.code in (400, 404)
            refused.value.close()
        assert {rank: entry["engine_id"] for rank, entry in query(port).items()} == {"0": "zero", "1": "again"}
        with pytest.raises(ConfigError, match="bootstrap_port: cannot listen"):
            Bootstrap.start(replica(5, local=True), options, "other")  # it has an HTTP server of its own
    finally:
        first.close()
    again = Bootstrap.start(replica(5, local=True), options, "other")
    assert again is not None
    assert {rank: entry["engine_id"] for rank, entry in query(port).items()} == {"0": "other"}
    again.close()


@pytest.mark.parametrize("is_dense", [False, True])
def test_the_number_of_replicas(is_dense: bool) -> None:
    """A replica of a dense model is one of its own for vLLM."""
    parallel = ParallelConfig(data_parallel_size=2)
    if is_dense:
        parallel.reconfigure_for_independent_dp_rank()
    assert (num_replicas(parallel), parallel.data_parallel_size) == (2, 1 if is_dense else 2)


@pytest.mark.parametrize("field", ["remote_request_id", "remote_beginnings", "remote_engine_id", "remote_num_tokens"])
@pytest.mark.parametrize("value", [5, 1.5, [], {}, True, "abc", "d" * 31, None])
@pytest.mark.parametrize("inside", [False, True])
def test_a_damaged_hand_off_is_a_value_error(field: str, value: object, inside: bool) -> None:
    """Whatever a client writes: the scheduler asks in each step of all requests."""
    part = {"do_remote_prefill": True, "remote_bootstrap_addr": "x", "remote_engine_id": "e@tcp://h:1", field: value}
    with contextlib.suppress(ValueError):
        found = HandOff.of({"kept": part} if inside else part)
        assert found is None or bytes.fromhex(found.remote_request_id) is not None
        assert found is None or bytes.fromhex(found.remote_beginnings) is not None


def test_connections_that_say_little_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 0.5)
    (port,) = free_ports(1)
    before, served = threading.active_count(), Bootstrap("127.0.0.1", port)
    try:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert query(port) == {}
        until = time.monotonic() + 30
        while threading.active_count() > before + 1 + 4:  # those that were ended may not have noticed
            assert time.monotonic() < until
            time.sleep(0.01)
        for each in slow:
            each.settimeout(30)
            assert each.recv(1) == b""
    finally:
        served.close()
