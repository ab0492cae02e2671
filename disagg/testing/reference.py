"""Reference implementation of transfers of paged KV, from global coordinates.

Independent of the planner: sharding uses the closed formulas of models and servers. The value of a byte depends only on its
coordinates. `fill` writes a source rank's share; `expected` returns a destination rank's pools after the transfer.

    >>> model = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
    >>> rank = KVRank(tp=2, tp_rank=1, layers=(0, 1), page_size=4, num_pages=8)
    >>> pools = allocate(model, rank)
    >>> fill(model, rank, pools, PageList((5, 2)), num_tokens=7)
    >>> wanted = expected(model, rank, PageList((5, 2)), num_tokens=7, need=(0, 7))
    >>> first_difference(wanted, pools) is None
    True
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CANARY = 0xA5
"""The byte of memory that must not be written. No content byte has this value, so a missing byte always shows."""

STALE = 0x5A
"""The byte of a source pool outside the request."""

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Pool = npt.NDArray[Any]
Pools = dict[int, tuple[Pool, ...]]
"""By layer id: `(k, v)`, or one tensor that packs both along the axis `kv`."""

_TOKEN_STEP = np.uint64(0x9E3779B97F4A7C15)
_HEAD_STEP = np.uint64(0xC2B2AE3D27D4EB4F)
_WORD_STEP = np.uint64(0x165667B19E3779F9)


def _key(component: str, role: str, layer: int) -> np.uint64:
    name = f"{component}\0{role}\0{layer}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


def _mix(words: Words) -> Words:
    """The finaliser of SplitMix64, in place."""
    spare = np.empty_like(words)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(words, np.uint64(shift), out=spare)
        np.bitwise_xor(words, spare, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    return words


def _avoid_canary(content: Bytes) -> Bytes:
    content[content == CANARY] = CANARY ^ 0xFF
    return content


def value(component: str, role: str, layer: int, *, token: npt.ArrayLike, head: npt.ArrayLike, offset: npt.ArrayLike) -> Bytes:
    """The byte at `offset` of a token's row of `head` (or channel); the three arguments broadcast.

    It is byte `offset % 8`, little-endian, of a 64-bit word hashed from the coordinates; never `CANARY`.
    """
    tokens, heads, offsets = (np.array(each, dtype=np.uint64, ndmin=1) for each in (token, head, offset))
    eight = np.uint64(8)
    words = _mix(tokens * _TOKEN_STEP + heads * _HEAD_STEP + offsets // eight * _WORD_STEP + _key(component, role, layer))
    content = _avoid_canary(((words >> (offsets % eight * eight)) & np.uint64(0xFF)).astype(np.uint8))
    return content.reshape(np.broadcast_shapes(np.shape(token), np.shape(head), np.shape(offset)))


def rows(
    component: str, role: str, layer: int, *, tokens: Sequence[int] | npt.NDArray[np.int64], heads: range, nbytes: int
) -> Bytes:
    """`value` of every byte of whole rows, `[tokens, heads, nbytes]`."""
    num_words = -(-nbytes // 8)
    inputs = np.arange(num_words, dtype=np.uint64) * _WORD_STEP + _key(component, role, layer)
    per_head = np.arange(heads.start, heads.stop, dtype=np.uint64) * _HEAD_STEP
    per_token = np.asarray(tokens, dtype=np.uint64) * _TOKEN_STEP
    words = _mix(per_token[:, None, None] + per_head[None, :, None] + inputs)
    content = words.astype("<u8", copy=False).view(np.uint8)
    return _avoid_canary(np.ascontiguousarray(content[:, :, :nbytes]))


class Context(enum.Enum):
    """The tokens that rank `c` of `C` context-parallel ranks holds."""

    WHOLE = "whole"
    PAGE_BLOCKS = "page blocks"
    """`n // C` consecutive pages of `n`; the first `n % C` ranks hold one more."""
    TOKENS_IN_TURN = "tokens in turn"
    """Rank `t % C` holds token `t`."""
    PAGES_IN_TURN = "pages in turn"
    """Rank `p % C` holds page `p`."""


@dataclass(frozen=True, kw_only=True)
class KVModel:
    """Unsharded paged KV; `dims` are elements per head and token, by role."""

    num_kv_heads: int
    dims: Mapping[str, int]
    dtype: str = "uint16"
    component: str = "kv"

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class KVRank:
    """One rank and its pools. `axes`: `page`, `token`, `kv_head`, `dim`, and `kv` where K and V share a tensor. Without
    `kv_head` there is one row per token, the same on every rank (MLA latent).
    """

    layers: tuple[int, ...]
    page_size: int
    num_pages: int
    axes: str = "page token kv_head dim"
    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    context: Context = Context.WHOLE

    @property
    def packed(self) -> bool:
        return "kv" in self.axes.split()


@dataclass(frozen=True)
class PageList:
    """The pages that a rank lists for a request; the first holds the rank's first token at or after `first_token`."""

    ids: tuple[int, ...]
    first_token: int = 0


