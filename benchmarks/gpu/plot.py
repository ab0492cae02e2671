"""Plots the results of `make gpu-bench`, from `docs/benchmarks` to `docs/images`: `python -m benchmarks.gpu.plot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2] / "docs"


def rows(name: str, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())[key]
    return found


def label(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes // 1024} KiB"


def plot_nvlink() -> None:
    """The kernel and whole submissions, relative to a plain copy, by piece size."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, (op, title) in zip(axes, (("write", "push"), ("read", "pull")), strict=True):
        found = [row for row in rows("nvlink-2xh200", "pieces") if row["op"] == op]
        names = [label(row["piece"]) for row in found]
        for key, text in (
            ("pipelined_ratio", "addresses computed on the GPU, 4 in flight"),
            ("request_ratio", "the same, one at a time"),
            ("addresses_ratio", "addresses uploaded"),
        ):
            axis.plot(names, [row[key] for row in found], marker="o", label=text)
        axis.set(title=title, xlabel="piece size", ylim=(0, 1.05))
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("fraction of a plain device-to-device copy")
    axes[1].legend(fontsize=8, loc="center right")
    figure.tight_layout()
    figure.savefig(ROOT / "images" / "gpu-nvlink.png", dpi=120)


def plot_engines() -> None:
    """Whole requests by engine and path."""
    figure, axis = plt.subplots(figsize=(8, 4.4))
    found = rows("gpu-engines-2xh200", "rows")
    for backend, way in sorted({(row["backend"], row["way"]) for row in found}):
        own = [row for row in found if (row["backend"], row["way"]) == (backend, way)]
        names = [label(row["piece"]) for row in own]
        (line,) = axis.plot(names, [row["gbps"] for row in own], marker="o", label=f"{backend}, {way}, one request")
        if "pipelined_gbps" in own[0]:
            several = [row["pipelined_gbps"] for row in own]
            axis.plot(names, several, "--", marker="s", color=line.get_color(), label=f"{backend}, {way}, four in flight")
    axis.set(yscale="log", xlabel="piece size", ylabel="GB/s, end to end")
    axis.grid(visible=True, alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "images" / "gpu-engines.png", dpi=120)


if __name__ == "__main__":
    plot_nvlink()
    plot_engines()
