"""The calls of a queue into the CUDA driver, against a fake driver that records them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.core import _native

DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
static uint64_t calls[64];
static int count, failing;
static int call(uint64_t name, uint64_t what) {
  calls[2 * count] = name;
  calls[2 * count++ + 1] = what;
  return (int)name == failing ? 700 : 0;
}
uint64_t *recorded(void) { return calls; }
int begin(int fail) { int made = count; count = 0; failing = fail; return made; }
int cuCtxPushCurrent_v2(void *context) { return call(1, (uintptr_t)context); }
int cuCtxPopCurrent_v2(void **context) { *context = 0; return call(2, 0); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *stream) {
  return call(3, to + (uintptr_t)from + n + (uintptr_t)stream);
}
int cuEventRecord(void *event, void *stream) { return call(4, (uintptr_t)event + (uintptr_t)stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return call(5, (uintptr_t)event + (uintptr_t)stream + flags);
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **extra) {
  uint64_t sum = (uintptr_t)f + x * y * z + bx * by * bz + shared + (uintptr_t)stream + (uintptr_t)extra;
  for (int i = 0; i < 3; ++i) sum += *(uint64_t *)arguments[i];
  return call(6, sum);
}
int cuEventQuery(void *event) {
  int failed = call(7, (uintptr_t)event);
  return failed ? failed : event == (void *)8 ? 600 : 0;
}
"""
CONTEXT, STREAM, UPLOADS = 1 << 8, 1 << 16, 1 << 24
PUSHED, POPPED = (1, CONTEXT), (2, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.c"], check=True)
    return folder / "driver.so"


def calls(library: Path, *, fail: int = 0) -> list[tuple[int, int]]:
    """The calls since the last invocation. From now on call `fail` fails."""
    driver = ctypes.CDLL(str(library))
    driver.recorded.restype = ctypes.POINTER(ctypes.c_uint64)
    count, recorded = driver.begin(fail), driver.recorded()
    return [(recorded[2 * i], recorded[2 * i + 1]) for i in range(count)]


@pytest.mark.parametrize("holds_gil", [False, True])
def test_calls_are_in_order_and_restore_the_context(library: Path, holds_gil: bool) -> None:
    queue = _native.CudaQueue(str(library), CONTEXT, STREAM, UPLOADS, holds_gil=holds_gil)
    calls(library)
    assert queue.upload(1 << 32, 1 << 40, 5, 9) == (None, 0)
    copied = (3, (1 << 32) + (1 << 40) + 5 + UPLOADS)
    assert calls(library) == [PUSHED, copied, (4, 9 + UPLOADS), (5, 9 + STREAM), POPPED]
    assert queue.launch(1 << 48, [2**40, 3, 2**50], 16, 1024, 1 << 12, 7) == (None, 0)
    launched = (6, (1 << 48) + 16 + 1024 + (1 << 12) + STREAM + 2**40 + 3 + 2**50)
    assert calls(library) == [PUSHED, launched, (4, 7 + STREAM), POPPED]
    assert queue.launch(1 << 48, [2**40, 3, 2**50], 16, 1024, 1 << 12, 0) == (None, 0)
    assert calls(library) == [PUSHED, launched, POPPED]
    assert queue.query(7)[1] == 0
    assert queue.query(8)[1] == 600
    assert calls(library) == [PUSHED, (7, 7), POPPED, PUSHED, (7, 8), POPPED]


@pytest.mark.parametrize(
    ("number", "name"), [(1, "cuCtxPushCurrent"), (3, "cuMemcpyHtoDAsync"), (4, "cuEventRecord"), (5, "cuStreamWaitEvent")]
)
def test_an_upload_stops_at_the_first_failed_call(library: Path, number: int, name: str) -> None:
    queue = _native.CudaQueue(str(library), CONTEXT, STREAM, UPLOADS)
    calls(library, fail=number)
    assert queue.upload(16, 32, 5, 9) == (name, 700)
    made = [call for call, _ in calls(library)]
    assert made == ([1] if number == 1 else [1, *range(3, number + 1), 2])


@pytest.mark.parametrize(("number", "name"), [(1, "cuCtxPushCurrent"), (6, "cuLaunchKernel"), (4, "cuEventRecord")])
def test_a_launch_stops_at_the_first_failed_call(library: Path, number: int, name: str) -> None:
    queue = _native.CudaQueue(str(library), CONTEXT, STREAM, UPLOADS)
    calls(library, fail=number)
    assert queue.launch(16, [1, 2, 3], 1, 32, 0, 9) == (name, 700)
    assert [call for call, _ in calls(library)] == {1: [1], 6: [1, 6, 2], 4: [1, 6, 4, 2]}[number]


def test_query_returns_the_error_of_a_lost_context(library: Path) -> None:
    queue = _native.CudaQueue(str(library), CONTEXT, STREAM, UPLOADS)
    calls(library, fail=7)
    assert queue.query(9) == ("cuEventQuery", 700)
    calls(library, fail=1)
    assert queue.query(9) == ("cuCtxPushCurrent", 700)


def test_a_library_other_than_the_driver_raises() -> None:
    with pytest.raises(RuntimeError, match="CUDA driver"):
        _native.CudaQueue("libm.so.6", 0, 0, 0)
    with pytest.raises(RuntimeError, match="CUDA driver"):
        _native.CudaQueue("no-such-library.so", 0, 0, 0)


CAPTURE = r"""
static int modes[2] = {-1, -1}, count;
int *exchanged(void) { return modes; }
int cuThreadExchangeStreamCaptureMode(int *mode) { modes[count++] = *mode; *mode = 0; return 0; }
"""
ENLIST = """
import ctypes, sys
from disagg.core import _native

_native.enlist_thread()
driver = ctypes.CDLL(sys.argv[1])
driver.exchanged.restype = ctypes.POINTER(ctypes.c_int)
print(driver.exchanged()[0])
_native.enlist_thread()
print(driver.exchanged()[0], driver.exchanged()[1])
"""


def test_a_thread_of_this_library_may_call_the_driver_during_a_capture(tmp_path: Path) -> None:
    """It asks for the mode `RELAXED` (2) of the driver that the process has loaded, and loads none itself."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(CAPTURE)
    driver = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, tmp_path / "driver.c"], check=True)
    done = subprocess.run([sys.executable, "-c", ENLIST, driver], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["-1", "2", "-1"]
