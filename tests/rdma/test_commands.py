"""`disagg prefill`, `disagg decode` and `disagg-bench` over verbs, as an operator starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.test_rank_command import line, rank
from tests.support.rdma import MTU, assert_sent, device_names, sent_packets

TOKENS = 64
CASE = ("--model", "tiny", "--prefill", "tp=1,page=8", "--decode", "tp=1", "--tokens", str(TOKENS))
"""A request of 256 KiB: 64 tokens of 4 KiB."""
BENCH_S = 240.0
pytestmark = pytest.mark.nightly
"""The guest takes up to two minutes to start these processes."""


def bench(*arguments: str, rows: Path) -> list[dict[str, object]]:
    """The rows of `disagg-bench`, which must succeed."""
    same = ("--warm-up", "0", "--repeat", "2", "--timeout", "200", "--json", str(rows))
    command = [sys.executable, "-m", "disagg.commands.bench", *arguments, *CASE, *same]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, object]] = json.loads(rows.read_text())
    return found


@pytest.mark.parametrize("engine", ["mooncake", "nixl"])
def test_running_ranks_serve_the_benchmark(engine: str, tmp_path: Path) -> None:
    same = ("--model", "tiny", "--backend", engine, "--require", "rdma", "--driver", "tcp://127.0.0.1:0")
    devices = [option for name in device_names(engine) for option in ("--device-nic", name)]
    with rank("prefill", *same, *devices, "--side", "tp=1,page=8") as prefill, rank("decode", *same, *devices) as decode:
        drivers = [line(process).partition("driver=")[2].split()[0] for process in (prefill, decode)]
        since = sent_packets(engine)
        (row,) = bench("--backend", engine, "--connect", drivers[0], "--connect", drivers[1], rows=tmp_path / "rows.json")
        assert (row["transport"], row["bytes"], row["verified"]) == ("rdma", TOKENS * 4096, True)
        assert_sent(engine, 2 * TOKENS * 4096 // MTU, since=since)
