"""Damages valid inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

BOUNDARIES = (0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "kv",
    "\x00",
    "ü" * 300,
    b"",
    b"\xff" * 16,
    [],
    {},
    [[]],
    [0] * 300,
)


def damage(rng: random.Random, valid: Sequence[bytes]) -> bytes:
    """A damaged copy of a random valid input; a few stay valid."""
    data = rng.choice(valid)
    draw = rng.random()
    if draw < 0.45:
        try:
            tree = msgpack.unpackb(data, strict_map_key=False, raw=False, max_ext_len=0)
        except (ValueError, TypeError, msgpack.UnpackException):
            return damage_bytes(rng, data, valid)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            tree = damage_tree(rng, tree)
        try:
            return bytes(msgpack.packb(tree, use_bin_type=True))
        except (ValueError, TypeError, OverflowError):
            return damage_bytes(rng, data, valid)
    if draw < 0.9:
        return damage_bytes(rng, data, valid)
    return rng.randbytes(rng.choice((0, 1, 3, 17, 200)))


def damage_bytes(rng: random.Random, data: bytes, valid: Sequence[bytes]) -> bytes:
    """Change, remove or repeat a few bytes, or insert some from another valid input."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if found:
                found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1 if found:
                found[min(at, len(found) - 1)] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF))
            case 2:
                del found[at : at + rng.choice((1, 4, 64))]
            case 3:
                found[at:at] = found[at : at + rng.choice((1, 8, 64))]
            case 4:
                other = rng.choice(valid)
                start = rng.randrange(len(other) + 1)
                found[at:at] = other[start : start + rng.choice((1, 8, 64))]
            case _:
                found[at:at] = rng.randbytes(rng.choice((1, 4)))
    return bytes(found)


def damage_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove or repeat one value somewhere in the tree."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        changed = dict(tree)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("x", "type", key))] = rng.choice(ODD)
            case _:
                changed[key] = damage_tree(rng, tree[key])
        return changed
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        match rng.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree[:at] + [tree[at]] * rng.choice((2, 50)) + tree[at:]
            case _:
                return [*tree[:at], damage_tree(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, bytes) and len(tree) > 20 and rng.random() < 0.8:
        return damage(rng, [tree])
    if isinstance(tree, int) and rng.random() < 0.8:
        return rng.choice((*BOUNDARIES, tree + 1, max(tree - 1, 0)))
    return rng.choice((*ODD, *BOUNDARIES))
