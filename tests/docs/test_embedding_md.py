"""The snippet for one side of a server is as short as its heading says. `test_pages.py` runs it."""

from __future__ import annotations

from scripts.docs_blocks import ROOT, blocks


def test_one_side_has_at_most_15_lines() -> None:
    page = ROOT / "docs/embedding.md"
    assert "## One side in 15 lines" in page.read_text()
    one_side, *_ = blocks(page)
    assert sum(line.strip() != "" for line in one_side.splitlines()) <= 15
    assert "manager.receiver(" in one_side
    assert "on_release(" in one_side
