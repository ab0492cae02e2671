"""Ends connections whose message does not end. libzmq bounds the size of a frame, but not the number of frames, and
delivers only complete messages, so a peer could fill this process's memory. The kernel knows how much a connection has
received.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Container, Iterable
from operator import itemgetter

from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.machine.tcp import duplicate, num_received
from disagg.protocol.messages import MAX_MESSAGE_NBYTES

logger = ThreadLog(__name__)

CHECK_S, MAX_CHECK_S = 0.25, 2.0
"""The pause between two checks: 20 times as long as the last one took, within these bounds."""
MAX_NBYTES = 2 * MAX_MESSAGE_NBYTES
"""The most that a connection may receive between two messages. Messages that leave together have at most half."""
MAX_UNKNOWN_NBYTES = 16 << 20
"""As above, for a connection whose rank is not known yet: a hello has at most half."""
MAX_ALL_NBYTES = 1 << 30
"""For all connections together."""


class EndlessMessages:
    def __init__(self) -> None:
        self._check_at = 0.0
        self._heard: set[int] = set()
        self._since: dict[int, int] = {}  # what each had received when its last message came, or a little later
        self._warnings = RateLimitedLog(logger)

    def hear(self, descriptor: int) -> None:
        self._heard.add(descriptor)

    def end(self, opened: Iterable[int], port: int, *, known: Container[int]) -> None:
        """Of the connections `opened`, those `known` are of ranks. `port` is the one that they were opened to: a descriptor may
        belong to something else by now.
        """
        now = time.monotonic()
        if now < self._check_at:
            return
        before, self._since, pending = self._since, {}, dict[int, int]()
        for descriptor in opened:
            received = num_received(descriptor)
            if received is None:  # it has ended, or is no TCP socket
                continue
            since = received if descriptor in self._heard else min(received, before.get(descriptor, received))
            self._since[descriptor] = since
            pending[descriptor] = received - since
        left = MAX_ALL_NBYTES
        for descriptor, nbytes in sorted(pending.items(), key=itemgetter(1)):
            left -= nbytes
            if left < 0 or nbytes > (MAX_NBYTES if descriptor in known else MAX_UNKNOWN_NBYTES):
                self.shut(descriptor, port, "its message does not end")
        self._heard.clear()
        self._check_at = now + max(CHECK_S, min(20 * (time.monotonic() - now), MAX_CHECK_S))

    def shut(self, descriptor: int, port: int, reason: str) -> None:
        with contextlib.suppress(OSError, IndexError), duplicate(descriptor) as connection:
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                self._warnings.warning("ended a connection to port %d: %s", port, reason)
