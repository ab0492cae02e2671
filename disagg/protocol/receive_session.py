"""One request that this rank receives: its states, their table, and the coverage of each writer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg.core.errors import DisaggError
from disagg.core.leases import Lease
from disagg.core.ranges import Ranges
from disagg.core.rows import Rows
from disagg.protocol.messages import (
    PartialChecksums,
    Reserve,
    TokenRange,
    Verify,
    Written,
    pack_rows,
)
from disagg.protocol.types import (
    NEVER,
    PeerRank,
    RequestKey,
    State,
    ids,
    take_step,
)


class ReceiveState(State):
    """`WAITING`: local kernels still use the rows. `VERIFYING`: everything has landed, and its checksums are
    compared. `ABORTING`: failed, writers not all quiet.
    """

    WAITING = "waiting"
    OPEN = "open"
    VERIFYING = "verifying"
    SUCCEEDED = "succeeded"
    ABORTING = "aborting"
    FAILED = "failed"


class ReceiveStep(State):
    READY = "the rows are ready"
    LANDED = "everything needed has landed, but is not verified yet"
    COVERED = "everything needed is there"
    FAILURE = "something failed"
    QUIET = "every writer is quiet"


RECEIVE_TABLE: dict[tuple[ReceiveState, ReceiveStep], ReceiveState] = {
    (ReceiveState.WAITING, ReceiveStep.READY): ReceiveState.OPEN,
    (ReceiveState.WAITING, ReceiveStep.FAILURE): ReceiveState.ABORTING,
    (ReceiveState.OPEN, ReceiveStep.COVERED): ReceiveState.SUCCEEDED,
    (ReceiveState.OPEN, ReceiveStep.LANDED): ReceiveState.VERIFYING,
    (ReceiveState.OPEN, ReceiveStep.FAILURE): ReceiveState.ABORTING,
    (ReceiveState.VERIFYING, ReceiveStep.COVERED): ReceiveState.SUCCEEDED,
    (ReceiveState.VERIFYING, ReceiveStep.FAILURE): ReceiveState.ABORTING,
    (ReceiveState.ABORTING, ReceiveStep.QUIET): ReceiveState.FAILED,
}


MAX_STEPS = 1 << 16
"""Limit on accounting for one complete message: ranges, times the layers of each. Honest writers join their ranges."""
MAX_NAMED = 8


class Coverage:
    """Which tokens of which layers one writer has accounted for, of one component."""

    def __init__(self, layers: tuple[int, ...], need: TokenRange) -> None:
        self.need = need
        self._layers = layers
        self._missing = Ranges(*need) if layers else Ranges()
        """Of every layer alike, until layers are tracked one by one."""
        self._by_layer: dict[int, Ranges] | None = None

    def add(self, layers: tuple[int, ...] | None, start: int, stop: int) -> int:
        """Unexpected layers and empty ranges are ignored. Returns the number of steps."""
        if start >= stop:
            return 1
        if self._by_layer is None:
            if layers is None or layers == self._layers:
                self._missing.remove(start, stop)
                return 1
            self._by_layer = {layer: self._missing.copy() for layer in self._layers} if self._missing else {}
        found = tuple(self._by_layer) if layers is None else layers
        for layer in found:
            left = self._by_layer.get(layer)
            if left is not None:
                left.remove(start, stop)
                if not left:
                    del self._by_layer[layer]
        return 1 + len(found)

    @property
    def complete(self) -> bool:
        return not (self._missing if self._by_layer is None else self._by_layer)

    @property
    def missing(self) -> dict[int, list[TokenRange]]:
        if self._by_layer is not None:
            return {layer: list(left) for layer, left in self._by_layer.items()}
        return {layer: list(self._missing) for layer in self._layers} if self._missing else {}

    def __str__(self) -> str:
        missing = self.missing
        layer, left = next(iter(missing.items()))
        tokens = ", ".join(f"[{a}, {b})" for a, b in left[:MAX_NAMED])
        more = f" and {len(left) - MAX_NAMED} more ranges" if len(left) > MAX_NAMED else ""
        return f"tokens {tokens}{more} of layer {layer} ({len(missing)} layers incomplete)"


class WriterState(State):
    """`RESERVED`: it may write. `ABORTING`: it was asked to stop. `LOST`: the peer is gone, and may still write. What then
    comes from a peer of this name proves nothing about the lost process.
    """

    RESERVED = "reserved"
    COMPLETE = "complete"
    ABORTING = "aborting"
    QUIET = "quiet"
    LOST = "lost"

    @property
    def quiet(self) -> bool:
        return self in (WriterState.COMPLETE, WriterState.QUIET)


class WriterStep(State):
    COVERED = "it has written everything, and all is unpacked"
    FAILURE = "the request failed"
    QUIET = "none of its writes can land any more"
    DRAINED = "it says that none of its writes can land any more"
    PEER_LOST = "the peer is gone"
    PEER_BACK = "the lost process has reconnected"


WRITER_TABLE: dict[tuple[WriterState, WriterStep], WriterState] = {
    (WriterState.RESERVED, WriterStep.COVERED): WriterState.COMPLETE,
    (WriterState.RESERVED, WriterStep.FAILURE): WriterState.ABORTING,
    (WriterState.RESERVED, WriterStep.QUIET): WriterState.QUIET,
    (WriterState.RESERVED, WriterStep.DRAINED): WriterState.QUIET,
    (WriterState.RESERVED, WriterStep.PEER_LOST): WriterState.LOST,
    (WriterState.ABORTING, WriterStep.QUIET): WriterState.QUIET,
    (WriterState.ABORTING, WriterStep.DRAINED): WriterState.QUIET,
    (WriterState.ABORTING, WriterStep.PEER_LOST): WriterState.LOST,
    (WriterState.LOST, WriterStep.QUIET): WriterState.QUIET,
    (WriterState.LOST, WriterStep.PEER_BACK): WriterState.ABORTING,
}


@dataclass
class Writer:
    """`owed` has the packed bytes of each chunk, from the complete message. `lost_at` is the epoch at which it was last
    lost.
    """

    coverage: dict[str, Coverage]
    state: WriterState = WriterState.RESERVED
    payload: bytes = b""
    unpacked: dict[int, int] = field(default_factory=dict)
    owed: dict[int, int] | None = None
    sums: tuple[PartialChecksums, ...] = ()
    retry_at: float = NEVER
    retry_s: float = 0.0
    reserve: Reserve | None = None
    lost_at: int | None = None

    def step(self, step: WriterStep) -> bool:
        return take_step(WRITER_TABLE, self, step)

    def was_lost_at(self, epoch: int) -> bool:
        return self.state is WriterState.LOST and self.lost_at == epoch

    def account(self, written: Iterable[Written]) -> bool:
        """Returns whether it took no more than `MAX_STEPS`."""
        steps = 0
        for each in written:
            coverage = self.coverage.get(each.component)
            if coverage is not None:
                steps += coverage.add(each.layers, each.start, each.stop)
            if steps > MAX_STEPS:
                return False
        return True

    @property
    def waiting(self) -> bool:
        return self.state in (WriterState.RESERVED, WriterState.ABORTING) and self.reserve is not None

    @property
    def has_everything(self) -> bool:
        """Whether its complete message has come and all that it packed is unpacked."""
        if not self.owed:
            return self.owed is not None
        return all(self.unpacked.get(chunk) == nbytes for chunk, nbytes in self.owed.items())


Expected = Mapping[int, Mapping[str, tuple[tuple[int, ...], TokenRange]]]
"""By writer rank and component: the layers and the tokens that this writer must account for."""


@dataclass
class ReceiveSession:
    """`streams` are those of its packed chunks."""

    key: RequestKey
    peer: str
    nonce: int
    source_group: int
    destination_group: int
    rows: Mapping[str, Rows]
    need: Mapping[str, TokenRange]
    writers: dict[PeerRank, Writer]
    deadline: float
    tag: Any
    verify: Verify = "off"
    trace: str = ""
    state: ReceiveState = ReceiveState.WAITING
    error: DisaggError | None = None
    payload: bytes = b""
    lease: Lease = field(default_factory=Lease)
    drain_deadline: float = NEVER
    local_work: int = 0
    streams: dict[Hashable, Any] = field(default_factory=dict)
    armed_at: float = NEVER

    def step(self, step: ReceiveStep) -> bool:
        return take_step(RECEIVE_TABLE, self, step)

    @property
    def ended(self) -> bool:
        return self.state in (ReceiveState.SUCCEEDED, ReceiveState.FAILED)

    @property
    def due(self) -> float:
        if self.ended:
            return NEVER
        judged = self.drain_deadline if self.state is ReceiveState.ABORTING else self.deadline
        return min(judged, *(writer.retry_at for writer in self.writers.values() if writer.waiting), NEVER)

    def reserve(self, components: Iterable[str], epoch: int) -> Reserve:
        names = tuple(components)
        return Reserve(
            **ids(self.key),
            nonce=self.nonce,
            source_group=self.source_group,
            destination_group=self.destination_group,
            rows={name: pack_rows(self.rows[name]) for name in names if name in self.rows},
            need={name: self.need[name] for name in names},
            verify=self.verify,
            epoch=epoch,
            trace=self.trace,
        )

    def late_reason(self) -> str:
        silent = [str(peer) for peer, writer in self.writers.items() if writer.state is WriterState.RESERVED]
        return f"request {self.key}: the deadline passed while waiting for {', '.join(silent) or 'local kernels'}"
