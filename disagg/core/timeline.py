"""Where the time of requests and transfers went."""

from __future__ import annotations

import time

import msgspec

NOT_YET = 0.0
PHASES = ("wait", "bind", "pack", "post", "wire", "unpack", "handover", "wake")
_FIELDS = {name: f"{name}_s" for name in PHASES}


class TransferPhases(msgspec.Struct):
    """The phases of a transfer, as `Timeline` explains them."""

    bind_s: float = 0.0
    pack_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        own = self.__struct_fields__
        return {name: getattr(self, field) for name, field in _FIELDS.items() if field in own}


class Timeline(TransferPhases, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec allows what dataclasses do not
    """The consecutive phases of one request on one rank, in seconds. They add up to `total_s`.

    `opened_at` is when the server made the request, by `time.monotonic`. Of several transfers or writers, the one that ended
    last counts.

    * `wait_s`: until that transfer could begin. A send waits for reservations and its rows, a receive for its writers.
    * `bind_s`, `pack_s`, `post_s`, `wire_s`: row ids become addresses, small pieces are packed,
      copies are given to the engine, the engine finishes.
    * `unpack_s`: of a receive, until the last packed bytes are in its rows.
    * `handover_s`: messages and checksums, until the manager has ended the request.
    * `wake_s`: until the server had the event; 0 before that.
    """

    opened_at: float
    wait_s: float
    unpack_s: float
    handover_s: float
    wake_s: float

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())


class Moments:
    """What an open request has done, and when (`time.monotonic`). The manager's thread notes all but `taken_at`.
    `landed_at`: the last transfer ended, or the writer said so. `nbytes` and `pieces` are of all transfers of a send.
    """

    __slots__ = ("ended_at", "landed_at", "nbytes", "opened_at", "pieces", "taken_at", "transfer", "unpacked_at")

    def __init__(self) -> None:
        self.opened_at = time.monotonic()
        self.landed_at = self.unpacked_at = self.ended_at = self.taken_at = NOT_YET
        self.transfer = TransferPhases()
        self.nbytes = self.pieces = 0

    def land(self, at: float, transfer: TransferPhases, *, nbytes: int = 0, pieces: int = 0) -> None:
        self.landed_at, self.transfer = at, transfer
        self.nbytes += nbytes
        self.pieces += pieces

    def take(self) -> None:
        """The server has the event, for the first time."""
        self.taken_at = self.taken_at or time.monotonic()

    def timeline(self) -> Timeline:
        """A peer's figures are cut to the time that there was."""
        ended = self.ended_at or time.monotonic()
        landed = self.landed_at or ended
        spent = landed - self.opened_at
        transfer = self.transfer
        total = transfer.bind_s + transfer.pack_s + transfer.post_s + transfer.wire_s
        share = spent / max(total, spent, 1e-9)
        unpacked = max(landed, self.unpacked_at)
        return Timeline(
            opened_at=self.opened_at,
            wait_s=max(0.0, spent - share * total),
            bind_s=share * transfer.bind_s,
            pack_s=share * transfer.pack_s,
            post_s=share * transfer.post_s,
            wire_s=share * transfer.wire_s,
            unpack_s=unpacked - landed,
            handover_s=max(0.0, ended - unpacked),
            wake_s=max(0.0, self.taken_at - ended) if self.taken_at else 0.0,
        )
