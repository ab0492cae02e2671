"""Child processes that hold one object each and call its methods for the parent. They end when the parent does.

Plumbing, with no disagg in it: a real server has its own.
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
    """A child died, raised, or did not answer in time; the message ends with what it wrote to stderr."""


class Resident(Protocol):
    """What a worker holds."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Build:
    """Order: hold what `factory` makes instead of what was held before."""

    factory: Callable[..., Resident]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Call:
    """Order: call a method of what is held."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Raised:
    """Answer: the order raised this."""

    trace: str


class Worker:
    """The parent's end of a child process. Every `build` and `call` is answered once, to `gather`."""

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._stderr = folder / f"{name.replace(' ', '-')}.stderr"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self._stderr)), name=name, daemon=True)
        self.process.start()
        theirs.close()

    def build(self, factory: Callable[..., Resident], **kwargs: Any) -> None:
        """Have the child close what it holds, and hold `factory(**kwargs)`."""
        self._order(_Build(factory, kwargs))

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Have the child call a method of what it holds."""
        self._order(_Call(method, args, kwargs))

    def take(self) -> Any:
        """The answer to the oldest order not answered yet; waits for it."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if isinstance(answer, _Raised):
            raise WorkerFailed(f"{self.name} failed\n{answer.trace}")
        return answer

    def hang_up(self) -> None:
        """Have the child close what it holds, and end."""
        self.connection.close()

    def end(self, *, timeout_s: float) -> None:
        """Wait until the child has ended; one that has not within `timeout_s` is killed."""
        self.process.join(max(0.0, timeout_s))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def stderr(self) -> str:
        """The last lines that the child wrote to stderr."""
        lines = self._stderr.read_text(errors="replace").splitlines() if self._stderr.exists() else []
        return "\n".join(lines[-30:])

    def _order(self, order: _Build | _Call) -> None:
        try:
            self.connection.send(order)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._died() from error

    def _died(self) -> WorkerFailed:
        self.process.join(5)
        return WorkerFailed(f"{self.name} died with exit status {self.process.exitcode}\n{self.stderr()}")


def gather(workers: Sequence[Worker], *, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """One answer of each, in their order. Raises `WorkerFailed` for the first child that fails, whichever it is."""
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
    """Workers by name; all of them have ended afterwards."""
    workers: dict[str, Worker] = {}
    patience_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                workers[name] = Worker(name, Path(folder))
            yield workers
            patience_s = 10.0  # after an error nobody waits for the others
        finally:
            deadline = time.monotonic() + patience_s
            for worker in workers.values():
                worker.hang_up()
            for worker in workers.values():
                worker.end(timeout_s=deadline - time.monotonic())


def _serve(connection: Connection, stderr: str) -> None:
    """The child: carry out orders until the parent hangs up."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    held: Resident | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order = connection.recv()
            answer: Any = None
            try:
                match order:
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
    """End at once when the parent is gone, whatever the main thread is waiting for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
