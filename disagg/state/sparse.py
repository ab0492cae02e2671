"""Sparse attention: index keys with their scales in one page (NSA, DSA), their open pools, and compressed KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.memory import RawTensor, raw_tensor
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state.declare import Role, Rule, all_tokens, by_layer, declare, whole


def index_roles(*, key_nbytes: int = 128, scale_nbytes: int = 4, tokens_per_key: int = 1) -> tuple[Role, ...]:
    """One key and one scale, in bytes, per `tokens_per_key` tokens. Every rank owns them whole."""
    sizes = {"key": key_nbytes, "scale": scale_nbytes}
    return tuple(
        Role(name=name, axes="page token byte", inner={"byte": whole(size)}, dtype="uint8", granule=tokens_per_key)
        for name, size in sizes.items()
        if size
    )


def compressed_roles(dim: int, *, ratio: int, dtype: str | None) -> tuple[Role]:
    """One entry of `dim` elements per `ratio` tokens. Every rank owns it whole."""
    return (Role(name="latent", axes="page token dim", inner={"dim": whole(dim)}, dtype=dtype, granule=ratio),)


def index_keys(
    pages: Mapping[int, Any],
    *,
    page_size: int,
    topology: Topology,
    key_nbytes: int = 128,
    scale_nbytes: int = 4,
    tokens_per_key: int = 1,
    name: str = "index",
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
    optional: bool = False,
) -> Component:
    """Index keys, the same on every rank, from tensors `[page, bytes]` by layer.

    A page has `page_size / tokens_per_key` keys of `key_nbytes`, *then* as many scales of `scale_nbytes` (0: none). Leave
    out layers that use another layer's top-k. Raises `ConfigError` if pages are too small, have gaps, or end within a key's
    tokens.
    """
    roles = index_roles(key_nbytes=key_nbytes, scale_nbytes=scale_nbytes, tokens_per_key=tokens_per_key)
    if page_size % tokens_per_key:
        raise ConfigError(f"index pages: expected a page_size that is a multiple of {tokens_per_key}, found {page_size}")
    bound = _halves(roles, pages, page_size // tokens_per_key, name)
    return declare(
        name, bound, rows="pages", topology=topology, layers_by_stage=layers_by_stage, tokens=tokens, optional=optional
    )


def index_tail(
    rings: Mapping[int, Any],
    *,
    tail: int,
    topology: Topology,
    key_nbytes: int = 128,
    scale_nbytes: int = 4,
    name: str = "index_tail",
    layers_by_stage: Sequence[Sequence[int]] | None = None,
) -> Component:
    """The open pool of pooled index keys, from tensors `[ring, bytes]` by layer.

    A ring has `tail` keys, then `tail` scales. Token `t` is at `t % tail`. `tail` may differ between the sides. Of `n`
    tokens, decode needs `open_pool(n, tokens_per_key)`, in the rows `window.ring_rows(ring, need=..., stride=tail)`. Raises
    `ConfigError` if rings are too small or have gaps.
    """
    bound = _halves(index_roles(key_nbytes=key_nbytes, scale_nbytes=scale_nbytes), rings, tail, name)
    return declare(name, bound, rows="pages", topology=topology, layers_by_stage=layers_by_stage)


def open_pool(num_tokens: int, tokens_per_key: int) -> tuple[int, int]:
    """The tokens without a pooled key: the last `num_tokens % tokens_per_key`."""
    return num_tokens - num_tokens % tokens_per_key, num_tokens


def compressed(
    tensors: Mapping[int, Any],
    *,
    ratio: int,
    dim: int,
    topology: Topology,
    name: str,
    axes: str = "page token dim",
    dtype: str | None = None,
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
    optional: bool = False,
) -> Component:
    """Compressed KV of one kind (DeepSeek-V4: ratio 4 or 128): `dim` elements per `ratio` tokens, the same on every rank. A
    tensor with `n` entries per page has pages of `n * ratio` tokens. Raises `ConfigError` as `paged.gqa` does.
    """
    roles = [role.of(tensors, axes=axes) for role in compressed_roles(dim, ratio=ratio, dtype=dtype)]
    return declare(
        name, roles, rows="pages", topology=topology, layers_by_stage=layers_by_stage, tokens=tokens, optional=optional
    )


def _halves(roles: Sequence[Role], pages: Mapping[int, Any], num_keys: int, name: str) -> list[Role]:
    bound, start = [], 0
    total = num_keys * sum(role.inner["byte"].size for role in roles)
    for role in roles:
        nbytes = role.inner["byte"].size
        part = partial(_part, start=start, num_keys=num_keys, nbytes=nbytes, total=total)
        bound.append(role.of(by_layer(pages, part, what=f"component {name!r}, tensor {role.name!r}")))
        start += num_keys * nbytes
    return bound


def _part(page: Any, start: int, num_keys: int, nbytes: int, total: int) -> RawTensor:
    """`num_keys` runs of `nbytes`, from byte `start` of each page, as `[page, key, byte]`."""
    raw = raw_tensor(page)
    if len(raw.shape) != 2 or raw.shape[1] * raw.itemsize < total:
        found = f"shape {raw.shape} of {raw.itemsize} bytes each"
        raise ConfigError(f"index pages: expected [page, at least {total} bytes], found {found}")
    if raw.strides[1] != 1:
        raise ConfigError(f"index pages: expected consecutive bytes in a page, found strides {raw.strides} of elements")
    strides = (raw.strides[0] * raw.itemsize, nbytes, 1)
    return RawTensor(raw.pointer + start, (raw.shape[0], num_keys, nbytes), strides, "uint8", raw.device, raw.owner)
