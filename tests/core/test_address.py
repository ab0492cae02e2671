"""Control addresses: those that can be dialled are accepted, everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from disagg import ConfigError
from disagg.core.address import advertised_address, is_loopback, is_wildcard, parse_address, reaches


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("tcp://decode-0.kv.svc.cluster.local:5555", ("decode-0.kv.svc.cluster.local", 5555)),
        ("tcp://host_1.example.:1", ("host_1.example.", 1)),
        ("tcp://[::1]:5555", ("::1", 5555)),
        ("tcp://[fe80::1%eth0]:5555", ("fe80::1%eth0", 5555)),
        ("tcp://*:0", ("*", 0)),
        ("tcp://a:*", ("a", 0)),
    ],
)
def test_addresses_that_can_be_dialled_are_parsed(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address, what="peer") == expected


@pytest.mark.parametrize(
    "address",
    [
        None, 5555, b"tcp://a:1", "", "a:1", "nonsense", "ipc:///tmp/x", "udp://a:1", "tcp://a", "tcp://:1", "tcp://a:1/x",
        "tcp://a:1?x",
        "tcp://a:1#x", "tcp://u@a:1", "tcp://a:65536", "tcp://a:-1", "tcp://a b:1", "tcp://%:1", "tcp://a*:1", "tcp://bücher.example:1",
        "tcp://-a:1", "tcp://a,b:1", "tcp://[a:1",
        "tcp://1.2.3.4:55\n55", "tcp://[fe80::1%\n2025-11-30 ERROR a]:5555", "tcp://[fe80::1%a b]:5555", "tcp://a:1\x1b[2J",
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_dialled_are_refused_by_name(address: Any) -> None:
    with pytest.raises(ConfigError, match=r"^peer: expected "):
        parse_address(address, what="peer")


def test_loopback_and_every_interface_are_recognized() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "a")] == [True] * 3 + [False] * 2
    assert [is_wildcard(host) for host in ("*", "0.0.0.0", "::", "127.0.0.1", "a")] == [True] * 3 + [False] * 2


def test_the_advertised_address_has_the_bound_port_unless_it_names_one() -> None:
    assert advertised_address(None, "tcp://a:5") == "tcp://a:5"
    assert advertised_address("tcp://b:0", "tcp://a:5") == "tcp://b:5"
    assert advertised_address("tcp://b:6", "tcp://a:5") == "tcp://b:6"
    assert advertised_address("tcp://[fd00::7]:0", "tcp://a:5") == "tcp://[fd00::7]:5"


@pytest.mark.parametrize(
    ("address", "listener", "expected"),
    [
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7000", True),
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001", False),
        ("tcp://10.0.0.2:7000", "tcp://10.0.0.1:7000", False),
        ("tcp://Decode-0.kv.:7000", "tcp://decode-0.kv:7000", True),
        ("tcp://localhost:7000", "tcp://127.0.0.1:7000", True),
        ("tcp://127.0.0.2:7000", "tcp://127.0.0.1:7000", False),
        ("tcp://[0:0::1]:7000", "tcp://[::1]:7000", True),
        ("tcp://127.0.0.1:7000", "tcp://*:7000", True),
        ("tcp://localhost:7000", "tcp://0.0.0.0:7000", True),
        ("tcp://10.0.0.1:7000", "tcp://0.0.0.0:7000", False),
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:0", False),
    ],
)
def test_an_address_of_this_machine_is_recognized(address: str, listener: str, expected: bool) -> None:
    """However its host is spelled, but without a name server."""
    assert reaches(address, listener) is expected
