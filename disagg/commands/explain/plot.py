"""What `disagg explain --plot` draws: ranks as boxes with flows as bands between them, and pages of memory, line by line as
they lie there, coloured by who writes or reads them: how long the coloured lines are is how long the pieces are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from disagg.commands.explain.counting import size, token_runs
from disagg.commands.explain.study import Pair, Study
from disagg.core.errors import ConfigError
from disagg.core.rows import Pages
from disagg.layout.ownership import Intervals
from disagg.layout.plan import ComponentPlan, SpanClass
from disagg.layout.tables import TOKEN, TensorLayout

MAX_SHOWN = 4
"""Ranks of one side whose page is drawn."""
MAX_LINES = 64
"""Lines of a page that are drawn."""
LABELLED_LINES = 20
"""Up to so many lines pieces have room for their size."""
NOBODY = "#e6e6e6"
FORMATS = ("pdf", "png", "svg")


def plot(study: Study, file: Path) -> None:
    """Draw an explanation. Raises `ConfigError` for a format that there is not, or where matplotlib is not installed."""
    if file.suffix.removeprefix(".").lower() not in FORMATS:
        raise ConfigError(f"plot: expected a file name that ends in one of {', '.join(FORMATS)}, found {str(file)!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot: the package 'matplotlib' is missing: pip install 'disagg[plot]'") from error
    found = study.explanation
    figure: Any = Figure(figsize=(15, 8), layout="constrained")
    flows, memory = figure.subfigures(1, 2, width_ratios=(2, 3))
    _draw_flows(flows.subplots(), found.pairs, len(study.source.items), len(study.destination.items))
    _draw_memory(memory, study)
    figure.suptitle(f"{found.model}, {found.tokens} tokens: prefill {found.prefill} -> decode {found.decode}", fontsize=13)
    figure.savefig(file, dpi=110)


def colour(rank: int) -> Any:
    """A prefill rank's colour, wherever it is drawn."""
    import matplotlib as mpl

    return mpl.colormaps["tab10"](rank % 10)


def reader_colour(rank: int) -> Any:
    """A decode rank's colour: other ones, so that nobody takes it for a prefill rank."""
    import matplotlib as mpl

    return mpl.colormaps["Set3"](rank % 12)


# -- who sends what to whom --------------------------------------------------------------------------------------------


