"""`python -m harness.site FOLDER`: pictures of every page of the built site (`make docs`) in a browser, at three widths.

Prints what is wrong with a page: content that is wider than the window, diagrams that are not drawn, images that are missing.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.browser import BrowserError, Page, browser

ROOT = Path(__file__).parents[1]
WIDTHS = (360, 800, 1440)
"""A phone, a tablet or half a screen, and a screen: CSS pixels."""
DIAGRAMS = "document.querySelectorAll('.mermaid').length"
UNDRAWN = "document.querySelectorAll('pre.mermaid').length"
MISSING_IMAGES = "[...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
TOO_WIDE = """
(() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.scrollingElement.scrollWidth > width) found.push('the page: ' + document.scrollingElement.scrollWidth);
  for (const each of document.querySelectorAll('article *')) {
    const right = each.getBoundingClientRect().right;
    const inside = each.parentElement.closest('.md-typeset__scrollwrap, pre, code, .md-typeset__table, p:has(> img)');
    if (right > width + 1 && !inside && getComputedStyle(each).display !== 'none')
      found.push(each.tagName.toLowerCase() + ' to ' + Math.round(right) + ': ' + each.textContent.trim().slice(0, 40));
  }
  return found.slice(0, 3);
})()
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder's files on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def problems(page: Page, url: str, *, shots: Path | None = None) -> list[str]:
    """What is wrong with a page at each of `WIDTHS`, after its diagrams have been drawn.

    `shots` is the beginning of the names of its pictures, if these are wanted.
    """
    page.resize(WIDTHS[-1])
    page.open(url)
    found = [f"missing image: {each}" for each in page.evaluate(MISSING_IMAGES)]
    try:
        page.wait(f"{UNDRAWN} === 0")
    except BrowserError:
        found.append(f"{page.evaluate(UNDRAWN)} of {page.evaluate(DIAGRAMS)} diagrams are not drawn")
    drawn, failed = _drawings(page.document())
    if drawn != page.evaluate(DIAGRAMS):
        found.append(f"{drawn} drawings of {page.evaluate(DIAGRAMS)} diagrams")
    found += [f"a diagram has an error: {each}" for each in failed]
    for width in WIDTHS:
        page.resize(width)
        found += [f"at {width} pixels: {each}" for each in page.evaluate(TOO_WIDE)]
        if shots is not None:
            page.wait("document.getAnimations().length === 0")
            shots.with_name(f"{shots.name}-{width}.png").write_bytes(page.screenshot(full=True))
    return found


def _drawings(document: dict[str, Any]) -> tuple[int, list[str]]:
    """The number of drawings of mermaid, which are in closed shadow roots, and the ids of those that only show an error."""
    count, failed, nodes = 0, list[str](), [document]
    while nodes:
        node = nodes.pop()
        attributes = dict(zip(node.get("attributes", [])[::2], node.get("attributes", [])[1::2], strict=True))
        if node["nodeName"].lower() == "svg" and attributes.get("id", "").startswith("__mermaid"):
            count += 1
            if attributes.get("aria-roledescription") == "error":
                failed.append(attributes["id"])
        nodes += node.get("children", []) + node.get("shadowRoots", [])
    return count, failed


def pages(site: Path) -> list[str]:
    """The paths of the site's pages."""
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.site", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    parser.add_argument("--pages", nargs="+", metavar="PATH", help="only pages with these paths, such as vllm.html")
    given = parser.parse_args()
    site = ROOT / "site"
    given.folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with served(site) as address, browser() as page:
        for path in given.pages or pages(site):
            name = path.removesuffix(".html").replace("/", "-")
            for problem in problems(page, f"{address}/{path}", shots=given.folder / name):
                sys.stdout.write(f"{path}: {problem}\n")
                wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
