"""The program `disagg`. Its subcommands are imported when they are used."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `disagg`."""
    try:
        from disagg.commands.shell import errors
        from disagg.commands.shell.group import disagg
    except ImportError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"disagg: the package {error.name!r} is missing: pip install 'disagg[cli]'")
    errors.main(disagg, "disagg")
