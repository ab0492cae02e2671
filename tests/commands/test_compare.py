"""`disagg-bench --compare`: regressions are named, and make the exit status 1."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.commands.bench.compare import compare
from disagg.commands.bench.main import main
from disagg.commands.bench.report import Row, to_json
from tests.commands.conftest import said

ROW = Row(
    backend="nixl", transport="shm", device="cpu", model="tiny", tokens=64, prefill="tp=2", decode="tp=1", components=("kv",),
    bytes=4096, pieces=8, piece_bytes_mean=512, way="packed", ways={"packed": 4096}, seconds={"total": 0.1},
    latency_ms={"p50": 2.0, "p99": 4.0}, gbps=2.0, ceiling_gbps=4.0, ratio=0.5, verified=True, versions={}, posts=8,
)  # fmt: skip


def changed(**fields: Any) -> Row:
    return msgspec.structs.replace(ROW, **fields)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (changed(gbps=1.0, ratio=0.49), []),  # a slower machine, not slower code
        (changed(ratio=0.44), ["44% of the ceiling instead of 50%"]),
        (changed(ratio=0.46), []),
        (changed(ratio=None, ceiling_gbps=None, gbps=1.7), ["1.70 GB/s instead of 2.00"]),
        (changed(posts=9), ["9 posts instead of 8"]),
        (changed(bytes=4095), ["4095 bytes delivered instead of 4096"]),
        (changed(verified=False, problem="a byte"), ["not verified: a byte"]),
        (changed(ending="rank decode/0 was killed"), ["ended badly: rank decode/0 was killed"]),
        (changed(transport="tcp"), []),
        (changed(tokens=65), ["the case is missing"]),
        (changed(run_pages=2), ["the case is missing"]),
        (changed(core_s_per_gb=2.0), []),
        (changed(ratio=None, added_ms={"p50": 200.0, "p99": 300.0}), []),
    ],
)
def test_regressions_are_named(after: Row, expected: list[str]) -> None:
    found = compare([ROW], [after], tolerance=0.1)
    assert list(found[0].regressions) == expected
    assert not any(each.regressions for each in found[1:])  # a new case is no regression


@pytest.mark.parametrize(("p50", "expected"), [(10.9, []), (11.1, ["p50 of 11.10 ms added instead of 10.00"])])
def test_at_a_given_rate_the_added_time_is_compared(p50: float, expected: list[str]) -> None:
    """The rate sets the bytes a second."""
    before, after = (changed(ratio=None, gbps=1.0, added_ms={"p50": each, "p99": each}) for each in (10.0, p50))
    (found,) = compare([before], [after], tolerance=0.1)
    assert list(found.regressions) == expected


def test_wrong_bytes_are_a_regression_whatever_was_there_before() -> None:
    wrong = changed(verified=False, problem="a byte")
    for before in ([wrong], []):
        (found,) = compare(before, [wrong], tolerance=0.1)
        assert found.regressions == ("not verified: a byte",)


@pytest.mark.parametrize(
    "other", [{"verify": "full"}, {"chunk_tokens": 16}, {"prefix_hit": 32}, {"num_layers": 2}, {"asked_transport": "tcp"}]
)
def test_cases_with_other_options_are_not_compared(other: dict[str, Any]) -> None:
    one, two = compare([ROW], [changed(**other, gbps=0.1, ratio=0.01)], tolerance=0.1)
    assert (one.regressions, two.regressions) == (("the case is missing",), ())


def test_repeated_cases_are_compared_in_order() -> None:
    found = compare([ROW, changed(ratio=0.9)], [ROW, ROW], tolerance=0.1)
    assert [bool(each.regressions) for each in found] == [False, True]


def test_the_command_marks_regressions_and_exits_with_1(tmp_path: Path) -> None:
    before, after, wrong = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    before.write_bytes(to_json([ROW, changed(tokens=128)]))
    after.write_bytes(to_json([changed(ratio=0.3), changed(tokens=128)]))
    wrong.write_text('[{"backend": 3}]')

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return said(main, "--compare", *arguments)

    worse = run(str(before), str(after))
    assert worse.returncode == 1
    (line,) = [line for line in worse.stdout.splitlines() if line.lstrip().startswith("WORSE")]
    assert "50% -> 30% (-40%)" in line
    assert "regression: nixl, tp=2 -> tp=1, 64 tokens: 30% of the ceiling instead of 50%" in worse.stdout
    assert "2 cases, 1 worse by more than 10%" in worse.stdout
    assert run(str(before), str(after), "--tolerance", "0.5").returncode == 0
    same = tmp_path / "one.json"
    same.write_bytes(to_json([ROW]))
    assert "1 case, 0 worse by more than 10%" in run(str(same), str(same)).stdout
    none = tmp_path / "none.json"
    none.write_text("[]")
    empty = run(str(none), str(none))
    assert (empty.returncode, empty.stdout) == (2, "")
    assert f"{none}: expected rows written by disagg-bench --json, found none" in empty.stderr
    assert run(str(same), str(none)).returncode == 1
    unread = run(str(before), str(wrong))
    assert unread.returncode == 2
    (sentence,) = unread.stderr.splitlines()
    assert "c.json" in sentence
    assert "$[0].backend" in sentence
    assert run(str(before), str(tmp_path / "missing.json")).returncode == 2
