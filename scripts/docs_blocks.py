"""Write the Python of each page as a module, so that type checkers can read it: `python scripts/docs_blocks.py FOLDER`.

A page's blocks are one module, in which every line has the number that it has in the page. Generated blocks are left out: they
are checked where they come from.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
_GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)
_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    """The path of a page inside the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    """Each block of Python except generated ones, padded with empty lines so that line numbers match the page."""
    text = _GENERATED.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in _BLOCK.finditer(text)]


def module(page: Path) -> str:
    """All blocks of a page as one module."""
    lines: list[str] = []
    for block in blocks(page):
        lines += block.splitlines()[len(lines) :]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in PAGES:
        if blocks(page):
            (folder / (re.sub(r"\W", "_", name(page).removesuffix(".md")) + ".py")).write_text(module(page), encoding="utf-8")


if __name__ == "__main__":
    main()
