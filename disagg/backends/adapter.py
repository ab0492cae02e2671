"""Base classes of backends and their peers, with the checks before anything reaches the engine. No lock, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from disagg.backends.base import Backend, RemotePeer, TransferStatus
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import MemoryRegion, RemoteRegion


class AdapterPeer:
    """A peer process at one epoch. `regions` are sorted by address, like those of `index`."""

    def __init__(self, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        self.regions: Sequence[RemoteRegion] = tuple(sorted(regions))
        self.index = RegionIndex(self.regions)
        self.epoch = epoch
        self.connected = True

    def refusal(self) -> str | None:
        """Why nothing may be posted to this peer, as the end of a sentence, or `None`."""
        return None if self.connected else "was disconnected"


Peer = TypeVar("Peer", bound=AdapterPeer)
Descriptor = TypeVar("Descriptor")
BackendT = TypeVar("BackendT", bound=Backend)


class Adapter(Generic[Peer, Descriptor]):
    """Base class of backends. `descriptors` decodes the engine's part of an endpoint.

    Create the decoder at import: msgspec 0.22 ends the process when two threads are the first to use one `Struct`. An
    adapter sets `is_open` to `False` when it closes.
    """

    name: str

    def __init__(self, *, peers: type[Peer], descriptors: msgspec.msgpack.Decoder[Descriptor]) -> None:
        self.is_open = True
        self._peers = peers
        self._descriptors = descriptors
        self._index: RegionIndex | None = None

    def check_open(self) -> None:
        if not self.is_open:
            raise LocalProtocolError(f"backend {self.name!r}: the engine has been closed")

    @property
    def index(self) -> RegionIndex:
        if self._index is None:
            raise LocalProtocolError(f"backend {self.name!r}: register has not been called")
        return self._index

    def check_not_registered(self) -> None:
        self.check_open()
        if self._index is not None:
            raise LocalProtocolError(f"backend {self.name!r}: register is called once")

    def set_registered(self, regions: Sequence[MemoryRegion]) -> None:
        self._index = RegionIndex(regions)

    def endpoint_with(self, descriptor: Descriptor) -> bytes:
        return encode_endpoint(self.name, msgspec.msgpack.encode(descriptor), self.index.regions)

    def decode(self, endpoint: bytes) -> tuple[Descriptor, tuple[RemoteRegion, ...]]:
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            return self._descriptors.decode(raw), regions
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend {self.name!r}: {error}") from error

    def reachable(self, peer: RemotePeer) -> Peer:
        """`peer` as this backend's own type. Raises `LocalProtocolError` for a closed engine or another backend's peer,
        `PeerUnreachable` for a peer that was disconnected or lost.
        """
        self.check_open()
        if not isinstance(peer, self._peers):
            expected, found = self._peers.__name__, type(peer).__name__
            raise LocalProtocolError(f"backend {self.name!r}: expected a peer of type {expected}, found {found}")
        if (refusal := peer.refusal()) is not None:
            raise PeerUnreachable(f"backend {self.name!r}: the peer of epoch {peer.epoch} {refusal}")
        return peer

    def at_epoch(self, peer: RemotePeer, epoch: int) -> Peer | None:
        """`peer` as this backend's own type, connected or not; `None` at another epoch."""
        return peer if isinstance(peer, self._peers) and peer.epoch == epoch else None

    def check_copies(self, peer: Peer, copies: CopyBatch) -> None:
        """Raises `NotRegistered` for an address outside the regions of its side."""
        self.index.require(copies.source, copies.nbytes, side="local")
        peer.index.require(copies.destination, copies.nbytes, side="remote")


def registered_as(index: RegionIndex, other: BackendT) -> BackendT:
    """`other`, a new backend, with this process's memory of `index` registered; closed if it cannot be."""
    try:
        other.register([region for region in index.regions if isinstance(region, MemoryRegion)])
    except BaseException:
        other.close()
        raise
    return other


def exchange(one: object, other: object, names: Sequence[str]) -> None:
    """Exchange these attributes of two backends."""
    for name in names:
        mine, theirs = getattr(one, name), getattr(other, name)
        setattr(one, name, theirs)
        setattr(other, name, mine)


def check_closable(status: TransferStatus) -> None:
    """Raises `LocalProtocolError` for a transfer that has not settled."""
    if not status.settled:
        raise LocalProtocolError(f"transfer: only a settled one can be closed, this one is {status.value}")
