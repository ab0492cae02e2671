"""Draw the documentation's pictures with the library's own plans: `python scripts/generate_docs.py --pictures`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from disagg.commands.explain.command import explain
from disagg.core.topology import Topology
from disagg.layout.election import elect
from disagg.layout.ownership import overlap
from disagg.layout.tables import layout_table
from disagg.state import mamba, paged, window
from disagg.state.declare import by_tp

ROOT = Path(__file__).resolve().parents[1]
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#225555")
UNOWNED = "#f0f0f0"

_EXPLAINED = re.compile(r"^\$ disagg explain (.+)$|^!\[.*\]\(images/(explain-.+\.svg)\)$", re.MULTILINE)


def _cell(axes: Axes, x: float, y: float, colour: str, text: str = "", *, width: float = 1.0) -> None:
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8, color="white" if colour != UNOWNED else "0.5")


def _finish(axes: Axes, title: str, *, width: float, height: float) -> None:
    axes.set_xlim(-0.05, width + 0.05)
    axes.set_ylim(height + 0.05, -0.05)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, fontsize=10, loc="left")


def heads() -> Figure:
    """Four heads, TP 4 to TP 2: owners of each head, and a page of decode rank 0 in both orders."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    owners, nhd, hnd = figure.subplots(1, 3, width_ratios=(4, 2.2, 4))
    ranks = {tp: list(Topology(tp=tp).group()) for tp in (4, 2)}
    rule = by_tp(4)
    for row, rank in enumerate([*ranks[4], *ranks[2]]):
        owned = rule.owned(rank).within(4)
        side = "prefill" if rank.tp == 4 else "decode"
        y = row + (0.7 if rank.tp == 2 else 0)
        owners.text(-0.15, y + 0.5, f"{side} {rank.tp_rank}", ha="right", va="center", fontsize=8)
        for head in range(4):
            held = bool(owned.locate(np.array([head]))[0] >= 0)
            writer = next(r.tp_rank for r in ranks[4] if rule.owned(r).within(4).locate(np.array([head]))[0] >= 0)
            _cell(owners, head, y, COLOURS[writer] if held else UNOWNED, f"h{head}")
    _finish(owners, "owners of each head", width=4, height=6.7)
    pieces = {source.tp_rank: overlap(rule.owned(source), rule.owned(ranks[2][0]), size=4) for source in ranks[4]}
    for source, found in pieces.items():
        for piece in found:
            for token in range(4):
                _cell(nhd, piece.destination_offset, token, COLOURS[source], f"t{token}")
                _cell(hnd, token, piece.destination_offset, COLOURS[source], f"t{token}")
    _finish(nhd, "page of decode 0, NHD:\nmemory order, line by line", width=2, height=4)
    _finish(hnd, "the same page in HND:\na head's tokens are contiguous", width=4, height=2)
    figure.legend(
        handles=[Patch(color=COLOURS[rank], label=f"written by prefill {rank}") for rank in range(4)],
        loc="outside lower center", ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip
    return figure


def latents() -> Figure:
    """Twelve layers of latents, TP 4 to TP 2: the writer of each layer to each rank."""

    def table(tp: int) -> object:
        topology = Topology(tp=tp)
        tensors = {layer: np.zeros((2, 16, 6), np.float16) for layer in range(12)}
        return layout_table(topology, [paged.mla(tensors, dim=6, topology=topology).layouts])

    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    for flow in elect(table(4), table(2)).flows:  # type: ignore[arg-type]
        for layer in flow.layers:
            _cell(axes, layer, flow.destination * 1.2, COLOURS[flow.source], str(flow.source))
    for rank in range(2):
        axes.text(-0.15, rank * 1.2 + 0.5, f"decode {rank}", ha="right", va="center", fontsize=8)
    for layer in range(12):
        axes.text(layer + 0.5, 2.45, f"L{layer}", ha="center", va="center", fontsize=8)
    _finish(axes, "the prefill rank that writes each layer; all four hold every layer", width=12, height=2.7)
    return figure


def convolution() -> Figure:
    """A gated delta net's fused channels: each rank has its heads of q, k and v."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.subplots()
    conv, _ = mamba.gdn_roles(num_key_heads=4, num_value_heads=8, key_head_dim=2, value_head_dim=1, kernel=4)
    rule, size = conv.inner["channel"], 24
    names = [f"{'qk'[i // 8]}{i % 8 // 2}" if i < 16 else f"v{i - 16}" for i in range(size)]
    for row, rank in enumerate([*Topology(tp=2).group(), *Topology(tp=4).group()]):
        y = row + (0.6 if rank.tp == 4 else 0)
        axes.text(-0.15, y + 0.5, f"TP {rank.tp}, rank {rank.tp_rank}", ha="right", va="center", fontsize=8)
        owned = rule.owned(rank).within(size)
        for channel in range(size):
            x = channel + 0.5 * (channel >= 8) + 0.5 * (channel >= 16)
            writer = next(
                r.tp_rank for r in Topology(tp=2).group() if rule.owned(r).within(size).locate(np.array([channel]))[0] >= 0
            )
            held = bool(owned.locate(np.array([channel]))[0] >= 0)
            _cell(axes, x, y, COLOURS[writer] if held else UNOWNED, names[channel])
    _finish(axes, "channels q ‖ k ‖ v of the convolution, coloured by the rank of TP 2 that holds them", width=25, height=6.6)
    return figure


def windows() -> Figure:
    """The last four of eighteen tokens, in pages of 4, pages of 8 and a ring of 8."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    start, stop = window.needed(18, window=4)
    rows = (("tokens", 18, None), ("pages of 4", 4, None), ("pages of 8", 8, None), ("ring of 8", 8, "ring"))
    for row, (label, page, form) in enumerate(rows):
        y = row * 1.25
        axes.text(-0.15, y + 0.5, label, ha="right", va="center", fontsize=8)
        if form == "ring":
            for slot in range(page):
                token = next(t for t in range(17, -1, -1) if t % page == slot)
                _cell(axes, slot, y, COLOURS[0] if start <= token < stop else UNOWNED, str(token) if token >= start else "")
            continue
        first = 0 if page == 18 else start // page * page
        last = 18 if page == 18 else -(-stop // page) * page
        for token in range(first, last):
            _cell(axes, token, y, COLOURS[0] if start <= token < stop else UNOWNED, str(token) if token < 18 else "")
    _finish(axes, "a request of 18 tokens; the next token needs the 4 before it: their positions in pages", width=24, height=5)
    return figure


def explained() -> dict[str, list[str]]:
    """Each picture of docs/explain.md, and the options of the command above it."""
    found, options = dict[str, list[str]](), list[str]()
    for command, picture in _EXPLAINED.findall((ROOT / "docs/explain.md").read_text(encoding="utf-8")):
        if picture:
            found[picture] = options
        options = command.split()
    return found


def draw_explained(folder: Path) -> None:
    """Draw every picture of docs/explain.md by the command itself. The same code draws the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "disagg", "svg.fonttype": "none"}), contextlib.redirect_stdout(io.StringIO()):
        for name, options in explained().items():
            file = folder / name
            explain.main([*options, "--plot", str(file)], standalone_mode=False)
            file.write_text(re.sub(r" *<metadata>.*?</metadata>\n", "", file.read_text(), flags=re.DOTALL))


def draw(folder: Path) -> None:
    """Draw every picture into a folder."""
    for name, figure in (("heads", heads()), ("latents", latents()), ("convolution", convolution()), ("window", windows())):
        figure.savefig(folder / f"concepts-{name}.png", dpi=110)
    draw_explained(folder)
