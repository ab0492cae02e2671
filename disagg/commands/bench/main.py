"""The program `disagg-bench`. Its parts are imported when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `disagg-bench`."""
    try:
        from disagg.commands.bench.command import bench
        from disagg.commands.shell import errors
    except ImportError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"disagg-bench: the package {error.name!r} is missing: pip install 'disagg[cli]'")
    errors.main(bench, "disagg-bench")
