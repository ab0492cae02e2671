"""Answers that no etcd server gives, but what stands in for one or in front of one may."""

from __future__ import annotations

import logging
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from disagg import DiscoveryError
from disagg.discovery import Announcement, Found, announced_at, etcd, peer_source
from tests.discovery.test_follower import until

OK = b"HTTP/1.1 200 OK\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"
Answer = Callable[[], Iterable[bytes]]
"""The pieces of an answer, as they are sent."""


class Gateway(socketserver.ThreadingTCPServer):
    """Gives each call the next of `answers`, then those of an etcd server that knows nothing. `calls` are the methods."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, answers: Iterable[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self.answers = deque(answers)
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.server_address[1]}/disagg"


class _Call(socketserver.StreamRequestHandler):
    server: Gateway

    def handle(self) -> None:
        method = self.rfile.readline().split()[1].decode().removeprefix("/v3/")
        length = 0
        while line := self.rfile.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split()[1])
        self.rfile.read(length)
        answer = (
            self.server.answers.popleft()
            if self.server.answers
            else lambda: [OK, b'{"ID": "7", "result": {"ID": "7", "TTL": "3"}}']
        )
        try:
            for piece in answer():
                self.wfile.write(piece)
        except OSError:
            pass  # the caller has hung up
        finally:
            self.server.calls.append(method)


@contextmanager
def gateway(*answers: Answer) -> Iterator[Gateway]:
    with Gateway(answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def slow(first: bytes, rest: bytes, *, pause_s: float = 0.05) -> Iterator[bytes]:
    yield first
    for position in range(len(rest)):
        time.sleep(pause_s)
        yield rest[position : position + 1]


BAD: dict[str, tuple[Answer, str]] = {
    "an error with a cut body": (
        lambda: [UNAVAILABLE + b"Transfer-Encoding: chunked\r\n\r\nff\r\ncut"],
        "HTTP 503 Service Unavailable",
    ),
    "an error whose body stalls": (lambda: slow(UNAVAILABLE + b"Content-Length: 9\r\n\r\n", b"slow", pause_s=0.6), "HTTP 503"),
    "an error with a reason": (lambda: [UNAVAILABLE + b"\r\nno leader\n"], "OSError: HTTP 503 Service Unavailable: no leader"),
    "nested JSON": (lambda: [OK, b'{"a":' * 100_000], "RecursionError"),
    "no HTTP": (lambda: [b"\x15\x03\x01\x00\x02\x02\x16"], "BadStatusLine"),
    "nothing": (list, "RemoteDisconnected"),
    "a dripping body": (lambda: slow(OK, b" " * 30 + b"{}"), "TimeoutError: timed out"),
    "a dripping head": (lambda: slow(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 6 + b"\r\n{}"), "TimeoutError: timed out"),
    "a long body": (lambda: [OK, *[b" " * (1 << 20)] * 6, b"{}"], "expected a reply of at most 4194304 bytes"),
}


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_answer_is_an_error_that_names_it(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "TIMEOUT_S", 0.5)
    bad, problem = BAD[answer]
    with gateway(bad) as server:
        source = peer_source(server.url)
        with pytest.raises(DiscoveryError) as raised:
            source.find()
        assert problem in str(raised.value)
        assert source.find() == {}


@pytest.mark.parametrize("answer", ["an error with a cut body", "an error whose body stalls", "nested JSON", "a dripping body"])
def test_an_announcement_outlives_a_bad_answer(
    answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(etcd, "TIMEOUT_S", 0.5)
    bad, problem = BAD[answer]
    with caplog.at_level(logging.WARNING), gateway(bad) as server:
        client, prefix = announced_at(server.url)
        with Announcement(client, prefix, name="decode-0", instance=Found("tcp://10.0.0.1:7100"), ttl_s=3):
            until(lambda: "kv/put" in server.calls)
        until(lambda: server.calls[-1] == "lease/revoke")
    assert "cannot announce /disagg/decode-0" in caplog.text
    assert problem in caplog.text
