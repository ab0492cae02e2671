"""The rate of this CPU's time stamp counter, which QEMU hands to an emulated guest as it is.

A guest measures the rate while it boots. Where other work delays it meanwhile, it finds a wrong one, and its clock then runs
many times too fast.
"""

from __future__ import annotations

import ctypes
import mmap
import time

_READ = b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3"
"""`rdtsc; shl rdx, 32; or rax, rdx; ret`, for x86-64."""
_APART_S = 0.2
_TRIES = 20


def tsc_khz() -> int:
    """The rate in kHz, within about 0.01%."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(_READ)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))

    def sample() -> tuple[int, int]:
        """The counter, and the time in nanoseconds when it was read: of the quickest of some tries."""
        tries = [(time.monotonic_ns(), read(), time.monotonic_ns()) for _ in range(_TRIES)]
        before, counter, after = min(tries, key=lambda one: one[2] - one[0])
        return counter, (before + after) // 2

    first, began = sample()
    time.sleep(_APART_S)
    last, ended = sample()
    return (last - first) * 10**6 // (ended - began)
