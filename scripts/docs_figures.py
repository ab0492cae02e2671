"""Tables of the documentation with the figures of docs/benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integrations.vllm.recipes import CACHES, RECIPES

FOLDER = Path(__file__).resolve().parents[1] / "docs/benchmarks"
SERVERS, MODELS, CPU = "vllm-client-2xgpu.json", "vllm-2xh200-models.json", "vllm-cpu.json"
STEPS, TURNS, FP8, CONVERTED = "vllm-steps-2xh200.json", "turns-2xgpu.json", "vllm-fp8-2xgpu.json", "convert-2xgpu.json"
DRAFTS = "vllm-drafts-2xgpu.json"
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
    load = next(row for row in gpu["load"] if row["clients"] == 32)
    first, rate, gap = (
        [load[f"{way}_{figure}"] for way in ("both", "nixl", "two_undivided")]
        for figure in ("first_p50_ms", "rps", "gap_p99_ms")
    )
    yield (
        f"* **First token as the client sees it**, 32 clients: {first[0]:.0f} ms. {THEIRS}: {first[1]:,.0f} ms. "
        f"Two undivided servers: {first[2]:.0f} ms."
    )
    yield (
        f"* **Requests per second** of the same clients: {rate[0]:.1f}. {THEIRS}: {rate[1]:.1f}. "
        f"Two undivided servers: {rate[2]:.1f}, with longer gaps between tokens: {gap[2]:.0f} ms instead of {gap[0]:.0f} (p99)."
    )


def vllm_first_tokens() -> Iterator[str]:
    """The time from a client's request to its first token between two GPUs."""
    columns = {
        "undivided": "one undivided server",
        "prefill": "prefill's answer",
        "both": "both at once",
        "proxy": "by `pd_proxy.py`",
        "in_turn": "prefill first",
        "nothing": "nothing moved, prefill first",
        "nixl": f"{THEIRS}, prefill first",
    }
    yield from _times(SERVERS, columns, {"TP": lambda row: _arrow(row["tp"])})


def vllm_steps() -> Iterator[str]:
    """Where the time to the first token goes."""
    columns = {
        "launched": "prefill's step is launched",
        "sampled": "prefill has its token",
        "received": "decode's worker has the state",
        "known": "decode's scheduler knows",
        "decoding": "decode's step begins",
        "first_token": "the client has the token",
    }
    yield from _times(STEPS, columns, {})


def _times(
    file: str, columns: Mapping[str, str], more: Mapping[str, Callable[[Mapping[str, Any]], str]], *, part: str = "rows"
) -> Iterator[str]:
    """The rows of a part of a file, in milliseconds: the tokens of the prompt, `more` by its title, and each column's title."""
    titles = ("ms, prompt tokens", *more, *columns.values())
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for row in _read(file)[part]:
        times = (f"{row[f'{name}_ms']:.1f}" if f"{name}_ms" in row else "" for name in columns)
        cells = (f"{row['tokens']:,}", *(cell(row) for cell in more.values()), *times)
        yield f"| {' | '.join(cells)} |"


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
    """What several clients see between two GPUs."""
    ways = {
        "two_undivided": "two undivided servers",
        "both": "both at once",
        "in_turn": "prefill first",
        "nothing": "nothing moved, prefill first",
        "nixl": f"{THEIRS}, prefill first",
    }
    yield "| clients | | requests/s | first token, p50 | p99 | whole answer, p50 | p99 | gap, p99 | longest gap |"
    yield "|---|---|---|---|---|---|---|---|---|"
    figures = ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms", "gap_p99_ms", "gap_max_ms")
    for row in _read(SERVERS)["load"]:
        for way, title in ways.items():
            cells = " | ".join(f"{row[f'{way}_{figure}']:,.0f} ms" for figure in figures)
            yield f"| {row['clients']} | {title} | {row[f'{way}_rps']:.1f} | {cells} |"


def vllm_turns() -> Iterator[str]:
    """The first token of a next turn between two GPUs."""
    columns = {
        "cached": "one server that has it cached",
        "here": "decode's state, taken by a server that answers",
        "divided": "taken by prefill, both servers asked at once",
        "computed": "computed",
    }
    yield from _times(TURNS, columns, {}, part="turn2")


def vllm_moves() -> Iterator[str]:
    """Running requests that move between two GPUs."""
    yield "| prompt tokens | longest gap, median | most | step | equal to one server's |"
    yield "|---|---|---|---|---|"
    for row in _read(TURNS)["moves"]:
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("gap_ms", "gap_max_ms", "step_ms"))
        yield f"| {row['tokens']:,} | {times} | {row['equal']} of {row['asked']} |"


def vllm_drains() -> Iterator[str]:
    """A server that is drained, between two GPUs."""
    yield "| running requests | state | until the server was empty | a plain copy of the state | longest gap, median | most |"
    yield "|---|---|---|---|---|---|"
    for row in _read(TURNS)["drain"]:
        times = " | ".join(f"{1e3 * row[name]:.0f} ms" for name in ("seconds", "copy_seconds"))
        gaps = " | ".join(f"{row[name]:.0f} ms" for name in ("gap_ms", "gap_max_ms"))
        yield f"| {row['requests']} | {row['bytes'] / 1e9:.2f} GB | {times} | {gaps} |"


