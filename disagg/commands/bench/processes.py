"""Ranks that a driver starts: processes, or threads of its own for the `local` backend."""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec

from disagg.commands.rank.rank import RankConfig
from disagg.commands.rank.serve import Stop, serve
from disagg.commands.shell.child import ChildEnded, ChildProcess
from disagg.core.errors import DisaggError

STOP_S = 15.0
TAIL_LINES = 15
_ADDRESSES = re.compile(r"address=(\S+) driver=(\S+) ")


class RankDied(DisaggError):
    """Has the exit status and the last output."""


class StartedRank(Protocol):
    """A rank that this driver started."""

    name: str

    def addresses(self) -> tuple[str, str]:
        """The control address and the driver address, once it is up. Raises `RankDied`."""

    def check(self) -> None:
        """Raises `RankDied` if it has ended."""

    def end(self, *, until: float) -> None:
        """Wait for its end, and kill it if it is late. Raises `RankDied` then, or if its exit status is not 0."""

    def kill(self) -> None:
        """End it at once."""


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _not_up(name: str, timeout_s: float) -> str:
    return f"starting: rank {name} was not up within {timeout_s:g} s (--timeout)"


class RankProcess:
    """Runs one or several ranks of an instance. It ends with this process, because its standard input ends."""

    def __init__(self, configs: Sequence[RankConfig], *, timeout_s: float) -> None:
        self.name = ", ".join(f"{config.name}/{config.rank}" for config in configs)
        self.ranks = tuple(ProcessRank(self, config) for config in configs)
        self._timeout_s, self._up_by = timeout_s, time.monotonic() + timeout_s
        self._ended = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end` or `kill`)
        self._lines: list[str] = []
        command = [sys.executable, "-P", "-m", "disagg.commands.bench.child", msgspec.json.encode(configs).decode()]
        self._process = ChildProcess(command, errors=self._errors)

    def addresses(self, config: RankConfig) -> tuple[str, str]:
        begins = f"{config.name} rank {config.rank} of "
        while True:
            found = next((_ADDRESSES.search(line) for line in self._lines if line.startswith(begins)), None)
            if found:
                return found[1], found[2]
            try:
                self._lines.append(self._process.receive(timeout_s=_left_s(self._up_by)))
            except TimeoutError:
                raise RankDied(f"{_not_up(self.name, self._timeout_s)}{self._tail()}") from None
            except ChildEnded as error:
                raise RankDied(f"rank {self.name} ended with {error}{self._tail()}") from error

    def check(self) -> None:
        if not self._errors.closed:
            self._errors.write(self._process.read())  # of the engine, which logs there
            self._errors.flush()
        if (ending := self._process.ending) is not None:
            raise RankDied(f"rank {self.name} ended with {ending}{self._tail()}")

    def end(self, *, until: float) -> None:
        if self._ended:
            return
        self._ended = True
        ending, tail = self._process.wait(timeout_s=_left_s(until)), self._tail()
        self.kill()
        if ending is None:
            raise RankDied(f"rank {self.name} was killed: it did not end within {self._timeout_s:g} s (--timeout){tail}")
        if ending != "exit status 0":
            raise RankDied(f"rank {self.name} ended with {ending}{tail}")

    def kill(self) -> None:
        self._process.kill()
        self._errors.close()

    def _tail(self) -> str:
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)


class ProcessRank:
    """All ranks of a process end together."""

    def __init__(self, process: RankProcess, config: RankConfig) -> None:
        self.name = f"{config.name}/{config.rank}"
        self._process = process
        self._config = config

    def addresses(self) -> tuple[str, str]:
        return self._process.addresses(self._config)

    def check(self) -> None:
        self._process.check()

    def end(self, *, until: float) -> None:
        self._process.end(until=until)

    def kill(self) -> None:
        self._process.kill()


class RankThread:
    """The `local` backend cannot reach other processes."""

    def __init__(self, config: RankConfig, *, timeout_s: float) -> None:
        self.name = f"{config.name}/{config.rank}"
        self._config = config
        self._timeout_s, self._up_by = timeout_s, time.monotonic() + timeout_s
        self._stop = Stop()
        self._lines: list[str] = []
        self._reported = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"rank-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            serve(self._config, stop=self._stop, report=self._report)
        except (DisaggError, OSError) as error:  # `check` raises it; any other error ends the thread with a traceback
            self._error = error
        finally:
            self._reported.set()

    def _report(self, line: str) -> None:
        self._lines.append(line)
        self._reported.set()

    def addresses(self) -> tuple[str, str]:
        self._reported.wait(_left_s(self._up_by))
        self.check()
        found = _ADDRESSES.search(self._lines[0]) if self._lines else None
        if found is None:
            raise RankDied(_not_up(self.name, self._timeout_s))
        return found[1], found[2]

    def check(self) -> None:
        if self._error is not None:
            raise RankDied(f"rank {self.name} ended: {self._error}")
        if not self._thread.is_alive():
            raise RankDied(f"rank {self.name} ended")

    def end(self, *, until: float) -> None:
        self._thread.join(_left_s(until))
        if self._error is not None:
            raise RankDied(f"rank {self.name} did not end cleanly: {self._error}")
        if self._thread.is_alive():
            raise RankDied(f"rank {self.name} did not end within {self._timeout_s:g} s (--timeout)")

    def kill(self) -> None:
        self._stop.end("the benchmark has ended", drain=False)
        self._thread.join(STOP_S)


def start(configs: Sequence[RankConfig], *, timeout_s: float) -> list[StartedRank]:
    started: list[StartedRank] = []
    with ExitStack() as undo:
        for config in configs:
            rank = (
                RankThread(config, timeout_s=timeout_s)
                if config.backend == "local"
                else RankProcess([config], timeout_s=timeout_s).ranks[0]
            )
            undo.callback(rank.kill)
            started.append(rank)
        undo.pop_all()
    return started


def start_together(instances: Sequence[Sequence[RankConfig]], *, timeout_s: float) -> list[list[StartedRank]]:
    """One process per instance; the first rank of each is the leader."""
    started: list[list[StartedRank]] = []
    with ExitStack() as undo:
        for configs in instances:
            process = RankProcess(configs, timeout_s=timeout_s)
            undo.callback(process.kill)
            started.append(list(process.ranks))
        undo.pop_all()
    return started
