"""Starts ranks by fork from a process that has imported everything they need, since imports take long on a slow machine.

That process has opened no engine, so its children may. There is one for each place where ranks run. It reads requests from a
socket, its standard input: a rank's settings, with the file descriptors of the rank's standard streams, which it answers with
the rank's process id; or the id of a rank that was started so, which it answers with the exit status.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from disagg.backends.cma import CmaBackend
from disagg.backends.mooncake.launch import import_engine
from disagg.backends.nixl.bindings import load_bindings
from harness.chaos.jobs import RankSettings
from harness.chaos.places import Place
from harness.chaos.rank import run_rank

ENGINES: Mapping[str, Callable[[], object]] = {
    "nixl": load_bindings,
    "mooncake": import_engine,
    "cma": lambda: CmaBackend,
}
"""What imports each engine without opening it."""
MAX_NBYTES = 1 << 16


class Launcher:
    """Starts ranks in one place. `close` ends the process that it forks them from, not the ranks."""

    def __init__(self, place: Place, *, engine: str) -> None:
        self.place = place
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = place.command([sys.executable, "-m", "harness.chaos.launcher", engine])
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno())

    def start(self, settings: RankSettings, *, streams: tuple[int, int, int]) -> int:
        """The process id of a new rank with these file descriptors as its standard input, output and error.

        Raises `ChildProcessError` if the process to fork from has ended.
        """
        return self._ask(msgspec.json.encode(settings), streams)

    def wait(self, pid: int) -> int:
        """Wait for the end of a rank that was started here, once. Returns its exit status, negative for a signal."""
        return self._ask(msgspec.json.encode(pid))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, request: bytes, streams: tuple[int, ...] = ()) -> int:
        socket.send_fds(self._socket, [request], streams)
        answer = self._socket.recv(MAX_NBYTES)
        if not answer:
            raise ChildProcessError(f"the process that starts ranks has ended, status {self._process.wait()}")
        return msgspec.json.decode(answer, type=int)


def serve(requests: socket.socket) -> None:
    """Answer requests until the socket is closed. Every rank returns from here to `main`, too, in its own process."""
    while True:
        request, streams, _, _ = socket.recv_fds(requests, MAX_NBYTES, 3)
        if not request:
            return
        asked = msgspec.json.decode(request, type=RankSettings | int)
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        elif (answer := os.fork()) == 0:
            requests.detach()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            run_rank(asked)
            return
        for stream in streams:
            os.close(stream)
        requests.send(msgspec.json.encode(answer))


def main() -> None:
    """Serve the socket at standard input; the argument names the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller ends ranks
    ENGINES[sys.argv[1]]()
    serve(socket.socket(fileno=0))


if __name__ == "__main__":
    main()
