"""The HTTP server of a manager: what it answers, and what silent or broken clients cost."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from disagg.runtime import metrics_server
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster
from tests.support.inside import in_control_thread


@pytest.fixture
def instances() -> Iterator[Cluster]:
    with cluster(Side(), Side(), settings={"metrics_port": 0}) as instances:
        yield instances


def url_of(instances: Cluster, path: str) -> str:
    url = instances.decode[0].manager.metrics_url
    assert url is not None
    return url.removesuffix("/metrics") + path


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str]:
    """Status, body and content type."""
    request = urllib.request.Request(url, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["Content-Type"]


def connect(instances: Cluster) -> socket.socket:
    host, _, port = url_of(instances, "").removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def exchange(instances: Cluster, data: bytes) -> bytes:
    """Everything that comes back for these bytes until the server closes the connection, perhaps before it has read all."""
    with connect(instances) as connection:
        found = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
            while part := connection.recv(65536):
                found += part
        return found


def test_the_health_is_served_and_other_paths_do_not_exist(instances: Cluster) -> None:
    assert get(url_of(instances, "/healthz")) == (200, b"ok\n", "text/plain; charset=utf-8")
    assert get(url_of(instances, "/healthz?verbose=1"))[:2] == (200, b"ok\n")
    assert get(url_of(instances, "/healthz"), "HEAD")[:2] == (200, b"")
    assert get(url_of(instances, "/healthz"), "DELETE")[0] == 405
    until(lambda: get(url_of(instances, "/readyz"))[0] == 200)  # a peer is ready
    for path in ("", "/", "/metrics/", "/favicon.ico", "/healthz/..", "/other"):
        assert get(url_of(instances, path))[0] == 404, path
    instances.decode[0].manager._runtime.loop.fail("transfer", ZeroDivisionError())
    until(lambda: not instances.decode[0].manager.health().ok)
    problem = instances.decode[0].manager.health().problem
    assert "the transfer thread died: ZeroDivisionError" in problem
    assert get(url_of(instances, "/healthz"))[:2] == (503, f"{problem}\n".encode())
    assert get(url_of(instances, "/healthz"), "HEAD")[:2] == (503, b"")
    assert get(url_of(instances, "/readyz"))[:2] == (503, f"{problem}\n".encode())
    assert b"disagg_healthy 0.0" in get(url_of(instances, "/metrics"))[1]
    instances.decode.pop().manager.close()


def test_a_rank_that_takes_no_requests_lives_and_is_not_ready(instances: Cluster) -> None:
    until(lambda: get(url_of(instances, "/readyz"))[0] == 200)
    manager, go_on = instances.decode[0].manager, threading.Event()

    def hold(_: float) -> None:
        go_on.wait(DEADLINE_S)

    in_control_thread(manager, hold)
    manager.remove_peer("prefill-0")
    manager.add_peer("absent", address="tcp://127.0.0.1:9")
    no_peer = b"no configured peer is ready: "
    changing = (503, no_peer + b"prefill-0: its configuration is being changed\n")
    assert get(url_of(instances, "/readyz"))[:2] == changing, "the control thread has not carried out either yet"
    go_on.set()
    until(lambda: get(url_of(instances, "/readyz"))[1].startswith(no_peer + b"absent: "))
    assert get(url_of(instances, "/readyz"))[0] == 503
    assert get(url_of(instances, "/healthz"))[0] == 200
    manager.remove_peer("absent")
    until(lambda: get(url_of(instances, "/readyz"))[0] == 200)  # without configured peers whoever is admitted may come
    assert manager.drain(timeout_s=DEADLINE_S)
    assert get(url_of(instances, "/readyz"))[:2] == (503, b"it takes no new requests: it is draining\n")
    assert get(url_of(instances, "/healthz"))[0] == 200


def test_metrics_are_served_in_the_format_that_the_client_asks_for(instances: Cluster) -> None:
    url = url_of(instances, "/metrics")
    status, text, kind = get(url)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert b"disagg_healthy 1.0" in text
    assert gzip.decompress(get(url, Accept_Encoding="gzip")[1]).startswith(b"# HELP")
    assert get(url, Accept="application/openmetrics-text; version=1.0.0")[2].startswith("application/openmetrics-text")
    assert all(event.ok for event in instances.transfer(20))
    only = get(f"{url}?name[]=disagg_requests_ended_total")[1].decode()
    assert {line.partition("{")[0] for line in only.splitlines() if line[0] != "#"} == {"disagg_requests_ended_total"}
    assert get(url, "POST")[0] == 405


def test_an_error_while_reading_the_metrics_is_answered(instances: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances.decode[0].manager._runtime, "queue_depths", lambda: 1 / 0)
    assert get(url_of(instances, "/metrics"))[0] == 500
    assert get(url_of(instances, "/healthz"))[0] == 200


def test_silent_connections_cost_no_threads_and_are_closed(instances: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent_connections(stack: contextlib.ExitStack, count: int) -> list[socket.socket]:
        found = []
        for number in range(count):
            found.append(stack.enter_context(connect(instances)))
            if number % 3 == 1:
                found[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # not the whole request
        return found

    def are_closed(connections: list[socket.socket]) -> bool:
        """Whether the server closes them, without an answer. Raises `TimeoutError` if it does not."""
        answers = set()
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                answers.add(connection.recv(1))
        return answers <= {b""}

    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 10 * DEADLINE_S)
        silent = silent_connections(stack, 300)
        assert get(url_of(instances, "/healthz"))[0] == get(url_of(instances, "/metrics"))[0] == 200
        assert threading.active_count() <= before  # a thread that connected a peer may have ended
        assert are_closed(silent[: -metrics_server.MAX_CONNECTIONS])
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.2)
        assert are_closed(silent_connections(stack, 1))
        monkeypatch.undo()
        assert get(url_of(instances, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\xff\x00 / \xff\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n:\r\n\r\n",
        b"x" * 100_000,
        b"GET / HTTP/1.1\r\n" * 9999,
    ],
)
def test_requests_that_make_no_sense_disturb_nothing(instances: Cluster, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert exchange(instances, data)[:12] in (b"HTTP/1.1 404", b"")
    assert get(url_of(instances, "/healthz"))[0] == 200
    assert "Traceback" not in caplog.text
