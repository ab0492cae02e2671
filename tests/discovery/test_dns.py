"""Peers behind the records of a real DNS server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from disagg import DiscoveryError, KVManager
from disagg.discovery import Found, PeerFollower
from disagg.discovery.dns import DnsPeers
from disagg.runtime.keys import KeyPair
from harness.ports import free_ports
from harness.services import DnsServer, dns_server
from tests.discovery.test_follower import DEADLINE_S, until

SERVICE = "decode.default.svc.test"
SRV = f"_disagg._tcp.{SERVICE}"
TWICE = f"_twice._tcp.{SERVICE}"


@pytest.fixture(scope="module")
def server() -> Iterator[DnsServer]:
    same = [
        ("port", "a", 7100, 0, 0), ("port", "a", 7101, 0, 0), ("weight", "a", 7100, 0, 1), ("weight", "a", 7101, 0, 2),
        ("priority", "a", 7100, 2, 9), ("priority", "a", 7101, 1, 0), ("target", "b", 7100, 0, 0), ("target", "a", 7100, 0, 0),
        ("equal", "a", 7100, 0, 0), ("equal", "a", 7100, 1, 0),
    ]  # fmt: skip
    twice = [(TWICE, f"{name}.{zone}.test", port, priority, weight) for name, zone, port, priority, weight in same]
    with dns_server([(SRV, f"decode-0.{SERVICE}", 7100), (SRV, f"decode-1.{SERVICE}", 7101), *twice]) as server:
        yield server


def records(server: DnsServer, name: str, port: int | None = None, keys: Mapping[str, str] | None = None) -> DnsPeers:
    return DnsPeers(name, port=port, keys=keys, nameservers=["127.0.0.1"], nameserver_port=server.port)


def set_addresses(server: DnsServer, addresses: Sequence[str], source: DnsPeers) -> None:
    """Replace the Service's addresses, and wait until the server has read them."""
    server.set_addresses({SERVICE: addresses})
    until(lambda: len(source.find()) == len(addresses))


def test_every_address_is_an_instance_at_the_given_port(server: DnsServer) -> None:
    source = records(server, SERVICE, 7100, keys={"decode": "shared", "decode-10.0.0.8": "own"})
    set_addresses(server, ["10.0.0.7", "10.0.0.8", "fd00::7"], source)
    assert source.find() == {
        "decode-10.0.0.7": Found("tcp://10.0.0.7:7100", "shared"),
        "decode-10.0.0.8": Found("tcp://10.0.0.8:7100", "own"),
        "decode-fd00::7": Found("tcp://[fd00::7]:7100", "shared"),
    }
    set_addresses(server, [], source)  # no pod is ready: the name does not exist
    assert source.find() == {}


def test_every_srv_target_is_an_instance_at_its_own_port(server: DnsServer) -> None:
    assert records(server, SRV, keys={"decode": "shared"}).find() == {
        "decode-0": Found(f"tcp://decode-0.{SERVICE}:7100", "shared"),
        "decode-1": Found(f"tcp://decode-1.{SERVICE}:7101", "shared"),
    }
    assert records(server, f"_other._tcp.{SERVICE}").find() == {}


def test_of_several_srv_records_with_one_name_always_the_same_is_taken(
    server: DnsServer, caplog: pytest.LogCaptureFixture
) -> None:
    source = records(server, TWICE)
    expected = {
        "port": ("a", 7100),
        "weight": ("a", 7101),
        "priority": ("a", 7101),
        "target": ("a", 7100),
        "equal": ("a", 7100),
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(12):  # the server rotates its records
            assert source.find() == {name: Found(f"tcp://{name}.{zone}.test:{port}") for name, (zone, port) in expected.items()}
    logged = [each.message for each in caplog.records]
    assert len(logged) == 4, logged
    assert f"{source} have several for 'weight': tcp://weight.a.test:7101 is taken, not tcp://weight.a.test:7100" in "".join(
        logged
    )


def test_a_server_that_is_silent_is_an_error() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        source = DnsPeers(SERVICE, port=1, nameservers=["127.0.0.1"], nameserver_port=silent.getsockname()[1])
        source._resolver.lifetime = 0.5
        with pytest.raises(DiscoveryError, match=f"no answer for the A records of {SERVICE}"):
            source.find()


def test_pods_of_a_service_become_peers_and_share_a_key(server: DnsServer, start: Callable[..., KVManager]) -> None:
    (port,) = free_ports(1)
    own, shared = KeyPair.generate(), KeyPair.generate()
    prefill = start("prefill-0", keys=own)
    known = {"peers": {"prefill-0": prefill.address}, "peer_keys": {"prefill-0": own.public}, "keys": shared}
    for host in ("127.0.0.1", "127.0.0.2"):
        start(f"decode-{host}", listen=f"tcp://{host}:{port}", **known)
    source = records(server, SERVICE, port, keys={"decode": shared.public})
    set_addresses(server, ["127.0.0.1"], source)
    with PeerFollower(prefill, source, interval_s=0.05):
        until(lambda: prefill.peer("decode-127.0.0.1").state == "ready")
        set_addresses(server, ["127.0.0.1", "127.0.0.2"], source)
        until(lambda: prefill.peer("decode-127.0.0.2").state == "ready")
    prefill.wait_ready("decode-127.0.0.1", timeout_s=DEADLINE_S)
