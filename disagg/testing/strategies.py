"""Hypothesis strategies for topologies, ownerships, page sizes, requests, and cases of paged KV."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from disagg.core.topology import Topology
from disagg.layout.ownership import Interval, Intervals, Owned, Periodic, Share
from disagg.testing.reference import Context, KVModel
from disagg.testing.scene import Case, Side

NHD = "page token kv_head dim"
HND = "page kv_head token dim"
AXES = (
    NHD,
    HND,
    "page kv token kv_head dim",
    "page kv kv_head token dim",
    "kv page token kv_head dim",
    "page token kv kv_head dim",
    "page token kv_head kv dim",
    "page kv_head dim token",
)
"""Memory orders of paged KV; no server has the last one."""
DTYPES = ("uint8", "float16", "float32", "float64")


def topologies(*, max_size: int = 4) -> st.SearchStrategy[Topology]:
    """Up to `max_size` in each dimension, seen from any rank."""

    @st.composite
    def build(draw: st.DrawFn) -> Topology:
        dp, pp, cp, tp = (draw(st.integers(1, max_size)) for _ in range(4))
        ep = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
        first = Topology(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)
        return first.at(draw(st.integers(0, first.num_ranks - 1)))

    return build()


@st.composite
def intervals(draw: st.DrawFn, *, size: int) -> Intervals:
    """Any disjoint intervals of an axis of `size`, in any order, touching ones included."""
    edges = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    parts = [Interval(*pair) for pair in itertools.pairwise(edges) if draw(st.booleans())]
    return Intervals(tuple(draw(st.permutations(parts))))


@st.composite
def periodics(draw: st.DrawFn, *, size: int) -> Periodic:
    """Not much longer than an axis of `size`."""
    period = draw(st.integers(1, size + 2))
    return Periodic(draw(st.integers(0, size + 2)), draw(st.integers(1, period)), period)


@st.composite
def shares(draw: st.DrawFn, *, size: int) -> Share:
    parts = draw(st.integers(1, 6))
    return Share(draw(st.integers(0, parts - 1)), parts, draw(st.integers(1, size + 2)))


def ownerships(*, size: int) -> st.SearchStrategy[Owned]:
    return st.one_of(intervals(size=size), periodics(size=size), shares(size=size))


@st.composite
def stages(draw: st.DrawFn, *, layers: Sequence[int], max_stages: int = 3) -> tuple[tuple[int, ...], ...]:
    """`layers` split into stages of at least one layer each, in any order within a stage."""
    num = draw(st.integers(1, min(max_stages, len(layers))))
    cuts = sorted(draw(st.sets(st.integers(1, len(layers) - 1), min_size=num - 1, max_size=num - 1))) if num > 1 else []
    edges = [0, *cuts, len(layers)]
    return tuple(tuple(draw(st.permutations(layers[a:b]))) for a, b in itertools.pairwise(edges))


@st.composite
def sides(draw: st.DrawFn, *, layers: Sequence[int], packable: bool) -> Side:
    cp = draw(st.integers(1, 3))
    return Side(
        tp=draw(st.integers(1, 6)),
        cp=cp,
        stages=draw(stages(layers=layers)),
        page=draw(page_sizes),
        axes=draw(st.sampled_from([axes for axes in AXES if packable or " kv " not in f" {axes} "])),
        context=draw(st.sampled_from(list(Context))),
        num_pages=0,
    )


page_sizes: st.SearchStrategy[int] = st.sampled_from((1, 2, 3, 4, 5, 8, 16))


@st.composite
def requests(draw: st.DrawFn, *, max_tokens: int = 40) -> tuple[int, int]:
    """`(num_tokens, need)`: the length of a request and the first needed token; sometimes no token is needed."""
    num_tokens = draw(st.integers(1, max_tokens))
    return num_tokens, draw(st.one_of(st.just(0), st.integers(0, num_tokens)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two instances of one model, and a request from one to the other."""
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True))
    key_dim = draw(st.integers(1, 5))
    value_dim = draw(st.one_of(st.just(key_dim), st.integers(1, 5)))
    num_tokens, need = draw(requests())
    model = KVModel(
        num_kv_heads=draw(st.integers(1, 6)), dims={"k": key_dim, "v": value_dim}, dtype=draw(st.sampled_from(DTYPES))
    )
    packable = key_dim == value_dim
    return Case(
        model=model,
        source=draw(sides(layers=layers, packable=packable)),
        destination=draw(sides(layers=layers, packable=packable)),
        num_tokens=num_tokens,
        need=need,
        source_first=draw(st.integers(0, need)),
        seed=draw(st.integers(0, 2**16)),
    )


def pairwise(settings: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations of `settings` that contain every pair of values of two settings. Greedy and deterministic."""
    names = list(settings)
    rng = np.random.default_rng(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(settings[names[a]]))
        for j in range(len(settings[names[b]]))
    }
    found: list[dict[str, Any]] = []
    while missing:
        best: tuple[int, ...] = ()
        covered: set[tuple[int, int, int, int]] = set()
        a, i, b, j = min(missing)
        for _ in range(30):
            row = [int(rng.integers(len(settings[name]))) for name in names]
            row[a], row[b] = i, j
            pairs = {(x, row[x], y, row[y]) for x, y in itertools.combinations(range(len(names)), 2)} & missing
            if len(pairs) > len(covered):
                best, covered = tuple(row), pairs
        missing -= covered
        found.append({name: settings[name][index] for name, index in zip(names, best, strict=True)})
    return found
