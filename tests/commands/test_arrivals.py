"""Requests that arrive over time: from a distribution, from a trace, in runs and in reports."""

from __future__ import annotations

import html.parser
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from disagg.commands.bench.command import bench, cases_of
from disagg.commands.bench.compare import compare, read_rows
from disagg.commands.bench.report import Sample
from disagg.commands.cases.arrivals import BURST, Arrivals, Kind, generated, read_trace
from disagg.commands.cases.instructions import RunReport
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import SPARE_ROWS, Case, items_of, rows_needed
from disagg.core.errors import ConfigError
from disagg.models import load_model

SAMPLE = Path(__file__).parents[2] / "examples/traces/sample.jsonl"
SIDES = (
    "--backend",
    "local",
    "--model",
    "tiny",
    "--prefill",
    "tp=2",
    "--decode",
    "tp=1,page=32",
    "--no-ceiling",
    "--repeat",
    "1",
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, [*SIDES, "--warm-up", "0", *arguments])


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    found = generated("poisson", requests=20_000, per_s=50.0, seed=1)
    gaps = np.diff(found.times_s)
    assert gaps.min() >= 0
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)
    assert found != generated("poisson", requests=20_000, per_s=50.0, seed=2)


def test_bursts_arrive_together_and_have_the_same_rate() -> None:
    found = generated("burst", requests=8_001, per_s=50.0, seed=1)
    times = np.array(found.times_s)
    assert len(times) == 8_001
    assert (np.diff(times[:8_000].reshape(-1, BURST), axis=1) == 0).all()


@pytest.mark.parametrize("kind", ["poisson", "burst"])
@pytest.mark.parametrize("requests", [1, 8, 20, 32])
def test_a_run_has_the_rate_that_was_asked_for(kind: Kind, requests: int) -> None:
    for seed in range(5):
        found = generated(kind, requests=requests, per_s=40.0, seed=seed)
        assert len(found.times_s) == requests
        assert found.per_s == pytest.approx(40.0)


def test_a_trace_is_read_in_the_order_of_its_times_and_stretched_to_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(3000, 7), (1000, 5), (2000, 6), (9000, 8)]
    trace.write_text("\n\n".join(json.dumps({"timestamp": t, "input_length": n, "hash_ids": [1]}) for t, n in lines))
    found = read_trace(trace, requests=3, per_s=None)
    assert (found.times_s, found.tokens) == ((0.0, 1.0, 2.0), (5, 6, 7))
    assert read_trace(trace, requests=3, per_s=6.0).times_s == (0.0, 0.25, 0.5)
    assert read_trace(trace, requests=None, per_s=None).tokens == (5, 6, 7, 8)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": -1, "input_length": 3}', '{"timestamp": 1, "input_length": 0}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"timestamp": 0, "input_length": 3}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2: expected timestamp and input_length"):
        read_trace(trace, requests=None, per_s=None)


def test_the_sample_is_moved_byte_for_byte_and_reported(tmp_path: Path) -> None:
    json_file, html_file = tmp_path / "rows.json", tmp_path / "report.html"
    ended = run(
        *("--trace", str(SAMPLE), "--requests", "12", "--rate", "200", "--concurrency", "2"),
        *("--json", str(json_file), "--html", str(html_file)),
    )
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(json_file.read_text())
    lines = sorted(map(json.loads, SAMPLE.read_text().splitlines()[:12]), key=lambda line: line["timestamp"])
    assert row["verified"]
    assert row["requests"] == 12
    assert row["bytes"] == sum(line["input_length"] for line in lines) * bytes_per_token(tmp_path / "one.json")
    assert row["per_s"] == pytest.approx(200.0)
    for name in ("p50", "p99"):
        assert 0 <= row["queue_ms"][name] <= row["added_ms"][name]
    assert row["added_ms"]["p50"] > 0
    assert "sample.jsonl" in ended.stdout
    assert "<p>1 case, 1 verified byte for byte.</p>" in html_file.read_text()
    assert not Links.of(html_file.read_text()), "the report needs another file"
    assert compare(read_rows(json_file), read_rows(json_file), tolerance=0.0)[0].regressions == ()


