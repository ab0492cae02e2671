"""Tables of the documentation with the figures of docs/benchmarks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integrations.vllm.recipes import CACHES, RECIPES

FOLDER = Path(__file__).resolve().parents[1] / "docs/benchmarks"
SERVERS, MODELS, CPU = "vllm-2xh200.json", "vllm-2xh200-models.json", "vllm-cpu.json"
OURS, THEIRS = "DisaggConnector", "NixlConnector"
TITLES = {"llama": "Llama", "falcon-h1": "Falcon-H1", "deepseek-v2": "DeepSeek-V2"}


def vllm_bullets() -> Iterator[str]:
    """Servers of vLLM on CPUs and between two GPUs, in three sentences."""
    gpu, cpu = _read(SERVERS), _read(CPU)
    answers = {row["connector"]: row for row in cpu["rows"] if row["decode_block"] == 64}
    ours, theirs = answers[OURS], answers[THEIRS]
    yield (
        f"* **Correct answers** with blocks of {ours['prefill_block']} tokens on prefill and {ours['decode_block']} on decode: "
        f"{ours['equal']} of {ours['asked']}. {THEIRS}: {theirs['equal']} of {theirs['asked']}, *without an error*."
    )
    load = [row for row in gpu["clients"] if row["clients"] == 32 and row["tp"] == "1 -> 1"]
    seen = {
        pair: statistics.mean(row["first_token_ms_p50"] for row in load if row["pair"] == pair)
        for pair in ("nvlink", THEIRS, "floor")
    }
    yield (
        f"* **First token as the client sees it**, 32 clients: {seen['nvlink']:.0f} ms. {THEIRS}: {seen[THEIRS]:,.0f} ms. "
        f"With nothing moved: {seen['floor']:.0f} ms."
    )
    rate = next(row for row in gpu["load"] if row["concurrency"] == 32 and row["tp"] == "1 -> 1")
    yield (
        f"* **Requests per second** of the same clients: {rate['disagg_rps']:.1f}. {THEIRS}: {rate['nixl_rps']:.1f}. "
        f"With nothing moved: {rate['floor_rps']:.1f}."
    )


def _load_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """Requests per second, and the longest gap between two tokens: with each connector, and with nothing moved."""
    names = ("disagg", "nixl", "floor")
    rates = " | ".join(f"{row[f'{name}_rps']:.1f}" for name in names)
    return rates, " | ".join(f"{row[f'{name}_max_gap_ms']:,.0f} ms" for name in names)


def vllm_first_tokens() -> Iterator[str]:
    """Decode's time to the first token between two GPUs."""
    rows = {(row["tokens"], row["tp"]): row for row in _read(SERVERS)["rows"]}
    sizes = list(dict.fromkeys(tp for _, tp in rows))
    pairs = [
        (f"{whose}, TP {_arrow(tp)}", tp, column)
        for tp in sizes
        for whose, column in (("`nvlink`", "disagg_ms"), (THEIRS, "nixl_ms"))
    ]
    columns = [("nothing moved, between steps", sizes[0], "floor_ms"), ("within a step", sizes[0], "within_a_step_ms"), *pairs]
    yield f"| ms, prompt tokens | {' | '.join(title for title, _, _ in columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for tokens in dict.fromkeys(tokens for tokens, _ in rows):
        yield f"| {tokens:,} | {' | '.join(f'{rows[tokens, tp][column]:.1f}' for _, tp, column in columns)} |"


def vllm_recipes() -> Iterator[str]:
    """The caches of the published prefill/decode deployments, and how they are checked."""
    yield "| caches | deployments | compared | NixlConnector, other TP on each side |"
    yield "|---|---|---|---|"
    for name, kind in CACHES.items():
        recipes = [recipe for recipe in RECIPES if recipe.caches == name]
        models = ", ".join(recipe.model for recipe in recipes)
        formats = sorted({dtype for recipe in recipes for dtype in recipe.dtypes} - {"auto"})
        extra = [f"also {' and '.join(f'`{each}`' for each in formats)}"] if formats else []
        extra += ["DCP"] if any(recipe.dcp for recipe in recipes) else []
        how = "; ".join(("bytes" + (f", and answers of {kind.engine}" if kind.engine else ""), *extra))
        yield f"| {kind.what} | {models} | {how} | {kind.nixl} |"


def vllm_loads() -> Iterator[str]:
    """Requests per second between two GPUs."""
    whose = ("`nvlink`", THEIRS, "nothing moved")
    columns = " | ".join(f"{what}, {each}" for what in ("requests/s", "longest gap") for each in whose)
    yield f"| clients | TP | {columns} |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in _read(SERVERS)["load"]:
        rates, gaps = _load_cells(row)
        yield f"| {row['concurrency']} | {_arrow(row['tp'])} | {rates} | {gaps} |"


def vllm_deaths() -> Iterator[str]:
    """Answers of vLLM's decode server whose prefill server is killed."""
    rows = {(row["model"], row["killed"]): row for row in _read(MODELS)["killed"]}
    tokens = next(iter(rows.values()))["tokens"]
    yield f"| {tokens:,} prompt tokens, `nvlink` | {' | '.join(TITLES.values())} |"
    yield "|---|---|---|---|"
    lines = {
        "decode alone: first token after": ("before", "alone_ms"),
        "prefill killed before decode asks: first token after": ("before", "first_token_ms"),
        "prefill killed while it computes: first token after the kill": ("during", "first_token_ms"),
        "prefill killed after the first token: longest gap between tokens": ("after", "gap_ms_max"),
    }
    for text, (moment, column) in lines.items():
        yield f"| {text} | {' | '.join(f'{rows[model, moment][column]:,.0f} ms' for model in TITLES)} |"


def sglang_rows() -> Iterator[str]:
    """SGLang's servers between two GPUs."""
    found = _read("sglang-2xh200.json")
    yield "| prompt tokens | TP | undivided | disagg, `nvlink` | SGLang's `nixl` | requests/s: disagg | SGLang's `nixl` |"
    yield "|---|---|---|---|---|---|---|"
    loads = {row["tp"]: row for row in found["load"]}
    for row in found["rows"]:
        times = " | ".join(f"{row[name]:,.1f} ms" for name in ("floor_ms", "disagg_ms", "nixl_ms"))
        load = loads.pop(row["tp"], None)
        rates = " | ".join(f"{load[name]:.1f}" if load else "" for name in ("disagg_rps", "nixl_rps"))
        yield f"| {row['tokens']:,} | {_arrow(row['tp'])} | {times} | {rates} |"


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _arrow(sizes: str) -> str:
    return sizes.replace("->", "→")
