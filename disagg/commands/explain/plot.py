"""The picture of `disagg explain --plot`: flows between ranks, and pages of memory coloured by the peer rank that writes or
reads the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.commands.explain.explanation import Explanation
from disagg.commands.explain.summary import Pair
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError
from disagg.core.rows import Slot
from disagg.layout.binding import bind_rows
from disagg.layout.ownership import Intervals
from disagg.layout.plan import ComponentPlan, SpanClass
from disagg.layout.tables import TOKEN, TensorLayout

MAX_SHOWN = 4
MAX_LINES = 64
LABELLED_LINES = 20
"""Maximum lines of a page whose pieces are labelled."""
UNUSED = "#e6e6e6"
FORMATS = ("pdf", "png", "svg")


def plot(explanation: Explanation, file: Path) -> None:
    if file.suffix.removeprefix(".").lower() not in FORMATS:
        raise ConfigError(f"plot: expected a file name that ends in one of {', '.join(FORMATS)}, found {str(file)!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot: the package 'matplotlib' is missing: pip install matplotlib") from error
    found = explanation.summary
    figure: Any = Figure(figsize=(15, 8), layout="constrained")
    flows, memory = figure.subfigures(1, 2, width_ratios=(2, 3))
    _draw_flows(flows.subplots(), found.pairs, len(explanation.source.items), len(explanation.destination.items))
    _draw_memory(memory, explanation)
    figure.suptitle(f"{found.model}, {found.tokens} tokens: prefill {found.prefill} -> decode {found.decode}", fontsize=13)
    figure.savefig(file, dpi=110)


def colour(rank: int) -> Any:
    import matplotlib as mpl

    return mpl.colormaps["tab10"](rank % 10)


def reader_colour(rank: int) -> Any:
    import matplotlib as mpl

    return mpl.colormaps["Set3"](rank % 12)


def _draw_flows(axes: Any, pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> None:
    total = sum(pair.bytes for pair in pairs) or 1
    ours = _boxes(
        axes, [sum(p.bytes for p in pairs if p.source == rank) / total for rank in range(num_sources)], 0.0, "prefill"
    )
    theirs = _boxes(
        axes, [sum(p.bytes for p in pairs if p.destination == rank) / total for rank in range(num_destinations)], 1.0, "decode"
    )
    steps = np.linspace(0, 1, 40)
    bend = 3 * steps**2 - 2 * steps**3
    for pair in pairs:
        thickness = pair.bytes / total
        start, stop = ours[pair.source], theirs[pair.destination]
        low = start + (stop - start) * bend
        axes.fill_between(0.09 + steps * 0.82, low, low + thickness, color=colour(pair.source), alpha=0.55, linewidth=0)
        if thickness > 0.04:
            text = f"{size(pair.bytes)}: {', '.join(dict.fromkeys(part.way for part in pair.components))}"
            axes.text(0.3, float(low[14]) + thickness / 2, text, fontsize=8, va="center", ha="center")
        ours[pair.source] += thickness
        theirs[pair.destination] += thickness
    axes.set_xlim(-0.12, 1.12)
    axes.invert_yaxis()
    axes.set_axis_off()
    axes.set_title("bytes written between ranks", fontsize=11)


def _boxes(axes: Any, heights: Sequence[float], x: float, role: str) -> list[float]:
    gap, at, begins = 0.6 / max(len(heights), 4), 0.0, []
    spread = 1.0 + gap * 8
    free = (spread - sum(heights)) / (len(heights) + 1)
    for rank, height in enumerate(heights):
        at += free
        begins.append(at)
        shown = max(height, 0.006)
        face = colour(rank) if role == "prefill" else reader_colour(rank)
        axes.bar(x, shown, bottom=at, width=0.18, color=face, edgecolor="#333333", linewidth=0.8)
        axes.text(x, at + shown / 2, f"{role}\n{rank}", fontsize=8, va="center", ha="center")
        at += height
    return begins


@dataclass(frozen=True)
class Piece:
    """Bytes of a row, from its offset `start`, that rank `other` writes or reads at its address `remote`."""

    start: int
    nbytes: int
    other: int
    remote: int


@dataclass(frozen=True)
class Page:
    """One row of one rank in one layer: a line of memory per position of the outermost axis, and the pieces in it."""

    rank: int
    line_nbytes: int
    num_lines: int
    line_axis: str
    pieces: tuple[Piece, ...]


def page_of(explanation: Explanation, name: str, role: str, rank: int, *, side: int) -> Page | None:
    """The request's first row on one rank of the source (0) or the destination (1); `None` if it has none."""
    half = (explanation.source, explanation.destination)[side]
    layout = half.table.ranks[rank].by_name.get(name)
    if layout is None or name not in half.placements[rank] or not layout.tensor(role).layers:
        return None
    place = half.placements[rank][name].tensor(role)
    strides = {axis: stride for axis, stride in place.strides.items() if axis in (TOKEN, split_axis(layout.tensor(role)))}
    line_axis = max(strides, key=lambda axis: (strides[axis], axis == TOKEN))
    pieces: list[Piece] = []
    for pair, plan in explanation.plans.items():
        if pair[side] == rank and name in plan.components:
            pieces += _pieces(explanation, plan.components[name], pair, side=side, base=place.bases[0])
    if not pieces:
        return None
    stop = max(piece.start + piece.nbytes for piece in pieces)
    return Page(
        rank,
        strides[line_axis],
        -(-stop // strides[line_axis]),
        line_axis,
        tuple(sorted(pieces, key=lambda piece: piece.start)),
    )


def split_axis(tensor: TensorLayout) -> str:
    return next((a.name for a in tensor.inner_axes if isinstance(a.owned, Intervals)), tensor.inner_axes[0].name)


def _pieces(
    explanation: Explanation, component: ComponentPlan, pair: tuple[int, int], *, side: int, base: int
) -> Iterator[Piece]:
    """What a pair moves of the first row on one side, in the layer that begins at `base`."""
    numbers = tuple(i for i, span in enumerate(component.spans) if _in_first_row(span, side, base))
    if not numbers:
        return
    need = explanation.destination.items[pair[1]].needs[component.name]
    rows = explanation.source.rows(pair[0], component.name), explanation.destination.rows(pair[1], component.name)
    copies = bind_rows(
        component,
        source=rows[0],
        destination=rows[1],
        tokens=need,
        num_tokens=need[1],
        layers=[int(component.spans[numbers[0]].layers[0])],
        spans=numbers,
    ).copies()
    mine = rows[side]
    row_nbytes = component.spans[numbers[0]].row_strides[side]
    row_address = base + int(mine.id if isinstance(mine, Slot) else mine.ids[0]) * row_nbytes
    addresses = (copies.source, copies.destination)
    starts, remote = addresses[side].astype(np.int64) - row_address, addresses[1 - side].astype(np.int64)
    sizes = copies.nbytes.astype(np.int64)
    for i in np.flatnonzero((starts < row_nbytes) & (starts + sizes > 0)).tolist():
        start, stop = max(int(starts[i]), 0), min(int(starts[i] + sizes[i]), row_nbytes)
        yield Piece(start, stop - start, pair[1 - side], int(remote[i]) + start - int(starts[i]))


def _in_first_row(span: SpanClass, side: int, base: int) -> bool:
    bases = (span.source_bases, span.destination_bases)[side]
    return 0 <= int(bases[0]) - base < max(span.row_strides[side], 1)


def _draw_memory(figure: Any, explanation: Explanation) -> None:
    parts = [part for pair in explanation.summary.pairs for part in pair.components]
    paged = [part for part in parts if explanation.source.spec.state(part.name).rows == "pages"]
    if not parts:
        return
    name = (paged or parts)[0].name
    role = explanation.source.spec.state(name).roles[0].name
    pages = [
        [page for rank in range(len(half.items)) if (page := page_of(explanation, name, role, rank, side=side))][:MAX_SHOWN]
        for side, half in enumerate((explanation.source, explanation.destination))
    ]
    grid = figure.subplots(2, max(len(pages[0]), len(pages[1]), 1), squeeze=False)
    for line in grid:
        for axes in line:
            axes.set_axis_off()
    for side, (titles, shown) in enumerate(zip((("prefill", "read by"), ("decode", "written by")), pages, strict=True)):
        for axes, page in zip(grid[side], shown, strict=False):
            _draw_page(axes, page, f"{titles[0]} rank {page.rank}", titles[1], side)
    figure.suptitle(
        f"one row of {name!r} from its tensor {role!r} on, one layer, in memory order: line by line, left to right.\n"
        "Prefill pages are coloured by the decode rank that needs the bytes, decode pages by the prefill rank\n"
        "that writes them. A black stroke marks the start of a piece, which is contiguous on both sides",
        fontsize=9,
    )


def _draw_page(axes: Any, page: Page, title: str, verb: str, side: int) -> None:
    num_lines = min(page.num_lines, MAX_LINES)
    axes.barh(range(num_lines), [page.line_nbytes] * num_lines, height=1.0, color=UNUSED)
    for piece in page.pieces:
        at, stop = piece.start, piece.start + piece.nbytes
        first, begin = divmod(at, page.line_nbytes)
        if first < num_lines:
            axes.vlines(begin, first - 0.46, first + 0.46, color="black", lw=3)
            axes.hlines(first - 0.5, begin, min(begin + piece.nbytes, page.line_nbytes), color="white", lw=1.5, zorder=3)
        while at < stop and at // page.line_nbytes < num_lines:
            line, offset = divmod(at, page.line_nbytes)
            taken = min(stop - at, page.line_nbytes - offset)
            face = colour(piece.other) if side else reader_colour(piece.other)
            axes.barh(line, taken, left=offset, height=1.0, color=face)
            if num_lines <= LABELLED_LINES and at == piece.start:
                axes.text(offset + taken / 2, line, f"{size(piece.nbytes)}", fontsize=7, va="center", ha="center")
            at += taken
    others = sorted({piece.other for piece in page.pieces})
    axes.set_axis_on()
    axes.set_ylim(num_lines - 0.4, -0.6)
    axes.set_yticks(range(0, num_lines, -(-num_lines // 8)))
    axes.set_xlim(0, page.line_nbytes)
    axes.set_xticks([0, page.line_nbytes], ["0", size(page.line_nbytes)], fontsize=8)
    axes.set_ylabel(page.line_axis, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_title(f"{title}, {verb} {', '.join(map(str, others))}", fontsize=9)
