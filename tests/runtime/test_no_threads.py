"""What starts a thread when it is first needed works again after there were no threads for a while."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from disagg.core.errors import DisaggError, RequestAborted
from disagg.runtime.resolver import Resolver
from disagg.runtime.verification import ChecksumWorker

ADDRESS = "tcp://localhost:7000"
REFUSAL = "can't start new thread"
PATIENCE_S = 60.0


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError(REFUSAL)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def test_names_are_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: queue.SimpleQueue[str | OSError] = queue.SimpleQueue()
    resolver = Resolver(lambda run: run(0.0), name="decode-0/0")
    with no_threads(monkeypatch):
        for _ in range(2):
            resolver.resolve(ADDRESS, "prefill-0", found.put)
            assert str(found.get_nowait()) == f"no thread to resolve it with: {REFUSAL}"
    resolver.resolve(ADDRESS, "prefill-0", found.put)
    assert found.get(timeout=PATIENCE_S) == "tcp://127.0.0.1:7000"
    resolver.close()


def test_checksums_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: queue.SimpleQueue[tuple[int | None, DisaggError | None]] = queue.SimpleQueue()

    def put(sums: int | None, error: DisaggError | None) -> None:
        summed.put((sums, error))

    worker = ChecksumWorker(name="decode-0/0", on_death=lambda _: None)
    with no_threads(monkeypatch):
        worker.submit(lambda: 1, put)
    sums, error = summed.get_nowait()
    assert (sums, type(error)) == (None, RequestAborted)
    assert REFUSAL in str(error)
    worker.stop(PATIENCE_S)  # nothing has started
    worker = ChecksumWorker(name="decode-0/0", on_death=lambda _: None)
    with no_threads(monkeypatch):
        worker.submit(lambda: 1, put)
    assert summed.get_nowait()[0] is None
    worker.submit(lambda: 2, put)
    assert summed.get(timeout=PATIENCE_S) == (2, None)
    worker.stop(PATIENCE_S)
