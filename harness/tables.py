"""Tables as texts."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from disagg.commands.shell.text import show


def table_text(table: Table) -> str:
    written = io.StringIO()
    show(table, Console(file=written, color_system=None))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