def test_the_median_request_of_a_trace_is_named(tmp_path: Path) -> None:
    json_file = tmp_path / "rows.json"
    trace = ("--trace", str(SAMPLE), "--requests", "5", "--rate", "100", "--pack-below", "0")
    ended = run(*trace, "--json", str(json_file))
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(json_file.read_text())
    lines = [json.loads(line)["input_length"] for line in SAMPLE.read_text().splitlines()[:5]]
    assert row["median"]["tokens"] == lines[row["median"]["request"]]
    assert (row["shortest_tokens"], row["tokens"]) == (min(lines), max(lines))
    assert f" {min(lines)}-{max(lines)} " in ended.stdout


def bytes_per_token(file: Path) -> int:
    """The bytes of one token of `tiny`, by a run of requests of one length."""
    assert run("--tokens", "64", "--json", str(file)).exit_code == 0
    return int(json.loads(file.read_text())[0]["bytes"]) // 64


class Links(html.parser.HTMLParser):
    """The addresses that a page loads."""

    @classmethod
    def of(cls, text: str) -> list[str]:
        parser = cls()
        parser.feed(text)
        assert {"table", "svg"} <= parser.tags
        return parser.found

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")]


def test_a_request_waits_in_the_queue_until_the_one_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RunReport] = []
    whole = Sample.of

    def recorded(**found: Any) -> Sample:
        sent.extend(found["sent"])
        return whole(**found)

    monkeypatch.setattr(Sample, "of", recorded)
    ended = run("--tokens", "512", "--requests", "16", "--arrivals", "burst", "--rate", "1000", "--concurrency", "1")
    assert ended.exit_code == 0, ended.output
    assert [len(report.results) for report in sent] == [16, 16]
    for report in sent:
        for before, after in itertools.pairwise(report.results):
            assert after.start >= before.end
        bursts = [report.results[:BURST], report.results[BURST:]]
        for first, *others in bursts:
            arrived = first.start - first.queued_s
            assert all(each.queued_s == pytest.approx(each.start - arrived, abs=1e-6) for each in others)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tokens", "8", "--arrivals", "poisson"), "rate: expected the requests per second of --arrivals poisson"),
        (("--tokens", "8", "--rate", "3"), "rate: expected --arrivals poisson or burst"),
        (("--trace", str(SAMPLE), "--tokens", "8"), "trace: expected neither --arrivals nor --tokens"),
        (("--trace", str(SAMPLE), "--rate", "0.1"), "timeout: expected at least"),
        (("--trace", str(SAMPLE), "--prefix-hit", "200"), "prefix-hit: expected less than"),
        (("--tokens", "8", "--arrivals", "poisson", "--rate", "5", "--seed", "-1"), "Invalid value for '--seed'"),
        (("--tokens", "1," * 200), "is not a valid integer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], text: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert text in ended.stderr


def test_a_pool_has_room_for_requests_of_different_lengths() -> None:
    (state,) = load_model("tiny").states
    arrivals = Arrivals("trace", (0.0, 0.1, 0.2), (17, 49, 5))
    two = Side(dp=2)
    case = Case(backend="local", model="tiny", tokens=49, prefill=Side(), decode=two, requests=3, arrivals=arrivals)
    assert rows_needed(state, Side(), case, prefix=0) == 2 + 4 + 1 + SPARE_ROWS
    assert rows_needed(state, two, case, prefix=0) == max(2 + 1, 4) + SPARE_ROWS
    (items,) = items_of(load_model("tiny"), Side(), two, case, name="prefill", pools={state.name: 10}, prefix=0)
    assert [(item.tokens, len(item.rows[state.name]), item.arrival_s) for item in items] == [
        (17, 2, 0.0),
        (49, 4, 0.1),
        (5, 1, 0.2),
    ]
    assert len({row for item in items for row in item.rows[state.name]}) == 7


def test_each_case_of_a_trace_has_the_most_tokens_of_its_own_requests() -> None:
    settings = {"backend": ("local",), "model": ("tiny",), "concurrency": (1,), "run_pages": (1,), "requests": (1, 2)}
    arrivals = [Arrivals("trace", (0.0,), (5,)), Arrivals("trace", (0.0, 0.1), (5, 9))]
    cases = cases_of([(Side(), Side())], [], {**settings, "tokens": (9,)}, arrivals=arrivals)
    assert [(case.requests, case.tokens) for case in cases] == [(1, 5), (2, 9)]
