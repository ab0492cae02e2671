"""Jobs of the transfer worker, and its reports. The worker knows neither messages nor requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from disagg.backends.abilities import PreparedSpans
from disagg.backends.base import RemotePeer
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import PeerUnreachable
from disagg.core.events import ReadyEvent
from disagg.core.spans import SpanBatch
from disagg.core.timeline import TransferPhases
from disagg.transfer.staging import Loans

CANCELLED = "the attempt ended before everything was sent"


class PendingWork(Protocol):
    """Work that continues without this thread, in the order in which it was started."""

    @property
    def completion(self) -> _native.Flag | _native.CudaEvent | None: ...

    def query(self) -> bool:
        """Raises `BackendError` if it has failed."""


class PackedStream(Protocol):
    """One side's bytes of a request, in an order that both sides derive from their plans."""

    @property
    def total(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...

    def gather(self, offset: int, nbytes: int, staging_address: int, /) -> PendingWork | None:
        """Pack `[offset, offset + nbytes)` of the stream. `None` if done on return."""

    def scatter(self, offset: int, nbytes: int, staging_address: int, /) -> PendingWork | None:
        """The reverse of `gather`."""


class ListedStream(PackedStream, Protocol):
    """A stream that can list its copies."""

    def copies(self, offset: int, nbytes: int, staging_address: int, /) -> tuple[Addresses, Addresses, Addresses]:
        """Sources, destinations and lengths of what `gather` would copy."""


class BoundTransfer(msgspec.Struct, frozen=True):
    """`direct` is posted piece by piece, over `prepared` span classes if given. `stream` goes through slots of the peer's,
    which `parts` describes to the peer. `gathered` is the same stream, if the engine gathers its pieces itself.
    """

    direct: CopyBatch | SpanBatch
    stream: PackedStream | None = None
    parts: Any = ()
    prepared: PreparedSpans | None = None
    gathered: ListedStream | None = None


class Job(msgspec.Struct, frozen=True):
    """`bind` computes the copies and may raise. They are posted once `ready` has passed, unless `cancelled()`. `is_over()`:
    nothing of it is under way, whatever the engine says.
    """

    ticket: Hashable
    peer: RemotePeer
    bind: Callable[[], BoundTransfer]
    cancelled: Callable[[], bool]
    ready: ReadyEvent | None = None
    loans: Loans | None = None
    is_over: Callable[[], bool] = lambda: False


class Unpack(msgspec.Struct, frozen=True):
    """A slot of this side to scatter: it holds `nbytes` of `stream()` from `offset` on."""

    token: object
    stream: Callable[[], PackedStream]
    address: int
    offset: int
    nbytes: int


class SlotFilled(msgspec.Struct, frozen=True):
    """Report: the peer's slot `loan` holds `nbytes` of the job's stream, from `offset` on."""

    ticket: Hashable
    loan: int
    parts: Any
    offset: int
    nbytes: int


class SlotsWanted(msgspec.Struct, frozen=True):
    """Report: a job has more to pack than the peer has lent slots for."""

    ticket: Hashable


class Unpacked(msgspec.Struct, frozen=True):
    """Report: a slot was scattered, or could not be."""

    token: object
    nbytes: int
    error: str
    seconds: float


class Settled(msgspec.Struct, kw_only=True):
    """Report: the end of a job. If `unsettled`, the engine cannot tell yet and another report follows. After a failure
    slots may still be written, but not rows. `unreachable` is the peer if the engine takes nothing more for it. Of
    `nbytes`, `packed` went through slots. `ended_at` is by `time.monotonic`.
    """

    ticket: Hashable
    error: str = ""
    unreachable: RemotePeer | None = None
    unsettled: bool = False
    nbytes: int = 0
    packed: int = 0
    pieces: int = 0
    phases: TransferPhases = msgspec.field(default_factory=TransferPhases)
    ended_at: float = 0.0

    @property
    def written(self) -> int:
        return 0 if self.error else self.nbytes

    @property
    def has_failed(self) -> bool:
        """Whether the engine or the job has failed, as opposed to a job that was cancelled."""
        return self.error not in ("", CANCELLED)

    def fail(self, error: Exception, peer: RemotePeer) -> None:
        """The first error stays."""
        self.error = self.error or str(error)
        if isinstance(error, PeerUnreachable):
            self.unreachable = peer

    def count_post(self, seconds: float, nbytes: int, *, pieces: int = 1) -> None:
        self.phases.post_s += seconds
        self.nbytes += nbytes
        self.pieces += pieces


class Broken(msgspec.Struct):
    """Report: a slot of `peer` may still be written, and nobody can say for how long. A new connection gets other slots."""

    ticket: Hashable
    peer: RemotePeer
    error: str


Report = Settled | SlotFilled | SlotsWanted | Broken | Unpacked
