"""Early completion between processes of one host.

While a long copy runs, its sender already sends the complete message, in a form that counts once a word of shared memory is
set. Native code sets the word as soon as the copy has finished, and the receiver polls it. Without this the receiver waits
until the sender's Python has run and its message has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from disagg.core import _native
from disagg.protocol.messages import Complete, CopyBegun, EarlyComplete, Message
from disagg.protocol.peers import PeerTable
from disagg.protocol.sending import Sends
from disagg.protocol.types import PeerRank, RequestKey, Ticket, ids, key_of
from disagg.runtime.completion_page import CompletionPageView
from disagg.runtime.wire import Wire

SPIN_S = 20e-3
"""How long a receiver polls for the word without a sleep. A copy that finishes within this is not reported by a message again.
"""

Outgoing = tuple[PeerRank, Message]


class _Announced(NamedTuple):
    """The signal of a transfer that its receiver polls, and until when."""

    signal: _native.CompletionSignal
    until: float


class _Expected(NamedTuple):
    """A complete message that counts once `word` is set, and until when this side polls without a sleep."""

    complete: Complete
    word: _native.CompletionWord
    until: float


class EarlyCompletion:
    """Both directions of one rank. The control thread owns it.

    `begun_copies` are long copies that were not announced, because they are not the last of their requests yet. `announced` are
    those whose end a receiver polls for, and `expected` the complete messages that this side polls for.
    """

    def __init__(self, channel: Wire, peers: PeerTable, sends: Sends) -> None:
        self.channel = channel
        self._peers = peers
        self._sends = sends
        self.begun_copies: dict[Ticket, _native.Flag | _native.CudaEvent] = {}
        self.announced: dict[Ticket, _Announced] = {}
        self.expected: dict[tuple[PeerRank, RequestKey], _Expected] = {}

    # -- the sender's side -------------------------------------------------------------------------------------------

    def begun(self, ticket: Ticket, completion: _native.Flag | _native.CudaEvent | None, now: float) -> Message | None:
        """The message to send when a long copy has begun: the early complete message if there can be one."""
        if completion is not None:
            early = self._announce(ticket, completion, now)
            if early is not None:
                return early
            self.begun_copies[ticket] = completion
        session = self._sends.sessions.get((ticket.peer.instance, ticket.key))
        destination = session.destinations.get(ticket.peer) if session is not None else None
        return CopyBegun(**ids(ticket.key), nonce=destination.reserved.nonce) if destination is not None else None

    def announce_begun(self, now: float) -> list[Outgoing]:
        """Early complete messages for copies that have become the last of their requests since they began."""
        found: list[Outgoing] = []
        for ticket, completion in list(self.begun_copies.items()):
            early = self._announce(ticket, completion, now)
            if early is not None:
                del self.begun_copies[ticket]
                found.append((ticket.peer, early))
        return found

    def settled(self, ticket: Ticket, *, error: str) -> bool:
        """A transfer has settled. Returns whether its receiver has seen that by itself."""
        self.begun_copies.pop(ticket, None)
        announced = self.announced.pop(ticket, None)
        if announced is None or error:
            return False
        announced.signal.signal()
        return time.monotonic() < announced.until

    def _announce(self, ticket: Ticket, completion: _native.Flag | _native.CudaEvent, now: float) -> EarlyComplete | None:
        link = self._peers.link(ticket.peer)
        page = self.channel.completion_page(link.dial) if link is not None else None
        if page is None or (complete := self._sends.complete_early(ticket)) is None:
            return None
        signal, word = page.signal(completion)
        self.announced[ticket] = _Announced(signal, now + SPIN_S)
        return EarlyComplete.of(complete, word)

    # -- the receiver's side -----------------------------------------------------------------------------------------

    def expect(self, peer: PeerRank, message: EarlyComplete, page: CompletionPageView, now: float) -> None:
        """Poll for the word of an early complete message. Raises `RemoteProtocolError` if the page has no such word."""
        word = page.word(*message.word)
        self.expected[peer, key_of(message)] = _Expected(message.complete(), word, now + 2 * SPIN_S)

    def take(self, is_open: Iterable[tuple[str, RequestKey]]) -> list[tuple[PeerRank, Complete]]:
        """Complete messages whose word has been set. Those of requests that are not open any more are forgotten."""
        found: list[tuple[PeerRank, Complete]] = []
        for (peer, key), (complete, word, _) in tuple(self.expected.items()):
            is_set = word.is_set()
            if is_set or (peer.instance, key) not in is_open:
                del self.expected[peer, key]
            if is_set:
                found.append((peer, complete))
        return found

    def peer_lost(self, peer: PeerRank) -> None:
        """Forget the words of a lost peer."""
        for found in [expected for expected in self.expected if expected[0] == peer]:
            del self.expected[found]

    # -- both --------------------------------------------------------------------------------------------------------

    @property
    def spins_until(self) -> float:
        """Until when to poll without a sleep, by `time.monotonic`."""
        return max((each.until for waiting in (self.announced, self.expected) for each in waiting.values()), default=0.0)

    def completions(self) -> list[_native.Completion]:
        """What native code polls."""
        found: list[_native.Completion] = [announced.signal for announced in self.announced.values()]
        return found + [expected.word for expected in self.expected.values()]
