"""Every page: its Python runs, its generated parts are current, and its links have targets."""

from __future__ import annotations

import functools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.docs_blocks import PAGES, ROOT, blocks, name

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WITH_PYTHON = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=map(name, WITH_PYTHON))
def test_every_block_of_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_generated_parts_are_current() -> None:
    outdated = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))["outdated"]
    assert list(map(name, outdated())) == [], "run python scripts/generate_docs.py"


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page: headings in lower case, without punctuation, with dashes for spaces."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def links(page: Path) -> Iterator[str]:
    """The targets of links and pictures."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'(?:src|href)="([^"]+)"', text)


def wrong(page: Path, link: str) -> str:
    """The problem with a link of a page; empty if there is none."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "no such file"
    if "docs" in page.relative_to(ROOT).parts and not target.is_relative_to(ROOT / "docs"):
        return "the site has only files of docs/"
    return f"no such anchor; there are {sorted(anchors(target))}" if anchor and anchor not in anchors(target) else ""


def test_every_link_has_a_target() -> None:
    found = [(page, link) for page in PAGES for link in links(page) if not link.startswith("https://")]
    assert len(found) > len(PAGES)
    assert [f"{name(page)}: {link}: {what}" for page, link in found if (what := wrong(page, link))] == []


def test_every_picture_is_shown_and_every_page_is_in_the_navigation() -> None:
    shown = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert [str(path) for path in (ROOT / "docs" / "images").iterdir() if path not in shown] == []
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and "decisions" not in page.parts]
    assert [name(page) for page in missing if str(page.relative_to(ROOT / "docs")) not in navigation] == []
