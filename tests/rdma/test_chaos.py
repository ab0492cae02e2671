"""A short `python -m harness.chaos --transport rdma`: ranks are killed, packets lost and devices taken down under load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness.chaos.run import run

SLOW = 6.0
"""Deadlines of a guest whose CPU is emulated."""


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["mooncake", "nixl"])
def test_no_byte_is_wrong_and_every_row_is_free_or_quarantined(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = run(
        engine, seed=1, rounds=3, kinds=["kill", "lose", "down"], transport="rdma", longest_s=3.0, requests=60, slow=SLOW
    )
    assert report.good, str(report)
    assert report.transport == "rdma"
    assert report.rounds_done == 3
    assert report.successes > 10
    assert report.lost_packets
