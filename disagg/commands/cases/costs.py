"""What moving bytes costs: measured between ranks, read from a file, or modelled for a NIC of given rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from disagg.core.errors import ConfigError

NIC_EFFICIENCY = 0.95
"""The share of a NIC's rate that is left for payload: published sweeps of long pieces reach 0.92 to 0.98."""
NIC_MESSAGE_S = 0.7e-6
"""Seconds between two work requests of one rank: Mooncake's engine posted 1.5 million pieces of 64 KiB a second."""
_LINK = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)gbit")


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one rank: seconds per piece and 1e9 bytes per second sent directly, and 1e9 bytes per second packed.

    `overlaps`: a NIC moves bytes while the next pieces are posted, so that the slower of the two decides; otherwise the
    caller's thread does both, and they add up. `num_nics` NICs of the rank share its bytes.
    """

    piece_s: float
    gbps: float
    packed_gbps: float
    overlaps: bool = False
    num_nics: int = 1

    def __post_init__(self) -> None:
        if self.piece_s < 0 or min(self.gbps, self.packed_gbps, self.num_nics) <= 0:
            raise ConfigError(f"costs: expected piece_s of at least 0, positive rates and NICs, found {self}")

    def direct_s(self, nbytes: int, descriptors: int) -> float:
        """Seconds to send bytes piece by piece."""
        wire_s, post_s = nbytes / self.gbps / 1e9, descriptors * self.piece_s
        return max(wire_s, post_s) if self.overlaps else wire_s + post_s

    def packed_s(self, nbytes: int) -> float:
        """Seconds to send bytes packed. An engine that gathers pieces itself is assumed to be as fast."""
        return nbytes / self.packed_gbps / 1e9


def link_costs(link: str) -> Costs:
    """The model of a rank's NICs, such as `400gbit`, or `8x400gbit` for eight. Raises `ConfigError`.

    Each descriptor is one work request. Packing is assumed to be as fast as the link.
    """
    found = _LINK.fullmatch(link)
    num_nics = int(found[1] or 1) if found else 0
    rate = float(found[2]) * num_nics if found else 0.0
    if not rate:
        raise ConfigError(f"link: expected a rate such as 400gbit or 8x400gbit, found {link!r}")
    gbps = NIC_EFFICIENCY * rate / 8
    return Costs(NIC_MESSAGE_S, gbps, gbps, overlaps=True, num_nics=num_nics)


def read_costs(file: Path) -> Costs:
    """The costs in a JSON file, such as `disagg-bench --calibrate` writes. Raises `ConfigError` for another content."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Costs)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"costs: {file}: expected JSON with piece_s, gbps and packed_gbps: {error}") from error


def fitted_costs(speeds: Sequence[tuple[int, float, float]]) -> Costs:
    """The costs that fit best, by least squares of relative errors, to `(piece size, direct GB/s, packed GB/s)`.

    Raises `ConfigError` for fewer than two piece sizes, and where the time does not grow with bytes.
    """
    if len({nbytes for nbytes, _, _ in speeds}) < 2:
        raise ConfigError(f"calibrate: expected two piece sizes or more, found {len(speeds)}")
    sizes, direct, packed = (np.array(column, dtype=float) for column in zip(*speeds, strict=True))
    # Seconds per 1e9 bytes: 1 / rate + piece_s * 1e9 / size. Each equation is divided by its left side.
    terms = np.stack([direct, direct * 1e9 / sizes], axis=1)
    (per_gb, piece_s), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if per_gb <= 0:
        raise ConfigError("calibrate: no rate fits these speeds, because longer pieces are not faster; measure longer ones")
    return Costs(max(0.0, float(piece_s)), float(1 / per_gb), float(np.median(packed)))
