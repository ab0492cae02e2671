"""A short `python -m harness.chaos --transport rdma`: ranks are killed, packets lost and devices taken down under load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness.chaos.run import run
from harness.rdma.link import RdmaLink

SLOW = 6.0
"""Deadlines of a guest whose CPU is emulated."""


@pytest.mark.parametrize(("engine", "rails"), [("mooncake", 1), ("nixl", 1)])
def test_no_byte_is_wrong_and_every_row_is_free_or_quarantined(
    engine: str, link: RdmaLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    since, kinds = link.sent_packets, ["kill", "lose", "down"]
    report = run(engine, seed=1, rounds=3, kinds=kinds, transport="rdma", longest_s=3.0, requests=60, slow=SLOW, link=link)
    assert report.good, str(report)
    assert report.transport == "rdma"
    assert report.rounds_done == 3
    assert report.successes > 10
    assert report.lost_packets
    assert link.sent_packets - since > 2 * report.successes, "a packet and its acknowledgement at least"
