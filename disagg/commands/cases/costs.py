"""What moving bytes costs: measured between ranks, read from a file, or modelled for a NIC of given rate."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from disagg.core.errors import ConfigError
from disagg.core.timeline import PHASES

NIC_EFFICIENCY = 0.95
"""The share of a NIC's rate that is left for payload: published sweeps of long pieces reach 0.92 to 0.98."""
NIC_MESSAGE_S = 0.7e-6
"""Seconds between two work requests of one rank: Mooncake's engine posted 1.5 million pieces of 64 KiB a second."""
ALWAYS = 1 << 40
"""A packing threshold that no piece reaches, so that all are packed."""
_LINK = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)gbit")


Terms = tuple[float, float, float]
"""Seconds per request, per piece and per byte."""
Shares = Mapping[str, tuple[int, int]]
"""Pieces and bytes by path, `direct` or `packed`."""


class Measured(NamedTuple):
    """Requests that sent `pieces` of `nbytes` in total on one path: the seconds of each phase of the median one."""

    path: str
    pieces: int
    nbytes: int
    phases: Mapping[str, float]


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one rank: seconds per piece and 1e9 bytes per second sent directly, and 1e9 bytes per second packed.

    `overlaps`: a NIC moves bytes while the next pieces are posted, so that the slower of the two decides; otherwise the
    caller's thread does both, and they add up. `num_nics` NICs of the rank share its bytes. `phases`: of each path, `direct` or
    `packed`, the terms of each phase of a request (`disagg.core.timeline`), if they were measured; nothing else is used then.
    `engine`: whose costs these are, such as `nixl tcp`, if that is known.
    """

    piece_s: float
    gbps: float
    packed_gbps: float
    overlaps: bool = False
    num_nics: int = 1
    phases: dict[str, dict[str, Terms]] = {}
    engine: str = ""

    def __post_init__(self) -> None:
        if self.piece_s < 0 or min(self.gbps, self.packed_gbps, self.num_nics) <= 0:
            raise ConfigError(f"costs: expected piece_s of at least 0, positive rates and NICs, found {self}")

    def direct_s(self, nbytes: int, descriptors: int) -> float:
        """Seconds to send bytes piece by piece."""
        wire_s, post_s = nbytes / self.gbps / 1e9, descriptors * self.piece_s
        return max(wire_s, post_s) if self.overlaps else wire_s + post_s

    def packed_s(self, nbytes: int) -> float:
        """Seconds to send bytes packed."""
        return nbytes / self.packed_gbps / 1e9

    def seconds(self, shares: Shares) -> float:
        """Seconds of one rank that sends these to one other, alone."""
        if phases := self.phases_s(shares, shares, one_link=False):
            return sum(phases.values())
        (pieces, nbytes), (_, packed_nbytes) = (shares.get(path, (0, 0)) for path in ("direct", "packed"))
        return self.direct_s(nbytes, pieces) + self.packed_s(packed_nbytes)

    @property
    def break_even_nbytes(self) -> int:
        """The size below which pieces are faster packed: `ALWAYS` if they are at any size."""
        if {"direct", "packed"} <= self.phases.keys():
            direct, packed = (self.phases[path].values() for path in ("direct", "packed"))
            per_piece = sum(terms[1] for terms in direct) - sum(terms[1] for terms in packed)
            per_byte = sum(terms[2] for terms in packed) - sum(terms[2] for terms in direct)
            if per_byte > 0:
                return min(ALWAYS, max(0, math.ceil(per_piece / per_byte)))
            return ALWAYS if per_piece > 0 or per_byte < 0 else 0
        lead = 1 / self.packed_gbps - (0.0 if self.overlaps else 1 / self.gbps)
        if self.packed_gbps > self.gbps or lead <= 0:
            return ALWAYS if self.piece_s or self.packed_gbps > self.gbps else 0
        return min(ALWAYS, math.ceil(self.piece_s * 1e9 / lead))

    def phases_s(self, sent: Shares, received: Shares, *, one_link: bool) -> dict[str, float]:
        """Seconds of each phase of a request, by what the busiest rank sends; of unpacking, by what the busiest rank receives.
        What occurs once per request is counted for the dearest path only. Empty if a path was not measured.

        `one_link`: what a rank receives passes one link, or one thread, however many ranks send it.
        """
        if not (sent.keys() | received.keys()) <= self.phases.keys():
            return {}
        spent = {phase: self._phase_s(phase, received if phase == "unpack" else sent) for phase in PHASES}
        if one_link:
            moved, arrived = (self._moving_s(shares) for shares in (sent, received))
            spent["wire"] += max(0.0, arrived - moved)
        return spent

    def _phase_s(self, phase: str, shares: Shares) -> float:
        terms = {path: self.phases[path].get(phase, (0.0, 0.0, 0.0)) for path in shares}
        once = max((each[0] for each in terms.values()), default=0.0)
        return once + sum(each[1] * shares[path][0] + each[2] * shares[path][1] for path, each in terms.items())

    def _moving_s(self, shares: Shares) -> float:
        """What the bytes alone cost while they are posted and under way."""
        terms = [(self.phases[path].get(phase, (0.0, 0.0, 0.0)), shares[path]) for path in shares for phase in ("post", "wire")]
        return sum(per_byte * nbytes for (_, _, per_byte), (_, nbytes) in terms)


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
    """The costs, none of them negative, that fit best to `(piece size, direct GB/s, packed GB/s)`, by least squares of relative
    errors.

    Raises `ConfigError` for fewer than two piece sizes, and where short pieces take as long as long ones or longer, so that no
    rate is left to find.
    """
    if len({nbytes for nbytes, _, _ in speeds}) < 2:
        raise ConfigError(f"calibrate: expected two piece sizes or more, found {len(speeds)}")
    sizes, direct, packed = (np.array(column, dtype=float) for column in zip(*speeds, strict=True))
    # Seconds per 1e9 bytes: 1 / rate + piece_s * 1e9 / size. Each equation is divided by its left side.
    terms = np.stack([direct, direct * 1e9 / sizes], axis=1)
    (per_gb, piece_s), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if per_gb <= 0:
        times = ", ".join(f"{s / d / 1e3:.3g} us for {s:.0f} bytes" for s, d in sorted(zip(sizes, direct, strict=True)))
        raise ConfigError(
            "calibrate: no rate fits these speeds: expected a piece's time to grow with its size, found "
            f"{times}; measure longer pieces, or again on an idle machine"
        )
    if piece_s < 0:
        per_gb, piece_s = direct.sum() / (direct @ direct), 0.0
    return Costs(float(piece_s), float(1 / per_gb), float(np.median(packed)))


def fitted_phases(measured: Sequence[Measured]) -> dict[str, dict[str, Terms]]:
    """The terms, none of them negative, that fit best to the phases of requests by least squares of their shares of the whole
    time, by path and phase.
    """
    return {
        path: {phase: _fitted([each for each in measured if each.path == path], phase) for phase in PHASES}
        for path in sorted({each.path for each in measured})
    }


def _fitted(measured: Sequence[Measured], phase: str) -> Terms:
    """The best terms of one phase: of all choices of terms that are not 0, the best whose terms are positive."""
    whole = np.array([sum(each.phases.values()) for each in measured])
    sizes = np.array([(1, each.pieces, each.nbytes) for each in measured], dtype=float) / whole[:, None]
    wanted = np.array([each.phases[phase] for each in measured]) / whole
    scale = sizes.max(axis=0)
    best, best_error = np.zeros(3), float(wanted @ wanted)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        columns = list(chosen)
        found, *_ = np.linalg.lstsq(sizes[:, columns] / scale[columns], wanted, rcond=None)
        error = wanted - sizes[:, columns] / scale[columns] @ found
        if (found >= 0).all() and error @ error < best_error:
            best, best_error = np.zeros(3), float(error @ error)
            best[columns] = found / scale[columns]
    per_request, per_piece, per_byte = best.tolist()
    return per_request, per_piece, per_byte
