"""Optional abilities of backends, found by `isinstance`. A manager works without any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from disagg.backends.base import Backend, BackendOptions, RemotePeer, StagingShape, Transfer
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessWatch


@runtime_checkable
class SaysStaging(Protocol):
    """A backend class that knows its `staging` for given options before it is started.

    `disagg explain` assumes that a backend without this ability does not pack.
    """

    def staging_for(self, options: BackendOptions, /) -> StagingShape: ...


@runtime_checkable
class QuietWhenClosed(Protocol):
    """An engine whose `close` can be a proof: the last resort for rows that nothing else proves quiet."""

    def is_quiet_when_closed(self) -> bool:
        """Whether, after `close`, nothing that a peer has posted or will post can touch memory here, and this engine reads
        no memory of a peer. Never a guess.
        """


@runtime_checkable
class ProvesByProcess(Protocol):
    """An engine that can prove from the end of a peer's process that nothing of the peer is under way any more."""

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Whether `process` has ended, and nothing that it posted by this engine can write or read here. Never a guess."""


@runtime_checkable
class Renewable(Protocol):
    """An engine that can find that it will never serve new peers again."""

    def renewal_due(self) -> str:
        """Why it must be closed and built anew; empty while it need not be. Cheap: asked several times a second."""


def renewal_due(backend: Backend) -> str:
    """Why a backend must be built anew; empty while it need not be, or cannot tell."""
    return backend.renewal_due() if isinstance(backend, Renewable) else ""


@runtime_checkable
class SeveralEngines(Protocol):
    """Several engines as one. Each side of a pair chooses the engine by which it writes to the other."""

    def engine_to(self, peer: RemotePeer) -> str:
        """The name of the engine that writes to a peer."""

    def written_by(self, peer: RemotePeer, engine: str) -> None:
        """The peer writes here by the engine of that name, and by no other. Without this a fence asks all engines."""


@runtime_checkable
class Gathering(Protocol):
    """An engine that gathers pieces from all over local memory on their way to one place in the peer's memory."""

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """The mean piece length in bytes from which on the engine gathers faster than packing; `None`: not towards this peer.

        Pieces that end up side by side are then submitted from where they lie, without packing them first.
        """


class PreparedSpans(Protocol):
    """Span classes that an engine has prepared for one peer at one epoch. Opaque to the manager."""

    @property
    def shapes(self) -> Sequence[SpanShape]: ...


@runtime_checkable
class SpanWriter(Protocol):
    """An engine that computes addresses itself: it gets span classes once, and only token runs with each request."""

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> PreparedSpans | None:
        """Prepare everything that stays the same for a pair of ranks. `None` if the engine takes only addresses for this peer.

        Raises `NotRegistered` for a pool outside the regions of its side.
        """

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        """Post `batch`, over the shapes that were prepared. Raises as `Backend.submit` does, with nothing posted."""
