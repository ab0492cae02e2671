"""NIXL's requests, transfers and peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from disagg.backends.adapter import AdapterPeer, check_closable
from disagg.backends.base import TransferStatus
from disagg.backends.endpoint import RegionIndex
from disagg.backends.nixl.bindings import ERRORS, Bindings
from disagg.core.copies import CopyBatch
from disagg.core.errors import DisaggError, PeerUnreachable
from disagg.core.memory import CPU, RemoteRegion
from disagg.machine.processes import ProcessWatch
from disagg.machine.tcp import EngineConnections

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint64]
"""`(address, length, device number)`, N x 3."""


class NixlPeer(AdapterPeer):
    def __init__(
        self,
        agent: str,
        machine: str,
        process: ProcessWatch | None,
        connections: EngineConnections,
        regions: Sequence[RemoteRegion],
        *,
        requests: Requests,
        epoch: int,
    ) -> None:
        super().__init__(regions, epoch=epoch)
        self.agent = agent
        self.machine = machine
        self.requests = requests
        self.process = process
        self.connections = connections
        self.over = False  # a fence has proved that nothing of it is under way
        self.lost: str | None = None  # NIXL's error when the connection broke

    def refusal(self) -> str | None:
        if self.requests.are_closed:
            return "was connected before the engine was renewed"
        return super().refusal() or (f"was lost: {self.lost}" if self.lost else None)


class TransferOwner(Protocol):
    def advance(self, transfer: NixlTransfer, /) -> None: ...
    def release(self, transfer: NixlTransfer, /) -> None: ...


class NixlTransfer:
    completion = None

    def __init__(self, owner: TransferOwner, peer: NixlPeer, handles: list[int]) -> None:
        self._owner = owner
        self.peer = peer
        self.handles = handles
        self.running = handles
        self.status = TransferStatus.PENDING if handles else TransferStatus.DONE
        self.error: str | None = None
        self._began = time.monotonic()

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._owner.advance(self)
        if self.status is TransferStatus.PENDING:
            self.peer.connections.note_progress(self._began)
        if self.status is TransferStatus.UNSETTLED and self.peer.over:
            self.status = TransferStatus.FAILED
        return self.status

    def close(self) -> None:
        check_closable(self.status)
        self._owner.release(self)

    def give_up(self, error: str) -> None:
        self.status = TransferStatus.UNSETTLED
        self.error = self.error or error


class Requests:
    """Those of one agent. Used under the backend's lock."""

    def __init__(self, nixl: Bindings, agent: Any, ucx: int) -> None:
        self._nixl = nixl
        self._agent = agent
        self._ucx = ucx
        self._handles: set[int] = set()

    @property
    def are_closed(self) -> bool:
        return self._agent is None

    def make_all(self, index: RegionIndex, peer: NixlPeer, copies: CopyBatch) -> list[int]:
        """Raises `NotRegistered`, or NIXL's error, with no request left."""
        local, remote = copies.source, copies.destination
        ours = index.describe(local, copies.nbytes, side="local")
        theirs = peer.index.describe(remote, copies.nbytes, side="remote")
        if not len(ours):
            return []
        if index.kind and peer.index.kind:
            return [self.make(peer, (index.kind, peer.index.kind), (ours, theirs))]
        on_gpu = (
            _are_on_gpu(index, index.check(local, copies.nbytes, side="local")),
            _are_on_gpu(peer.index, peer.index.check(remote, copies.nbytes, side="remote")),
        )
        handles: list[int] = []
        try:
            for kinds, chosen in _by_kind(*on_gpu):
                handles.append(self.make(peer, kinds, (ours[chosen], theirs[chosen])))
        except DisaggError:
            self.release(handles)
            raise
        return handles

    def make(self, peer: NixlPeer, kinds: tuple[str, str], rows: tuple[Rows, Rows], *, reads: bool = False) -> int:
        """`kinds` and `rows` are (local, remote)."""
        module = self._nixl.module
        with self._nixl.mapped(f"preparing {len(rows[0])} copies for peer {peer.agent!r}"):
            local = module.nixlXferDList(self._nixl.memory_kind(kinds[0]), rows[0])
            remote = module.nixlXferDList(self._nixl.memory_kind(kinds[1]), rows[1])
            operation = module.NIXL_READ if reads else module.NIXL_WRITE
            handle = int(self._agent.createXferReq(operation, local, remote, peer.agent, "", [self._ucx]))
        self._handles.add(handle)
        return handle

    def post(self, transfer: NixlTransfer) -> bool:
        return bool(transfer.handles) and self._update(transfer, self._agent.postXferReq, "posting")

    def poll(self, transfer: NixlTransfer) -> bool:
        return self._update(transfer, self._agent.getXferStatus, "transferring")

    def _update(self, transfer: NixlTransfer, call: Callable[[int], Any], what: str) -> bool:
        left = []
        for handle in transfer.running:
            try:
                status = call(handle)
            except self._nixl.errors as error:
                if ERRORS.get(type(error).__name__) is PeerUnreachable:
                    transfer.peer.lost = transfer.peer.lost or str(error)
                transfer.give_up(f"{what}: {type(error).__name__}: {error}")
                return False
            if status == self._nixl.in_progress:
                left.append(handle)
            elif status != self._nixl.success:
                transfer.give_up(f"{what}: NIXL returned status {status}")
                return False
        transfer.running = left
        if not left:
            transfer.status = TransferStatus.DONE
        return bool(left)

    def release(self, handles: Sequence[int]) -> None:
        """NIXL keeps a request that it refuses to release until it is closed."""
        for handle in handles:
            if handle not in self._handles:
                continue
            try:
                self._agent.releaseXferReq(handle)
                self._handles.discard(handle)
            except self._nixl.errors as error:
                logger.warning("backend 'nixl': NIXL keeps a request: %s", error)

    def close(self) -> None:
        self.release(tuple(self._handles))
        self._handles.clear()
        self._agent = None


def _are_on_gpu(index: RegionIndex, where: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.array([region.device.kind != CPU.kind for region in index.regions], dtype=np.bool_)[where]


def _by_kind(
    local: npt.NDArray[np.bool_], remote: npt.NDArray[np.bool_]
) -> Iterator[tuple[tuple[str, str], npt.NDArray[np.bool_]]]:
    for local_gpu in (False, True):
        for remote_gpu in (False, True):
            chosen = (local == local_gpu) & (remote == remote_gpu)
            if chosen.any():
                yield ("cuda" if local_gpu else "cpu", "cuda" if remote_gpu else "cpu"), chosen
