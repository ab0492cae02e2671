"""The program `disagg-bench`."""

from __future__ import annotations

from disagg.commands.bench.command import bench
from disagg.commands.shell import errors


def main() -> None:
    errors.main(bench, "disagg-bench")
