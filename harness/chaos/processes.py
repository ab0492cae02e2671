"""The instances of a chaos run, and the processes of their ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.chaos.jobs import RankSettings
from harness.chaos.launcher import Launcher
from harness.chaos.places import RESET

_ESTABLISHED = "01"
"""The state, as `/proc/net/tcp` writes it."""
NHD, HND = "page token kv_head dim", "page kv_head token dim"


@dataclass(frozen=True)
class Instance:
    """One instance: its role, its tensor-parallel size, and its pages."""

    name: str
    prefills: bool
    tp: int
    page: int
    axes: str
    num_pages: int


INSTANCES = (
    Instance("prefill-0", True, 2, 4, NHD, 32),
    Instance("prefill-1", True, 1, 8, HND, 16),
    Instance("decode-0", False, 1, 16, NHD, 10),
    Instance("decode-1", False, 2, 2, HND, 64),
)


Inbox = queue.SimpleQueue[tuple["RankProcess", dict[str, Any]]]


class RankProcess:
    """The process of one rank, from its start to its end.

    Every message of the rank goes to `inbox`; the last is `gone`. `state` is its last answer to an `ask` message, `{}` until
    then. `asked`: another answer is due. `may_end`: its end is no finding.
    """

    def __init__(self, instance: Instance, settings: RankSettings, log: Path, launcher: Launcher, inbox: Inbox) -> None:
        self.instance, self.rank, self.place = instance, settings.tp_rank, launcher.place
        self.name = f"{instance.name}/{settings.tp_rank}"
        self.address = ""
        self.transport = ""
        self.stopped = self.killed = self.may_end = self.asked = False
        self.state: dict[str, Any] = {}
        self.log = log
        self._launcher = launcher
        self._status: int | None = None
        input_end, self._input = os.pipe()
        self._output, output_end = os.pipe()
        with log.open("wb") as errors:
            self.pid = launcher.start(settings, streams=(input_end, output_end, errors.fileno()))
        os.close(input_end)
        os.close(output_end)
        threading.Thread(target=self._read, args=(inbox,), name=f"chaos-{self.name}", daemon=True).start()

    def _read(self, inbox: Inbox) -> None:
        """Put the rank's messages into the inbox until it ends."""
        with os.fdopen(self._output, "rb") as output:
            for line in output:
                with suppress(json.JSONDecodeError):  # transfer engines write lines of their own
                    message = json.loads(line)
                    if isinstance(message, dict):
                        inbox.put((self, message))
        inbox.put((self, {"op": "gone"}))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank; does nothing if it was killed."""
        if self.killed:
            return
        with suppress(OSError):
            os.write(self._input, json.dumps(message).encode() + b"\n")

    def stop(self) -> None:
        """Stop the process (SIGSTOP) until `go_on`."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def reset(self, port: int | None = None) -> int:
        """Reset the TCP connections to and from `port` of the process, by default all its own. Returns how many there were."""
        ports = _tcp_ports(self.pid) if port is None else {port}
        one_of = " or ".join(f"sport = :{each} or dport = :{each}" for each in ports)
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        command = [*inside, *RESET, f"( {one_of} )"]
        done = subprocess.run(command, capture_output=True, text=True, check=True) if ports else None
        return len(done.stdout.splitlines()) if done is not None else 0

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit status, negative for a signal."""
        if self._status is None:
            self._status = self._launcher.wait(self.pid)
        return self._status

    def leave(self) -> None:
        """Have the process execute another program, which only sleeps. To the run it is as killed; `end` ends it."""
        self.send({"op": "execute"})
        self.killed, self.address = True, ""

    def kill(self) -> None:
        """Kill the process and wait for its end. A second call does nothing."""
        if self.killed:
            return
        self.killed, self.stopped, self.address = True, False, ""
        self.end()

    def end(self) -> None:
        """Kill the process and wait for its end, once."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()
        os.close(self._input)


def _tcp_ports(pid: int) -> set[int]:
    """The local ports of a process's TCP connections."""
    held = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            held.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _ESTABLISHED and row[9] in held}
