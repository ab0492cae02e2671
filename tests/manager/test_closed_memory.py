"""The library's own memory after `close`, while a peer may still write into it."""

from __future__ import annotations

import gc
from pathlib import Path

from disagg.core.memory import MemoryRegion
from tests.manager.test_peers import manager
from tests.support.cluster import DEADLINE_S


def is_mapped(region: MemoryRegion) -> bool:
    """Whether this process still has the whole region."""
    at = region.address
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= at < stop:
            at = stop
    return at >= region.address + region.nbytes


def is_resident(region: MemoryRegion) -> bool:
    """Whether the system still has pages there."""
    entries = 8 * (region.nbytes // 4096)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * (region.address // 4096))
        return any(int.from_bytes(entry, "little") >> 63 for entry in _words(pagemap.read(entries)))


def _words(data: bytes) -> list[bytes]:
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def test_the_addresses_of_staging_memory_stay_taken_while_a_peer_lives() -> None:
    """A stopped writer that goes on later would otherwise write into whatever has got them."""
    prefill, decode = (manager(name=name, backend="cma") for name in ("prefill", "decode"))
    prefill.add_peer("decode", address=decode.address)
    decode.add_peer("prefill", address=prefill.address)
    for one, other in ((prefill, "decode"), (decode, "prefill")):
        one.wait_ready(other, timeout_s=DEADLINE_S)
    regions = [memory.region for each in (prefill, decode) for memory in each._runtime._staging]
    assert len(regions) == 4
    for each in (prefill, decode):
        each.close()
    del each, one, prefill, decode
    gc.collect()
    assert all(is_mapped(region) for region in regions)
    assert not any(is_resident(region) for region in regions), "the pages go back to the system"
    with manager(name="next", backend="cma") as following:
        for memory in following._runtime._staging:
            start, stop = memory.region.address, memory.region.address + memory.region.nbytes
            assert all(stop <= region.address or region.address + region.nbytes <= start for region in regions)
