"""Opens the sessions of requests, at once or when the peer is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.core.errors import DisaggError, PeerUnreachable, RequestTimeout
from disagg.protocol.types import NEVER
from disagg.requests import Receiver, RequestHandle, Sender
from disagg.runtime.accounting import Session
from disagg.runtime.directory import Directory
from disagg.runtime.loop import CommandQueue
from disagg.runtime.request_table import RequestTable

OpenSession = Callable[[float], Session]
"""Opens the session of a request, in the control thread. Raises `DisaggError` if that cannot be."""


@dataclass
class _Waiting:
    """What waits: the handle (`None`: nobody waits for an end), what to do once the peer is ready, and until when."""

    handle: Receiver | None
    run: Callable[[], None]
    deadline: float


class Openings:
    """Opens the requests of one manager. Any thread may call `put` and `put_when_ready`; the control thread calls the rest."""

    def __init__(self, directory: Directory, requests: RequestTable, commands: CommandQueue) -> None:
        self._directory = directory
        self._requests = requests
        self._commands = commands
        self._waiting: dict[str, list[_Waiting]] = {}

    def __len__(self) -> int:
        """How many wait for their peer."""
        return sum(map(len, self._waiting.values()))

    def put(self, handle: Sender, open_session: OpenSession) -> None:
        """Open the session of a request that waits for nobody. A failure ends the request."""
        self._commands.put(
            lambda now: self._requests.open(handle, lambda: open_session(now)),
            lambda error: self._requests.end_unopened(handle, error),
        )

    def put_when_ready(self, handle: Receiver, open_session: OpenSession, deadline: float) -> None:
        """Open the session of a request if its peer is ready then, or once it is. The request ends if that takes longer than
        `deadline`.
        """

        def open_or_wait(now: float) -> None:
            if not self._requests.has(handle):
                return  # it was aborted meanwhile
            if self._directory.is_ready(handle.peer):
                self._requests.open(handle, lambda: open_session(now))
            else:
                self.wait(handle.peer, handle, lambda: self.put_when_ready(handle, open_session, deadline), deadline)

        self._commands.put(open_or_wait, lambda error: self._requests.end_unopened(handle, error))

    def wait(self, peer: str, handle: Receiver | None, run: Callable[[], None], deadline: float) -> None:
        """Call `run` once the peer is ready, unless its time is over before."""
        waiting = self._waiting.setdefault(peer, [])
        waiting.append(_Waiting(handle, run, deadline))
        self._advance(peer, waiting, 0.0)

    def end(self, handle: RequestHandle, error: DisaggError) -> None:
        """End a request that has no session."""
        assert isinstance(handle, Receiver | Sender)
        left = [each for each in self._waiting.pop(handle.peer, []) if each.handle is not handle]
        if left:
            self._waiting[handle.peer] = left
        self._requests.end_unopened(handle, error)

    def advance(self, now: float) -> None:
        """Open the requests whose peer is ready now. End those that are late, or whose peer refuses this instance."""
        for peer, waiting in list(self._waiting.items()):
            self._advance(peer, waiting, now)

    def _advance(self, peer: str, waiting: list[_Waiting], now: float) -> None:
        if self._directory.is_ready(peer):
            del self._waiting[peer]
            for each in waiting:
                each.run()
            return
        if refusal := self._directory.refusal(peer):
            self.fail_all(peer, f"peer {peer!r} cannot become ready: {refusal}")
            return
        late = [each for each in waiting if each.deadline <= now]
        for each in late:
            waiting.remove(each)
            self._fail(each, RequestTimeout(f"peer {peer!r} did not become ready in time: {self._directory.problem(peer)}"))
        if not waiting:
            del self._waiting[peer]

    def fail_all(self, peer: str, reason: str) -> None:
        """End all that waits for a peer."""
        for each in self._waiting.pop(peer, []):
            self._fail(each, PeerUnreachable(reason))

    def _fail(self, waiting: _Waiting, error: DisaggError) -> None:
        if waiting.handle is not None:
            self._requests.end_unopened(waiting.handle, error)

    @property
    def next_tick(self) -> float:
        """When the next deadline passes."""
        return min((each.deadline for waiting in self._waiting.values() for each in waiting), default=NEVER)
