"""`disagg-bench --thresholds`: its cases, its break-even size, and a small run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from disagg.commands.bench import command
from disagg.commands.bench.command import run_cases
from disagg.commands.bench.fleet import rank_config
from disagg.commands.bench.report import PHASES_TITLE, Sample
from disagg.commands.bench.thresholds import TENSORS, TOKEN_NBYTES, PathSpeeds, break_even, path_speeds, threshold_cases
from disagg.commands.cases.costs import ALWAYS, Costs, read_costs
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain.engine import engine_of_row, shipped_costs
from disagg.commands.explain.explanation import ExplainRequest, explain_request
from disagg.core.errors import ConfigError
from disagg.core.timeline import PHASES
from disagg.models import load_model
from tests.backends.conftest import require_engine
from tests.commands.conftest import Bench

SETTINGS = {
    "tokens": 64, "device": "cpu", "transport": "auto", "devices": (), "warm_up": 0, "repeat": 1, "seed": 0, "timeout_s": 30.0,
}  # fmt: skip
SMALL = ("--tokens", "64", "--repeat", "1", "--warm-up", "0", "--timeout", "30")


def test_pieces_of_each_size_are_sent_both_directly_and_packed() -> None:
    assert load_model("tiny").nbytes(1) == TENSORS * TOKEN_NBYTES
    rows = list(run_cases(threshold_cases("local", (4, 1), SETTINGS)))
    assert [(row.prefill, row.pack_below, row.way) for row in rows] == [
        ("tp=1,page=1", 0, "direct"),
        ("tp=1,page=1", ALWAYS, "packed"),
        ("tp=1,page=4", 0, "direct"),
        ("tp=1,page=4", ALWAYS, "packed"),
    ]
    assert all(row.verified and row.bytes == 64 * TENSORS * TOKEN_NBYTES for row in rows)
    speeds = path_speeds(rows)
    assert [each.nbytes for each in speeds] == [512, 2048]
    assert [each.direct for each in speeds] == [row.gbps for row in rows if row.way == "direct"]
    assert [each.packed for each in speeds] == [row.gbps for row in rows if row.way == "packed"]
    for direct, packed in zip(rows[::2], rows[1::2], strict=True):
        assert direct.posts == direct.pieces == pytest.approx(direct.bytes / direct.piece_bytes_mean)
        assert packed.posts < direct.posts


def test_default_sizes_leave_enough_pieces_to_pack() -> None:
    sizes = {case.prefill.page * TOKEN_NBYTES for case in threshold_cases("local", (), {**SETTINGS, "tokens": None})}
    assert sizes == {512 << power for power in range(10)}
    assert {case.prefill.page for case in threshold_cases("local", (), SETTINGS)} == {1, 2, 4, 8, 16}
    with pytest.raises(ConfigError, match="at most 16 tokens for a request of 64, found 32"):
        threshold_cases("local", (1, 32), SETTINGS)


@given(st.floats(1e-8, 1e-3), st.floats(1e8, 1e11))
def test_break_even_is_where_a_piece_costs_as_much_as_a_copy(piece_s: float, copy_bytes_per_s: float) -> None:
    """A piece costs a constant time, a copy a time per byte: equal at the product of both, exact where measured."""
    expected = piece_s * copy_bytes_per_s
    sizes = [expected * 2.0**power for power in range(-4, 5)]
    link = 1e-10
    speeds = [PathSpeeds(round(s), 1 / (link + piece_s / s), 1 / (link + 1 / copy_bytes_per_s)) for s in sizes]
    if round(sizes[0]) < 1:
        return
    found = break_even(speeds)
    assert found is not None
    assert sizes[3] * 0.9 <= found <= sizes[5] * 1.1


def test_break_even_at_the_ends_of_what_was_measured() -> None:
    faster, slower = PathSpeeds(512, 2.0, 1.0), PathSpeeds(1024, 1.0, 2.0)
    assert break_even([faster]) == 512
    assert break_even([slower]) is None
    assert break_even([PathSpeeds(512, 1.0, 4.0), PathSpeeds(1024, 2.0, 1.0)]) == pytest.approx(512 * 2 ** (2 / 3))
    assert break_even([PathSpeeds(512, 1.0, 4.0), PathSpeeds(1024, 1.0, 1.0)]) == 1024


def test_the_command_names_the_engine_and_transport_in_use(bench: Bench) -> None:
    ended = bench("--backend", "local", "--thresholds", "--page", "1,2", *SMALL)
    assert ended.status == 0, ended.err
    first, header, *lines, last = ended.out.splitlines()
    assert first.startswith("local over memory")
    assert header.split() == ["piece", "direct", "GB/s", "packed", "GB/s"]
    assert [line.split()[:2] for line in lines] == [["512", "B"], ["1", "KiB"]]
    assert last.startswith("break-even: ")
    assert [row["way"] for row in ended.rows] == ["direct", "packed", "direct", "packed"]


def test_real_engines_are_measured(bench: Bench, engine: str) -> None:
    ended = bench("--backend", engine, "--transport", "tcp", "--thresholds", "--page", "4", *SMALL)
    assert ended.status == 0, ended.err
    assert ended.out.startswith(f"{engine} over tcp")
    assert [row["way"] for row in ended.rows] == ["direct", "packed"]


def test_the_engine_of_every_rank_gets_the_named_devices(bench: Bench) -> None:
    require_engine("nixl._bindings", "nixl")
    same = ("--backend", "nixl", "--transport", "tcp", "--thresholds", "--page", "4", *SMALL)
    ended = bench(*same, "--device-nic", "lo")
    assert ended.status == 0, ended.err
    ended = bench(*same, "--device-nic", "absent0")
    assert ended.status == 1
    assert "No such device" in ended.err
    case, *_ = threshold_cases("nixl", (4,), {**SETTINGS, "devices": ("rxe0:1", "rxe1:1")})
    for role in ("prefill", "decode"):
        assert rank_config(case, role, 0, None).devices == ("rxe0:1", "rxe1:1")


def test_running_ranks_keep_their_devices(bench: Bench) -> None:
    sides = ("--model", "tiny", "--tokens", "64", "--prefill", "tp=1", "--decode", "tp=1")
    ended = bench("--backend", "nixl", *sides, "--device-nic", "lo", "--connect", "tcp://127.0.0.1:9")
    assert ended.status == 2
    assert "device-nic: running ranks keep" in ended.err


def test_calibration_writes_costs_that_explain_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real runs that took as long as such costs would make them."""
    file, true, measure = tmp_path / "costs.json", Costs(3e-6, 8.0, 5.0), Sample.of

    def timed(**found: Any) -> Sample:
        sample = measure(**found)
        ((way, nbytes),) = sample.ways.items()
        return dataclasses.replace(
            sample, total_s=true.packed_s(nbytes) if way == "packed" else true.direct_s(nbytes, sample.posts)
        )

    monkeypatch.setattr(Sample, "of", timed)
    ended = CliRunner().invoke(command.bench, ["--backend", "local", "--page", "1,8", "--calibrate", str(file), *SMALL])
    assert ended.exit_code == 0, ended.output
    costs = read_costs(file)
    assert (costs.piece_s, costs.gbps, costs.packed_gbps) == pytest.approx((true.piece_s, true.gbps, true.packed_gbps))
    explained = subprocess.run(
        [sys.executable, "-m", "disagg.commands", "explain", "--model", "tiny", "--tokens", "64", "--prefill", "tp=1",
         "--decode", "tp=1", "--backend", "local", "--costs", str(file), "--json", "-"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(explained.stdout)
    assert found["costs"] == json.loads(file.read_text())
    assert found["costs"]["engine"] == "local memory"
    assert found["pack_below"] == costs.break_even_nbytes
    assert found["seconds"] == pytest.approx(sum(found["phases"].values()))
    assert tuple(found["phases"]) == PHASES


def test_costs_of_another_engine_give_way_to_those_that_come_with_the_package(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(Costs(1e-6, 5.0, 5.0, engine="nixl tcp")))
    sides = ("--model", "tiny", "--prefill", "tp=1", "--decode", "tp=1", "--no-ceiling")
    ended = bench("--backend", "local", *sides, "--costs", str(file), *SMALL)
    (row,) = ended.rows
    assert row["predicted_by"] == "a host with 2 cores"
    case = Case(backend="local", model="tiny", tokens=64, prefill=Side.parse("tp=1"), decode=Side.parse("tp=1"))
    assert row["predicted"] == pytest.approx(explain_request(ExplainRequest(case=case)).summary.phases)


@pytest.mark.parametrize(
    ("backend", "transport", "key"),
    [
        ("cma", "shm", "cma shm"),
        ("nixl", "tcp (inferred)", "nixl tcp"),
        ("auto", "cma: shm", "cma shm"),
        ("local", "memory copy", "local memory"),
    ],
)
def test_a_row_names_the_engine_whose_costs_apply(backend: str, transport: str, key: str) -> None:
    assert engine_of_row(backend, transport) == key
    assert shipped_costs(key) is not None


def test_predicted_phases_are_shown_beside_measured_ones(bench: Bench, tmp_path: Path) -> None:
    terms = {"direct": dict.fromkeys(PHASES, (0.001, 0.0, 0.0))}
    file, report = tmp_path / "costs.json", tmp_path / "report.html"
    file.write_bytes(msgspec.json.encode(Costs(1e-6, 5.0, 5.0, phases=terms)))
    sides = ("--model", "tiny", "--prefill", "tp=1", "--decode", "tp=1", "--pack-below", "0", "--no-ceiling")
    ended = bench("--backend", "local", *sides, "--costs", str(file), "--html", str(report), *SMALL)
    assert ended.status == 0, ended.err
    (row,) = ended.rows
    assert row["predicted"] == pytest.approx(dict.fromkeys(PHASES, 0.001))
    assert sum(row["phases"].values()) == pytest.approx(row["latency_ms"]["p50"] / 1e3)
    title, columns, measured, predicted = ended.out.splitlines()[-4:]
    assert title == PHASES_TITLE
    assert columns.split() == ["prefill", "decode", "way", "run", "request", "tokens", *PHASES, "all"]
    assert measured.split()[3:6] == ["1", "0", "64"]
    assert float(measured.split()[-1]) == pytest.approx(row["latency_ms"]["p50"], abs=0.01)
    assert predicted.split() == ["predicted", "by", "--costs", *["1.00"] * len(PHASES), "8.00"]
    assert "<td>predicted" in report.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--backend", "local", "--model", "tiny"), "--model"),
        (("--backend", "local", "--prefill", "tp=1", "--pack-below", "4"), "--prefill, --pack-below"),
        (("--backend", "local", "--tokens", "64,128"), "one length"),
        ((), "--backend"),
    ],
)
def test_options_that_do_not_go_with_it_are_named(bench: Bench, arguments: tuple[str, ...], named: str) -> None:
    ended = bench("--thresholds", *arguments)
    assert ended.status == 2
    assert named in ended.err
