"""The short form of `make chaos`: real engines and processes, ranks that are killed under load, every byte looked at.

Case 40 as well: ranks of either side come back, at their address or another, and nobody else is restarted; roles change by
the request, as some go back from decode to prefill.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness.chaos import run


@pytest.fixture(autouse=True)
def _logs_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(("engine", "seed"), [("nixl", 2), ("mooncake", 12)])
def test_ranks_are_killed_and_come_back_and_no_byte_is_wrong(engine: str, seed: int) -> None:
    report = run(engine, seed=seed, rounds=2)
    killed = {(victim.partition("-")[0], victim.partition(", ")[2]) for victim in report.victims}
    assert {side for side, _ in killed} == {"prefill", "decode"}
    assert {how for _, how in killed} == {"same address", "other address"}
    assert report.successes > 20
    assert report.returns, "some went from decode to prefill"
    assert report.good, report


def test_the_same_harness_finds_wrong_bytes_where_engines_lie_about_what_is_over() -> None:
    assert run("nixl", seed=1, rounds=0, fencing=False, grace_s=0.0).wrong
