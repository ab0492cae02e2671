"""The built site: loads nothing from another host, fits three widths of a real browser, and its search works from disk."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness.browser import browser
from harness.site import DIAGRAMS, pages, problems, served

pytestmark = pytest.mark.release

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Skips where a program that it needs cannot be fetched."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if "npm cannot fetch" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    return folder


def test_no_page_needs_another_host(site: Path) -> None:
    diagrams = 0
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        diagrams += loads.diagrams
        assert [each for each in loads.found if urlsplit(each).netloc] == [], page
        if loads.diagrams:
            scripts = [page.parent / each for each in loads.found if each.endswith("mermaid.min.js")]
            assert len(scripts) == 1
            assert b"sequenceDiagram" in scripts[0].read_bytes()
    assert diagrams == diagrams_in_sources() > 0
    assert (site / "alerts.yml").exists()


TYPE = """
(() => {
  const field = document.querySelector('.md-search__input');
  field.focus();
  field.value = '%s';
  field.dispatchEvent(new Event('input', {bubbles: true}));
  field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
})()
"""
RESULTS = "[...document.querySelectorAll('.md-search-result__item a')].map(each => each.href)"


def test_search_works_from_disk(site: Path) -> None:
    """A page of each depth, opened without a server, finds a heading of another page."""
    with browser() as page:
        page.resize(1440)
        for path in ("index.html", "benchmarks/gpu.html"):
            page.open(f"file://{site}/{path}")
            page.evaluate(TYPE % "quarantine")
            page.wait(f"{RESULTS}.length > 0")
            assert f"file://{site}/operations.html#quarantine" in page.evaluate(RESULTS)


def diagrams_in_sources() -> int:
    return sum(page.read_text().count("```mermaid") for page in (ROOT / "docs").rglob("*.md"))


def test_every_page_fits_and_every_diagram_is_drawn(site: Path) -> None:
    found, diagrams = {}, 0
    with served(site) as address, browser() as page:
        for path in pages(site):
            if wrong := problems(page, f"{address}/{path}"):
                found[path] = wrong
            diagrams += page.evaluate(DIAGRAMS)
    assert found == {}
    assert diagrams == diagrams_in_sources()


BROKEN = """<!doctype html><html><body><article>
<div style="width: 500px">wide</div><div style="width: 300px">narrow</div><img src="missing.png" alt="">
</article></body></html>"""


def test_what_does_not_fit_or_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(BROKEN)
    with served(tmp_path) as address, browser() as page:
        found = problems(page, f"{address}/page.html")
        assert found[0] == f"missing image: {address}/missing.png"
        assert found[1].startswith("at 360 pixels: the page: 5")
        assert found[2:] == ["at 360 pixels: div to 508: wide"]
