"""Benchmarks over real ranks. `disagg-bench` is `main`; its parts are imported when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """The command `disagg-bench`."""
    try:
        from disagg.bench.command import bench
        from disagg.cli import errors
    except ImportError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"disagg-bench: the package {error.name!r} is missing: pip install 'disagg[cli]'")
    errors.main(bench, "disagg-bench")
