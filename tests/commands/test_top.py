"""`disagg top`, with real managers."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from disagg.commands.main import main
from disagg.commands.top import HEADINGS, Sample, engine_of, is_bad, problems, quantile, read, row, shown
from harness.ports import held_port
from tests.commands.conftest import said
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster


@pytest.fixture(scope="module")
def instances() -> Iterator[Cluster]:
    with cluster(Side(tp=2), Side(page=8, num_pages=16), settings={"metrics_port": 0}) as instances:
        yield instances


def sample(instances: Cluster) -> tuple[str, Sample]:
    url = instances.decode[0].manager.metrics_url
    assert url is not None
    return url, read(url, timeout_s=DEADLINE_S)


def test_rates_count_what_ended_between_two_readings(instances: Cluster) -> None:
    url, before = sample(instances)
    for _ in range(3):
        instances.transfer(20)
    _, now = sample(instances)
    cells = row(url, before, now)
    transport = instances.decode[0].manager.backend.transport
    assert (*cells[:5], cells[10]) == ("decode-0/0", "ok", "1/1", "0", "0", f"local: {transport}")
    assert float(cells[5]) == pytest.approx(3 / (now.at - before.at), abs=0.06)
    assert cells[6] == "0.0"
    assert all(re.fullmatch(r"[0-9.]+", cell) for cell in cells[7:9])
    assert row(url, None, now)[5:10] == ("-", "-", *cells_of_all(now), "-")
    assert problems(url, now) == ""


def cells_of_all(now: Sample) -> tuple[str, str]:
    both = [quantile([], now.buckets(), share) for share in (0.5, 0.99)]
    assert None not in both
    return f"{both[0] * 1e3:.1f}", f"{both[1] * 1e3:.1f}"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("before", "now", "share", "expected"),
    [
        ([], [], 0.5, None),
        ([(1.0, 4.0), (float("inf"), 4.0)], [(1.0, 4.0), (float("inf"), 4.0)], 0.5, None),
        ([], [(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5, 1.5),
        ([(1.0, 6.0), (2.0, 6.0)], [(1.0, 6.0), (2.0, 16.0)], 0.9, 1.9),
        ([], [(1.0, 5.0), (float("inf"), 10.0)], 0.99, 1.0),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(
    before: list[tuple[float, float]], now: list[tuple[float, float]], share: float, expected: float | None
) -> None:
    assert quantile(before, now, share) == expected


def metrics(**values: float) -> Sample:
    """A healthy rank's sample with these values. `__PEER` after a name is its label."""
    build = frozenset(
        {"name": "prefill-0", "rank": "1", "backend": "auto", "transport": "cma: shm; nixl: tcp (inferred)"}.items()
    )
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {("disagg_build_info", build): 1.0}
    for key, value in {"healthy": 1.0, **values}.items():
        name, _, peer = key.partition("__")
        found[f"disagg_{name}", frozenset({("peer", peer)} if peer else ())] = value
    return Sample(0.0, found)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (metrics(peer_ready__a=1), ""),
        (metrics(peer_ready__a=1, peer_ready__c=0, peer_ready__b=0), "prefill-0/1: not ready: b, c"),
        (metrics(quarantined_rows=12), "prefill-0/1: 12 quarantined rows"),
        (metrics(healthy=0), "prefill-0/1: a thread of it has died: its log has the cause, restart it"),
        (Sample(0.0, {}, "timed out"), "here:1: timed out"),
    ],
)
def test_what_is_wrong_with_a_rank_is_a_line_below_the_table(now: Sample, expected: str) -> None:
    assert problems("here:1", now) == expected
    assert engine_of(metrics()) == "cma: shm; nixl: tcp"


def test_what_peers_are_called_does_not_reach_the_terminal() -> None:
    now = metrics(**{"peer_ready__\x1b[2Ja\nb": 0})
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    console.print(shown(["here:1"], [now], [now]))
    assert "not ready: \\x1b[2Ja\\nb" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_quarantined_rows_are_shown_by_reason() -> None:
    values = {("disagg_healthy", frozenset[tuple[str, str]]()): 1.0}
    values |= {("disagg_quarantined_rows", frozenset({("reason", name)})): count for name, count in (("b", 2.0), ("a", 5.0))}
    assert problems("here:1", Sample(0.0, values)) == "here:1: 7 quarantined rows (a: 5, b: 2)"


def test_what_needs_attention_is_in_colour() -> None:
    now = metrics(peer_ready__a=1, peer_ready__b=0)
    assert [is_bad(*each) for each in zip(HEADINGS, row("here:1", now, now), strict=True)] == [
        heading == "peers" for heading in HEADINGS
    ]
    assert is_bad("health", "dead")
    assert is_bad("health", "silent")
    assert is_bad("fail/s", "0.1")


def top(*urls: str, columns: int) -> subprocess.CompletedProcess[str]:
    once = ("--once", "--interval", "0.1", "--timeout", str(DEADLINE_S))
    return said(main, "top", *once, *urls, COLUMNS=str(columns))


@pytest.mark.parametrize("columns", [80, 120])
def test_the_command_shows_every_rank_and_fails_for_a_silent_one(columns: int) -> None:
    with cluster(Side(tp=2), Side(), settings={"metrics_port": 0, "backend": "auto"}) as instances:
        urls = [str(rank.manager.metrics_url) for rank in (*instances.prefill, *instances.decode)]
        ended = top(*urls, columns=columns)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        head, *lines = ended.stdout.splitlines()
        assert head.split() == " ".join(HEADINGS).split()
        expected = [[name, "ok", "1/1", "0", "0"] for name in ("prefill-0/0", "prefill-0/1", "decode-0/0")]
        assert [line.split()[:5] for line in lines] == expected
        assert all(line.rstrip().endswith("cma: shm") for line in lines)
        with held_port() as port:
            silent = f"127.0.0.1:{port}"
            ended = top(urls[0], silent, columns=columns)
    assert ended.returncode == 1
    _, first, second, problem = ended.stdout.splitlines()
    assert first.split()[:3] == ["prefill-0/0", "ok", "1/1"]
    assert second.split() == [silent, "silent"]
    assert problem.startswith(f"{silent}: ")
    assert "refused" in problem


def test_a_rank_that_does_not_answer_in_time_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        now = read(url, timeout_s=0.1)
    assert row(url, None, now)[:3] == (url, "silent", "")
    assert problems(url, now) == f"{url}: timed out"


def test_an_answer_that_is_cut_is_a_problem() -> None:
    def answer() -> None:
        with server.accept()[0] as accepted:
            accepted.recv(1 << 16)
            accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        assert "IncompleteRead" in read(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=DEADLINE_S).problem
        thread.join()


@pytest.mark.parametrize("body", [b"", b"# TYPE vllm:disagg_healthy gauge\nvllm:disagg_healthy 1.0\n"])
def test_metrics_of_another_server_are_not_a_dead_rank(body: bytes) -> None:
    def answer() -> None:
        with server.accept()[0] as accepted:
            accepted.recv(1 << 16)
            accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"127.0.0.1:{server.getsockname()[1]}"
        now = read(url, timeout_s=DEADLINE_S)
        thread.join()
    assert problems(url, now) == f"{url}: these are not a rank's metrics; expected the address of its metrics_port"
    assert row(url, None, now)[1] != "dead"
