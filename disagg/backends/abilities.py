"""Optional abilities of backends, found by `isinstance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from disagg.backends.base import BackendOptions, Op, RemotePeer, StagingShape, Transfer
from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanBatch, SpanShape


@runtime_checkable
class SaysStaging(Protocol):
    """An optional ability of a backend's class: what its `staging` would be with those options, before it is started.

    Without it `disagg explain` takes the backend not to pack.
    """

    def staging_for(self, options: BackendOptions, /) -> StagingShape: ...


@runtime_checkable
class Progressive(Protocol):
    """An engine that moves bytes only while someone calls it."""

    def progress(self) -> None:
        """Do what is due; never blocks."""


@runtime_checkable
class QuietWhenClosed(Protocol):
    """An engine whose end can be a proof: the last resort for rows that nothing else proves quiet."""

    def is_quiet_when_closed(self) -> bool:
        """Whether, `close` having returned, nothing that a peer has posted or will post can touch memory here any more, and
        this engine reads none. Never a guess.
        """


@runtime_checkable
class PlainCopier(Protocol):
    """An engine that the driver's own copies can be measured against."""

    def submit_plain(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        """As `Backend.submit` of a write, but one plain device-to-device copy for each piece."""


@runtime_checkable
class Gathering(Protocol):
    """An engine that collects pieces from all over this side's memory on their way to one place at the peer's."""

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """From which length on, on average, pieces are to be submitted as they are even if they end up side by side: packing
        them first costs more. `None`: towards this peer never.
        """


class PreparedSpans(Protocol):
    """Span classes that an engine has taken for one peer at one epoch. Opaque to the manager."""

    @property
    def shapes(self) -> Sequence[SpanShape]: ...


@runtime_checkable
class SpanWriter(Protocol):
    """An engine that computes addresses itself: it is given span classes once, and per request token runs only."""

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> PreparedSpans | None:
        """Take what is fixed between two ranks; `None`: towards this peer it takes addresses only.

        Raises `NotRegistered` for a pool outside the regions of its side.
        """

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        """Post `batch`, over the shapes that were prepared. Raises as `Backend.submit` does, with nothing posted.

        The transfer may have a `sign`, which shows once it is `DONE`, not before, also after `close`; that of one that fails
        shows the failure, or nothing.
        """


class Prepared(Protocol):
    """Copies to one peer, checked once, that may be posted again and again: each time after the last one has settled."""

    def post(self) -> Transfer:
        """As `Backend.submit`. Raises `PeerUnreachable` where the peer was disconnected, with nothing posted."""


@runtime_checkable
class Preparing(Protocol):
    """An engine for which posting the same copies again costs less than submitting them."""

    def prepare(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Prepared:
        """Get `copies` ready; raises as `Backend.submit`. What it holds in the engine is given back with the peer."""
