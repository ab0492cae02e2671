"""The options that the programs which start servers on GPUs have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def server_options(
    description: str | None, *, gpus: int, most_gpus: int = 2, limit_s: float, start_s: float = 240.0
) -> argparse.ArgumentParser:
    """A parser with these options. `description` is a module's docstring; the numbers are defaults, but `most_gpus`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    choices = [count for count in (0, 1, 2, 4, 8) if count <= most_gpus]
    parser.add_argument("--gpus", type=int, choices=choices, default=gpus, help="0: a small model on the CPU")
    limit_help = "end after this time, with the results so far"
    parser.add_argument("--limit-s", type=float, default=limit_s, metavar="SECONDS", help=limit_help)
    parser.add_argument("--start-s", type=float, default=start_s, metavar="SECONDS", help="how long to wait for the servers")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to put the logs of the servers")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser
