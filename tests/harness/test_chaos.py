"""A short `make chaos`: real engines and processes, ranks killed under load, every byte checked.

Also case 40: ranks of both roles restart, at the same address or another, without any other restart; and some requests go
from decode to prefill.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness.chaos.run import run


@pytest.fixture(autouse=True)
def _rank_logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(("engine", "seed"), [("nixl", 2), ("mooncake", 12)])
def test_no_byte_is_wrong_while_ranks_are_killed_and_restarted(engine: str, seed: int) -> None:
    report = run(engine, seed=seed, rounds=2)
    killed = {(victim.partition("-")[0], victim.partition(", ")[2]) for victim in report.victims}
    assert {role for role, _ in killed} == {"prefill", "decode"}
    assert {how for _, how in killed} == {"same address", "other address"}
    assert report.successes > 20
    assert report.returns, "no request went from decode to prefill"
    assert report.good, report


def test_wrong_bytes_are_found_without_fencing() -> None:
    assert run("nixl", seed=1, rounds=0, fencing=False, grace_s=0.0).wrong
