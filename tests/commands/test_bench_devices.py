"""`disagg-bench --device-nic`, the phases that it prints, and its latency mode."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from disagg.commands.bench.fleet import rank_config
from disagg.commands.bench.report import LATENCY_COLUMNS, PHASES_TITLE
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.core.timeline import PHASES
from tests.backends.conftest import require_engine
from tests.commands.conftest import Bench

SIDES = ("--model", "tiny", "--tokens", "64", "--prefill", "tp=1", "--decode", "tp=1")
SHORT = (*SIDES, "--no-ceiling", "--repeat", "1", "--warm-up", "0", "--timeout", "30")


def test_the_engine_of_every_rank_gets_the_named_devices(bench: Bench) -> None:
    require_engine("nixl._bindings", "nixl")
    same = ("--backend", "nixl", "--transport", "tcp", *SHORT)
    ended = bench(*same, "--device-nic", "lo")
    assert ended.status == 0, ended.err
    ended = bench(*same, "--device-nic", "absent0")
    assert ended.status == 1
    assert "No such device" in ended.err
    devices = ("rxe0:1", "rxe1:1")
    case = Case(backend="nixl", model="tiny", tokens=64, prefill=Side(), decode=Side(), devices=devices)
    for role in ("prefill", "decode"):
        assert rank_config(case, role, 0, None).devices == devices


def test_running_ranks_keep_their_devices(bench: Bench) -> None:
    ended = bench("--backend", "nixl", *SIDES, "--device-nic", "lo", "--connect", "tcp://127.0.0.1:9")
    assert ended.status == 2
    assert "device-nic: running ranks keep" in ended.err


@pytest.mark.parametrize("backend", ["cma", "local"])
def test_an_engine_without_nics_refuses_devices(bench: Bench, backend: str) -> None:
    ended = bench("--backend", backend, *SHORT, "--device-nic", "lo")
    assert ended.status == 1
    assert f"devices: backend {backend!r} uses no NIC, found lo" in ended.err


def test_the_phases_of_the_median_request_add_up_to_its_time(bench: Bench) -> None:
    ended = bench("--backend", "local", *SHORT)
    assert ended.status == 0, ended.err
    (row,) = ended.rows
    assert sum(row["phases"].values()) == pytest.approx(row["latency_ms"]["p50"] / 1e3)
    title, columns, measured = ended.out.splitlines()[-3:]
    assert title == PHASES_TITLE
    assert columns.split() == ["backend", "transport", "prefill", "decode", "way", "run", "request", "tokens", *PHASES, "all"]
    assert measured.split()[-12:-9] == ["1", "0", "64"]
    assert measured.split()[0] == "local"
    assert float(measured.split()[-1]) == pytest.approx(row["latency_ms"]["p50"], abs=0.01)


def test_latency_mode_prints_the_spread_and_measures_for_the_duration(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    ended = bench("--backend", "local", *SHORT, "--requests", "3", "--latency", "--duration", "0.2", "--csv", str(file))
    assert ended.status == 0, ended.err
    (row,) = ended.rows
    assert row["repeat"] > 1
    assert row["count"] == 3 * row["repeat"]
    assert row["environment"]["cores"] > 0
    assert row["ceiling_gbps"] is None
    assert ended.out.splitlines()[0].split() == " ".join(LATENCY_COLUMNS).split()
    (line,) = csv.DictReader(file.read_text().splitlines())
    assert (
        float(line["latency_ms.max"]) == row["latency_ms"]["max"] >= row["latency_ms"]["p99.9"] >= row["latency_ms"]["min"] > 0
    )
    assert bench("--backend", "local", *SHORT, "--latency", "--concurrency", "2").status == 2


def test_latency_mode_refuses_groups_that_would_send_at_once(bench: Bench) -> None:
    ended = bench("--backend", "local", *SHORT, "--prefill", "dp=2,page=16", "--decode", "page=16", "--latency")
    assert ended.status == 2
    assert "latency: expected --prefill with dp=1" in ended.err
