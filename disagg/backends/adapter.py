"""Shared base of the adapters: the checks that each of them makes before it gives anything to its engine.

An adapter derives its backend from `Adapter` and its peers from `AdapterPeer`. The base class has no lock and no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from disagg.backends.base import RemotePeer, TransferStatus
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import MemoryRegion, RemoteRegion


class AdapterPeer:
    """One peer process at one epoch. `regions` are sorted by address, like those of `index`."""

    def __init__(self, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        self.regions: Sequence[RemoteRegion] = tuple(sorted(regions))
        self.index = RegionIndex(self.regions)
        self.epoch = epoch
        self.connected = True

    def refusal(self) -> str | None:
        """Why nothing may be posted to this peer, as the end of a sentence; `None` if it may."""
        return None if self.connected else "was disconnected"


Peer = TypeVar("Peer", bound=AdapterPeer)
Descriptor = TypeVar("Descriptor")


class Adapter(Generic[Peer, Descriptor]):
    """Base class of backends. `descriptors` decodes what the engine's endpoint carries beside its regions.

    Create the decoder when the module is imported: msgspec 0.22 ends the process when two threads are the first to use one
    `Struct`. An adapter sets `is_open` to `False` when it closes.
    """

    name: str

    def __init__(self, *, peers: type[Peer], descriptors: msgspec.msgpack.Decoder[Descriptor]) -> None:
        self.is_open = True
        self._peers = peers
        self._descriptors = descriptors
        self._index: RegionIndex | None = None

    def check_open(self) -> None:
        """Raises `LocalProtocolError` after `close`."""
        if not self.is_open:
            raise LocalProtocolError(f"backend {self.name!r}: the engine has been closed")

    # -- this side's memory --------------------------------------------------------------------------------------------

    @property
    def index(self) -> RegionIndex:
        """The registered regions; raises `LocalProtocolError` before `register`."""
        if self._index is None:
            raise LocalProtocolError(f"backend {self.name!r}: register has not been called")
        return self._index

    def check_not_registered(self) -> None:
        """Raises `LocalProtocolError` for a second `register`, or one after `close`."""
        self.check_open()
        if self._index is not None:
            raise LocalProtocolError(f"backend {self.name!r}: register is called once")

    def set_registered(self, regions: Sequence[MemoryRegion]) -> None:
        """Record what the engine has registered."""
        self._index = RegionIndex(regions)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def endpoint_with(self, descriptor: Descriptor) -> bytes:
        """The endpoint of this engine: its name, `descriptor`, and the registered regions."""
        return encode_endpoint(self.name, msgspec.msgpack.encode(descriptor), self.index.regions)

    def decode(self, endpoint: bytes) -> tuple[Descriptor, tuple[RemoteRegion, ...]]:
        """The descriptor and the regions in a peer's endpoint; raises `RemoteProtocolError`."""
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            return self._descriptors.decode(raw), regions
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend {self.name!r}: {error}") from error

    # -- peers ---------------------------------------------------------------------------------------------------------

    def reachable(self, peer: RemotePeer) -> Peer:
        """`peer` as this backend's own type; raises where nothing may be posted to it.

        Raises `LocalProtocolError` for a closed engine or a peer of another backend, `PeerUnreachable` for a peer that was
        disconnected or lost.
        """
        self.check_open()
        if not isinstance(peer, self._peers):
            expected, found = self._peers.__name__, type(peer).__name__
            raise LocalProtocolError(f"backend {self.name!r}: expected a peer of type {expected}, found {found}")
        if (refusal := peer.refusal()) is not None:
            raise PeerUnreachable(f"backend {self.name!r}: the peer of epoch {peer.epoch} {refusal}")
        return peer

    def at_epoch(self, peer: RemotePeer, epoch: int) -> Peer | None:
        """`peer` as this backend's own type if it is the peer's instance of `epoch`, connected or not; else `None`."""
        return peer if isinstance(peer, self._peers) and peer.epoch == epoch else None

    def check_copies(self, peer: Peer, copies: CopyBatch) -> None:
        """Raises `NotRegistered` for an address of `copies` outside the regions of its side."""
        self.index.require(copies.source, copies.nbytes, side="local")
        peer.index.require(copies.destination, copies.nbytes, side="remote")


def check_closable(status: TransferStatus) -> None:
    """Raises `LocalProtocolError` for a transfer that has not settled."""
    if not status.settled:
        raise LocalProtocolError(f"transfer: only a settled one can be closed, this one is {status.value}")
