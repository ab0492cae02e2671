"""The built site loads nothing from another host."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]


class Loads(html.parser.HTMLParser):
    """The addresses that a page loads by itself, as opposed to those that it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.diagrams = 0

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.found.append(given.get("href") or "")
        self.diagrams += given.get("class") == "mermaid"


def test_no_page_needs_another_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if "from another host" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    pages = list(tmp_path.rglob("*.html"))
    diagrams = 0
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        diagrams += loads.diagrams
        assert [each for each in loads.found if urlsplit(each).netloc] == [], page
        if loads.diagrams:
            scripts = [page.parent / each for each in loads.found if each.endswith("mermaid.min.js")]
            assert len(scripts) == 1
            assert b"sequenceDiagram" in scripts[0].read_bytes()
    sources = sum(page.read_text().count("```mermaid") for page in (ROOT / "docs").rglob("*.md"))
    assert diagrams == sources > 0
    assert (tmp_path / "alerts.yml").exists()