def heads_of(num_kv_heads: int, *, tp: int, tp_rank: int) -> range:
    """The global heads of a rank, in memory order."""
    if num_kv_heads % tp == 0 or tp % num_kv_heads == 0:
        replicas, num_heads = max(1, tp // num_kv_heads), max(1, num_kv_heads // tp)
        start = tp_rank // replicas * num_heads
        return range(start, start + num_heads)
    start = tp_rank * num_kv_heads // tp
    return range(start, max(start + 1, (tp_rank + 1) * num_kv_heads // tp))


def tokens_of(rank: KVRank, num_tokens: int) -> npt.NDArray[np.int64]:
    """The tokens that `rank` holds of a request, in memory order."""
    everything: npt.NDArray[np.int64] = np.arange(num_tokens, dtype=np.int64)
    mine: npt.NDArray[np.int64]
    match rank.context:
        case Context.WHOLE:
            mine = everything
        case Context.PAGE_BLOCKS:
            num_pages = -(-num_tokens // rank.page_size)
            base, rest = num_pages // rank.cp, num_pages % rank.cp
            first = rank.cp_rank * base + min(rank.cp_rank, rest)
            last = first + base + (1 if rank.cp_rank < rest else 0)
            mine = everything[first * rank.page_size : last * rank.page_size]
        case Context.TOKENS_IN_TURN:
            mine = everything[rank.cp_rank :: rank.cp]
        case Context.PAGES_IN_TURN:
            mine = everything[everything // rank.page_size % rank.cp == rank.cp_rank]
    return mine


def pages_needed(rank: KVRank, *, num_tokens: int, first_token: int = 0) -> int:
    """How many pages `rank` must list for its tokens from `first_token` on."""
    tokens = tokens_of(rank, num_tokens)
    first_page = int((tokens < first_token).sum()) // rank.page_size
    return max(0, -(-len(tokens) // rank.page_size) - first_page)


def pool_shape(model: KVModel, rank: KVRank, role: str) -> tuple[int, ...]:
    sizes = {
        "page": rank.num_pages,
        "kv": 2,
        "token": rank.page_size,
        "kv_head": len(heads_of(model.num_kv_heads, tp=rank.tp, tp_rank=rank.tp_rank)),
        "dim": model.dims[role],
    }
    return tuple(sizes[axis] for axis in rank.axes.split())


def allocate(model: KVModel, rank: KVRank, *, byte: int = CANARY) -> Pools:
    roles = [next(iter(model.dims))] if rank.packed else list(model.dims)
    return {layer: tuple(_blank(pool_shape(model, rank, role), model.dtype, byte) for role in roles) for layer in rank.layers}


def _blank(shape: tuple[int, ...], dtype: str, byte: int) -> Pool:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(nbytes, byte, dtype=np.uint8).view(dtype).reshape(shape)


def fill(model: KVModel, rank: KVRank, pools: Pools, pages: PageList, *, num_tokens: int) -> None:
    """Write every token of the rank that has a page in `pages`."""
    tokens, index = _listed(rank, pages, num_tokens)
    ids = np.asarray((*pages.ids, -1), dtype=np.int64)
    present = (index >= 0) & (index < len(pages.ids))
    present &= ids[np.where(present, index, -1)] >= 0
    _write(model, rank, pools, tokens=tokens, chosen=present, page=ids[np.where(present, index, -1)])


def expected(
    model: KVModel, rank: KVRank, pages: PageList, *, num_tokens: int, need: tuple[int, int], byte: int = CANARY
) -> Pools:
    """The whole pools of a destination rank after the tokens `need` arrived. Raises `IndexError` if one of them has no page."""
    pools = allocate(model, rank, byte=byte)
    tokens, index = _listed(rank, pages, num_tokens)
    chosen = (tokens >= need[0]) & (tokens < need[1])
    if (index[chosen] < 0).any():
        raise IndexError("a needed token lies before the listed pages")
    ids = np.asarray(pages.ids, dtype=np.int64)
    page = np.zeros(len(tokens), dtype=np.int64)
    page[chosen] = ids[index[chosen]]
    if (page < 0).any():
        raise IndexError("the page of a needed token is a sentinel")
    _write(model, rank, pools, tokens=tokens, chosen=chosen, page=page)
    return pools


def _listed(rank: KVRank, pages: PageList, num_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rank's tokens, and the index of each one's page, which may be outside the list."""
    tokens = tokens_of(rank, num_tokens)
    local = np.arange(len(tokens), dtype=np.int64)
    first_page = int((tokens < pages.first_token).sum()) // rank.page_size
    return tokens, local // rank.page_size - first_page


def _write(
    model: KVModel,
    rank: KVRank,
    pools: Pools,
    *,
    tokens: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.bool_],
    page: npt.NDArray[np.int64],
) -> None:
    if not chosen.any():
        return
    within = np.arange(len(tokens), dtype=np.int64) % rank.page_size
    heads = heads_of(model.num_kv_heads, tp=rank.tp, tp_rank=rank.tp_rank) if "kv_head" in rank.axes.split() else range(1)
    for layer, role, view in _views(model, rank, pools):
        nbytes = model.dims[role] * model.itemsize
        content = rows(model.component, role, layer, tokens=tokens[chosen], heads=heads, nbytes=nbytes)
        view[page[chosen], within[chosen]] = content.view(view.dtype)


def _views(model: KVModel, rank: KVRank, pools: Pools) -> Iterator[tuple[int, str, Pool]]:
    """Every (layer, role) as a view `[page, token, head, dim]` of unsigned integers."""
    axes = rank.axes.split()
    plain = [axis for axis in axes if axis != "kv"]
    order = [plain.index(axis) for axis in ("page", "token", "kv_head", "dim") if axis in plain]
    for layer, tensors in pools.items():
        for number, role in enumerate(model.dims):
            pool = np.moveaxis(tensors[0], axes.index("kv"), 0)[number] if rank.packed else tensors[number]
            view = pool.view(f"u{model.itemsize}").transpose(order)
            yield layer, role, view if "kv_head" in plain else view[:, :, None, :]


def first_difference(wanted: Pools, found: Pools) -> str | None:
    """Describe the first element that differs; `None` if there is none."""
    if list(wanted) != list(found):
        return f"layers: expected {list(wanted)}, found {list(found)}"
    for layer in wanted:
        for number, (ours, theirs) in enumerate(zip(wanted[layer], found[layer], strict=True)):
            unsigned = f"u{ours.dtype.itemsize}"
            differs = ours.view(unsigned) != theirs.view(unsigned)
            if differs.any():
                at = np.unravel_index(int(differs.argmax()), ours.shape)
                return (
                    f"layer {layer}, tensor {number}, {int(differs.sum())} of {differs.size} elements, the first at "
                    f"{tuple(map(int, at))}: expected {ours.view(unsigned)[at]:#x}, found {theirs.view(unsigned)[at]:#x}"
                )
    return None
