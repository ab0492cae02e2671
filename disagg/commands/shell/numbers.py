"""Numbers on command lines."""

from __future__ import annotations

import math
from typing import Any

import click

MAX_SECONDS = 1_000_000
"""Of any time: the system cannot wait for much longer ones."""


class Number(click.FloatRange):
    """Neither NaN nor an infinity, which Click takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found
