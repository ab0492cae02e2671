"""The instances of a chaos run, and the processes of their ranks."""

from __future__ import annotations

import json
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

from harness.chaos.jobs import RankSettings
from harness.chaos.places import RESET, Place

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


class RankProcess:
    """The process of one rank, from its start to its end. `state` is its last answer to an `ask` message; `{}` until then.

    `may_end`: its end is no finding.
    """

    def __init__(self, instance: Instance, settings: RankSettings, log: Path, place: Place) -> None:
        self.instance, self.rank, self.place = instance, settings.tp_rank, place
        self.name = f"{instance.name}/{settings.tp_rank}"
        self.address = ""
        self.transport = ""
        self.stopped = self.killed = self.may_end = False
        self.state: dict[str, Any] = {}
        self.log = log
        self._errors = log.open("wb")
        self.process = subprocess.Popen(
            place.command([sys.executable, "-m", "harness.chaos.rank", msgspec.json.encode(settings).decode()]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def listen(self, inbox: queue.SimpleQueue[tuple[RankProcess, dict[str, Any]]]) -> None:
        """Put every message of the rank into `inbox`, and a message `gone` when it ends."""

        def run() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                with suppress(json.JSONDecodeError):  # the process was killed within a line
                    inbox.put((self, json.loads(line)))
            inbox.put((self, {"op": "gone"}))

        threading.Thread(target=run, name=f"chaos-{self.name}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank; does nothing if it was killed."""
        if self.killed:
            return
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Stop the process (SIGSTOP) until `go_on`."""
        self.stopped = True
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped = False
        self.process.send_signal(signal.SIGCONT)

    def reset(self, port: int | None = None) -> int:
        """Reset the TCP connections to and from `port` of the process, by default all its own. Returns how many there were."""
        ports = _tcp_ports(self.process.pid) if port is None else {port}
        one_of = " or ".join(f"sport = :{each} or dport = :{each}" for each in ports)
        inside = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net"]
        command = [*inside, *RESET, f"( {one_of} )"]
        done = subprocess.run(command, capture_output=True, text=True, check=True) if ports else None
        return len(done.stdout.splitlines()) if done is not None else 0

    def kill(self) -> None:
        """Kill the process and wait for its end. A second call does nothing."""
        if self.killed:
            return
        self.killed, self.stopped, self.address = True, False, ""
        self.process.kill()
        self.process.wait()
        self._errors.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _tcp_ports(pid: int) -> set[int]:
    """The local ports of a process's TCP connections."""
    held = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            held.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _ESTABLISHED and row[9] in held}
