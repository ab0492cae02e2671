"""What SGLang's `KVArgs` do not say about a rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.core.memory import CPU, Device
from disagg.core.topology import Topology
from disagg.integrations.identity import component_name
from disagg.state.declare import Block


class Buffer(NamedTuple):
    pointer: int
    nbytes: int
    row_nbytes: int


@dataclass(frozen=True, kw_only=True)
class ScaleFacts:
    """Block scales beside K and V: `nbytes` of each per head and `granule` tokens."""

    granule: int
    nbytes: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LatentScaleFacts:
    """Block scales beside latents, `nbytes` per token. `KVArgs` do not list their `buffers`, one per layer."""

    nbytes: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, kw_only=True)
class PageFacts:
    """Paged tensors of one pool. `layers` are numbers in the model, in the pool's order.

    With `num_kv_heads` (the model's, not this rank's) a layer has a K and a V of `dims` elements per head, else one latent
    of `dims[0]` elements. `kv_scales` are set if peers may hold K and V in another dtype; `rounding` is that of
    `disagg.state.declare.Role`.
    """

    layers: tuple[int, ...]
    dtype: str
    dims: tuple[int, ...]
    num_kv_heads: int | None = None
    scales: ScaleFacts | None = None
    latent_scales: LatentScaleFacts | None = None
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    rounding: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """One layer's tensor of recurrent state, with a slot per request. `axes` and `shape` describe a slot on this rank.
    Tensor-parallel ranks divide the axis `sharded`, each of `blocks` by itself; with `None` all have the same bytes.
    """

    role: str
    layer: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    sharded: str | None = None
    blocks: tuple[Block, ...] = ()
    component: str = "ssm"


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Index keys of sparse attention: `key_dim` elements in FP8 per `tokens_per_key` tokens, with a 4-byte scale. `tail` is
    the size of a request's ring of tokens without a key, or 0.
    """

    layers: tuple[int, ...]
    key_dim: int
    tokens_per_key: int = 1
    tail: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressedFacts:
    """QSA's compressed index keys: `dim` elements per `ratio` tokens, and per request a ring of the last `ratio` tokens'
    keys. All layers share the ring's positions. Every rank has all of it.
    """

    layers: tuple[int, ...]
    dim: int
    ratio: int
    dtype: str
    ring_dtype: str


@dataclass(frozen=True, kw_only=True)
class DraftFacts:
    """The pool of one draft runner. Its pages have the model's ids: those of sliding layers (`window_kv`) the windows' ids,
    or with `has_full_ids` full attention's. They need `window` tokens before the next one. `KVArgs` list only the first
    runner's index keys.
    """

    kv: PageFacts | None = None
    buffers: tuple[Buffer, ...] = ()
    window_kv: PageFacts | None = None
    window_buffers: tuple[Buffer, ...] = ()
    window: int | None = None
    has_full_ids: bool = False
    scale_buffers: tuple[Buffer, ...] = ()
    window_scale_buffers: tuple[Buffer, ...] = ()
    index: IndexFacts | None = None
    compressed: CompressedFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank's `KVArgs` lack.

    Layers of `window_kv` need `window` tokens before the next one. `windows` has this number for layers of `kv` that attend
    to a window, although their pages have all tokens. With `reuses_pages` decode keeps pages for later requests, so it needs
    all tokens. `by_layer`: each layer of `kv` is a component. `index_k` are index keys of one vector per token.
    """

    topology: Topology
    device: Device = CPU
    kv: PageFacts | None = None
    drafts: tuple[DraftFacts, ...] = ()
    window_kv: PageFacts | None = None
    window: int | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    by_layer: bool = False
    reuses_pages: bool = False
    slots: tuple[SlotFacts, ...] = ()
    index: IndexFacts | None = None
    index_k: PageFacts | None = None
    compressed: CompressedFacts | None = None

    def kv_name(self, layer: int) -> str:
        kind = "mla" if self.kv is not None and self.kv.num_kv_heads is None else "kv"
        return component_name(kind, layer if self.by_layer else None)


def draft_name(number: int, kind: str = "") -> str:
    """The component of a draft runner's pages, or of its state of another `kind`."""
    return f"draft{kind and '_'}{kind}{f'.{number}' if number else ''}"
