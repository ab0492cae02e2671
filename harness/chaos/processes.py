"""The instances of a chaos run, and the processes of their ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from disagg.commands.shell.child import ChildEnded, ChildProcess
from harness.chaos.jobs import RankSettings
from harness.chaos.places import RESET, Place

READ_S = 3600.0
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
    """The process of one rank, from its start to its end. `state` is its last answer to an `ask` message; `{}` until then.

    Every message of the rank comes to `inbox`, the last one is `gone`. `may_end`: its end is no finding.
    """

    def __init__(self, instance: Instance, settings: RankSettings, log: Path, place: Place, inbox: Inbox) -> None:
        self.instance, self.rank, self.place = instance, settings.tp_rank, place
        self.name = f"{instance.name}/{settings.tp_rank}"
        self.address = ""
        self.transport = ""
        self.stopped = self.killed = self.may_end = False
        self.state: dict[str, Any] = {}
        self.log = log
        self._inbox = inbox
        command = [sys.executable, "-m", "harness.chaos.rank", msgspec.json.encode(settings).decode()]
        with log.open("wb") as errors:
            self.child = ChildProcess(place.command(command), errors=errors)
        self._reader = threading.Thread(target=self._read, name=f"chaos-{self.name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Put every message of the rank into the inbox, and a message `gone` when it ends."""
        while True:
            try:
                self._inbox.put((self, json.loads(self.child.receive(timeout_s=READ_S))))
            except TimeoutError:
                continue
            except ChildEnded:
                break
        self._inbox.put((self, {"op": "gone"}))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank; does nothing if it has ended."""
        if not self.killed and self.child.ending is None:
            with suppress(ChildEnded):
                self.child.send(json.dumps(message))

    def stop(self) -> None:
        """Stop the process (SIGSTOP) until `go_on`."""
        self.stopped = True
        os.kill(self.child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped = False
        os.kill(self.child.pid, signal.SIGCONT)

    def reset(self, port: int | None = None) -> int:
        """Reset the TCP connections to and from `port` of the process, by default all its own. Returns how many there were."""
        ports = _tcp_ports(self.child.pid) if port is None else {port}
        one_of = " or ".join(f"sport = :{each} or dport = :{each}" for each in ports)
        inside = ["nsenter", f"--net=/proc/{self.child.pid}/ns/net"]
        command = [*inside, *RESET, f"( {one_of} )"]
        done = subprocess.run(command, capture_output=True, text=True, check=True) if ports else None
        return len(done.stdout.splitlines()) if done is not None else 0

    def kill(self) -> None:
        """Kill the process and wait for its end. A second call does nothing."""
        if self.killed:
            return
        self.killed, self.stopped, self.address = True, False, ""
        if self.child.ending is None:
            os.kill(self.child.pid, signal.SIGKILL)
        self._reader.join()  # it ends with the process, and reads no pipe that `kill` closes
        self.child.kill()


def _tcp_ports(pid: int) -> set[int]:
    """The local ports of a process's TCP connections."""
    held = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            held.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _ESTABLISHED and row[9] in held}
