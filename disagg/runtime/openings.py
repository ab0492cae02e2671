"""Opens the sessions of requests, at once or when the peer is ready."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from disagg.core.errors import DisaggError, PeerUnreachable, RequestTimeout
from disagg.protocol.types import NEVER
from disagg.requests import Receiver, RequestHandle, Sender
from disagg.runtime.accounting import Session
from disagg.runtime.directory import Directory
from disagg.runtime.loop import CommandQueue
from disagg.runtime.request_table import RequestTable

LOOK_S = 0.25
OpenSession = Callable[[float], Session]
"""Runs in the control thread, and may raise `DisaggError`."""


class _Waiting(NamedTuple):
    """`handle`: the request that fails if the peer does not become ready."""

    handle: Receiver | None
    run: Callable[[], None]


class Openings:
    """Any thread may call `put`; the control thread calls the rest."""

    def __init__(self, directory: Directory, requests: RequestTable, commands: CommandQueue) -> None:
        self._directory = directory
        self._requests = requests
        self._commands = commands
        self._count = itertools.count()
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        self._numbers: dict[RequestHandle, int] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; some have ended
        self._look_at = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_requests(self) -> int:
        return len(self._numbers)

    def put(self, handle: Receiver | Sender, open_session: OpenSession, deadline: float) -> None:
        """A failure ends the request. A receive waits for its peer, and ends if that is not ready before `deadline`."""

        def open_or_wait(now: float) -> None:
            if not self._requests.has(handle):
                return
            if isinstance(handle, Sender) or self._directory.is_ready(handle.peer):
                self._requests.open(handle, lambda: open_session(now))
            else:
                self.wait(handle.peer, handle, lambda: self.put(handle, open_session, deadline), deadline)

        self._commands.put(open_or_wait, lambda error: self._requests.end_unopened(handle, error))

    def wait(self, peer: str, handle: Receiver | None, run: Callable[[], None], deadline: float) -> None:
        """Call `run` once the peer is ready, unless `deadline` passes first."""
        number = next(self._count)
        self._waiting.setdefault(peer, {})[number] = _Waiting(handle, run)
        if handle is not None:
            self._numbers[handle] = number
        heapq.heappush(self._deadlines, (deadline, number, peer))
        self.advance(peer)

    def _take(self, peer: str, number: int) -> _Waiting | None:
        waiting = self._waiting.get(peer, {})
        found = waiting.pop(number, None)
        if found is not None and found.handle is not None:
            del self._numbers[found.handle]
        if not waiting:
            self._waiting.pop(peer, None)
        return found

    def _take_all(self, peer: str) -> list[_Waiting]:
        return [each for number in tuple(self._waiting.get(peer, ())) if (each := self._take(peer, number)) is not None]

    def end(self, handle: RequestHandle, error: DisaggError) -> None:
        assert isinstance(handle, Receiver | Sender)
        self._take(handle.peer, self._numbers.get(handle, -1))
        self._requests.end_unopened(handle, error)

    def tick(self, now: float) -> None:
        """End requests that are late. Now and then look at all peers: time alone changes some."""
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            for peer in tuple(self._waiting):
                self.advance(peer)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, peer = heapq.heappop(self._deadlines)
            if (late := self._take(peer, number)) is not None:
                problem = self._directory.problem(peer)
                self._fail(late, RequestTimeout(f"peer {peer!r} did not become ready in time: {problem}"))

    def advance(self, peer: str) -> None:
        """Open the peer's requests if it is ready. End them if it refuses this instance."""
        if self._directory.is_ready(peer):
            for each in self._take_all(peer):
                each.run()
        elif refusal := self._directory.refusal(peer):
            self.fail_all(peer, f"peer {peer!r} cannot become ready: {refusal}")

    def fail_all(self, peer: str, reason: str) -> None:
        for each in self._take_all(peer):
            self._fail(each, PeerUnreachable(reason))

    def _fail(self, waiting: _Waiting, error: DisaggError) -> None:
        if waiting.handle is not None:
            self._requests.end_unopened(waiting.handle, error)

    @property
    def next_tick(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._waiting.get(self._deadlines[0][2], ()):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else NEVER
