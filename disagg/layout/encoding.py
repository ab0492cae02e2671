"""Encoding of layouts as bytes, for peers and for digests."""

from __future__ import annotations

import operator

import msgspec

from disagg.core.errors import LayoutError


def encode(value: object) -> bytes:
    """MessagePack. Equal values give equal bytes. Integers may be NumPy's; raises `LayoutError` for other types."""
    return msgspec.msgpack.encode(value, enc_hook=_plain_integer)


def _plain_integer(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"layouts: expected integers, found {value!r}, a {type(value).__name__}") from None
