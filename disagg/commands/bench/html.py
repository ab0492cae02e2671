"""Rows as one self-contained HTML file."""

from __future__ import annotations

import html
import io
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from disagg.commands.bench.plot import figure_of
from disagg.commands.bench.report import (
    COLUMNS,
    PACED_COLUMNS,
    PHASES_COLUMNS,
    PHASES_TITLE,
    Row,
    cells,
    paced_cells,
    phases_cells,
    problems_of,
)
from disagg.commands.shell.text import counted

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color-scheme: light dark; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.25rem 0.75rem; text-align: left; border-bottom: 1px solid #8884; }
.no { color: #c00; font-weight: bold; }
svg { max-width: 100%; height: auto; background: white; }
"""


def write_html(rows: Sequence[Row], path: Path) -> None:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>disagg-bench</title><style>{STYLE}</style><h1>disagg-bench</h1>",
        f"<p>{counted(len(rows), 'case')}, {sum(row.verified for row in rows)} verified byte for byte.</p>",
        f"<p>{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {html.escape(platform.platform())}</p>",
        _table(COLUMNS, map(cells, rows)),
    ]
    paced = [row for row in rows if row.added_ms is not None]
    if paced:
        parts += [
            "<h2>What the transfers add to the time to the first token</h2>",
            "<p>From a request's arrival to its first send (queue), and to its last byte (added).</p>",
            _table(PACED_COLUMNS, map(paced_cells, paced)),
        ]
    parts += [
        "<h2>Picture</h2><div>",
        _svg(rows),
        f"</div><h2>Phases</h2><p>{PHASES_TITLE[0].upper() + PHASES_TITLE[1:]}</p>",
        _table(PHASES_COLUMNS, (cells for row in rows for cells in phases_cells(row))),
        "<h2>Versions</h2>",
        _table(("package", "version"), sorted({each for row in rows for each in row.versions.items()})),
    ]
    problems = [sentence for row in rows for sentence in problems_of(row)]
    if problems:
        parts.append("<h2>Problems</h2><ul class='no'>" + "".join(f"<li>{html.escape(each)}" for each in problems) + "</ul>")
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    lines = (
        "".join(f"<td{' class=no' if cell in ('NO', 'BADLY') else ''}>{html.escape(cell)}</td>" for cell in row) for row in rows
    )
    return f"<div><table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _svg(rows: Sequence[Row]) -> str:
    """The picture without the prologue of a file of its own."""
    target = io.StringIO()
    figure_of(rows).savefig(target, format="svg")
    text = target.getvalue()
    return text[text.index("<svg") :]