def vllm_drafts() -> Iterator[str]:
    """What becomes of drafts after a hand-over between two GPUs."""
    yield "| prompt tokens | decode alone | handed over | handed over without the head's KV | answers equal to decode alone |"
    yield "|---|---|---|---|---|"
    for row in _read(DRAFTS)["drafts"]:
        counts = " | ".join(f"{row[way]['accepted']} of {row[way]['drafted']:,}" for way in ("alone", "moved", "without"))
        yield f"| {row['tokens']:,} | {counts} | {row['moved_equal']} and {row['without_equal']} of {row['asked']} |"


def vllm_fp8() -> Iterator[str]:
    """KV in bfloat16 and FP8 on each side, between two GPUs."""
    table = _read(FP8)
    ways = {"both": "bfloat16, bfloat16", "to_fp8": "bfloat16, FP8", "fp8": "FP8, FP8"}
    blocks = {"both": f"{table['backend']} decode"}
    titles = (
        "prefill, decode",
        *(f"{row['tokens']:,}" for row in table["rows"]),
        "decode's blocks",
        "requests/s",
        "first token",
    )
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    load = table["load"][-1]
    for way, title in ways.items():
        times = " | ".join(f"{row[f'{way}_ms']:.1f} ms" for row in table["rows"])
        count = table["kv_blocks"][blocks.get(way, f"{table['backend']} decode fp8")]
        yield f"| {title} | {times} | {count:,} | {load[f'{way}_rps']:.1f} | {load[f'{way}_first_p50_ms']:.0f} ms |"


def converted() -> Iterator[str]:
    """Copies between two GPUs that convert."""
    table = _read(CONVERTED)
    own, most = str(table["blocks"]), "132"
    rules: dict[str, list[Any]] = {}
    for row in table["rows"]:
        scales = f"scales of {row['heads']} heads" if row["heads"] > 1 else f"scale {row['scale']:g}"
        rules.setdefault(row["rule"].replace("->", "to") + f", {scales}", []).append(row)
    yield f"| | GB/s, {own} blocks | share of a copy | GB/s, {most} blocks | share of a copy |"
    yield "|---|---|---|---|---|"
    for rule, rows in rules.items():
        cells = [f"`{rule.split(',')[0].replace(' to ', '` to `')}`,{rule.split(',')[1]}"]
        for blocks in (own, most):
            rates = [row["by_blocks"][blocks] for row in rows]
            shares = [row["by_blocks"][blocks] / row["copy_by_blocks"][blocks] for row in rows]
            cells += [f"{min(rates):.0f} to {max(rates):.0f}", f"{min(shares):.2f} to {max(shares):.2f}"]
        yield f"| {' | '.join(cells)} |"


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
    """First tokens of SGLang's servers between two GPUs."""
    yield "| prompt tokens | TP | undivided | disagg, `nvlink` | SGLang's `nixl` |"
    yield "|---|---|---|---|---|"
    for row in _sglang("rows"):
        columns = ("floor_ms", "disagg_ms", "nixl_ms")
        times = " | ".join("{:,.1f} ms ({:,.1f} to {:,.1f})".format(row[name], *row["ranges"][name]) for name in columns)
        yield f"| {row['tokens']:,} | {_arrow(row['tp'])} | {times} |"


def sglang_load() -> Iterator[str]:
    """SGLang's servers under load, between two GPUs."""
    ways = {"disagg": "disagg, `nvlink`", "nixl": "SGLang's `nixl`", "undivided": "two undivided servers, TP 1"}
    yield "| clients | TP | | requests/s | first token, p50 | gap, p99 | longest gap |"
    yield "|---|---|---|---|---|---|---|"
    for row in _sglang("load"):
        for way, title in ways.items():
            rates = "{:.1f} ({:.1f} to {:.1f})".format(row[f"{way}_rps"], *row[f"{way}_rps_range"])
            first = "{:.0f} ms ({:.0f} to {:.0f})".format(row[f"{way}_first_p50_ms"], *row[f"{way}_first_p50_ms_range"])
            gaps = f"{row[f'{way}_gap_p99_ms']:.0f} ms | {row[f'{way}_max_gap_ms']:.0f} ms"
            yield f"| {row['concurrency']} | {_arrow(row['tp'])} | {title} | {rates} | {first} | {gaps} |"


def _sglang(part: str) -> Iterator[Any]:
    """The rows that were measured with both backends: TP 1 in the first run, TP 2 in the second one."""
    for name in ("sglang-2xh200.json", "sglang-2xh200-tp2.json"):
        yield from (row for row in _read(name)[part] if {"nixl_ms", "nixl_rps"} & row.keys())


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _arrow(sizes: str) -> str:
    return sizes.replace("->", "→")
