"""Values and effects that both sides of a request share."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from disagg.core.errors import ConfigError, DisaggError
from disagg.core.events import ReadyEvent
from disagg.core.leases import Lease
from disagg.core.rows import Rows, Slot
from disagg.protocol.messages import (
    Borrow,
    Busy,
    Filled,
    Lend,
    PartialChecksums,
    RequestMessage,
    Reserve,
    TokenRange,
    Written,
)

NEVER = float("inf")


class PeerRank(NamedTuple):
    instance: str
    rank: int

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


class RequestKey(NamedTuple):
    """One attempt of one request."""

    request_id: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id.hex()}#{self.attempt}"


def check_seconds(given: object, what: str, *, most: float = NEVER) -> None:
    """Raise `ConfigError` unless it is a number above 0 and at most `most`."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= most:
        limit = "" if most == NEVER else f" and at most {most}"
        raise ConfigError(f"{what}: expected more than 0{limit} seconds, found {given!r}")


@dataclass(frozen=True)
class Limits:
    """Bounds and times of the protocol, in seconds. `max_parked_reserves` is per peer instance, `max_parked_nbytes` is divided
    among those that have something parked, and `max_quarantined` and `max_tombstones` are for all. Raises `ConfigError` for a
    time that is not above 0, or a count that is no integer of at least 0.
    """

    max_parked_reserves: int = 16384
    max_parked_nbytes: int = 256 << 20
    max_tombstones: int = 65536
    max_quarantined: int = 1024
    retry_s: float = 0.5
    max_retry_s: float = 5.0
    busy_retry_s: float = 0.05
    parked_reserve_s: float = 600.0
    drain_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given, what = getattr(self, field.name), f"limits {field.name}"
            if field.name.endswith("_s"):
                check_seconds(given, what)
            elif isinstance(given, bool) or not isinstance(given, int) or given < 0:
                raise ConfigError(f"{what}: expected an integer of at least 0, found {given!r}")


class Chunk(msgspec.Struct, frozen=True):
    """Rows given to one `send`: their tokens (`None`: from each row list's first token on) and layers (`None`: all). They
    may be read once `ready` has passed.
    """

    number: int
    rows: Mapping[str, Rows]
    tokens: TokenRange | None
    layers: tuple[int, ...] | None
    ready: ReadyEvent | None = None

    def written(self, component: str, need: TokenRange) -> Written | None:
        rows = self.rows[component]
        if isinstance(rows, Slot):
            start, stop = need
        else:
            start, stop = self.tokens or (rows.first_token, need[1])
        start, stop = max(start, need[0]), min(stop, need[1])
        return Written(self.number, component, self.layers, start, stop) if start < stop else None


class State(enum.Enum):
    """Hashed by identity, because `enum` computes its hash in Python."""

    __hash__ = object.__hash__


StateT = TypeVar("StateT", bound=State)
StepT = TypeVar("StepT", bound=State)


class HasState(Protocol[StateT]):
    state: StateT


def take_step(table: Mapping[tuple[StateT, StepT], StateT], machine: HasState[StateT], step: StepT) -> bool:
    """Take a step. If the table does not have it, change nothing and return `False`."""
    after = table.get((machine.state, step))
    if after is None:
        return False
    machine.state = after
    return True


class Ticket(NamedTuple):
    peer: PeerRank
    key: RequestKey
    chunk: int


class SendMessage(msgspec.Struct, frozen=True):
    """Effect: send `message` to `peer`."""

    peer: PeerRank
    message: RequestMessage | Busy | Lend | Borrow


class StartTransfer(msgspec.Struct, frozen=True):
    """Effect: copy `written` of a chunk's rows into the destination's rows, then call `settled(ticket, ...)`."""

    ticket: Ticket
    chunk: Chunk
    reserve: Reserve
    written: tuple[Written, ...]

    def is_for(self, epoch: int) -> bool:
        """Whether the rows are those of the destination's process at this epoch."""
        return self.reserve.epoch in (0, epoch)


class CancelTransfers(msgspec.Struct, frozen=True):
    """Effect: a request has failed towards `peer`. Its transfers that have not begun settle at once."""

    peer: PeerRank
    key: RequestKey


class UnpackSlot(msgspec.Struct, frozen=True):
    """Effect: scatter the `filled` slot at `address` into the rows of `session`, a `ReceiveSession`, then call
    `Sessions.unpacked`. `account` has the loan.
    """

    peer: PeerRank
    session: Any
    filled: Filled
    address: int
    account: Any


class TakeLoans(msgspec.Struct, frozen=True):
    """Effect: the peer lists its loans by number and address, up to number `newest`. Some may be new."""

    peer: PeerRank
    loans: tuple[tuple[int, int], ...]
    newest: int


class ReturnLoans(msgspec.Struct, frozen=True):
    """Effect: no request is open towards the peer."""

    peer: PeerRank


class ReleaseLease(msgspec.Struct, frozen=True):
    """Effect: nothing touches the rows any more."""

    lease: Lease


class QuarantineLease(msgspec.Struct, frozen=True):
    """Effect: the rows are not proved quiet."""

    lease: Lease
    reason: str


class Event(msgspec.Struct, frozen=True, weakref=True):
    """Effect, and what the server gets: a request of this rank has ended. `direction` is `"send"` or `"receive"`; `error` is
    `None` if `ok`.
    """

    key: RequestKey
    peer: str
    direction: str
    ok: bool
    payload: bytes
    error: DisaggError | None
    lease: Lease
    tag: Any


class StartVerify(msgspec.Struct, frozen=True):
    """Effect: compare the checksums of a request's rows with `sums`, those of its writers, then call `verified`."""

    key: RequestKey
    peer: str
    rows: Mapping[str, Rows]
    need: Mapping[str, TokenRange]
    sums: Mapping[PeerRank, tuple[PartialChecksums, ...]]


Effect = (
    SendMessage
    | StartTransfer
    | CancelTransfers
    | StartVerify
    | UnpackSlot
    | TakeLoans
    | ReturnLoans
    | ReleaseLease
    | QuarantineLease
    | Event
)


def key_of(message: RequestMessage) -> RequestKey:
    return RequestKey(message.request_id, message.attempt)


def ids(key: RequestKey) -> dict[str, Any]:
    return {"request_id": key.request_id, "attempt": key.attempt}


def brief(error: DisaggError | str | None) -> str:
    """Truncated to the wire's limit, and valid UTF-8."""
    return str(error or "")[:4096].encode(errors="replace").decode()
