"""Finds out whether anybody listens at the address of a silent peer, without blocking the control thread."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable

from disagg.core.address import parse_address
from disagg.protocol.types import NEVER

MAX_PROBES = 64
"""Others are left out; the next hello to the peer asks for another one."""
POLL_S, PROBE_S = 0.02, 1.0
"""The interval of polls, and the time for a probe: a host that is up answers at once, also if nobody listens."""


class Probes:
    """`on_gone` is called with the number of the dial and the reason if the host refuses a connection."""

    def __init__(self, on_gone: Callable[[int, str], None]) -> None:
        self._on_gone = on_gone
        self._open: dict[int, tuple[socket.socket, str, float]] = {}
        self.next_tick = NEVER

    def begin(self, dial: int, address: str, now: float) -> None:
        """`address` is numeric."""
        if dial in self._open or len(self._open) >= MAX_PROBES:
            return
        host, port = parse_address(address, what="peer address")
        try:
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return
        self._open[dial] = probe, address, now + PROBE_S
        self.next_tick = now + POLL_S
        try:
            error = probe.connect_ex((host, port))
        except OSError:  # the interface of an IPv6 address
            error = errno.EADDRNOTAVAIL
        if error != errno.EINPROGRESS:
            self._end(dial, error)

    def tick(self, now: float) -> None:
        self.next_tick = now + POLL_S
        poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
        dials = {probe.fileno(): dial for dial, (probe, *_) in self._open.items()}
        for descriptor in dials:
            poll.register(descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(0) if dials else ():
            probe, *_ = self._open[dials[descriptor]]
            self._end(dials[descriptor], probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        for dial in [dial for dial, (*_, until) in self._open.items() if until <= now]:
            self._end(dial, errno.ETIMEDOUT)
        if not self._open:
            self.next_tick = NEVER

    def close(self, dial: int) -> None:
        if (found := self._open.pop(dial, None)) is not None:
            found[0].close()

    def close_all(self) -> None:
        for dial in list(self._open):
            self.close(dial)

    def _end(self, dial: int, error: int) -> None:
        probe, address, _ = self._open.pop(dial)
        probe.close()
        if error == errno.ECONNREFUSED:
            self._on_gone(dial, f"nobody listens at {address}")
