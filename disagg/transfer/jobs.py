"""Jobs of the transfer worker, and its reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from disagg.backends.abilities import PreparedSpans
from disagg.backends.base import RemotePeer
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.events import ReadyEvent
from disagg.core.spans import SpanBatch
from disagg.transfer.staging import RemoteRing

QUICK_NBYTES = 1 << 20
"""What is bound, and what is posted or unpacked, in the thread that hands it over; more is left to the worker's own."""


class PendingWork(Protocol):
    """Work that goes on without this thread; what was begun first passes first. As a `Transfer` it may have a `sign` that says
    when it is over.
    """

    def query(self) -> bool:
        """Whether it is done; raises `BackendError` where it will never be."""


class PackedStream(Protocol):
    """One side's bytes of a request, in an order that both sides know. Ranges are inside `total`."""

    @property
    def total(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...

    def gather(self, offset: int, nbytes: int, staging_address: int, /) -> PendingWork | None:
        """Pack the bytes `[offset, offset + nbytes)` into a slot. `None`: done on return; else when that has passed."""

    def scatter(self, offset: int, nbytes: int, staging_address: int, /) -> PendingWork | None:
        """Unpack a slot into the bytes `[offset, offset + nbytes)`; done as `gather` is."""


class ListedStream(PackedStream, Protocol):
    """A stream that can say which copies packing it takes."""

    def copies(self, offset: int, nbytes: int, staging_address: int, /) -> tuple[Addresses, Addresses, Addresses]:
        """Sources, destinations and lengths of what `gather` would copy."""


class SourcePacked(Protocol):
    """Bytes of a request that are packed in the order in which they lie at their destination, and written right there."""

    @property
    def total(self) -> int: ...

    def gather(self, offset: int, nbytes: int, staging_address: int, /) -> None:
        """Pack the bytes `[offset, offset + nbytes)` into a slot; done on return."""

    def copies(self, offset: int, nbytes: int, staging_address: int, /) -> CopyBatch:
        """From the slot to where these bytes belong."""


class BoundTransfer(msgspec.Struct, frozen=True):
    """What a job comes to: pieces that go one by one, over `prepared` span classes where those are given; a stream that is
    packed at the source alone; and one that goes packed through the peer's ring, `parts` of which say what is in it.
    `listed` is that one, where the engine is to collect its pieces from where they lie.
    """

    direct: CopyBatch | SpanBatch
    stream: PackedStream | None = None
    parts: Any = ()
    prepared: PreparedSpans | None = None
    source: SourcePacked | None = None
    listed: ListedStream | None = None

    @property
    def nbytes(self) -> int:
        return self.direct.total_nbytes + sum(packed.total for packed in (self.stream, self.source) if packed is not None)

    @property
    def ring_nbytes(self) -> int:
        """What goes through the peer's ring."""
        return self.stream.total if self.stream is not None else 0

    @property
    def is_quick(self) -> bool:
        """Whether posting it holds nobody up: it is little, or an engine that computes addresses does the rest by itself."""
        return self.prepared is not None or self.nbytes <= QUICK_NBYTES


class Job(msgspec.Struct, frozen=True):
    """Copies to make: `bind` gives them, and may raise; they are posted once `ready` has passed, and not after `cancelled()`.
    `num_rows`: so many page ids and slots there are to bind.
    """

    ticket: Hashable
    peer: RemotePeer
    bind: Callable[[], BoundTransfer]
    cancelled: Callable[[], bool]
    ready: ReadyEvent | None = None
    ring: RemoteRing | None = None
    num_rows: int = 0


class Unpack(msgspec.Struct, frozen=True):
    """A slot of this side's ring to be scattered: `nbytes` of `stream()`, from `offset` on, lie at `address`."""

    token: Any
    stream: Callable[[], PackedStream]
    address: int
    offset: int
    nbytes: int


class SlotFilled(msgspec.Struct, frozen=True):
    """Report: a slot of the peer's ring at address `ring` holds `nbytes` of the job's stream, from `offset` on."""

    ticket: Hashable
    ring: int
    slot: int
    sequence: int
    parts: Any
    offset: int
    nbytes: int


class Begun(msgspec.Struct, frozen=True):
    """Report: the engine has begun to copy a job that takes it a while; its receiver may want to be awake in time. `sign` says
    when it is over, if there is one.
    """

    ticket: Hashable
    sign: _native.Flag | _native.CudaEvent | None = None


class Unpacked(msgspec.Struct, frozen=True):
    """Report: a slot was scattered, or could not be."""

    token: Any
    nbytes: int
    error: str
    seconds: float


class Settled(msgspec.Struct):
    """Report: what became of a job. `unsettled`: the engine cannot tell yet; another report follows when it can. Of `nbytes`,
    `packed` went through the peer's ring, `source_packed` were packed here alone.
    """

    ticket: Hashable
    error: str = ""
    unsettled: bool = False
    nbytes: int = 0
    packed: int = 0
    source_packed: int = 0
    pieces: int = 0
    bind_s: float = 0.0
    pack_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0


Report = Settled | SlotFilled | Begun | Unpacked
