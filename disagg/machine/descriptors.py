"""Descriptors that this process can still open."""

from __future__ import annotations

import errno
import os

NEEDED = 32
"""Descriptors that must be free before an engine connects: more than one connection of any engine takes."""


def shortage(needed: int = NEEDED) -> str:
    """Why this process cannot open `needed` descriptors more now; empty if it can."""
    opened: list[int] = []
    try:
        while len(opened) < needed:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"only {len(opened)} of {needed} descriptors that connecting may take are free"
    finally:
        for each in opened:
            os.close(each)
    return ""
