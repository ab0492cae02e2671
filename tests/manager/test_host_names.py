"""Peers that are given by host names."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disagg import new_request_id
from disagg.core.errors import PeerUnreachable
from disagg.protocol import peers
from disagg.runtime import resolver
from disagg.testing.reference import KVModel
from tests.manager.test_peers import problem, until
from tests.support.cluster import DEADLINE_S, Rank, Side, start_side

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")


class Names:
    """A name server: names that start with `slow` are answered once `answer` is set, and `gone` is not known."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.places = {"decode.test": "127.0.0.1", "slow.test": "127.0.0.1", "six.test": "::1"}
        self.asked: list[str] = []
        self._system = socket.getaddrinfo

    def __call__(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        if not host.endswith(".test"):
            return self._system(host, port, *args, **options)
        self.asked.append(host)
        if host.startswith("slow"):
            assert self.answer.wait(DEADLINE_S)
        if host not in self.places:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._system(self.places[host], port, *args, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield found
    found.answer.set()


@pytest.fixture
def prefill(names: Names) -> Iterator[Rank]:
    (rank,) = start_side(MODEL, Side(), "prefill-0", num_layers=2)
    yield rank
    names.answer.set()
    rank.manager.close()


def test_a_request_whose_peer_has_no_address_any_more_fails_at_once(names: Names, prefill: Rank) -> None:
    """A server that is gone may have lost its name as well."""
    request = prefill.manager.receiver(
        new_request_id(), peer="decode", address="tcp://gone.test:7000", rows={}, deadline_s=None
    )
    error = request.wait(timeout_s=DEADLINE_S).error
    assert isinstance(error, PeerUnreachable)
    assert "tcp://gone.test:7000: the host cannot be resolved" in str(error)


def at(rank: Rank, host: str) -> str:
    """The address of a rank by a host's name."""
    return f"tcp://{host}:{rank.manager.address.rpartition(':')[2]}"


def test_a_name_that_is_not_answered_delays_no_other_peer(names: Names, prefill: Rank) -> None:
    (decode,) = start_side(MODEL, Side(), "decode-0", num_layers=2)
    try:
        decode.manager.add_peer("prefill-0", address=prefill.manager.address)
        prefill.manager.add_peer("slow", address="tcp://slow.test:7000")
        prefill.manager.add_peer("decode-0", address=at(decode, "decode.test"))
        prefill.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        decode.manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        assert not names.answer.is_set()
        assert prefill.manager.peer("slow").state == "connecting"
        prefill.manager.remove_peer("decode-0")
        prefill.manager.add_peer("decode-0", address=at(decode, "slow.test"))
        until(lambda: names.asked.count("slow.test") == 2)
        names.answer.set()
        prefill.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
    finally:
        decode.manager.close()


def test_one_instance_of_many_slow_names_delays_no_other() -> None:
    asked, go_on, resolved = list[str](), threading.Event(), threading.Event()
    commands = queue.SimpleQueue[Callable[[float], None]]()

    def slow(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        if host.startswith("slow"):
            assert go_on.wait(DEADLINE_S)
        return [(socket.AF_INET, None, None, None, ("127.0.0.1", 0))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", slow)
        names = resolver.Resolver(commands.put, name="test")
        for number in range(4 * resolver.MAX_RESOLVING):
            names.resolve(f"tcp://slow-{number}.test:7000", "slow", lambda _: None)
        names.resolve("tcp://good.test:7000", "good", lambda _: resolved.set())
        while not resolved.is_set():
            commands.get(timeout=DEADLINE_S)(0.0)
        assert sum(host.startswith("slow") for host in asked) == resolver.MAX_EACH
        go_on.set()
        for _ in range(4 * resolver.MAX_RESOLVING):
            commands.get(timeout=DEADLINE_S)(0.0)
        assert len(set(asked)) == 4 * resolver.MAX_RESOLVING + 1
        names.close()


def test_a_name_that_nobody_knows_is_the_peers_problem_and_asked_again(names: Names, prefill: Rank) -> None:
    (decode,) = start_side(MODEL, Side(), "decode-0", num_layers=2)
    try:
        decode.manager.add_peer("prefill-0", address=prefill.manager.address)
        prefill.manager.add_peer("decode-0", address=at(decode, "gone.test"))
        until(lambda: "cannot be resolved" in problem(prefill.manager, "decode-0"))
        assert "cannot be resolved: [Errno -2] Name or service not known" in problem(prefill.manager, "decode-0")
        names.places["gone.test"] = "127.0.0.1"
        prefill.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
    finally:
        decode.manager.close()


def test_few_threads_resolve_many_names_and_all_end(names: Names, prefill: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "disagg-resolve-prefill-0/0"]

    monkeypatch.setattr(peers, "RECONNECT_AFTER", 1)
    for number in range(3 * resolver.MAX_RESOLVING):
        prefill.manager.add_peer(f"slow-{number}", address=f"tcp://slow-{number}.test:7000")
    until(lambda: len(names.asked) == resolver.MAX_RESOLVING)
    until(lambda: len(threads()) == resolver.MAX_RESOLVING)  # those of an earlier test may end just now
    prefill.manager.close()
    names.answer.set()
    until(lambda: not threads())


def test_an_address_of_ipv6_is_taken_where_there_is_no_other(names: Names) -> None:
    assert resolver._resolve("tcp://six.test:7000") == "tcp://[::1]:7000"
    assert resolver._resolve("tcp://decode.test:7000") == "tcp://127.0.0.1:7000"
