"""A program started as a child, with lines on its standard input and output."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO


class ChildEnded(Exception):
    """The message says how."""


class ChildProcess:
    """The child must end when its standard input ends, as it does with this process. `errors` takes its standard error;
    `None`: this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        errors: IO[bytes] | int | None = subprocess.DEVNULL,
    ) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ, bufsize=0
        )
        self._rest = b""

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ending(self) -> str | None:
        """How it ended, such as "exit status 1" or "signal SIGKILL"; `None` while it runs."""
        status = self._process.poll()
        if status is None or status >= 0:
            return None if status is None else f"exit status {status}"
        return f"signal {signal.Signals(-status).name if -status in {each.value for each in signal.Signals} else -status}"

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError:
            raise self._ended() from None

    def receive(self, *, timeout_s: float) -> str:
        """Raises `TimeoutError` if there is no line in time, `ChildEnded` if there will be none."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"no line within {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode(errors="replace")

    def read(self) -> bytes:
        """What it has written since, without waiting. A child whose output nobody reads stands still once the pipe is full."""
        assert self._process.stdout is not None
        found, self._rest = self._rest, b""
        while select.select([self._process.stdout], [], [], 0)[0]:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                break
            found += data
        return found

    def _ended(self) -> ChildEnded:
        """A closed pipe: the child has ended, or is about to."""
        return ChildEnded(self.wait(timeout_s=3.0) or "a closed pipe, while it runs")

    def wait(self, *, timeout_s: float) -> str | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.ending

    def end(self, *, timeout_s: float = 3.0) -> None:
        """Close its standard input, and kill it if it does not end in time."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self.wait(timeout_s=timeout_s)
        self.kill()

    def kill(self) -> None:
        """A second call does nothing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
