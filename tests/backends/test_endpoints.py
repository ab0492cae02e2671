"""Endpoints of any engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from disagg.backends.endpoint import MAX_REGIONS, decode_endpoint, encode_endpoint
from disagg.core.errors import RemoteProtocolError
from disagg.core.memory import MemoryRegion

FIRST = """
import sys, threading
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core.memory import MemoryRegion

sys.setswitchinterval(1e-6)
data = encode_endpoint("any", b"", [MemoryRegion(4096, 64)])
together = threading.Barrier(8)

def first():
    together.wait()
    assert decode_endpoint("any", data)[1][0].nbytes == 64

threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


def test_several_threads_may_be_the_first_to_read_an_endpoint() -> None:
    """Managers of one process connect at the same time, each in its own thread; msgspec ends the process if two threads create
    the decoder of one type at the same time.
    """
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (0, "read\n"), ended.stderr


def test_an_endpoint_has_a_bounded_number_of_regions() -> None:
    """Each costs memory and look-ups at the peer."""
    region = MemoryRegion(4096, 64)
    assert len(decode_endpoint("any", encode_endpoint("any", b"", [region] * MAX_REGIONS))[1]) == MAX_REGIONS
    with pytest.raises(RemoteProtocolError, match=f"length <= {MAX_REGIONS}"):
        decode_endpoint("any", encode_endpoint("any", b"", [region] * (MAX_REGIONS + 1)))
