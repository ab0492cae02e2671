"""Each ended request in the log and in the metrics, and what a manager holds right now."""

from __future__ import annotations

import enum
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from disagg.core.errors import Cause
from disagg.core.leases import LeaseState
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import Rows, Slot
from disagg.core.thread_log import ThreadLog
from disagg.core.timeline import Timeline, TransferPhases
from disagg.layout.tables import Axis, ComponentLayout
from disagg.protocol.messages import TokenRange
from disagg.protocol.receive_session import ReceiveSession, ReceiveState, WriterState
from disagg.protocol.send_session import SendSession, SendState
from disagg.runtime.metrics import Metrics
from disagg.transfer.jobs import Settled

logger = ThreadLog("disagg.requests")
"""One line per request: INFO if it succeeded, WARNING if it failed."""


class Stats(TransferPhases, kw_only=True):
    """Transfers that this rank has started, once they have settled: bytes written, pieces posted, and seconds by phase;
    `unpack_s` is that of received slots. `verified` counts received requests that were compared with what was sent,
    `mismatches` those that differed.
    """

    unpack_s: float = 0.0
    nbytes: int = 0
    pieces: int = 0
    transfers: int = 0
    failures: int = 0
    nbytes_packed: int = 0
    verified: int = 0
    mismatches: int = 0

    @property
    def nbytes_by_way(self) -> dict[str, int]:
        return {"direct": self.nbytes - self.nbytes_packed, "packed": self.nbytes_packed}

    def add(self, settled: Settled) -> None:
        self.bind_s += settled.phases.bind_s
        self.pack_s += settled.phases.pack_s
        self.post_s += settled.phases.post_s
        self.wire_s += settled.phases.wire_s
        self.pieces += settled.pieces
        self.transfers += 1
        self.failures += settled.has_failed
        self.nbytes += settled.written
        self.nbytes_packed += 0 if settled.error else settled.packed


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """`nbytes` is this rank's share, sent or received."""

    rank: str
    request_id: str
    label: str
    attempt: int
    direction: str
    peer: str
    outcome: str
    cause: str
    nbytes: int
    pieces: int
    timeline: Timeline
    lease: str
    error: str

    @property
    def values(self) -> dict[str, str | int | float]:
        """For the log, in order; `timeline` becomes `total_s` and the phases that add up to it."""
        found: dict[str, str | int | float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Timeline):
                found["total_s"] = value.total_s
                found |= {f"{phase}_s": seconds for phase, seconds in value.phases.items() if phase != "wake"}
            else:
                found[name] = value
        return found


_QUOTED = re.compile(r'[\s"=\\]')


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    return text if text and text.isprintable() and not _QUOTED.search(text) else json.dumps(text)


def as_line(values: Mapping[str, str | int | float]) -> str:
    return " ".join([f"{name}={_plain(value)}" for name, value in values.items()])


def account(record: RequestRecord, metrics: Metrics | None) -> None:
    """`logging` also gets the values as `record.request`."""
    level = logging.WARNING if record.cause else logging.INFO
    if logger.isEnabledFor(level):
        values = record.values
        logger.log(level, "%s", as_line(values), extra={"request": values})
    if metrics is not None:
        metrics.count(
            direction=record.direction,
            peer=record.peer,
            cause=record.cause,
            nbytes=record.nbytes,
            seconds=record.timeline.total_s,
        )


def wanted(metrics: Metrics | None, cause: Cause | None) -> bool:
    return metrics is not None or logger.isEnabledFor(logging.INFO if cause is None else logging.WARNING)


class HeldSize:
    def __init__(self, layout: ComponentLayout) -> None:
        self._constant = 0
        self._by_token: list[tuple[Axis, int]] = []
        for tensor in layout.tensors:
            nbytes = ITEMSIZE[tensor.dtype] * len(tensor.layers)
            for axis in tensor.inner_axes:
                assert axis.size is not None
                nbytes *= axis.owned.within(axis.size).count_below(axis.size)
            if tensor.token is None:
                self._constant += nbytes
                continue
            same = next((i for i, (axis, _) in enumerate(self._by_token) if axis == tensor.token), None)
            if same is None:
                self._by_token.append((tensor.token, nbytes))
            else:
                self._by_token[same] = tensor.token, self._by_token[same][1] + nbytes

    def nbytes(self, need: TokenRange) -> int:
        """Bytes of the tokens `[start, stop)`, and of the slot if the component has one."""
        start, stop = need
        total = self._constant
        for axis, nbytes in self._by_token:
            owned = axis.owned.within(max(stop, 1))
            total += nbytes * -(-(owned.count_below(stop) - owned.count_below(start)) // axis.granule)
        return total


class Quarantine(enum.Enum):
    """Labels; the lease's reason has the details."""

    PEER_LOST = "peer_lost"
    """The peer may still write to the rows, or a transfer to it may still read them."""
    UNSETTLED = "unsettled"
    SILENT = "silent"
    """A connected peer has not confirmed that it stopped."""
    ENDED = "ended"
    """The manager was closed, or a thread of it died."""


Session = ReceiveSession | SendSession


def quarantine_of(session: Session, *, ended: bool) -> Quarantine:
    if ended:
        return Quarantine.ENDED
    if isinstance(session, ReceiveSession):
        lost = any(writer.state is WriterState.LOST for writer in tuple(session.writers.values()))
        return Quarantine.PEER_LOST if lost else Quarantine.SILENT
    destinations = tuple(session.destinations.values())
    if any(d.state is SendState.LOST and not d.quiet for d in destinations):
        return Quarantine.PEER_LOST
    return Quarantine.UNSETTLED


def quarantined(sessions: Iterable[Session], *, ended: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Rows and requests by reason. Every reason is a key."""
    rows, requests = ({reason.value: 0 for reason in Quarantine} for _ in range(2))
    for session in sessions:
        if session.lease.state is LeaseState.QUARANTINED:
            reason = quarantine_of(session, ended=ended).value
            rows[reason] += num_rows(session)
            requests[reason] += 1
    return rows, requests


def num_rows(session: Session) -> int:
    given = [session.rows] if isinstance(session, ReceiveSession) else [chunk.rows for chunk in tuple(session.chunks)]
    return len({(name, row) for rows in given for name, listed in rows.items() for row in _ids(listed)})


def _ids(rows: Rows) -> Iterable[int]:
    return (rows.id,) if isinstance(rows, Slot) else rows.ids.tolist()


def states(
    receives: Iterable[ReceiveSession], sends: Iterable[SendSession], *, num_unopened: int
) -> dict[tuple[str, str], int]:
    """By direction and state. A send is as far as its least advanced destination; a receive whose peer is not ready is
    `unopened`.
    """
    counts = Counter({("receive", state.value): 0 for state in ReceiveState})
    counts.update({("send", state.value): 0 for state in SendState})
    counts.update(("receive", session.state.value) for session in receives)
    counts.update(("send", _send_state(session).value) for session in sends)
    counts["receive", "unopened"] += num_unopened
    return dict(counts)


_ORDER = {state: number for number, state in enumerate(SendState)}


def _send_state(session: SendSession) -> SendState:
    found = tuple(destination.state for destination in tuple(session.destinations.values()))
    if session.num_awaited > 0 and session.error is None:
        return SendState.AWAITED
    return min(found, key=_ORDER.__getitem__, default=SendState.CLOSED)
