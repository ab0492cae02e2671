"""The program `disagg`. Its subcommands are imported when they are used."""

from __future__ import annotations

from disagg.commands.shell import errors
from disagg.commands.shell.group import disagg


def main() -> None:
    errors.main(disagg, "disagg")
