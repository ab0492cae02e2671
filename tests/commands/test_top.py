"""`disagg top`, with real managers."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from disagg.commands.top import Sample, quantile, read, row
from harness.ports import held_port
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
    assert cells[:6] == ("decode-0/0", "local " + instances.decode[0].manager.backend.transport, "ok", "1/1", "0", "0")
    assert float(cells[6]) == pytest.approx(3 / (now.at - before.at), abs=0.06)
    assert cells[7] == "0.0"
    assert all(re.fullmatch(r"[0-9.]+ ms", cell) for cell in cells[8:10])
    assert row(url, None, now)[6:11] == ("-", "-", *cells_of_all(now), "-")


def cells_of_all(now: Sample) -> tuple[str, str]:
    both = [quantile([], now.buckets(), share) for share in (0.5, 0.99)]
    assert None not in both
    return f"{both[0] * 1e3:.1f} ms", f"{both[1] * 1e3:.1f} ms"  # type: ignore[operator]


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


def test_the_command_shows_every_rank_and_fails_for_a_silent_one(instances: Cluster) -> None:
    command = [sys.executable, "-m", "disagg.commands", "top", "--once", "--interval", "0.1", "--timeout", str(DEADLINE_S)]
    urls = [str(rank.manager.metrics_url) for rank in (*instances.prefill, *instances.decode)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *urls, *more], capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "180"}
        )

    ended = run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [name in ended.stdout for name in ("prefill-0/0", "prefill-0/1", "decode-0/0")] == [True] * 3
    with held_port() as port:
        ended = run(f"127.0.0.1:{port}")
    assert ended.returncode == 1
    assert "refused" in ended.stdout


def test_a_rank_that_does_not_answer_in_time_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        assert row(url, None, read(url, timeout_s=0.1))[:3] == (url, "", "timed out")
