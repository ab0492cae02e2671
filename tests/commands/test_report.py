"""Rows, their JSON and their table."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from disagg.commands.bench.environment import Environment, cautions
from disagg.commands.bench.report import COLUMNS, Alone, Sample, mechanism_of, percentiles, summarise, table, to_csv, to_json
from disagg.commands.cases.instructions import Description, Raw, Result, RunReport
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, Planned
from disagg.commands.shell.text import show, size

KEYS = {
    "backend", "transport", "device", "model", "tokens", "prefill", "decode", "components", "bytes", "pieces",
    "piece_bytes_mean", "way", "ways", "seconds", "latency_ms", "gbps", "ceiling_gbps", "ratio", "verified", "versions",
}  # fmt: skip


def description(name: str) -> Description:
    return Description(
        name=name,
        role=name,
        rank=0,
        side="tp=1,page=16",
        model="tiny",
        num_layers=4,
        rows={"kv": 8},
        device="cpu",
        address="tcp://127.0.0.1:1",
        backend="nixl",
        transport="tcp",
        arena=(4096, 4096),
        table=b"",
        placements=b"",
        pid=1,
        process="",
        boot_id="",
        pid_namespace="",
        now=0.0,
        versions={"nixl": "1"},
    )


def report(*results: tuple[int, float, float], nbytes: int = 0, posts: int = 0, **seconds: float) -> RunReport:
    ways = {"direct": nbytes} if nbytes else {}
    return RunReport(tuple(Result(n, True, "", start, end) for n, start, end in results), nbytes, posts, seconds, ways)


def sample(scale: float = 1.0, *, problem: str = "") -> Sample:
    sent = [
        report((0, 10.0, 99.0), (1, 11.0, 99.0), nbytes=600, posts=3, bind=0.5, wire=1.0),
        report((0, 10.5, 99.0), (1, 10.75, 99.0), nbytes=400, posts=2, bind=0.25, wire=2.0),
    ]
    received = [report((0, 1.0, 10 + 2 * scale), (1, 1.0, 10 + 4 * scale)), report((0, 1.0, 10 + 3 * scale), (1, 1.0, 11.5))]
    return Sample.of(sent=sent, received=received, problem=problem, cpu_s=scale * 4e-6)


ALONE = Alone(0.5e-6, 1e-6, 9.0, 2e-6)


def row(*samples: Sample, alone: Alone | None = ALONE) -> dict[str, Any]:
    case = Case(backend="nixl", model="tiny", tokens=100, prefill=Side(tp=2), decode=Side(), requests=2)
    found = summarise(
        case,
        sources=[description("prefill")],
        destinations=[description("decode")],
        planned=Planned({(0, 0): 600, (1, 0): 400}, 8, 0.125),
        samples=samples,
        alone=alone,
    )
    (written,) = json.loads(to_json([found]))
    assert isinstance(written, dict)
    return written


def test_a_run_lasts_from_the_first_send_to_the_last_success() -> None:
    found = sample()
    assert found.total_s == 4.0  # 10.0 to 14.0: what senders and early receivers see does not count
    assert {each.number: each.latency_s for each in found.requests} == {0: 3.0, 1: 3.25}  # 10.0 to 13.0, 10.75 to 14.0
    assert found.seconds == {"bind": 0.5, "wire": 2.0}  # the busiest rank's
    assert (found.posts, found.ways) == (5, {"direct": 1000})


def test_a_row_has_every_key_of_the_contract() -> None:
    found = row(sample())
    assert set(found) >= KEYS
    assert set(found["seconds"]) == {"plan", "bind", "pack", "post", "wire", "unpack", "total"}
    assert list(found["latency_ms"]) == ["min", "mean", "p50", "p90", "p99", "p99.9", "max"]
    assert found["components"] == ["kv"]
    assert found["prefill"] == "tp=2,page=16"
    assert (found["bytes"], found["pieces"], found["piece_bytes_mean"], found["posts"]) == (1000, 8, 125.0, 5)
    assert (found["way"], found["ways"]) == ("direct", {"direct": 1000})
    assert found["gbps"] == 1000 / 4.0 / 1e9
    assert found["ratio"] == found["gbps"] / found["ceiling_gbps"] == 0.5
    assert found["seconds"]["plan"] == 0.125
    assert found["verified"] is True


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    found = percentiles(number / 1e3 for number in range(1, 2001))
    assert found == {"min": 1, "mean": 1000.5, "p50": 1000, "p90": 1800, "p99": 1980, "p99.9": 1998, "max": 2000}


def test_csv_has_the_values_of_the_json_by_their_paths() -> None:
    case = Case(backend="nixl", model="tiny", tokens=100, prefill=Side(tp=2), decode=Side(), requests=2)
    ours, theirs = [description("prefill")], [description("decode")]
    plan = Planned({(0, 0): 600, (1, 0): 400}, 8, 0.125)
    found = summarise(case, sources=ours, destinations=theirs, planned=plan, samples=[sample()], alone=None)
    (line,) = csv.DictReader(io.StringIO(to_csv([found])))
    assert line["prefill"] == "tp=2,page=16"
    assert float(line["latency_ms.p99.9"]) == found.latency_ms["p99.9"] == 3250
    assert line["ceiling_gbps"] == ""
    assert line["versions.nixl"] == "1"
    assert float(line["cpu_percent"]) == pytest.approx(100 * 4e-6 / 4)


def test_a_busy_machine_and_more_ranks_than_cores_are_noted() -> None:
    case = Case(backend="cma", model="tiny", tokens=100, prefill=Side(tp=2), decode=Side())
    quiet = Environment(date="", host="", cpu="", cores=4, kernel="", load=0.5)
    assert list(cautions(quiet, [case])) == []
    busy, few = msgspec.structs.replace(quiet, load=3.0), msgspec.structs.replace(quiet, cores=2, load=0.1)
    assert "load 3.0 on 4 cores" in next(cautions(busy, [case]))
    assert "3 ranks share 2 cores" in next(cautions(few, [case]))


def test_the_row_is_that_of_the_median_run() -> None:
    assert row(sample(1), sample(5), sample(2))["seconds"]["total"] == sample(2).total_s


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_phases_of_a_named_request_add_up_to_the_median(count: int) -> None:
    found = row(*(sample(scale) for scale in range(1, count + 1)))
    latencies = {(run, each.number): each.latency_s for run in range(1, count + 1) for each in sample(run).requests}
    named = found["median"]
    assert latencies[named["run"], named["request"]] == sorted(latencies.values())[count - 1]
    assert named["tokens"] == 100
    assert 1e3 * sum(found["phases"].values()) == pytest.approx(found["latency_ms"]["p50"])
    assert found["latency_ms"]["p50"] == pytest.approx(1e3 * latencies[named["run"], named["request"]])
    assert found["latency_ms"]["p99"] == pytest.approx(1e3 * max(latencies.values()))


def test_the_row_has_cpu_time_and_the_speed_of_the_system_alone() -> None:
    found = row(sample(1), sample(5), sample(2))
    assert found["core_s_per_gb"] == pytest.approx(2 * 4e-6 / 1000 * 1e9)
    assert found["ceiling_core_s_per_gb"] == pytest.approx(1e-6 / 1000 * 1e9)
    assert (found["raw"], found["raw_gbps"], found["memcpy_gbps"]) == ("socket", 2e-6, 9.0)
    medians = Alone.median([Alone(g, g, g, None if g == 3 else g) for g in (1.0, 3.0, 2.0, 9.0)])
    assert medians == Alone(2.5, 2.5, 2.5, 2.0)
    bare = row(sample(), alone=None)
    assert [bare[name] for name in ("raw", "raw_gbps", "memcpy_gbps", "ceiling_core_s_per_gb")] == [None] * 4


@pytest.mark.parametrize(
    ("backend", "transport", "raw"),
    [
        ("cma", "shm", Raw.WRITEV),
        ("auto", "cma: shm", Raw.WRITEV),
        ("nixl", "shm (inferred)", Raw.WRITEV),
        ("nixl", "tcp (inferred)", Raw.SOCKET),
        ("mooncake", "tcp", Raw.SOCKET),
        ("nixl", "rdma", None),
        ("local", "tcp", None),
    ],
)
def test_the_system_mechanism_of_a_transport(backend: str, transport: str, raw: Raw | None) -> None:
    assert mechanism_of(msgspec.structs.replace(description("prefill"), backend=backend, transport=transport)) is raw


def test_one_failed_run_fails_the_row() -> None:
    found = row(sample(), sample(problem="rank decode/0: layer 3"), sample())
    assert found["verified"] is False
    assert found["problem"] == "rank decode/0: layer 3"


def test_a_run_without_any_success_has_no_rate() -> None:
    found = row(Sample.of(sent=[report()], received=[report()], problem="nothing arrived"), alone=None)
    assert (found["gbps"], found["ceiling_gbps"], found["ratio"], found["verified"]) == (0.0, None, None, False)
    assert found["way"] == "none"


def test_several_paths_are_mixed() -> None:
    mixed = Sample(1.0, (), {}, 2, {"direct": 10, "packed": 20}, "")
    assert row(mixed)["way"] == "mixed"


def test_the_table_has_a_line_per_row_and_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(backend="nixl", model="tiny", tokens=100, prefill=Side(tp=2), decode=Side())
    about = [description("prefill")]
    rows = [
        summarise(case, sources=about, destinations=about, planned=Planned({(0, 0): 10}, 1, 0.0), samples=[each], alone=None)
        for each in (sample(), sample(problem="wrong"))
    ]
    show(table(rows), Console(width=20))
    head, good, bad = map(str.rstrip, capsys.readouterr().out.splitlines())
    assert head.split()[0] == COLUMNS[0]
    assert good.split()[-2:] == ["yes", "well"]
    assert bad.split()[-2:] == ["NO", "well"]
    assert good.index("tp=2") == bad.index("tp=2") == head.index("prefill")


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (512, "512 B"), (16384, "16 KiB"), (33554432, "33.6 MB")])
def test_sizes_have_readable_units(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
