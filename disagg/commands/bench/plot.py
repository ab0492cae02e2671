"""A picture of rows: speed, or what transfers add to the time to the first token, by what varies; and the phases of the
median request.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.commands.bench.report import Row
from disagg.commands.cases.sides import Side
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError
from disagg.core.timeline import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 40
SWEPT = {
    "tokens": "tokens of a request",
    "requests": "requests per run",
    "concurrency": "requests in flight on each rank",
    "run_pages": "consecutive pages",
}
"""Swept fields, with labels of the x axis."""
PIECES = "piece_bytes_mean"
AXES = {**SWEPT, PIECES: "bytes per piece of the plan, mean", "page": "tokens of a page"}


def check_plot(path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot: the package {error.name!r} is missing: pip install matplotlib") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"plot: expected a file name that ends in one of {', '.join(sorted(known))}, found {path.name!r}")


def plot(rows: Sequence[Row], path: Path) -> None:
    figure_of(rows).savefig(path)


def figure_of(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, max(4.0, 1.5 + 0.4 * min(len(rows), MAX_BARS))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _figures(left, rows)
    _phases(right, rows[:MAX_BARS])
    return figure


def value_of(row: Row, name: str) -> Any:
    """A field of a row; or its `sides`, its `ranks` (sides without pages), or the decode side's `page`."""
    sides = f"{row.prefill} → {row.decode}"
    match name:
        case "sides":
            return sides
        case "ranks":
            return re.sub(r",page=\d+", "", sides)
        case "page":
            return Side.parse(row.decode).page
    return getattr(row, name)


def varied(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """The field for the x axis, and those that tell its lines apart: the first of `SWEPT` that varies, and all others that
    do. If only sides and models do, it is the mean size of a piece, or the page if that size stays the same.
    """

    def varying(*names: str) -> list[str]:
        return [name for name in names if len({value_of(row, name) for row in rows}) > 1]

    if swept := varying(*SWEPT):
        return swept[0], [*swept[1:], *varying("model", "sides")]
    if varying("page") and not varying(PIECES):
        return "page", varying("model", "ranks")
    return PIECES, varying("model")


def _settings(row: Row, names: Sequence[str]) -> list[str]:
    found = {name: value_of(row, name) for name in names}
    return [value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}" for name, value in found.items()]


def _figures(axes: Axes, rows: Sequence[Row]) -> None:
    """GB/s of each line and of the engine alone; for requests that do not arrive together, what transfers add to the time to
    the first token.
    """
    across, others = varied(rows)
    is_paced = all(row.added_ms is not None for row in rows)
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        line, x = ", ".join([row.backend, row.transport, *_settings(row, others)]), value_of(row, across)
        if row.added_ms is not None and is_paced:
            for name, style in (("p50", "o-"), ("p99", "x:")):
                lines[f"{line}, {name}", style].append((x, row.added_ms[name]))
            continue
        lines[f"{line}, {row.way}", "o-"].append((x, row.gbps))
        if row.ceiling_gbps is not None:
            lines[f"{line}: one block per pair", "x:"].append((x, row.ceiling_gbps))
    for (label, style), points in lines.items():
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set_xscale("log", base=2)
    if across != PIECES:
        values = sorted({value_of(row, across) for row in rows})
        axes.set_xticks(values, list(map(str, values)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[across])
    axes.set_ylabel("ms from a request's arrival to its last byte" if is_paced else "GB/s")
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 1.0))


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    """Phases follow each other, so that a bar is as long as the request took."""
    across, others = varied(rows)
    shown = [name for name in (across, *others) if name in (*SWEPT, "model")]
    ends = [0.0] * len(rows)
    for phase in PHASES:
        spent = [1e3 * row.phases.get(phase, 0.0) for row in rows]
        axes.barh(range(len(rows)), spent, 0.7, left=ends, label=phase)
        ends = [end + more for end, more in zip(ends, spent, strict=True)]
    labels = [", ".join([*_settings(row, shown), size(row.bytes), row.way]) for row in rows]
    labels = [f"{row.backend} {row.prefill} → {row.decode}\n{label}" for row, label in zip(rows, labels, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms of the median request, by phase")
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
