"""What SGLang's `KVArgs` do not say about a rank's memory, and what its pools do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.core.memory import CPU, Device
from disagg.core.topology import Topology
from disagg.integrations.identity import component_name
from disagg.state.declare import Block


class Buffer(NamedTuple):
    """Memory of `nbytes` from `pointer`, in rows of `row_nbytes`."""

    pointer: int
    nbytes: int
    row_nbytes: int


@dataclass(frozen=True, kw_only=True)
class ScaleFacts:
    """Block scales beside K and V: `nbytes` of each per head and `granule` tokens, which follow each other in memory."""

    granule: int
    nbytes: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LatentScaleFacts:
    """Block scales beside latents, `nbytes` per token, in `buffers`, which `KVArgs` do not list: one per layer."""

    nbytes: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, kw_only=True)
class PageFacts:
    """Paged tensors of one pool. `layers` are this rank's, by their numbers in the whole model, in the order of the pool.

    With `num_kv_heads` there are a K and a V per layer, of `dims` elements per head; these are the model's heads, not this
    rank's. Without (`None`) there is one latent per layer, of `dims[0]` elements.

    `kv_scales` are those of K and V by layer, if peers may hold the numbers in another dtype; `rounding` as in
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
    """One tensor of recurrent state: one layer, with a slot per request.

    `axes` and `shape` describe a slot on this rank. The axis `sharded` is divided over tensor-parallel ranks, each of `blocks`
    by itself. `None`: every rank has the same bytes. `component` is that of the tensor: some have other layers.
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
    """Index keys of sparse attention: one key per `tokens_per_key` tokens, of `key_dim` elements in FP8 with a 4-byte scale.

    `tail` is the number of tokens in a request's ring of tokens that have no key yet, 0 without one.
    """

    layers: tuple[int, ...]
    key_dim: int
    tokens_per_key: int = 1
    tail: int = 0
    tail_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class CompressedFacts:
    """Compressed index keys of QSA: one of `dim` elements per `ratio` tokens, and per request a ring of the keys of the last
    `ratio` tokens, with their positions, which all layers share. Every rank has all of it.
    """

    layers: tuple[int, ...]
    dim: int
    ratio: int
    dtype: str
    ring_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class RingFacts:
    """Rows of a window that are addressed by request and position: `row_nbytes` bytes a token, the same on every rank."""

    layers: tuple[int, ...]
    row_nbytes: int


@dataclass(frozen=True, kw_only=True)
class DraftFacts:
    """The pool of one draft runner. Its pages have the model's ids.

    `kv` are the pages of full attention, in `buffers`. `window_kv` are those of its sliding layers, in `window_buffers`, with
    the ids of the model's sliding windows, or those of full attention with `has_full_ids`. `window` is the number of tokens
    before the next one that they need. `KVArgs` list the index keys of the first runner only.
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
    """Everything about one rank's pools that its `KVArgs` lack.

    `window` is the number of tokens before the next one that the layers of `window_kv` need. `windows` are those of the layers
    of `kv` to which SGLang applies a window, although their pages have all tokens. With `reuses_pages` decode keeps these pages
    for later requests, and so needs all tokens of them. `by_layer`: each layer of `kv` is a component of its own.

    `index_k` are index keys of one vector per token.
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
    ring: RingFacts | None = None
    index_k: PageFacts | None = None
    compressed: CompressedFacts | None = None

    def kv_name(self, layer: int) -> str:
        """The component that has the pages of a layer of `kv`, by the names that all integrations share."""
        kind = "mla" if self.kv is not None and self.kv.num_kv_heads is None else "kv"
        return component_name(kind, layer if self.by_layer else None)


def draft_name(number: int, kind: str = "") -> str:
    """The component that has state of a draft runner: its pages, or another kind of state."""
    return f"draft{kind and '_'}{kind}{f'.{number}' if number else ''}"
