"""Sliding-window KV, with its own pool and page ids. Decode needs only the window's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disagg.core.errors import LayoutError
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state import paged
from disagg.state.declare import Rule, all_tokens, last_tokens


def swa(
    tensors: Mapping[int, Any],
    *,
    axes: str,
    num_kv_heads: int,
    topology: Topology,
    name: str = "window",
    dims: tuple[int, int] | None = None,
    dtype: str | None = None,
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
) -> Component:
    """K and V of sliding-window layers; arguments and errors are those of `paged.gqa`. Give `needed(...)` to `receiver`."""
    return paged.gqa(
        tensors,
        axes=axes,
        num_kv_heads=num_kv_heads,
        topology=topology,
        name=name,
        dims=dims,
        dtype=dtype,
        layers_by_stage=layers_by_stage,
        tokens=tokens,
    )


def needed(num_tokens: int, *, window: int, prefix: int = 0) -> tuple[int, int]:
    """The tokens that decode needs: `[max(prefix, num_tokens - window), num_tokens)`, or none. If the model's next token
    attends to itself and the `window - 1` tokens before it, give `window - 1`.
    """
    return last_tokens(num_tokens, window=window, prefix=prefix)


def ring_rows(slot: int, *, need: tuple[int, int], stride: int) -> Pages:
    """The rows of a ring-addressed window, where token `t` is row `slot * stride + t % stride`: page `slot`, once for each
    time the ring wraps. Declare the pool with pages of `stride` tokens. Raises `LayoutError` if `need` is longer than the
    ring.
    """
    start, stop = need
    if not 0 <= start <= stop <= start + stride:
        raise LayoutError(f"ring of {stride} tokens: expected a range that fits, found [{start}, {stop})")
    num_wraps = -(-stop // stride) - start // stride
    return Pages(np.full(num_wraps, slot, dtype=np.int32), start // stride * stride)
