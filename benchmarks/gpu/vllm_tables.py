"""Tables of the figures that `vllm_clients.py` measures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from disagg.commands.shell.text import plain_table
from harness.tables import table_text

Rows = Sequence[Mapping[str, Any]]
TIMES = {
    "floor": "floor_ms",
    "nothing": "within_a_step_ms",
    "nvlink": "disagg_ms",
    "nixl": "disagg_nixl_ms",
    "NixlConnector": "nixl_ms",
    "MooncakeConnector": "mooncake_ms",
    "P2pNcclConnector": "p2p_nccl_ms",
}
"""The column of each pair in `rows`: decode's time to the first token. Pairs without prefill are the same for every TP."""
LOADS = {"nvlink": "disagg", "NixlConnector": "nixl", "floor": "floor"}
"""The prefix of each pair's columns in `load`."""


def rows_of(first_token: Rows) -> list[dict[str, Any]]:
    """The medians of `first_token` side by side: a row for each length of the prompt and each `tp`."""
    moving = [row for row in first_token if row["prefill_ms_p50"]]
    found = []
    for tokens, tp in _distinct((row["tokens"], row["tp"]) for row in moving):
        alike = [row for row in first_token if row["tokens"] == tokens and (row["tp"] == tp or row not in moving)]
        times = {TIMES[row["pair"]]: row["ms_p50"] for row in alike}
        found.append({"tokens": tokens, "tp": tp, **{name: times[name] for name in TIMES.values() if name in times}})
    return found


def load_of(clients: Rows) -> list[dict[str, Any]]:
    """The means of all rounds of `clients` side by side, and the longest gap between two tokens in any of them."""
    found = []
    for count, tp in _distinct((row["clients"], row["tp"]) for row in clients):
        alike = [row for row in clients if (row["clients"], row["tp"]) == (count, tp)]
        line: dict[str, Any] = {"concurrency": count, "tokens": alike[0]["tokens_in"], "tp": tp}
        for pair, name in LOADS.items():
            rounds = [row for row in alike if row["pair"] == pair]
            if rounds:
                line[f"{name}_rps"] = round(statistics.mean(row["requests_per_s"] for row in rounds), 2)
                line[f"{name}_max_gap_ms"] = max((row["gap_ms_max"] for row in rounds if row["answered"]), default=None)
        found.append(line)
    return found


def _distinct(keys: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return sorted(set(keys), key=lambda key: (key[1], key[0]))


def show(table: Mapping[str, Any], problems: Sequence[str], *, elapsed_s: float) -> None:
    """Print the tables, and what could not be measured."""
    for part, rows in table.items():
        if isinstance(rows, list) and rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            lines = [[str(row.get(name, "-")) for name in columns] for row in rows]
            print(f"\n{part}\n{table_text(plain_table(columns, lines, right=columns))}")
    for name, path in table.get("transport", {}).items():
        print(f"{name}: {path}")
    for problem in problems[:20]:
        print(f"PROBLEM {problem}")
    print(f"{len(problems)} problems; {elapsed_s:.0f} s", flush=True)
