"""Forked children: a manager of the parent cannot be used there, and the parent goes on undisturbed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from disagg import BackendUnavailable, KVManager, LocalProtocolError, ModelId, Pages, Topology, new_request_id
from disagg.state import paged
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import PageList
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, receive

PAGES = PageList((0, 1, 2))
NBYTES = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000
"""Linux 4.17. Python's `mmap` does not name it."""


def fork(run: Callable[[], None]) -> int:
    """Start a child that calls `run`, and ends with status 0 unless that raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12, because other threads may hold locks
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(60)
        run()
        status = 0
    except BaseException:  # noqa: BLE001 - shows it, and must not return into pytest
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    """The exit status of a child, which is killed after some time."""
    deadline = time.monotonic() + 4 * DEADLINE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child did not end")


@contextlib.contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    """Within the scope a thread holds the locks. It does not exist in a child that is forked meanwhile."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            go_on.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(DEADLINE_S)
    yield
    go_on.set()
    thread.join()


def use_inherited(instances: Cluster, receiver: Any, sender: Any) -> None:
    """In the child: every call is refused, and closing changes nothing."""
    manager: Any = instances.decode[0].manager
    rows, need, request = {"kv": Pages(np.arange(3))}, {"kv": (0, 20)}, new_request_id()
    for call in (
        lambda: manager.receiver(request, peer="prefill-0", rows=rows, need=need),
        lambda: manager.sender(request, peer="prefill-0"),
        lambda: manager.add_peer("other", address="tcp://127.0.0.1:1"),
        lambda: manager.wait_ready("prefill-0"),
        lambda: manager.engine("prefill-0", 0),
        manager.__enter__,
        manager.events,
        manager.fileno,
        lambda: manager.drain(timeout_s=1),
        lambda: mistreat(manager, MessageFaults()),
        receiver.poll,
        receiver.wait,
        lambda: receiver.abort("gone"),
        lambda: sender.needed("kv"),
        lambda: sender.send(rows, tokens=(0, 4)),
        lambda: sender.finish(rows),
        lambda: sender.abort("gone"),
        sender.poll,
    ):
        with pytest.raises(LocalProtocolError, match=rf"process {os.getppid()} has built this manager; a forked child cannot"):
            call()
    assert not manager.health().ok
    assert "a forked child cannot use it" in manager.health().problem
    manager.close()
    manager.__exit__()
    for rank in instances.decode + instances.prefill:
        rank.manager.close()
    instances.decode.clear()
    instances.prefill.clear()


@pytest.mark.parametrize("engine", ["local", "cma", "nixl", "mooncake"])
def test_a_forked_child_leaves_its_parents_managers_alone_and_builds_its_own(engine: str) -> None:
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    with cluster(Side(), Side(page=8), settings={"backend": engine, "metrics_port": 0}) as instances:
        assert all(event.ok for event in instances.transfer(20))
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PAGES, need=(0, 20), deadline_s=10 * DEADLINE_S)  # outlives the child
        sender = instances.prefill[0].manager.sender(request, peer="decode-0", deadline_s=10 * DEADLINE_S)

        def child() -> None:
            nonlocal instances, receiver, sender
            use_inherited(instances, receiver, sender)
            del instances, receiver, sender
            gc.collect()
            with cluster(Side(), Side(page=8), settings={"backend": "cma" if engine == "nixl" else engine}) as own:
                assert all(event.ok for event in own.transfer(20))

        runtime = instances.decode[0].manager._runtime
        with held_by_another_thread(runtime.directory._changed, runtime.lifetime._lock, runtime.requests._lock):
            pid = fork(child)
        assert all(event.ok for event in instances.transfer(20))
        assert status_of(pid) == 0
        assert all(event.ok for event in instances.transfer(20))
        assert receiver.poll() is None, "the child did not end the parent's request"
        sender.abort("the test is finished")
        assert not receiver.wait(timeout_s=DEADLINE_S).ok


def test_a_child_is_refused_nixl_even_if_its_parent_has_closed_it() -> None:
    """UCX works there nearly always, and sometimes crashes."""
    require_engine(*ENGINES["nixl"])
    with cluster(Side(), Side(), settings={"backend": "nixl"}) as instances:
        assert all(event.ok for event in instances.transfer(20))

    def child() -> None:
        with pytest.raises(BackendUnavailable, match=rf"process {os.getppid()} used NIXL before it forked this one"):
            cluster(Side(), Side(), settings={"backend": "nixl"}).__enter__()
        with cluster(Side(), Side(), settings={"backend": "cma"}) as own:
            assert all(event.ok for event in own.transfer(20))

    assert status_of(fork(child)) == 0
    with cluster(Side(), Side(), settings={"backend": "nixl"}) as again:
        assert all(event.ok for event in again.transfer(20))


def test_a_child_that_drops_a_closed_manager_keeps_its_own_memory() -> None:
    """Staging memory is not inherited, so the child may get its addresses for something else."""
    k, v = np.zeros((2, 8, 16, 2, 16), np.float16)
    kv = paged.gqa({0: (k, v)}, axes="nhd", num_kv_heads=2, topology=Topology())
    manager = KVManager(name="decode", components=[kv], model=ModelId("m"), backend="cma")
    staging = [each.region.address for each in manager._runtime._staging]
    manager.close()
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.restype = ctypes.c_size_t
    map_at.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]

    def child() -> None:
        nonlocal manager
        for address in staging:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            assert map_at(address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
            ctypes.memset(address, 7, NBYTES)
        del manager
        gc.collect()
        for address in staging:
            assert ctypes.string_at(address, NBYTES) == b"\7" * NBYTES

    assert len(staging) == 2
    assert status_of(fork(child)) == 0


def test_a_manager_of_a_child_is_inherited_by_its_own_children_only() -> None:
    with cluster(Side(), Side()) as instances:

        def grandchild() -> None:
            assert not instances.decode[0].manager.health().ok

        def child() -> None:
            grandchild()
            with cluster(Side(), Side()) as own:

                def grandchild_of_own() -> None:
                    assert f"process {os.getppid()} has built" in own.decode[0].manager.health().problem

                assert status_of(fork(grandchild_of_own)) == 0
                assert all(event.ok for event in own.transfer(20))

        assert status_of(fork(child)) == 0
        assert all(event.ok for event in instances.transfer(20))
