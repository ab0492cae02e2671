"""The end of an interpreter that has not closed its managers: silent, with its own exit status, and peers get a goodbye."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES

ROOT = Path(__file__).parents[2]
SCRIPT = """
import logging, os, sys, threading
from disagg import new_request_id
from disagg.testing.reference import KVModel, PageList
from tests.support.cluster import Cluster, Side, introduce, receive, start_side

engine, end = sys.argv[1:]
model, settings = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16"), {"backend": engine, "metrics_port": 0}
instances = Cluster(model)
instances.prefill = start_side(model, Side(), "prefill-0", num_layers=3, settings=settings)
instances.decode = start_side(model, Side(page=8), "decode-0", num_layers=3, settings=settings)
introduce(instances.prefill, instances.decode)
instances.prefill[0].manager.wait_ready("decode-0")
instances.decode[0].manager.wait_ready("prefill-0")
assert all(event.ok for event in instances.transfer(20))
receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
sys.stderr.flush()
print("READY", flush=True)

def serve(instances, receiver, busy):
    busy.set()
    while True:
        instances.decode[0].manager.events()
        receiver.poll()

if end == "daemon":
    busy = threading.Event()
    threading.Thread(target=serve, args=(instances, receiver, busy), daemon=True).start()
    busy.wait()
elif end == "dropped":
    del instances, receiver
elif end == "status":
    sys.exit(3)
elif end == "fork":
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert all(event.ok for event in instances.transfer(20))
        sys.exit(status)
"""


@pytest.mark.parametrize(
    ("engine", "end"),
    [
        ("local", "return"),
        ("local", "daemon"),
        ("local", "dropped"),
        ("local", "status"),
        ("local", "fork"),
        ("cma", "return"),
        ("nixl", "return"),
        ("nixl", "fork"),
        ("mooncake", "return"),
        ("mooncake", "fork"),
        ("auto", "daemon"),
    ],
)
def test_an_interpreter_ends_without_noise_although_managers_are_open(engine: str, end: str) -> None:
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, engine, end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "READY" in done.stdout, done.stderr
    assert done.returncode == (3 if end == "status" else 0), done.stderr
    for noise in ("nanobind", "Traceback", "leaked", "Fatal", "terminate called", "Exception ignored"):
        assert noise not in done.stderr, done.stderr
    ended = done.stderr.count("direction=receive peer=prefill-0 outcome=failed")
    assert ended == 1, f"the open request ends in the process that has it, and in no child:\n{done.stderr}"
