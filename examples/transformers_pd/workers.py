"""Child processes that each hold one object and call its methods for the parent. They end when the parent does.

This module does not use disagg: a real server has its own processes.
"""

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

TIMEOUT_S = 60.0


class WorkerFailed(RuntimeError):
    """A child died, raised, or did not answer in time. The message ends with its output on stderr."""


class Resident(Protocol):
    """The object in a worker."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Build:
    """Request: replace the object by a new one from `factory`."""

    factory: Callable[..., Resident]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Call:
    """Request: call a method of the object."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Raised:
    """Answer: the request raised this."""

    trace: str


class Worker:
    """The parent's end of a child process. `gather` takes one answer to each `build` and `call`."""

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._stderr = folder / f"{name.replace(' ', '-')}.stderr"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self._stderr)), name=name, daemon=True)
        self.process.start()
        theirs.close()

    def build(self, factory: Callable[..., Resident], **kwargs: Any) -> None:
        """Close the child's object, and replace it by `factory(**kwargs)`."""
        self._send(_Build(factory, kwargs))

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the child's object."""
        self._send(_Call(method, args, kwargs))

    def take(self) -> Any:
        """Wait for the answer to the oldest open request, and return it."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if isinstance(answer, _Raised):
            raise WorkerFailed(f"{self.name} failed\n{answer.trace}")
        return answer

    def disconnect(self) -> None:
        """Disconnect: the child closes its object and ends."""
        self.connection.close()

    def end(self, *, timeout_s: float) -> None:
        """Wait until the child has ended; kill it after `timeout_s`."""
        self.process.join(max(0.0, timeout_s))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def stderr(self) -> str:
        """The last lines that the child wrote to stderr."""
        lines = self._stderr.read_text(errors="replace").splitlines() if self._stderr.exists() else []
        return "\n".join(lines[-30:])

    def _send(self, request: _Build | _Call) -> None:
        try:
            self.connection.send(request)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._died() from error

    def _died(self) -> WorkerFailed:
        self.process.join(5)
        return WorkerFailed(f"{self.name} died with exit status {self.process.exitcode}\n{self.stderr()}")


def gather(workers: Sequence[Worker], *, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return one answer of each worker, in their order. Raises `WorkerFailed` as soon as any child fails."""
    deadline = time.monotonic() + timeout_s
    pending: dict[object, Worker] = {worker.connection: worker for worker in workers}
    answers: dict[str, Any] = {}
    while pending:
        ready = wait([worker.connection for worker in pending.values()], max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = "\n".join(f"{worker.name}\n{worker.stderr()}" for worker in pending.values())
            raise WorkerFailed(f"no answer after {timeout_s} s from {silent}")
        for connection in ready:
            worker = pending.pop(connection)
            answers[worker.name] = worker.take()
    return [answers[worker.name] for worker in workers]


@contextlib.contextmanager
def start(names: Sequence[str]) -> Iterator[dict[str, Worker]]:
    """Start workers, and yield them by name. All have ended afterwards."""
    workers: dict[str, Worker] = {}
    grace_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                workers[name] = Worker(name, Path(folder))
            yield workers
            grace_s = 10.0  # after an error, kill the others at once
        finally:
            deadline = time.monotonic() + grace_s
            for worker in workers.values():
                worker.disconnect()
            for worker in workers.values():
                worker.end(timeout_s=deadline - time.monotonic())


def _serve(connection: Connection, stderr: str) -> None:
    """Run the child: carry out requests until the parent disconnects."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    held: Resident | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            answer: Any = None
            try:
                match request:
                    case _Build(factory, kwargs):
                        if held is not None:
                            held.close()
                        held = None
                        held = factory(**kwargs)
                    case _Call(method, args, kwargs):
                        answer = getattr(held, method)(*args, **kwargs)
            except Exception:  # noqa: BLE001 - the parent raises it
                answer = _Raised(traceback.format_exc())
            connection.send(answer)
    if held is not None:
        held.close()


def _end_with_parent() -> None:
    """End the process at once when the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
