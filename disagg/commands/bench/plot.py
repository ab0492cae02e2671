"""A picture of rows: speed, or what transfers add to the time to the first token, by what varies; and time by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.commands.bench.report import Row
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = ("bind", "pack", "post", "wire", "unpack")
MAX_LABELS = 40
VARIED = {
    "tokens": "tokens of a request",
    "requests": "requests per run",
    "concurrency": "requests in flight on each rank",
    "run_pages": "consecutive pages",
    "per_s": "requests per second",
}


def check_plot(path: Path) -> None:
    """Check before measuring that a picture can be drawn. Raises `ConfigError` if not."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot: the package {error.name!r} is missing: pip install matplotlib") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"plot: expected a file name that ends in one of {', '.join(sorted(known))}, found {path.name!r}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw `rows` to the file `path`."""
    figure_of(rows).savefig(path)


def figure_of(rows: Sequence[Row]) -> Figure:
    """The picture of `rows`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, max(4.0, 1.5 + 0.4 * min(len(rows), MAX_LABELS))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _figures(left, rows)
    _phases(right, rows[:MAX_LABELS])
    return figure


def varied(rows: Sequence[Row]) -> str:
    """The field of rows for the x axis: the only one of `VARIED` that varies, else the mean size of a piece."""
    found = [name for name in VARIED if len({getattr(row, name) for row in rows} - {None}) > 1]
    return found[0] if len(found) == 1 else "piece_bytes_mean"


def _figures(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw GB/s by what varies, with a line per engine, transport and path, and the engine alone; for requests that do not
    arrive together, what the transfers add to the time to the first token.
    """
    across = varied(rows)
    is_paced = all(row.added_ms is not None for row in rows)
    several = across != "piece_bytes_mean" and len({(row.prefill, row.decode) for row in rows}) > 1
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        engine = f"{row.backend}, {row.transport}" + (f", {row.prefill} → {row.decode}" if several else "")
        x = float(getattr(row, across) or 0.0)
        if row.added_ms is not None and is_paced:
            for (name, value), style in zip(row.added_ms.items(), ("o-", "x:"), strict=True):
                lines[f"{engine}, {name}", style].append((x, value))
            continue
        lines[f"{engine}, {row.way}", "o-"].append((x, row.gbps))
        if row.ceiling_gbps is not None:
            lines[f"{engine}: one block per pair", "x:"].append((x, row.ceiling_gbps))
    for (label, style), points in lines.items():
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    if across != "per_s":
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(VARIED.get(across, "bytes per piece of the plan, mean"))
    axes.set_ylabel("ms from a request's arrival to its last byte" if is_paced else "GB/s")
    axes.legend(fontsize="small")


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the milliseconds of the busiest rank in each phase side by side, since phases overlap, and a mark at the total."""
    height = 0.8 / len(PHASES)
    for number, phase in enumerate(PHASES):
        places = [row + (number - (len(PHASES) - 1) / 2) * height for row in range(len(rows))]
        axes.barh(places, [1e3 * row.seconds[phase] for row in rows], height, label=phase)
    axes.plot([1e3 * row.seconds["total"] for row in rows], list(range(len(rows))), "k|", markersize=14, label="total")
    axes.set_yticks(range(len(rows)), [f"{r.backend} {r.prefill} → {r.decode}\n{size(r.bytes)}, {r.way}" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms, of the rank that spent most in it")
    axes.legend(fontsize="small")