def _draw_flows(axes: Any, pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> None:
    """Boxes of both sides, as high as the bytes they move, and a band for every pair."""
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
    axes.set_title("who writes how much to whom", fontsize=11)


def _boxes(axes: Any, heights: Sequence[float], x: float, role: str) -> list[float]:
    """A box per rank, one below the other; where each begins."""
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


# -- how it lies in memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """`nbytes` from `start` of a row, that rank `other` writes or reads; `remote` is where they lie there."""

    start: int
    nbytes: int
    other: int
    remote: int


@dataclass(frozen=True)
class Page:
    """One row of one rank in one layer: lines of memory, each a position of the outermost axis, and the pieces in it."""

    rank: int
    line_nbytes: int
    num_lines: int
    line_axis: str
    pieces: tuple[Piece, ...]


def page_of(study: Study, name: str, role: str, rank: int, *, side: int) -> Page | None:
    """The first row of the request on one rank of the source (0) or the destination (1); `None` where it has none."""
    half = (study.source, study.destination)[side]
    layout = half.table.ranks[rank].by_name.get(name)
    if layout is None or name not in half.placements[rank] or not layout.tensor(role).layers:
        return None
    place = half.placements[rank][name].tensor(role)
    strides = {axis: stride for axis, stride in place.strides.items() if axis in (TOKEN, split_axis(layout.tensor(role)))}
    line_axis = max(strides, key=lambda axis: (strides[axis], axis == TOKEN))
    pieces: list[Piece] = []
    for pair, plan in study.plans.items():
        if pair[side] == rank and name in plan.components:
            pieces += _pieces(study, plan.components[name], role, pair, side=side, base=place.bases[0])
    if not pieces:
        return None
    stop = max(piece.start + piece.nbytes for piece in pieces)
    return Page(rank, strides[line_axis], -(-stop // strides[line_axis]), line_axis, tuple(_joined(pieces)))


def split_axis(tensor: TensorLayout) -> str:
    """The inner axis that ranks share out, or the first one."""
    return next((a.name for a in tensor.inner_axes if isinstance(a.owned, Intervals)), tensor.inner_axes[0].name)


def _pieces(
    study: Study, component: ComponentPlan, role: str, pair: tuple[int, int], *, side: int, base: int
) -> Iterator[Piece]:
    """What a pair moves of the first row on one side, in the tensor's first layer there, one by one."""
    need = study.destination.items[pair[1]].needs[component.name]
    rows = study.source.rows(pair[0], component.name), study.destination.rows(pair[1], component.name)
    first_row = rows[side].ids[0] if isinstance(rows[side], Pages) else rows[side].id  # type: ignore[union-attr]
    for span in component.spans:
        bases = (span.source_bases, span.destination_bases)
        inside = int(bases[side][0]) - base
        if span.role != role or not 0 <= inside < max(span.row_strides[side], 1):
            continue
        runs = token_runs(component, span.granule, source=rows[0], destination=rows[1], need=need)
        for i in np.flatnonzero(runs.rows[side] == first_row).tolist():
            starts = [
                int(bases[s][0]) + int(runs.rows[s][i]) * span.row_strides[s] + int(runs.offsets[s][i]) * span.token_strides[s]
                for s in (0, 1)
            ]
            mine = starts[side] - base - int(first_row) * span.row_strides[side]
            yield from _steps(span, int(runs.length[i]), (mine, starts[1 - side]), pair[1 - side], side=side)


def _steps(span: SpanClass, length: int, starts: tuple[int, int], other: int, *, side: int) -> Iterator[Piece]:
    """The pieces of one run; `starts` and strides on this side first."""
    levels = [(count, ours, theirs) for count, ours, theirs in span.dims]
    if not span.dense:
        levels.insert(0, (length, *span.token_strides))
    nbytes = span.nbytes * length if span.dense else span.nbytes
    for steps in itertools.product(*(range(level[0]) for level in levels)):
        here, there = (sum(step * level[1 + s] for step, level in zip(steps, levels, strict=True)) for s in (side, 1 - side))
        yield Piece(starts[0] + here, nbytes, other, starts[1] + there)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """In order, neighbours joined where both sides go on."""
    last: Piece | None = None
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if (
            last
            and last.other == piece.other
            and (last.start + last.nbytes, last.remote + last.nbytes)
            == (
                piece.start,
                piece.remote,
            )
        ):
            last = replace(last, nbytes=last.nbytes + piece.nbytes)
            continue
        if last:
            yield last
        last = piece
    if last:
        yield last


def _draw_memory(figure: Any, study: Study) -> None:
    """A page of some ranks of each side, for the first component that has pages, or else the first one."""
    parts = [part for pair in study.explanation.pairs for part in pair.components]
    paged = [part for part in parts if study.source.spec.state(part.name).rows == "pages"]
    if not parts:
        return
    name = (paged or parts)[0].name
    role = study.source.spec.state(name).roles[0].name
    pages = [
        [page for rank in range(len(half.items)) if (page := page_of(study, name, role, rank, side=side))][:MAX_SHOWN]
        for side, half in enumerate((study.source, study.destination))
    ]
    grid = figure.subplots(2, max(len(pages[0]), len(pages[1]), 1), squeeze=False)
    for line in grid:
        for axes in line:
            axes.set_axis_off()
    for side, (titles, shown) in enumerate(zip((("prefill", "read by"), ("decode", "written by")), pages, strict=True)):
        for axes, page in zip(grid[side], shown, strict=False):
            _draw_page(axes, page, f"{titles[0]} rank {page.rank}", titles[1], side)
    figure.suptitle(
        f"one row of {name!r}, tensor {role!r}, one layer, as it lies in memory: line by line, left to right.\n"
        "Prefill pages are coloured by the decode rank that needs the bytes, decode pages by the prefill rank\n"
        "that writes them. A black stroke begins a piece: what lies together on both sides",
        fontsize=9,
    )


def _draw_page(axes: Any, page: Page, title: str, verb: str, side: int) -> None:
    """Lines of memory with their pieces; those beyond `MAX_LINES` are left out."""
    num_lines = min(page.num_lines, MAX_LINES)
    axes.barh(range(num_lines), [page.line_nbytes] * num_lines, height=1.0, color=NOBODY)
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
