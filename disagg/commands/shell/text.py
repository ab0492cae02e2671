"""Texts that several commands print or write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_WIDTH = 10_000


def indented_json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def size(nbytes: float) -> str:
    """512 B, 16 KiB, 33.6 MB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.4g} KiB" if nbytes < 1024**2 else f"{nbytes / 1e6:.1f} MB"


def counted(number: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain_table(columns: Sequence[str], lines: Iterable[Sequence[str]], *, right: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def show(table: Table, console: Console) -> None:
    """Terminals wrap lines that are too wide, while a cut line would lose figures."""
    width = Console(width=MAX_WIDTH).measure(table).maximum
    out = console if console.width >= width else Console(width=width, file=console.file, color_system=None)
    out.print(table)
