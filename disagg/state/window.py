"""Sliding-window KV: its own pool and page ids, of which only the window's tokens are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disagg.core.errors import LayoutError
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state import paged
from disagg.state.declare import Rule, all_tokens


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
    """K and V of sliding-window layers: as `paged.gqa`, under a name of its own. Say `needed(...)` to `receiver`."""
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
    """The tokens that decode needs of `num_tokens`: `[max(prefix, num_tokens - window), num_tokens)`.

    A model whose next token attends to itself and the `window - 1` before it needs `window - 1`.
    """
    return min(max(prefix, num_tokens - window, 0), num_tokens), num_tokens


def ring_rows(slot: int, *, need: tuple[int, int], stride: int) -> Pages:
    """The rows of a ring-addressed window: token `t` is row `slot * stride + t % stride`, so the ring is one page of
    `stride` tokens that comes round again. Declare the pool with pages of `stride` tokens.

    Raises `LayoutError` where `need` is longer than the ring, since its tokens would overwrite each other.
    """
    start, stop = need
    if not 0 <= start <= stop <= start + stride:
        raise LayoutError(f"ring of {stride} tokens: expected a range that fits, found [{start}, {stop})")
    turns = -(-stop // stride) - start // stride
    return Pages(np.full(turns, slot, dtype=np.int32), start // stride * stride)
