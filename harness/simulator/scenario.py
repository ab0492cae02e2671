"""What servers do, and which ranks and connections are lost: one scenario, without its faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg.protocol.messages import TokenRange
from disagg.protocol.types import Limits, PeerRank

PREFILL, DECODE, INTRUDER = "P", "D", "E"
"""The three instances. The intruder reserves requests that are not its own, or that are kept for anyone."""
MAX_LOST = 12
"""Messages of one request that a schedule may lose in a row."""


@dataclass(frozen=True)
class Piece:
    """One `send` of a prefill rank: rows of tokens, in some layers (`None`: all), or the state."""

    after_s: float
    tokens: TokenRange = (0, 0)
    layers: tuple[int, ...] | None = None
    state: bool = False


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the servers do for one request. Fields that end in `_at` count from the start of the simulation.

    At `impostor_at` the intruder reserves the request too. At `stray_at` another group of the destination instance
    does, and aborts 50 ms later. `reverse`: the request goes from decode to prefill. `repeat`: each destination
    reserves a second time. `skew_s`: delay from each rank of a group to the next. `receive_aborts` and `send_aborts`: when the
    server of a rank aborts, by rank. `replicated`: every source rank holds all heads, so writers are elected. `kept`: the
    source names no destination, and whoever reserves first takes the request, also the intruder. `any_attempt`: it names no
    attempt either, and the intruder asks for another one than the destination.
    """

    prompt: int = 5
    hit: int = 0
    reserve_at: float = 0.0
    ready_after_s: float = 0.0
    send_at: float | None = 0.0
    pieces: tuple[Piece, ...] | None = None
    finish_after_s: float | None = 0.1
    deadline_s: float = 20.0
    send_deadline_s: float = 20.0
    receive_aborts: Mapping[int, float] = field(default_factory=dict)
    send_aborts: Mapping[int, float] = field(default_factory=dict)
    reverse: bool = False
    replicated: bool = False
    source_group: int = 0
    destination_group: int = 0
    impostor_at: float | None = None
    stray_at: float | None = None
    repeat: bool = False
    skew_s: float = 0.0
    kept: bool = False
    any_attempt: bool = False

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """`pieces`; by default all tokens at once, and the state."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(0.0, (0, self.prompt)), Piece(0.0, state=True))

    @property
    def latest_start(self) -> float:
        """When the last rank of the request starts."""
        return max(self.reserve_at, self.send_at or 0.0, self.impostor_at or 0.0, self.stray_at or 0.0)


@dataclass(frozen=True)
class Loss:
    """`rank` dies and restarts; or, with `other`, only the connection between the two ends.

    `proved`: the peers prove that the lost side is quiet. `reopen`: the restarted rank reserves again what the old
    one received. `notice_s`: after how long peers notice, alternately. `late_s`: until then after its death, peers read what it
    had sent before, also once they have noticed.
    """

    at: float
    rank: PeerRank
    other: PeerRank | None = None
    proved: bool = True
    reopen: bool = False
    notice_s: tuple[float, float] = (0.0, 0.5)
    late_s: float = 0.0


@dataclass(frozen=True)
class Stop:
    """`rank` is stopped (SIGSTOP) for `seconds`: it reads, sends and copies nothing, and then goes on."""

    at: float
    rank: PeerRank
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The scripts of all requests, the sizes of the instances, the losses and the stops. `slots_only`: ranks write slots of
    their peers, and no rows.
    """

    scripts: tuple[Script, ...]
    num_senders: int = 1
    num_receivers: int = 1
    num_groups: int = 1
    tp: int = 1
    losses: tuple[Loss, ...] = ()
    stops: tuple[Stop, ...] = ()
    heal_at: float = 0.0
    slots_only: bool = False
    limits: Limits = field(default_factory=lambda: Limits(parked_reserve_s=15.0))

    @property
    def replaces_slots(self) -> bool:
        """Whether slots of lost ranks are replaced. Without that they come back with a proof only."""
        return self.slots_only or not all(loss.proved for loss in self.losses)

    def group_size(self, instance: str) -> int:
        """The number of ranks in a group of `instance`."""
        return {PREFILL: self.num_senders, DECODE: self.num_receivers, INTRUDER: 1}[instance]

    @property
    def end(self) -> float:
        """When every request must have ended and all must be cleaned up, even if `MAX_LOST` messages in a row were lost."""
        starts = [script.latest_start for script in self.scripts] + [loss.at + 1.0 for loss in self.losses]
        starts += [stop.at + stop.seconds for stop in self.stops]
        last = max(starts) + max(max(s.deadline_s, s.send_deadline_s) for s in self.scripts)
        limits = self.limits
        return max(last, self.heal_at) + limits.drain_timeout_s + MAX_LOST * limits.max_retry_s + limits.parked_reserve_s
