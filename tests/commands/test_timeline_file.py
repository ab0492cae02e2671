"""`disagg-bench --timeline`: every request by phase, as a trace that other programs read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from disagg.commands.bench.timelines import phases_of
from disagg.commands.cases.instructions import Result
from disagg.core.timeline import PHASES
from tests.commands.conftest import Bench


def spans(events: list[dict[str, Any]], process: int, thread: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (process, thread)]


def test_each_rank_is_a_process_and_each_request_a_thread(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    ended = bench(
        *("--backend", "mooncake", "--model", "tiny", "--tokens", "256", "--prefill", "tp=2", "--decode", "tp=1,page=32"),
        *("--requests", "3", "--concurrency", "2", "--repeat", "2", "--no-ceiling", "--timeline", str(file)),
    )
    assert ended.status == 0, ended.err
    events = json.loads(file.read_text())["traceEvents"]
    ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(",")[0] for name in ranks.values()] == ["prefill/0", "prefill/1", "decode/0"]
    starts = []
    for process, rank in ranks.items():
        for number in range(3):
            whole, *phases = spans(events, process, number + 1)
            assert whole["name"] == f"{'receive' if rank.startswith('decode') else 'send'} {number}"
            assert [each["name"] for each in phases] == [phase for phase in PHASES if phase in {e["name"] for e in phases}]
            assert phases[0]["ts"] == whole["ts"]
            assert sum(each["dur"] for each in phases) == whole["dur"]
            for before, after in itertools.pairwise(phases):  # to the last digit: a viewer would nest phases that overlap
                assert after["ts"] == before["ts"] + before["dur"]
            starts.append(whole["ts"])
    assert min(starts) == 0
    assert max(starts) < 600e6  # microseconds of one clock


def test_a_request_waits_from_its_first_send_only() -> None:
    phases = dict.fromkeys(PHASES, 0.5) | {"wait": 7.0}
    found = phases_of(10.0, Result(0, True, "", 1.0, 14.0, phases=phases))
    assert found == phases | {"wait": pytest.approx(0.5)}
    assert sum(found.values()) == pytest.approx(4.0)
