"""Valid messages that cost the rank that reads them as much as possible: huge tables, and parts that are repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from disagg.layout.agreement import LocalRank
from disagg.protocol.messages import Filled, PagesRow, Part, Reserve, SlotsFilled, encode
from harness.fuzz.samples import hello_of

Tree = dict[str, Any]
SIZES = (10, 1_000, 30_000, 300_000, 1_000_000)
"""How often something is repeated. A hello may have 64 MiB."""


def hostile_table(rng: random.Random, table: bytes) -> bytes:
    """A layout table that takes long to read or to compare: many intervals, many ranks, deep nesting, or long lists."""
    tree: Tree = msgpack.unpackb(table, strict_map_key=False)
    count = rng.choice(SIZES)
    attack = rng.choice(
        (_many_intervals, _wide_layers, _many_ranks, _many_tensors, _left_out, _large_axes, _long_period, _many_shares)
    )
    if rng.random() < 0.2:
        return _nested(rng, count)
    attack(tree, count)
    return bytes(msgpack.packb(tree))


def hostile_hello(rng: random.Random, local: LocalRank, *, address: str, epoch: int) -> bytes:
    """A hello with a hostile table."""
    tree: Tree = msgpack.unpackb(hello_of(local, "peer", address=address, epoch=epoch), strict_map_key=False)
    tree["table"] = hostile_table(rng, tree["table"])
    return bytes(msgpack.packb(tree))


def hostile_slots(rng: random.Random, reserve: Reserve, loans: Sequence[int]) -> bytes:
    """Slots for an open request: their stream has the same part many times, or there are many slots of one stream."""
    need = reserve.need["kv"]
    part = Part("kv", tuple([0] * rng.choice((1, 1, 1000))), None, *need)
    parts = (part,) * rng.choice((1, 100, 10_000, 65_536))
    slots = loans[:4] if len(parts) > 100 else loans
    filled = tuple(Filled(loan, rng.randrange(1 << 20), parts, 0, 16) for loan in slots)
    identity: Tree = {"request_id": reserve.request_id, "attempt": reserve.attempt, "nonce": reserve.nonce}
    return encode(SlotsFilled(**identity, slots=filled))


def hostile_reserve(rng: random.Random, reserve: Reserve) -> bytes:
    """A reserve with millions of pages, or with many components."""
    pages = PagesRow(bytes(4 * rng.choice(SIZES)), 0)
    rows = {"kv": pages} if rng.random() < 0.5 else {f"kv{n}": PagesRow(b"", 0) for n in range(rng.choice((100, 60_000)))}
    changes = {"request_id": rng.randbytes(16), "rows": rows, "need": dict.fromkeys(rows, (0, 2**31))}
    tree = {name: getattr(reserve, name) for name in reserve.__struct_fields__} | changes
    return encode(Reserve(**tree))


def _axes(tree: Tree) -> Sequence[Tree]:
    return [axis for rank in tree["ranks"] for part in rank["components"] for one in part["tensors"] for axis in one["axes"]]


def _set_owned(tree: Tree, name: str, owned: Tree) -> None:
    for axis in _axes(tree):
        if axis["name"] == name:
            axis["owned"] = owned


def _many_intervals(tree: Tree, count: int) -> None:
    parts = [[2 * n, 2 * n + 1] for n in range(count)]
    _set_owned(tree, "token", {"form": "intervals", "parts": parts})


def _wide_layers(tree: Tree, count: int) -> None:
    _set_owned(tree, "layer", {"form": "intervals", "parts": [[0, min(count, 2**14)]]})


def _large_axes(tree: Tree, count: int) -> None:
    for axis in _axes(tree):
        if axis["size"] is not None:
            axis["size"] = 2**24
            axis["owned"] = {"form": "intervals", "parts": [[2 * n, 2 * n + 1] for n in range(count)]}


def _long_period(tree: Tree, count: int) -> None:
    _set_owned(tree, "token", {"form": "periodic", "offset": 0, "run": 1, "period": count})


def _many_ranks(tree: Tree, count: int) -> None:
    tree["ranks"] = tree["ranks"][:1] * min(count, 2048)
    tree["sizes"] = {"tp": len(tree["ranks"])}


def _many_tensors(tree: Tree, count: int) -> None:
    component = tree["ranks"][0]["components"][0]
    component["tensors"] = [{**component["tensors"][0], "role": f"r{n}"} for n in range(min(count, 30_000))]


def _left_out(tree: Tree, count: int) -> None:
    """Tensors of a component that the other side need not have, each of thousands of layers."""
    layers = {"name": "layer", "size": None, "owned": {"form": "intervals", "parts": [[0, 2**14]]}}
    tensors = [{"role": f"r{n}", "dtype": "bool", "axes": [layers]} for n in range(min(count, 30_000))]
    for rank in tree["ranks"]:
        rank["components"].append({"name": "x", "rows": "slot", "tensors": tensors, "optional": True})


def _many_shares(tree: Tree, count: int) -> None:
    _set_owned(tree, "token", {"form": "share", "index": 0, "parts": 2_000 * count, "granule": 1})


def _nested(rng: random.Random, depth: int) -> bytes:
    opening: Callable[[], bytes] = lambda: rng.choice((b"\x91", b"\x81\xa1x"))  # noqa: E731
    return b"".join(opening() for _ in range(depth)) + b"\xc0"
