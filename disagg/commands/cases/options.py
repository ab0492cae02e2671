"""Options that `disagg-bench` and `disagg explain` share."""

from __future__ import annotations

import click

from disagg.core.errors import ConfigError

MODEL_HELP = "A preset, the path of a config.json, a model in the local Hugging Face cache, or LAYERSxKV_HEADSxHEAD_DIM."
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
kv_heads = click.option(
    "--kv-heads", type=click.IntRange(1), help="KV heads of a model of plain attention; instead of --model, with --layers."
)
head_dim = click.option("--head-dim", type=click.IntRange(1), help="Elements per head of such a model.")


def shape_of(model: object, *, layers: int | None, kv_heads: int | None, head_dim: int | None) -> str | None:
    """A name such as `32x8x128`; `None` if no part of a shape is given. Raises `ConfigError` if only some are, or `model`
    too.
    """
    if kv_heads is None and head_dim is None:
        return None
    if model is not None or layers is None or kv_heads is None or head_dim is None:
        raise ConfigError("model: expected --model, or --layers, --kv-heads and --head-dim together without it")
    return f"{layers}x{kv_heads}x{head_dim}"
