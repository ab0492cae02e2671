"""A picture of rows: speed by piece size, and time by phase."""

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

PHASES = ("bind", "pack", "post", "wire", "unpack")
MAX_LABELS = 40


def check_plot(path: Path) -> None:
    """Check before measuring that a picture can be drawn. Raises `ConfigError` if not."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot: the package {error.name!r} is missing: pip install 'disagg[plot]'") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"plot: expected a file name that ends in one of {', '.join(sorted(known))}, found {path.name!r}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw `rows` to the file `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, max(4.0, 1.5 + 0.4 * min(len(rows), MAX_LABELS))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _speeds(left, rows)
    _phases(right, rows[:MAX_LABELS])
    figure.savefig(path)


def _speeds(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw GB/s by bytes per piece, with a line per engine, transport and path, and the engine alone."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        engine = f"{row.backend}, {row.transport}"
        lines[f"{engine}, {row.way}", "o-"].append((row.piece_bytes_mean, row.gbps))
        if row.ceiling_gbps is not None:
            lines[f"{engine}: one block per pair", "x:"].append((row.piece_bytes_mean, row.ceiling_gbps))
    for (label, style), points in lines.items():
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes per piece of the plan, mean")
    axes.set_ylabel("GB/s")
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
