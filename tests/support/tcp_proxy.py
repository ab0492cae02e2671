"""A TCP proxy whose connections a test can reset, and which may be slow."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

_RESET = struct.pack("ii", 1, 0)
"""`SO_LINGER`: send a reset on `close`."""


class TcpProxy:
    """Passes on what comes to `address` to the address `target`, both `tcp://host:port`. What comes back is `delay_s` late."""

    def __init__(self, target: str, *, delay_s: float = 0.0) -> None:
        self.aim(target)
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_accepted = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def aim(self, target: str) -> None:
        """Later connections go to another address."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))

    def reset(self) -> int:
        """Reset every connection on both sides, and return how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for each in (each for pair in pairs for each in pair):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RD)  # wakes the thread that reads here
            each.close()
        return len(pairs)

    def close(self) -> None:
        """Take no more connections, and reset those that there are."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # `close`
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # nobody listens there
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
                self.num_accepted += 1
            for source, destination, delay_s in ((near, far, 0.0), (far, near, self._delay_s)):
                threading.Thread(target=self._copy, args=(source, destination, delay_s), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, destination: socket.socket, delay_s: float) -> None:
        with contextlib.suppress(OSError):  # closed, here or there
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                destination.sendall(data)
            destination.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def proxies(*targets: str, delay_s: float = 0.0) -> Iterator[list[TcpProxy]]:
    """A proxy in front of each address."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(TcpProxy(target, delay_s=delay_s))) for target in targets]
