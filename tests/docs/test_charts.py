"""Charts are drawn from the figures beside them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from scripts.docs_charts import CHARTS, draw_charts

ROOT = Path(__file__).parents[2]


def drawn_at(root: Path) -> dict[str, str]:
    """The texts of each chart that is drawn from the figures of a folder."""
    (root / "docs/images").mkdir(exist_ok=True)
    draw_charts(root)
    return {name: texts(root / "docs/images" / name) for name in CHARTS}


def texts(chart: Path) -> str:
    """What a chart says, and where its lines are, without what depends on the version of the program that drew it."""
    text = chart.read_text()
    return "\n".join(re.findall(r"<text[^>]*>([^<]+)</text>", text) + re.findall(r"<path d=\"([^\"]{60,})", text))


def test_every_chart_shows_its_figures(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/benchmarks", tmp_path / "docs/benchmarks")
    assert drawn_at(tmp_path) == {name: texts(ROOT / "docs/images" / name) for name in CHARTS}
    for name, sources in CHARTS.items():
        for source in sources:
            check_that_it_shows(source, name, root=tmp_path)


def check_that_it_shows(source: str, name: str, *, root: Path) -> None:
    """A change of a figure in a file changes the chart."""
    file = root / "docs/benchmarks" / source
    before = file.read_text()
    changed = json.loads(before)
    if "load" in changed:
        changed["load"][0]["both_rps"] += 10
    elif "rows" in changed:
        changed["rows"][0]["equal"] -= 1
    else:
        span = next(event for event in changed["traceEvents"] if event["name"] == "wire")
        span["dur"] *= 2
    file.write_text(json.dumps(changed))
    found = drawn_at(root)
    file.write_text(before)
    assert found[name] != texts(ROOT / "docs/images" / name), source
