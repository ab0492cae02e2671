"""Starts tasks of `disagg.commands.doctor.child` and waits for each up to a timeout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from disagg.commands.shell.child import ChildEnded, ChildProcess

TIMEOUT_S = 25.0


class ChildFailed(Exception):
    """Has the task's error if it reported one."""


class ChildLate(ChildFailed):
    """The task hangs, or the machine is too slow."""


class Child:
    def __init__(self, task: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.task = task
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._process = ChildProcess([sys.executable, "-P", "-m", "disagg.commands.doctor.child", task], environ=environ)

    def answer(self) -> dict[str, Any]:
        """Skips lines of the engine, which are not JSON. Raises `ChildFailed`."""
        while True:
            try:
                line = self._process.receive(timeout_s=max(0.0, self._deadline - time.monotonic()))
            except TimeoutError:
                raise ChildLate(f"no output within {self._timeout_s:g} s") from None
            except ChildEnded as error:
                raise ChildFailed(f"its process ended without output, with {error}") from error
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                if found.get("error"):
                    raise (ChildLate if found.get("late") else ChildFailed)(found["error"])
                return found

    def send(self, line: Mapping[str, Any]) -> None:
        try:
            self._process.send(json.dumps(line))
        except ChildEnded as error:
            raise ChildFailed(f"its process ended, with {error}") from error

    def close(self) -> None:
        self._process.end()


@contextmanager
def child(task: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Iterator[Child]:
    started = Child(task, environ, timeout_s=timeout_s)
    try:
        yield started
    finally:
        started.close()
