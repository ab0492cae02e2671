"""The memory that this GPU exports, and the peers' memory that is mapped here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import numpy as np

from disagg.backends.adapter import AdapterPeer
from disagg.backends.cuda.driver import IPC_HANDLE_NBYTES, Allocation, CudaError, Gpu
from disagg.backends.nvlink.holders import hold
from disagg.backends.nvlink.neighbours import Neighbour
from disagg.core.copies import Addresses
from disagg.core.errors import ConfigError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessWatch, machine_identity

MAX_ALLOCATIONS = 1 << 12


class ExportedAllocation(msgspec.Struct, frozen=True, array_like=True):
    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    handle: Annotated[bytes, msgspec.Meta(min_length=IPC_HANDLE_NBYTES, max_length=IPC_HANDLE_NBYTES)]


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`machine`: the owner's `machine_identity`. `gpu`: UUID. `mappings`: address of the owner's `Mappings`."""

    machine: str
    gpu: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    mappings: Annotated[str, msgspec.Meta(pattern="^disagg-[0-9a-f]{32}$")]
    allocations: Annotated[tuple[ExportedAllocation, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]

    def allocation_of(self, region: MemoryRegion | RemoteRegion) -> ExportedAllocation:
        """Raises `RemoteProtocolError` for a region outside all allocations."""
        for allocation in self.allocations:
            if allocation.base <= region.address and region.address + region.nbytes <= allocation.base + allocation.nbytes:
                return allocation
        raise RemoteProtocolError(
            f"endpoint of backend 'nvlink': region [{region.address:#x}, +{region.nbytes}) is outside all "
            f"{len(self.allocations)} allocations of the endpoint"
        )


DECODER = msgspec.msgpack.Decoder(Descriptor)
"""Created at import: see `Adapter`."""


def gpu_of(regions: Sequence[MemoryRegion]) -> int:
    devices = sorted({region.device for region in regions})
    if len(devices) != 1 or devices[0].kind == CPU.kind:
        found = ", ".join(map(str, devices)) or "no memory"
        raise ConfigError(f"backend 'nvlink': expected memory of one GPU, found {found}")
    return devices[0].index


def export_memory(gpu: Gpu, regions: Sequence[MemoryRegion]) -> tuple[tuple[Allocation, ...], tuple[MemoryRegion, ...]]:
    """The allocations that contain `regions`, and the regions, merged. Enter `gpu.current()` first. Raises `ConfigError` for
    memory that another process cannot map.
    """
    extents = {region: _extent(gpu, region) for region in regions}
    allocations = tuple(gpu.export(base) for base, _ in sorted(set(extents.values())))
    return allocations, _merge_by_allocation(extents)


def _extent(gpu: Gpu, region: MemoryRegion) -> tuple[int, int]:
    where = f"backend 'nvlink': the memory at {region.address:#x}"
    found = gpu.ordinal_of(region.address)
    if found != gpu.ordinal:
        raise ConfigError(f"{where} was registered as memory of GPU {gpu.ordinal}, but it is on {found}")
    if not gpu.has_legacy_handle(region.address):
        raise ConfigError(
            f"{where} has no IPC handle, because cudaMalloc did not allocate it "
            "(PyTorch's expandable_segments:True and SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 allocate such memory; allocate KV "
            "pools without)"
        )
    base, nbytes = gpu.extent(region.address)
    if region.address + region.nbytes > base + nbytes:
        raise ConfigError(f"{where}, {region.nbytes} bytes, leaves its allocation [{base:#x}, +{nbytes})")
    return base, nbytes


def _merge_by_allocation(extents: dict[MemoryRegion, tuple[int, int]]) -> tuple[MemoryRegion, ...]:
    merged = []
    for base in sorted({base for base, _ in extents.values()}):
        inside = [MemoryRegion(r.address, r.nbytes) for r, (own, _) in extents.items() if own == base]
        device = next(r.device for r, (own, _) in extents.items() if own == base)
        # Without their device: `merge_regions` merges touching regions of the CPU only.
        merged += [MemoryRegion(r.address, r.nbytes, device) for r in merge_regions(inside)]
    return tuple(merged)


class NvlinkPeer(AdapterPeer):
    """The mapped memory of a peer.

    `held`: the connection that registers the mapping. `opened`: bases of mapped allocations. `deltas`: for each region, an
    address here minus the same address in the peer. `table`: starts and deltas on this GPU (`kernels.cu`). `prepared`:
    tables of span classes on this GPU.
    """

    def __init__(
        self, regions: Sequence[RemoteRegion], *, epoch: int, descriptor: Descriptor, process: ProcessWatch | None
    ) -> None:
        super().__init__(regions, epoch=epoch)
        self.process = process
        self.held = hold(descriptor.mappings)
        self.neighbour: Neighbour | None = None
        self.opened: list[int] = []
        self.deltas: Addresses = np.zeros(0, np.uint64)
        self.table = 0
        self.prepared: list[int] = []
        self.pending = 0

    def refusal(self) -> str | None:
        return super().refusal() or ("belongs to a process that has ended" if self.has_ended else None)

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.has_ended()

    @property
    def is_own(self) -> bool:
        return self.process is not None and self.process.pid == os.getpid()

    def map(self, gpu: Gpu, descriptor: Descriptor) -> None:
        """Enter `gpu.current()` first. After an error, `unmap` undoes what succeeded."""
        bases = self._open(gpu, descriptor)
        owners = [descriptor.allocation_of(region).base for region in self.regions]
        self.deltas = np.array([(bases[base] - base) % 2**64 for base in owners], np.uint64)
        starts = np.array([region.address for region in self.regions], np.uint64)
        self.table = gpu.table(np.concatenate([starts, self.deltas]))

    def _open(self, gpu: Gpu, descriptor: Descriptor) -> dict[int, int]:
        if self.is_own:  # mapped already
            return {allocation.base: allocation.base for allocation in descriptor.allocations}
        bases = {}
        for allocation in descriptor.allocations:
            base = gpu.open(allocation.handle)
            self.opened.append(base)
            _, nbytes = gpu.extent(base)
            if nbytes < allocation.nbytes:
                raise RemoteProtocolError(
                    f"endpoint of backend 'nvlink': expected a handle of {allocation.nbytes} bytes, found {nbytes}"
                )
            bases[allocation.base] = base
        return bases

    def unmap(self, gpu: Gpu) -> None:
        """A lost context's mappings end when it is destroyed."""
        with suppress(CudaError), gpu.current():
            for base in self.opened:
                gpu.close(base)
            for address in (self.table, *self.prepared):
                if address:
                    gpu.free(address)
        self.opened, self.table, self.prepared = [], 0, []
        if self.held is not None:
            self.held.close()


def check_access(gpu: Gpu, descriptor: Descriptor, *, is_own: bool) -> str:
    """The transport to the peer's GPU; raises `PeerUnreachable` if there is none."""
    if descriptor.machine != machine_identity():
        raise PeerUnreachable("backend 'nvlink': the peer is on another host, and GPUs map memory of their own host only")
    if descriptor.gpu == gpu.uuid:
        return "same GPU"
    ordinal = gpu.peers().get(descriptor.gpu)
    if ordinal is None:
        if is_own:
            raise RemoteProtocolError("endpoint of backend 'nvlink': names this process and a GPU that it does not have")
        return "peer memory (a GPU hidden from this process)"
    if not gpu.can_access(ordinal):
        raise PeerUnreachable(f"backend 'nvlink': GPU {gpu.ordinal} has no access to the memory of GPU {ordinal}")
    if is_own:
        _enable_access(gpu, ordinal)
    return "nvlink (inferred)" if gpu.has_nvlink(ordinal) else "pcie (inferred)"


def _enable_access(gpu: Gpu, ordinal: int) -> None:
    other = Gpu(ordinal)
    try:
        with gpu.current():
            gpu.enable_peer_access(other)
    except CudaError as error:
        raise PeerUnreachable(f"backend 'nvlink': no access to the memory of GPU {ordinal}: {error}") from error
    finally:
        other.release()
