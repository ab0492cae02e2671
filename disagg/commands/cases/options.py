"""Options that `disagg-bench` and `disagg explain` share."""

from __future__ import annotations

import click

prefix_hit = click.option(
    "--prefix-hit", type=click.IntRange(0), default=0, help="Leading tokens that the decode side already has."
)
layers = click.option("--layers", type=click.IntRange(1), help="Keep only the model's first layers.")
pack_below = click.option(
    "--pack-below",
    type=click.IntRange(0),
    metavar="BYTES",
    help="Pack pieces below this size; 0: never; default: the engine's threshold.",
)
