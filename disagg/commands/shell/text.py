"""Texts that several commands print: sizes and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def size(nbytes: float) -> str:
    """Bytes in a readable unit: 512 B, 16 KiB, 33.6 MB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.4g} KiB" if nbytes < 1024**2 else f"{nbytes / 1e6:.1f} MB"


def aligned(lines: Sequence[Sequence[str]], *, right: Collection[int]) -> str:
    """Lines of cells as columns; those whose numbers are in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
