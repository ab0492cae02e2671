"""Charts of the documentation, drawn from the figures in docs/benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"DisaggConnector": "#4477aa", "NixlConnector": "#ee6677"}
CHARTS = {"vllm-cpu.svg": "vllm-cpu.json"}
"""Each chart in docs/images, and the file of docs/benchmarks that it is drawn from."""


def vllm(figures: dict[str, Any]) -> Figure:
    """The time to the first token by the length of the prompt, and right answers by the decode side's block size."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    times, answers = figure.subplots(1, 2, width_ratios=(3, 2))
    for row in figures["rows"]:
        name, colour = row["connector"], COLOURS[row["connector"]]
        if row["prefill_block"] == row["decode_block"]:
            lengths = sorted(map(int, row["first_token_ms_p50"]))
            times.plot(lengths, [row["first_token_ms_p50"][str(n)] for n in lengths], "o-", color=colour, label=name)
        blocks = f"{row['prefill_block']} → {row['decode_block']}"
        height = 100 * row["equal"] / row["asked"]
        answers.bar(f"{blocks}\n{name}", height, color=colour)
        answers.annotate(
            f"{row['equal']} of {row['asked']}", (f"{blocks}\n{name}", height), ha="center", va="bottom", fontsize=9
        )
    times.set(xlabel="tokens of the prompt", ylabel="ms", ylim=(0, None), title="First token after prefill's answer, median")
    times.legend()
    answers.set(ylim=(0, 115), ylabel="%", title="Right answers, by block sizes")
    answers.tick_params(axis="x", labelsize=7)
    vllm, cores = figures["versions"]["vllm-cpu"], figures["machine"]["cores"]
    figure.suptitle(f"vLLM {vllm}, a small Llama, {cores} CPU cores, {figures['date']}", fontsize=9, color="grey")
    return figure


def draw_charts(root: Path) -> None:
    """Draw every chart. The same figures give the same bytes."""
    import matplotlib as mpl

    mpl.rcParams.update({"svg.hashsalt": "disagg", "svg.fonttype": "none"})
    for name, source in CHARTS.items():
        figures = json.loads((root / "docs/benchmarks" / source).read_text())
        vllm(figures).savefig(root / "docs/images" / name, metadata={"Date": None, "Creator": None})
