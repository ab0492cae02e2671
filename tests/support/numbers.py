"""Pools of K and V in several formats, with scales: pairs between which numbers are converted, and pairs that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg import Component, Topology
from disagg.core.memory import RawTensor
from disagg.state import paged
from disagg.testing.reference_numbers import FORMATS, convert, same

HEADS, DIMS, LAYERS, NUM_PAGES = 4, {"k": 6, "v": 4}, 3, 24
CANARY = 0xA5
Scales = Mapping[int, Any] | float | None


@dataclass(frozen=True)
class Holder:
    """One instance: how its ranks hold K and V."""

    dtype: str
    tp: int = 1
    page: int = 4
    axes: str = "page token kv_head dim"
    k_scale: Scales = 1.0
    v_scale: Scales = 1.0
    rounding: str | None = "nearest"
    by_head: bool = False

    def scale(self, role: str, layer: int) -> Any:
        """What `[token, head, dim]` is multiplied by."""
        given = {"k": self.k_scale, "v": self.v_scale}[role]
        found = np.array(given[layer] if isinstance(given, Mapping) else given or 1.0)
        return found[:, None] if found.ndim else found


@dataclass(frozen=True)
class Rank:
    topology: Topology
    pools: dict[tuple[str, int], npt.NDArray[Any]]
    component: Component


def make_rank(holder: Holder, tp_rank: int) -> Rank:
    """Pools full of canaries, and their component."""
    topology, form = Topology(tp=holder.tp, tp_rank=tp_rank), FORMATS[holder.dtype]
    pools, tensors = {}, {}
    for layer in range(LAYERS):
        for role, dim in DIMS.items():
            sizes = {"page": NUM_PAGES, "token": holder.page, "kv_head": HEADS // holder.tp, "dim": dim}
            pool = np.full([sizes[axis] for axis in holder.axes.split()], 0, dtype=form.dtype)
            pool.view(np.uint8)[...] = CANARY
            pools[role, layer] = pool
        tensors[layer] = tuple(
            RawTensor(pool.ctypes.data, pool.shape, tuple(s // pool.itemsize for s in pool.strides), holder.dtype, owner=pool)
            for pool in (pools["k", layer], pools["v", layer])
        )
    component = paged.gqa(
        tensors, axes=holder.axes, num_kv_heads=HEADS, topology=topology, k_scale=holder.k_scale, v_scale=holder.v_scale,
        scales_by_head=holder.by_head, rounding=holder.rounding,
    )  # fmt: skip
    return Rank(topology, pools, component)


def place(holder: Holder, rank: Rank, numbers: Mapping[tuple[str, int], Any], pages: Sequence[int], tokens: range) -> None:
    """Write tokens of `numbers`, `[token, head, dim]` by role and layer, into a rank's pools."""
    heads = HEADS // holder.tp
    own = slice(rank.topology.tp_rank * heads, (rank.topology.tp_rank + 1) * heads)
    for key, pool in rank.pools.items():
        plain = np.moveaxis(pool, [holder.axes.split().index(axis) for axis in ("page", "token", "kv_head", "dim")], range(4))
        for token in tokens:
            plain[pages[token // holder.page], token % holder.page] = numbers[key][token, own]


def random_numbers(rng: np.random.Generator, dtype: str, num_tokens: int) -> dict[tuple[str, int], Any]:
    """Random bits of a dtype, `[token, head, dim]` by role and layer."""
    form = FORMATS[dtype]
    return {
        (role, layer): rng.integers(0, 2**form.bits, (num_tokens, HEADS, dim), dtype=np.uint64).astype(form.dtype)
        for role, dim in DIMS.items()
        for layer in range(LAYERS)
    }


def check_moved(
    pair: tuple[Holder, Holder],
    numbers: Mapping[tuple[str, int], Any],
    found: Sequence[Rank],
    pages: Sequence[int],
    tokens: range,
) -> None:
    """Decode's pools have what the reference makes of prefill's numbers in their places, and canaries everywhere else."""
    prefill, decode = pair
    quantized = prefill if prefill.dtype.startswith("float8") else decode
    expected = numbers
    if prefill.dtype != decode.dtype:
        expected = {
            key: convert(
                stored, prefill.dtype, decode.dtype, scale=quantized.scale(*key), rounding=decode.rounding or "nearest"
            )
            for key, stored in numbers.items()
        }
    for rank in found:
        wanted = make_rank(decode, rank.topology.tp_rank)
        place(decode, wanted, expected, pages, tokens)
        for key, pool in rank.pools.items():
            assert same(pool, wanted.pools[key], decode.dtype), (rank.topology, key)


BF16, E4M3 = "bfloat16", "float8_e4m3fn"
BY_LAYER = {0: 0.5, 1: 0.02, 2: 3.0}
BY_HEAD = {layer: [0.03 * (layer + 1), 0.5, 2.0 + layer, 0.1] for layer in range(LAYERS)}
HALVES = {layer: np.full(HEADS, 0.5) for layer in range(LAYERS)}
NHD, HND, LAST = "page token kv_head dim", "page kv_head token dim", "kv_head page dim token"
PAIRS = {
    "quantized": (Holder(BF16), Holder(E4M3, k_scale=BY_LAYER, v_scale=0.25)),
    "TP 2 to 1": (Holder(BF16, tp=2), Holder(E4M3, page=8, k_scale=0.1, v_scale=BY_LAYER)),
    "TP 1 to 4": (Holder("float32", page=8), Holder("float8_e5m2", tp=4, axes=HND, rounding="unbounded")),
    "toward zero": (Holder(BF16, tp=2), Holder(E4M3, page=16, k_scale=0.1, v_scale=BY_LAYER, rounding="toward_zero")),
    "TP 4 to 2": (Holder(BF16, tp=4, page=16, axes=HND), Holder(E4M3, tp=2, axes=NHD, k_scale=0.7, v_scale=0.3)),
    "strided": (Holder("float16", axes=LAST), Holder(E4M3, page=8, k_scale=2.0, v_scale=2.0)),
    "back": (Holder(E4M3, tp=2, k_scale=BY_LAYER, v_scale=0.3), Holder(BF16, page=16, axes=HND)),
    "back, strided": (Holder("float8_e5m2", k_scale=4.0, v_scale=4.0), Holder("float32", tp=2, axes=LAST)),
    "wider": (Holder("float16"), Holder("float32", tp=2, page=8)),
    "other": (Holder(BF16, tp=2, axes=HND, rounding=None), Holder("float16", page=2, rounding=None)),
    "copied": (Holder(E4M3, k_scale=0.5, v_scale=BY_LAYER), Holder(E4M3, tp=2, k_scale=0.5, v_scale=BY_LAYER)),
    "by head": (Holder(BF16), Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True)),
    "by head, TP 4 to 2": (
        Holder(BF16, tp=4, page=8, axes=HND),
        Holder(E4M3, tp=2, axes=NHD, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
    ),
    "by head, TP 1 to 4": (
        Holder("float32", axes=LAST),
        Holder(E4M3, tp=4, page=16, axes=HND, k_scale=HALVES, v_scale=BY_HEAD, by_head=True),
    ),
    "by head, back": (
        Holder("float8_e5m2", tp=2, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(BF16, page=16, axes=HND),
    ),
    "by head, copied": (
        Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(E4M3, tp=2, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
    ),
    "copied, rounding unknown": (Holder(E4M3, k_scale=0.5, rounding=None), Holder(E4M3, k_scale=0.5)),
}

NO_SCALE = Holder(BF16, k_scale=None, v_scale=None)
REFUSED = {
    "one side has no scale": (Holder(BF16), NO_SCALE, "any with scales"),
    "other dtypes without scales": (
        NO_SCALE,
        Holder(E4M3, k_scale=None, v_scale=None),
        r"dtype: (bfloat16 here, float8_e4m3fn|float8_e4m3fn here, bfloat16) at the peer",
    ),
    "other scales": (
        Holder(E4M3, k_scale=0.5),
        Holder(E4M3, k_scale=0.25),
        r"layer 0: scales 0\.(5|25) and 0\.(25|5): .* quantized twice",
    ),
    "other scales of a head": (
        Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(E4M3, tp=2, k_scale=BY_HEAD | {1: [0.06, 0.5, 4.0, 0.1]}, v_scale=HALVES, by_head=True),
        r"layer 1, kv_head 2: scales (3\.0 and 4\.0|4\.0 and 3\.0): .* quantized twice",
    ),
    "by head and by layer": (
        Holder(E4M3, k_scale=0.5, v_scale=0.5),
        Holder(E4M3, k_scale=HALVES, v_scale=HALVES, by_head=True),
        r"scales by (layer|kv_head) and by (kv_head|layer): .* quantized twice",
    ),
    "quantized twice": (
        Holder(E4M3),
        Holder("float8_e5m2"),
        r"float8_e(4m3fn|5m2) and float8_e(5m2|4m3fn): .* quantized twice",
    ),
    "a rounding that is not known": (
        Holder(BF16, rounding=None),
        Holder(E4M3, rounding=None),
        "expected the same dtype, since only the engine itself can make its float8_e4m3fn",
    ),
    "prefill's rounding is not known": (
        Holder(E4M3, rounding=None),
        Holder(BF16),
        "expected the same dtype, since only the engine itself can make its float8_e4m3fn",
    ),
}
