"""`make demo`: instances that divide a model differently, over real engines."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from disagg.commands.bench.command import bench

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "transformers_pd" / "run.py"

INTRODUCTION = """\
disagg moves the state of LLM requests from the ranks that computed it (prefill) to the ranks that continue with it (decode).
Each side divides the model in its own way: here 2 prefill ranks feed 1 decode rank and vice versa, with different page
sizes and axis orders. Every rank is a separate process with its own memory; the engines are CMA (the kernel copies), NIXL
(shared memory) and Mooncake (TCP). After each run, every byte of every decode rank's memory is compared with an independent
reference, including the bytes that no request should have touched.
"""
SETTINGS = (
    "--model",
    "llama-3-8b",
    "--layers",
    "8",
    "--tokens",
    "4096",
    "--repeat",
    "5",
)
SIDES = (("tp=2,page=16", "tp=1,page=64"), ("tp=1,page=64", "tp=2,page=16,layout=hnd"))
BACKENDS = ("cma", "nixl", "mooncake")


def main() -> None:
    print(INTRODUCTION, flush=True)
    failed = [backend for backend in BACKENDS if not _moves(backend)]
    if failed:
        sys.exit(f"demo: failed: {', '.join(failed)}")
    print("Every byte was verified, for all engines.\n", flush=True)
    sys.exit(_example())


def _moves(backend: str) -> bool:
    arguments = ["--backend", backend, *SETTINGS]
    for prefill, decode in SIDES:
        arguments += ["--prefill", prefill, "--decode", decode]
    print(f"$ disagg-bench {' '.join(arguments)}", flush=True)
    try:
        bench(arguments, prog_name="disagg-bench")
    except SystemExit as ended:
        print(flush=True)
        return ended.code in (0, None)
    return True


def _example() -> int:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if not EXAMPLE.is_file() or missing:
        why = f"{', '.join(missing)} missing" if missing else "the examples are not installed"
        print(f"Skipped: the same with a real model's code ({why}).")
        return 0
    print("The same with a real model's code, which must produce the same tokens as without disagg:", flush=True)
    return subprocess.run([sys.executable, str(EXAMPLE)], check=False).returncode


if __name__ == "__main__":
    main()
