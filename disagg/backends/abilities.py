"""Optional abilities of backends, found by `isinstance`. A manager works without any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from disagg.backends.base import Backend, BackendOptions, RemotePeer, StagingShape, Transfer
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessWatch


@runtime_checkable
class SaysStaging(Protocol):
    """A backend class that knows its `staging` before it starts. `disagg explain` assumes no packing without this."""

    def staging_for(self, options: BackendOptions, /) -> StagingShape: ...


@runtime_checkable
class QuietWhenClosed(Protocol):
    """An engine whose `close` can prove rows quiet, when nothing else does."""

    def is_quiet_when_closed(self) -> bool:
        """Whether after `close` no peer can touch memory here, and this engine reads no memory of a peer."""


@runtime_checkable
class ProvesByProcess(Protocol):
    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Whether `process` has ended, and nothing that it posted by this engine can write or read here."""


@runtime_checkable
class Renewable(Protocol):
    """An engine that can be closed and started again over the same memory."""

    def renewal_due(self) -> str:
        """Why it will never serve new peers again, else empty. Cheap: called several times a second."""

    def renew(self) -> bool:
        """Start another engine, with another endpoint, then end this one: peers that it had connected to are disconnected, and
        transfers under way are unsettled. Returns whether there is another one. If it raises, nothing has changed.
        """

    def is_renewed(self, peer: RemotePeer) -> bool:
        """Whether it has been renewed since it connected to the peer, and one of the two may write by the former engine."""

    def reads_no_more(self, peer: RemotePeer) -> bool:
        """Whether the end of the former engine ended all that read this rank's memory to write it to the peer."""


def renewal_due(backend: Backend) -> str:
    return backend.renewal_due() if isinstance(backend, Renewable) else ""


@runtime_checkable
class SeveralEngines(Protocol):
    """Several engines as one. Each rank chooses the engine by which it writes to the other."""

    def engine_to(self, peer: RemotePeer) -> str:
        """The name of the engine that writes to a peer."""

    def written_by(self, peer: RemotePeer, engine: str) -> None:
        """Record that the peer writes here by that engine only. Until then a fence asks all engines."""


@runtime_checkable
class Gathering(Protocol):
    """An engine that gathers scattered local pieces which end up side by side at the peer, so that they need no
    packing.
    """

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """The mean piece length in bytes from which gathering beats packing; `None`: not towards this peer."""


class PreparedSpans(Protocol):
    """Span classes prepared for one peer at one epoch. Opaque to the manager."""

    @property
    def shapes(self) -> Sequence[SpanShape]: ...


@runtime_checkable
class SpanWriter(Protocol):
    """An engine that computes addresses itself. It gets span classes once per peer, and then only token runs."""

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> PreparedSpans | None:
        """`None` if the engine takes only addresses for this peer. Raises `NotRegistered` for a pool outside the
        regions of its side.
        """

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        """Raises as `Backend.submit` does."""
