"""Where the time of one request went on one rank: the moments that are noted, and the phases between them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

NOT_YET = 0.0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of one request on one rank, in seconds. They follow each other, so they add up to `total_s`.

    `opened_at` is when the server made the request, by `time.monotonic`. Where several transfers belong to the request, or
    several writers, the phases from binding to the wire are those of the one that ended last.

    * `wait_s`: until that transfer could begin. A send waits for reservations and for its rows, a receive for its writers.
    * `bind_s`, `pack_s`, `post_s`: row ids become addresses, small pieces are packed, copies are given to the engine.
    * `wire_s`: the rest of the transfer, until the engine has finished.
    * `unpack_s`: of a receive, until the last packed bytes are in its rows.
    * `handover_s`: messages and checksums, until the manager has ended the request.
    * `wake_s`: until the server had the event; 0 before that.
    """

    opened_at: float
    wait_s: float
    bind_s: float
    pack_s: float
    post_s: float
    wire_s: float
    unpack_s: float
    handover_s: float
    wake_s: float

    @property
    def total_s(self) -> float:
        """From the call that made the request until the server had its event."""
        return sum(self.phases.values())

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase, in order: `wait`, `bind`, `pack`, `post`, `wire`, `unpack`, `handover`, `wake`."""
        return {name: getattr(self, f"{name}_s") for name in PHASES}


PHASES = tuple(field.removesuffix("_s") for field in Timeline.__struct_fields__[1:])
"""The names of the phases, in order."""


class Moments:
    """Times noted while a request is under way, by `time.monotonic`. The manager's thread notes all but `taken_at`.

    `landed_at`: the transfer that ended last has ended, or the writer has said so. It took `transfer` seconds: binding,
    packing, posting, and the rest.
    """

    __slots__ = ("ended_at", "landed_at", "opened_at", "taken_at", "transfer", "unpacked_at")

    def __init__(self) -> None:
        self.opened_at = time.monotonic()
        self.landed_at = self.unpacked_at = self.ended_at = self.taken_at = NOT_YET
        self.transfer: Sequence[float] = ()

    def land(self, at: float, transfer: Sequence[float]) -> None:
        """A transfer has ended. The one that is noted last counts."""
        self.landed_at, self.transfer = at, transfer

    def take(self) -> None:
        """The server has the event, for the first time."""
        self.taken_at = self.taken_at or time.monotonic()

    def timeline(self) -> Timeline:
        """The phases between the moments. A peer's figures are cut to the time that there was."""
        ended = self.ended_at or time.monotonic()
        landed = self.landed_at or ended
        spent = landed - self.opened_at
        bind, pack, post, wire = self.transfer if len(self.transfer) == 4 else (0.0,) * 4
        share = spent / max(bind + pack + post + wire, spent, 1e-9)
        bind, pack, post, wire = (share * each for each in (bind, pack, post, wire))
        unpacked = max(landed, self.unpacked_at)
        return Timeline(
            opened_at=self.opened_at,
            wait_s=spent - bind - pack - post - wire,
            bind_s=bind,
            pack_s=pack,
            post_s=post,
            wire_s=wire,
            unpack_s=unpacked - landed,
            handover_s=max(0.0, ended - unpacked),
            wake_s=max(0.0, self.taken_at - ended) if self.taken_at else 0.0,
        )
