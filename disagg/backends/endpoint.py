"""Endpoints, which backends send to their peers, and the look-up of addresses in registered regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.errors import ConfigError, NotRegistered, RemoteProtocolError
from disagg.core.memory import Device, MemoryRegion, RemoteRegion

# Address and size stay below 2**63 each, so their sum fits uint64.
_Bounded = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


MAX_REGIONS = 1 << 16


class _RegionRow(msgspec.Struct, frozen=True, array_like=True):
    address: _Bounded
    nbytes: _Bounded
    device: Annotated[str, msgspec.Meta(pattern="^(cpu|cuda(:[0-9]{1,4})?)$")]


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's own descriptor, and the regions it serves."""

    backend: str
    descriptor: bytes
    regions: Annotated[tuple[_RegionRow, ...], msgspec.Meta(max_length=MAX_REGIONS)]


_ENDPOINT = msgspec.msgpack.Decoder(Endpoint)
"""Created at import: see `Adapter`."""


def encode_endpoint(backend: str, descriptor: bytes, regions: Sequence[MemoryRegion | RemoteRegion]) -> bytes:
    rows = tuple(_RegionRow(r.address, r.nbytes, str(r.device)) for r in regions)
    return msgspec.msgpack.encode(Endpoint(backend, descriptor, rows))


def decode_endpoint(backend: str, data: bytes) -> tuple[bytes, tuple[RemoteRegion, ...]]:
    """Raises `RemoteProtocolError` for bytes that are not an endpoint of this backend."""
    try:
        endpoint = _ENDPOINT.decode(data)
        regions = tuple(RemoteRegion(r.address, r.nbytes, Device.parse(r.device)) for r in endpoint.regions)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise RemoteProtocolError(
            f"endpoint: expected one of backend {backend!r}, found {len(data)} other bytes: {error}"
        ) from error
    if endpoint.backend != backend:
        raise RemoteProtocolError(f"endpoint: expected backend {backend!r}, found {endpoint.backend!r}")
    return endpoint.descriptor, regions


class RegionIndex:
    def __init__(self, regions: Sequence[MemoryRegion | RemoteRegion]) -> None:
        ordered = sorted(regions, key=lambda r: r.address)
        self.regions = tuple(ordered)
        kinds = {region.device.kind for region in ordered}
        self.kind = kinds.pop() if len(kinds) == 1 else None
        """`None` if regions are on several kinds of devices."""
        columns = ([r.address for r in ordered], [r.address + r.nbytes for r in ordered], [r.device.index for r in ordered])
        self._native = _native.Regions(*(np.array(column, dtype=np.uint64) for column in columns))

    def require(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> None:
        """Raises `NotRegistered`, naming the first copy outside all regions."""
        inside = self.num_inside(addresses, nbytes)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)

    def num_inside(self, addresses: Addresses, nbytes: Addresses) -> int:
        """How many copies precede the first that is outside all regions."""
        return self._native.count_held(addresses, nbytes)

    def check(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> npt.NDArray[np.int64]:
        """Each copy's index in `regions`; raises as `require` does."""
        where = np.empty(len(addresses), dtype=np.int64)
        inside = self._native.locate(addresses, nbytes, where)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)
        return where

    def describe(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> npt.NDArray[np.uint64]:
        """Rows `(address, length, device number)`, N x 3; raises as `require` does."""
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        inside = self._native.describe(addresses, nbytes, rows)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)
        return rows

    def _outside(self, addresses: Addresses, nbytes: Addresses, first: int, side: str) -> NotRegistered:
        return NotRegistered(
            f"{side} copy {first} of {len(addresses)}: [{int(addresses[first]):#x}, +{int(nbytes[first])}) is in none "
            f"of the {len(self.regions)} registered regions; nothing was posted"
        )
