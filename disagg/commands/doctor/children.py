"""Starts tasks of `disagg.commands.doctor.child` and waits for each up to a timeout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

TIMEOUT_S = 25.0


class ChildFailed(Exception):
    """A task failed; the message is the task's error if it reported one."""


class Child:
    """One task in its own process."""

    def __init__(self, task: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.task = task
        self._deadline = time.monotonic() + timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "disagg.commands.doctor.child", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
        )
        self._rest = b""

    def answer(self) -> dict[str, Any]:
        """Its next line of JSON; other lines come from the engine and are skipped. Raises `ChildFailed`."""
        while True:
            line, newline, self._rest = self._rest.partition(b"\n")
            if not newline:
                self._rest = line + self._more()
                continue
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                if found.get("error"):
                    raise ChildFailed(found["error"])
                return found

    def _more(self) -> bytes:
        assert self._process.stdout is not None
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
            raise ChildFailed("it hangs: no output before the timeout")
        data = os.read(self._process.stdout.fileno(), 65536)
        if not data:
            raise ChildFailed(f"its process ended without output, {self._ending()}")
        return data

    def _ending(self) -> str:
        status = self._process.wait()
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    def send(self, line: Mapping[str, Any]) -> None:
        """Write a line of JSON to its standard input. Raises `ChildFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(f"its process ended, {self._ending()}") from error

    def close(self) -> None:
        """End it by closing its standard input, or kill it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended with a line unread
            self._process.stdin.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def child(task: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Iterator[Child]:
    """A task that is ended with the block."""
    started = Child(task, environ, timeout_s=timeout_s)
    try:
        yield started
    finally:
        started.close()
