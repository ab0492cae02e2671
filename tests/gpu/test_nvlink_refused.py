"""Input that backend `nvlink` refuses: nothing is posted, and the engine stays usable."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest

from disagg.backends.base import BackendOptions
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.backends.nvlink import engine as nvlink
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.core.errors import (
    ConfigError,
    DisaggError,
    LocalProtocolError,
    NotRegistered,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch
from tests.gpu.pieces import SHAPES, batch_of, check, pieces_of, shapes_of
from tests.gpu.targets import REGION_NBYTES, Memory, Target, batch

pytestmark = pytest.mark.gpu


def test_addresses_outside_the_regions_are_refused(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    images = local.read(), target.read()
    for side in (0, 1):
        start = (local, target)[side].address(0)
        stop = start + REGION_NBYTES[0]
        for bad in ((start - 1, 1), (stop, 64), (stop - 63, 64), (0, 64), (2**64 - 1, 2**64 - 1), (start + 10, 2**64 - 10)):
            rows = [[local.address(0), target.address(0), 64] for _ in range(3)]
            rows[1][side], rows[1][2] = bad
            here, there, sizes = zip(*rows, strict=True)
            with pytest.raises(NotRegistered):
                backend.submit(peer, batch(here, there, sizes))
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), images[1])


def test_malformed_endpoints_are_refused(backend: NvlinkBackend, target: Target) -> None:
    raw, regions = decode_endpoint("nvlink", target.endpoint)
    here = [MemoryRegion(r.address, r.nbytes, r.device) for r in regions]
    rng = random.Random(3)
    outside = [*here, MemoryRegion(4096, 16, Device("cuda", 1))]
    wrong = [
        b"",
        rng.randbytes(500),
        target.endpoint + b"\x00",
        encode_endpoint("another", raw, here),
        encode_endpoint("nvlink", b"", here),
        encode_endpoint("nvlink", rng.randbytes(len(raw)), here),
        encode_endpoint("nvlink", raw[: len(raw) // 2], here),
        encode_endpoint("nvlink", raw, outside),
    ]
    for endpoint in wrong:
        with pytest.raises(RemoteProtocolError):
            backend.connect(endpoint, epoch=1)
    backend.disconnect(backend.connect(target.endpoint, process=target.watch, epoch=1))


def altered(endpoint: bytes, **fields: object) -> bytes:
    """The endpoint with `fields` replaced in its descriptor."""
    raw, regions = decode_endpoint("nvlink", endpoint)
    descriptor = msgspec.msgpack.decode(raw)
    for name, value in fields.items():
        descriptor[name] = value
    return encode_endpoint(
        "nvlink", msgspec.msgpack.encode(descriptor), [MemoryRegion(r.address, r.nbytes, r.device) for r in regions]
    )


def test_a_peer_that_cannot_be_mapped_is_refused_with_the_reason(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    with pytest.raises(PeerUnreachable, match="another host"):
        backend.connect(altered(target.endpoint, machine="another"), process=target.watch, epoch=1)
    raw, _ = decode_endpoint("nvlink", target.endpoint)
    forged = [[base, nbytes, bytes(64)] for base, nbytes, _ in msgspec.msgpack.decode(raw)["allocations"]]
    with pytest.raises(PeerUnreachable, match="cannot be mapped"):
        backend.connect(altered(target.endpoint, allocations=forged), process=target.watch, epoch=1)
    check(backend, local, target, SHAPES["mixed"])


@pytest.mark.two_gpus
def test_memory_that_cannot_be_served_is_refused(local: Memory) -> None:
    host = np.zeros(64, np.uint8)
    gpu = Device("cuda", 0)
    for regions, words in (
        ([MemoryRegion(host.ctypes.data, 64)], "one GPU, found cpu"),
        ([], "no memory"),
        ([MemoryRegion(local.address(0), 64, gpu), MemoryRegion(4096, 64, Device("cuda", 1))], "cuda:0, cuda:1"),
        ([MemoryRegion(local.address(0), 64, Device("cuda", 1))], "it is on 0"),
        ([MemoryRegion(4096, 64, gpu)], "cannot serve"),
        ([MemoryRegion(local.address(0), 1 << 40, gpu)], "leaves its allocation"),
    ):
        backend = NvlinkBackend(BackendOptions())
        with pytest.raises(ConfigError, match=words):
            backend.register(regions)
        backend.close()


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated:FutureWarning")
def test_memory_of_expandable_segments_is_refused() -> None:
    torch = pytest.importorskip("torch")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        tensor = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:0")
        backend = NvlinkBackend(BackendOptions())
        with pytest.raises(ConfigError, match="expandable_segments"):
            backend.register([MemoryRegion(tensor.data_ptr(), tensor.numel(), Device("cuda", 0))])
        backend.close()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_one_bad_piece_in_many_parts_stops_all_of_them(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    images = local.read(), target.read()
    pieces = pieces_of(5, SHAPES["more than one launch"])
    for bad in (0, nvlink.PART + 7):
        spoilt = list(pieces)
        spoilt[bad] = (0, REGION_NBYTES[0] - 5, 0, 0, 30)
        with pytest.raises(NotRegistered, match=f"copy {bad} of"):
            backend.submit(peer, batch_of(local, target, spoilt))
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), images[1])
    check(backend, local, target, SHAPES["mixed"])


def test_calls_out_of_order_are_refused(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    fresh = NvlinkBackend(BackendOptions())
    with pytest.raises(LocalProtocolError, match="register"):
        fresh.endpoint()
    assert fresh.transport
    fresh.close()
    with pytest.raises(LocalProtocolError):
        backend.register(local.regions)
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    one = batch_of(local, target, [(0, 0, 0, 0, 10)])
    backend.disconnect(peer)
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable):
        backend.submit(peer, one)
    backend.close()
    backend.close()
    for call in (
        lambda: backend.submit(peer, one),
        lambda: backend.connect(target.endpoint, process=target.watch, epoch=2),
    ):
        with pytest.raises(DisaggError):
            call()


def test_span_classes_outside_the_regions_are_refused(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    shapes, parts = shapes_of(local, target, unit=256, skew=0)
    outside = dataclasses.replace(shapes[0], num_rows=(9, 10**6))
    with pytest.raises(NotRegistered, match="remote copy 0 of 3"):
        backend.prepare_spans(peer, (outside,))
    prepared = backend.prepare_spans(peer, shapes)
    with pytest.raises(LocalProtocolError, match="that were prepared"):
        backend.submit_spans(prepared, SpanBatch(shapes[:1], parts[:1]))
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable, match="was disconnected"):
        backend.submit_spans(prepared, SpanBatch(prepared.shapes, parts))
