"""The control thread: it alone touches the protocol, takes what arrives, and carries out the effects.

`Hub` joins `links`, `session`, `handshake`, the channel and the transfer worker. Other threads hand it commands. A thread
that dies fails every request at once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from disagg.backends.base import Backend, Fence, RemotePeer
from disagg.core import _native
from disagg.core.address import parse_address
from disagg.core.errors import DisaggError, RemoteProtocolError, RequestAborted, VerificationFailed
from disagg.core.events import ReadyEvent
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.rows import Pages, Rows
from disagg.layout.agreement import LocalRank
from disagg.layout.checksums import ChecksumFunction
from disagg.protocol.messages import (
    Busy,
    Complete,
    Credit,
    Message,
    PartialChecksums,
    Reject,
    RequestMessage,
    Reserve,
    Welcome,
    decode,
    encode,
)
from disagg.protocol.peer_state import Connect, Disconnect, Lost, Ready, ReplyOn, SendHello, SendTo
from disagg.protocol.peers import PeerTable
from disagg.protocol.receive_session import ReceiveSession, ReceiveState
from disagg.protocol.send_session import SendSession
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import (
    NEVER,
    Event,
    PeerRank,
    RequestKey,
    SendMessage,
    StartTransfer,
    StartVerify,
    Ticket,
    ids,
    key_of,
)
from disagg.runtime.accounting import Work
from disagg.runtime.channel import Channel, Inbound, Reply
from disagg.runtime.completion_page import CompletionPage
from disagg.runtime.credits import Packing
from disagg.runtime.handshake import Handshake, RemoteRank
from disagg.runtime.paths import bind_outgoing
from disagg.runtime.streams import bind_prepared
from disagg.runtime.verification import ChecksumWorker, checksum_sent, verify_rows
from disagg.transfer.jobs import Begun, Job, Report, Settled, SlotFilled, Unpacked
from disagg.transfer.staging import SlotPool
from disagg.transfer.worker import TransferWorker

logger = logging.getLogger(__name__)

READY_POLL_S = 0.0005
JOIN_TIMEOUT_S = 10.0
MAX_CONNECTING = 1
"""Ranks that the engine is being connected to at a time. With eight, a process with NIXL's engine ended with SIGSEGV once, in a
dozen rounds of chaos, while it connected to three ranks.
"""
FENCE_S, MAX_FENCE_S = 0.025, 5.0
"""How long after a rank was lost its engine is asked again for a proof; each time twice as long."""
MOST_LATE_S = 2e-3
"""How late what time brings may come where there is always something else to do."""
LINGER_S, TOLD_S = 10e-6, 200e-6
"""Between looks without a sleep, at work that has to be asked and where all of it says when it is done."""
KNOWN_S = 20e-3
"""A receiver that was told beforehand how it will see that copying has ended looks for twice as long; what ends within this
is not said again, and its writer stays awake for it.
"""
LOOKS = 8
"""At work under way, for one at the control channel."""
MAX_FENCING = 4096
"""Lost ranks that are asked about. Beyond it those that were lost first are asked no more: their rows stay quarantined."""


@dataclass
class Stats:
    """Work over all transfers that this rank has started, since its manager was built; and over all requests that it has
    received, how many were `verified`, and how many of these did not hold what was sent.
    """

    nbytes: int = 0
    pieces: int = 0
    transfers: int = 0
    failures: int = 0
    nbytes_packed: int = 0
    nbytes_source_packed: int = 0
    bind_s: float = 0.0
    pack_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    unpack_s: float = 0.0
    verified: int = 0
    mismatches: int = 0

    @property
    def nbytes_by_way(self) -> dict[str, int]:
        """What was written: directly, packed at the source alone, and packed through the peer's ring."""
        direct = self.nbytes - self.nbytes_packed - self.nbytes_source_packed
        return {"direct": direct, "source": self.nbytes_source_packed, "packed": self.nbytes_packed}

    def add(self, settled: Settled) -> None:
        self.transfers += 1
        self.failures += bool(settled.error)
        self.nbytes += 0 if settled.error else settled.nbytes
        self.pieces += settled.pieces
        self.nbytes_packed += 0 if settled.error else settled.packed
        self.nbytes_source_packed += 0 if settled.error else settled.source_packed
        self.bind_s += settled.bind_s
        self.pack_s += settled.pack_s
        self.post_s += settled.post_s
        self.wire_s += settled.wire_s


@dataclass
class _Fencing:
    """A lost rank's engine, and when it is next asked for a proof that nothing of it is under way."""

    engine: RemotePeer
    next_at: float
    renewed: bool
    delay_s: float = FENCE_S


@dataclass
class _Summing:
    """A chunk whose sums are being made: what of it went packed, once it has settled, and its sums or why there are none."""

    packed: int | None = None
    sums: tuple[PartialChecksums, ...] | None = None
    error: str = ""


class _Foretold(NamedTuple):
    """What the receiver of a transfer sees when that is done, and until when it looks, if it was told."""

    notice: _native.CompletionSignal
    until: float


class _Expected(NamedTuple):
    """A writer's last word, which counts from when `word` has its value, and until when this side stays awake to see that."""

    complete: Complete
    word: _native.CompletionWord
    until: float


class Wire(Protocol):
    """What the control thread asks of its channel."""

    def connect(self, address: str, *, public_key: str | None = None) -> None: ...
    def disconnect(self, address: str) -> None: ...
    def send(self, address: str, data: bytes) -> bool: ...
    def reply(self, connection: bytes, data: bytes, *, lane: bool = False) -> bool: ...
    def board(self, address: str) -> CompletionPage | None: ...
    def wake(self) -> None: ...
    def busy_poll(self, seconds: float, signs: list[_native.Completion]) -> bool: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float) -> Iterator[Inbound | Reply]: ...


_NOTHING = Work()


class Hub:
    """The threads of one manager. `on_events` is called in them when requests end, `on_begin` when copying begins for one that
    is received, where the writer says so, and `on_death` when one of them dies. For `spin_s` after there was last something to
    do the control thread looks for more without a sleep, and moves bytes as well: of two threads that are awake each would
    wait for the other's turn at the interpreter.

    `problem` says why they died; `over` is set before the last look at who must be told, so that whoever comes later sees it.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        links: PeerTable,
        handshake: Handshake,
        sessions: Sessions,
        backend: Backend,
        packing: Packing,
        slots: SlotPool | None,
        spin_s: float,
        local: LocalRank,
        digest: ChecksumFunction,
        on_begin: Callable[[str, RequestKey], None],
        on_events: Callable[[Sequence[tuple[Event, Work]]], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._channel: Wire = channel
        self._links = links
        self._handshake = handshake
        self.sessions = sessions
        self.stats = Stats()
        self.changed = threading.Condition()
        self.problem = ""
        self.over = False
        self._on_begin = on_begin
        self._on_events = on_events
        self._on_death = on_death
        self._commands: deque[tuple[Callable[[float], None], Callable[[DisaggError], None] | None]] = deque()
        self._early: dict[PeerRank, list[StartTransfer]] = {}
        self._work: dict[tuple[str, str, RequestKey], Work] = {}
        self._settled: list[tuple[Settled, SendSession | None]] = []
        self._ended: list[Event] = []
        self.peer_losses: Counter[str] = Counter()
        self.refused_messages = self.rejected_hellos = 0
        self._lost: dict[PeerRank, int] = {}
        self._backend = backend
        self._fencing: dict[tuple[PeerRank, int], _Fencing] = {}
        self._connecting: dict[PeerRank, threading.Thread] = {}
        self._connectors: list[threading.Thread] = []
        self._connector = threading.BoundedSemaphore(MAX_CONNECTING)
        self._rows_waiting: list[tuple[ReceiveSession, ReadyEvent]] = []
        self._stopping = False
        self._warnings = RateLimitedLog(logger)
        self._due = self._due_again = self._awake_until = 0.0
        self._due_known = False
        self._passes_over = False
        self._spin_s = spin_s
        self._packing = packing
        self._worker = TransferWorker(
            backend,
            name=str(handshake.me),
            slots=slots,
            calls_turns=spin_s > 0,
            on_reports=self._wake,
            on_death=self._on_worker_death,
        )
        self._local = local
        self._digest = digest
        self._summing: dict[Ticket, _Summing] = {}
        self._begun: dict[Ticket, _native.Flag | _native.CudaEvent] = {}
        self._foretold: dict[Ticket, _Foretold] = {}
        self._expected: dict[tuple[PeerRank, RequestKey], _Expected] = {}
        self._sums = ChecksumWorker(name=str(handshake.me), on_summed=self._on_summed, on_death=self._on_worker_death)
        self._thread = threading.Thread(target=self._run, name=f"disagg-control-{handshake.me}", daemon=True)

    def start(self) -> None:
        self._worker.start()
        self._thread.start()

    def command(self, run: Callable[[float], None], *, on_error: Callable[[DisaggError], None] | None = None) -> None:
        """Have the control thread call `run(now)`; from any thread. Its `DisaggError` goes to `on_error`."""
        self._commands.append((run, on_error))
        self._channel.wake()

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        """Put something between this manager and its channel; from any thread, once."""
        assert isinstance(self._channel, Channel)
        self._channel = wrap(self._channel)

    def queue_depths(self) -> dict[str, int]:
        """What waits, by where; from any thread."""
        return {
            "commands": len(self._commands),
            "transfers": self._worker.depth,
            "rows_not_ready": len(self._rows_waiting),
            "parked_reserves": self.sessions.sends.num_parked,
            "early_transfers": sum(map(len, tuple(self._early.values()))),
            "sums": self._sums.depth,
            "fences": len(self._fencing),
        }

    def when_ready(self, session: ReceiveSession, ready: ReadyEvent) -> None:
        """Reserve a session's rows once `ready` has passed; in the control thread."""
        self._rows_waiting.append((session, ready))

    def _wake(self) -> None:
        """In the worker's thread: there is something to take."""
        self._channel.wake()

    def stop(self, reason: str) -> None:
        """SendTo goodbye and end both threads."""

        def last(_: float) -> None:
            self._links.close(reason)
            self._stopping = True

        self.command(last)
        self._thread.join(JOIN_TIMEOUT_S)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._connectors:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._worker.stop(JOIN_TIMEOUT_S)
        self._sums.stop(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            while not self._stopping:
                self._turn()
            self._channel.flush()
            self.over = True
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("%s: the control thread died", self._handshake.me)
            self._die(error)

    def _on_worker_death(self, error: BaseException) -> None:
        """In the worker's thread: without it nothing settles, so the control thread ends too, and fails what both owned."""

        def die(_: float) -> None:
            raise error

        self.problem = f"the transfer thread died: {type(error).__name__}: {error}"
        self.command(die)

    def _die(self, error: BaseException) -> None:
        """The last act of the control thread: no session changes any more."""
        self.over = True
        self.problem = self.problem or f"the control thread died: {type(error).__name__}: {error}"
        self._on_death(self.problem)
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for a change of peers or health."""
        with self.changed:
            self.changed.notify_all()

    def _turn(self) -> None:
        """One round: take what has arrived, then commands, and carry out the effects; then what time brings."""
        arrived = False
        work = bool(self._expected) and self._take_expected()
        # What is there already is carried out first; then it is the channel's turn.
        self._passes_over = not self._passes_over and bool(work or self._commands or self._worker.has_reports)
        if not self._passes_over:
            idle_s = 0.0 if work else self._idle_s()
            if self._spin_s and idle_s > 0:
                self._worker.take_over()
            for each in self._channel.poll(idle_s):
                work = self._take(each, time.monotonic()) or work
                arrived = True
        now = time.monotonic()
        if work or self._commands or self._worker.has_reports or (self._spin_s and self._worker.turn()):
            self._awake_until = max(self._awake_until, now + self._spin_s)
        elif not arrived and self._is_awake(now) and now < self._next_due() and not self._rows_waiting:
            self._look()
            return
        for _ in range(len(self._commands)):
            run, on_error = self._commands.popleft()
            try:
                run(now)
            except DisaggError as error:
                if on_error is None:
                    raise
                on_error(error)
        if self._rows_waiting:
            self._take_ready_rows(now)
        self._carry_out(now)
        # Last, as somebody waits for what has arrived.
        if now >= self._due_again:
            self._due_again = now + MOST_LATE_S
            self._next_due()
        if now >= self._due:
            self._due = NEVER  # until it is looked up again
            self._links.tick(now)
            self._packing.tick(now)
            self._carry_out_links(now)
            self.sessions.tick(now)
            self._fence_lost(now)
            self._carry_out(now)
        self._due_known = False
        if (self._foretold or self._expected) and not (self._commands or self._worker.has_reports):
            # At once: whatever lets go of the interpreter before may have to wait for it. What comes over TCP meanwhile may be
            # seen as late as the look lasts.
            self._look()

    def _carry_out(self, now: float) -> None:
        """The effects of what was taken; those who wait for a request are told last of all."""
        self._carry_out_links(now)
        self._carry_out_sessions()
        for report in self._worker.attend():
            self._take_report(report, now)
        if self._begun:
            self._foretell_begun(now)
        self._carry_out_sessions()
        for peer, message in self._packing.take_messages():
            self._say(peer, message)
        self._channel.flush()
        self._tell()

    def _look(self) -> None:
        """Without a sleep, at what is likely to come next; the next turn carries it out."""
        for _ in range(LOOKS):
            signs, all_told = self._worker.signs()
            signs += (foretold.notice for foretold in self._foretold.values())
            signs += (expected.word for expected in self._expected.values())
            told = self._channel.busy_poll(TOLD_S if all_told else LINGER_S, signs)
            if self._worker.turn():
                self._awake_until = max(self._awake_until, time.monotonic() + self._spin_s)
                return
            if told or all_told:
                return

    def _is_awake(self, now: float) -> bool:
        """Whether to look for more without a sleep."""
        if now < self._awake_until:
            return True
        return any(now < each.until for awaited in (self._foretold, self._expected) for each in awaited.values())

    def _idle_s(self) -> float:
        """How long nothing is due."""
        now = time.monotonic()
        if self._commands or self._is_awake(now):
            return 0.0
        idle_s = self._next_due() - now
        return min(idle_s, READY_POLL_S) if self._rows_waiting else idle_s

    def _next_due(self) -> float:
        """When time alone next brings something. Looked up before a wait: a turn that has work does without."""
        if not self._due_known:
            fence_at = min((fencing.next_at for fencing in self._fencing.values()), default=NEVER)
            self._due = min(self.sessions.next_tick(), self._links.next_tick(), self._packing.next_tick(), fence_at)
            self._due_known = True
        return self._due

    def _take(self, arrived: Inbound | Reply, now: float) -> bool:
        """One message, and whether it was about a request; what cannot be read, or breaks the protocol, is refused and changes
        nothing.
        """
        try:
            message = decode(arrived.data)
            if isinstance(arrived, Reply):
                self._links.on_reply(arrived.address, message, now)
                return False
            peer = self._links.on_inbound(arrived.connection, arrived.user, message, now)
            if peer is None:
                return False
            if isinstance(message, Complete) and (message.filled or not message.final):
                self._take_filled(peer, message)
                if message.word is not None and arrived.board is not None:
                    self._expect(peer, message, arrived.board.word(*message.word), now)
            if isinstance(message, Credit):
                self._take_credit(peer, message)
            elif isinstance(message, RequestMessage | Busy):
                self.sessions.on_message(peer, message, now)
        except RemoteProtocolError as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: RemoteProtocolError) -> None:
        self.refused_messages += 1
        self._warnings.warning("%s: refused a message: %s", self._handshake.me, error)

    def _expect(self, peer: PeerRank, message: Complete, word: _native.CompletionWord, now: float) -> None:
        """Look for a word that says that a request's bytes have landed; in vain where the request is none of this side's."""
        key = key_of(message)
        if (peer.instance, key) in self.sessions.receives.sessions:
            complete = msgspec.structs.replace(message, final=True, word=None)
            self._expected[peer, key] = _Expected(complete, word, now + 2 * KNOWN_S)

    def _take_expected(self) -> bool:
        """Take what words say; whether there is anything. What has ended otherwise is expected no more."""
        taken = False
        for (peer, key), (complete, word, _) in tuple(self._expected.items()):
            told = word.is_set()
            if told or (peer.instance, key) not in self.sessions.receives.sessions:
                del self._expected[peer, key]
            if told:
                taken = True
                try:
                    self.sessions.on_message(peer, complete, time.monotonic())
                except RemoteProtocolError as error:
                    self._refuse(error)
        return taken

    def _take_filled(self, peer: PeerRank, message: Complete) -> None:
        """Have what a writer has put into this rank's ring scattered."""
        rank = self._handshake.rank(peer)
        if rank is None:
            return
        if not (message.final or message.filled):
            self._on_begin(peer.instance, key_of(message))
        begin = functools.partial(self.sessions.receives.begin_unpack, peer, message)
        unpacks = [self._packing.take(peer, filled, begin, rank.incoming, rank.unpack) for filled in message.filled]
        self._worker.unpack(unpack for unpack in unpacks if unpack is not None)

    def _take_credit(self, peer: PeerRank, message: Credit) -> None:
        """Slots of a peer's ring are free again."""
        rank = self._handshake.rank(peer)
        if rank is None or rank.ring is None:
            return
        for slot, sequence in message.slots:
            self._packing.on_credit(peer, message.ring, slot, sequence)
            if message.ring == rank.ring.ring.address:
                rank.ring.credit(slot, sequence)

    def _take_ready_rows(self, now: float) -> None:
        waiting, self._rows_waiting = self._rows_waiting, []
        for session, ready in waiting:
            if session.error is not None:
                continue
            try:
                passed = ready.query()
            except Exception as error:  # of the server's own event
                logger.exception("%s: the event of a receiver's rows", self._handshake.me)
                what = f"the event of the rows failed: {type(error).__name__}: {error}"
                self.sessions.receives.abort(session, RequestAborted(what), now)
                continue
            if passed:
                self.sessions.receives.ready(session, now)
            else:
                self._rows_waiting.append((session, ready))

    def _carry_out_links(self, now: float) -> None:
        while self._links.effects:
            match self._links.effects.popleft():
                case Connect(address, public_key):
                    self._channel.connect(address, public_key=public_key)
                case Disconnect(address):
                    self._channel.disconnect(address)
                case SendHello(address, generation, dial):
                    self._channel.send(address, encode(self._handshake.hello(generation, dial)))
                case SendTo(address, message):
                    self._channel.send(address, encode(message))
                case ReplyOn(connection, message):
                    if isinstance(message, Reject) and not message.hello_first:
                        self.rejected_hellos += 1
                        self._warnings.warning("%s: rejected a hello: %s", self._handshake.me, message.reason)
                    self._channel.reply(connection, encode(message), lane=isinstance(message, Welcome))
                case Ready() as ready:
                    self._connect(ready)
                case Lost() as lost:
                    self._lose(lost, now)

    def _connect(self, ready: Ready) -> None:
        """Have the engine connected in a thread of its own: a peer that does not answer there holds up nobody else."""
        reach = self._handshake.reaching(ready.peer, ready.welcome, host=self._host_of(ready.peer))
        name = f"disagg-connect-{self._handshake.me}-{ready.peer}"
        thread = threading.Thread(target=self._reach, args=(ready, reach), name=name, daemon=True)
        self._connecting[ready.peer] = thread
        self._connectors = [each for each in self._connectors if each.is_alive()]
        self._connectors.append(thread)
        thread.start()

    def _host_of(self, peer: PeerRank) -> str:
        link = self._links.link(peer)
        return parse_address(link.address, what=str(peer))[0] if link is not None else ""

    def _reach(self, ready: Ready, reach: Callable[[], RemoteRank]) -> None:
        """In a thread of its own."""
        rank, problem = None, ""
        with self._connector:
            try:
                rank = reach()
            except DisaggError as error:
                problem = str(error)
            except Exception as error:  # of one peer
                logger.exception("%s: connecting to %s", self._handshake.me, ready.peer)
                problem = f"{type(error).__name__}: {error}"
        thread = threading.current_thread()
        self.command(lambda now: self._reached(ready, thread, rank, problem, now))

    def _reached(self, ready: Ready, thread: threading.Thread, rank: RemoteRank | None, problem: str, now: float) -> None:
        if self._connecting.get(ready.peer) is not thread:  # lost since, or begun anew
            if rank is not None:
                self._handshake.discard(ready.peer, rank)
            return
        del self._connecting[ready.peer]
        if rank is None:
            logger.warning("%s: cannot use %s: %s", self._handshake.me, ready.peer, problem)
            self._links.refuse(ready.peer, problem, now)
            return
        self._handshake.add(ready.peer, rank)
        if self._lost.pop(ready.peer, None) == ready.epoch:
            self._fencing.pop((ready.peer, ready.epoch), None)
            self.sessions.receives.peer_back(ready.peer, now)
        for start in self._early.pop(ready.peer, []):
            self._start(start)
        self.notify()

    def _lose(self, lost: Lost, now: float) -> None:
        level = logging.INFO if lost.announced else logging.WARNING
        logger.log(level, "%s: lost %s: %s", self._handshake.me, lost.peer, lost.cause)
        self.peer_losses[lost.peer.instance] += 1
        self._lost[lost.peer] = lost.epoch
        self._connecting.pop(lost.peer, None)
        self.sessions.peer_lost(lost.peer, lost.cause, now, epoch=lost.epoch)
        self._packing.lose(lost.peer)
        for peer, key in [found for found in self._expected if found[0] == lost.peer]:
            del self._expected[peer, key]
        for start in self._early.pop(lost.peer, []):
            self.sessions.sends.settled(start.ticket, now=now, error=f"{lost.peer} is gone: {lost.cause}")
        engine = self._handshake.disconnect(lost.peer, lost.epoch)
        if engine is not None:
            if len(self._fencing) >= MAX_FENCING:
                del self._fencing[next(iter(self._fencing))]
            self._fencing[lost.peer, lost.epoch] = _Fencing(engine, now, lost.renewed)
            self._fence_lost(now)
        self.notify()

    def _fence_lost(self, now: float) -> None:
        """Ask again whether lost ranks are proved quiet; those that are give back rows and rings."""
        for (peer, epoch), fencing in list(self._fencing.items()):
            if now < fencing.next_at:
                continue
            fencing.delay_s = min(fencing.delay_s * 2, MAX_FENCE_S)
            fencing.next_at = now + fencing.delay_s
            try:
                fence = self._backend.fence(fencing.engine, epoch=epoch)
            except DisaggError as error:
                logger.warning("%s: fencing %s: %s", self._handshake.me, peer, error)
                continue
            if fence is Fence.QUIET:
                del self._fencing[peer, epoch]
                self.sessions.peer_quiet(peer, epoch=epoch)
                self._packing.quiet(peer, epoch, renewed=fencing.renewed)
                logger.info("%s: lost %s is proved quiet", self._handshake.me, peer)

    def _carry_out_sessions(self) -> None:
        effects = self.sessions.effects
        while effects:
            match effects.popleft():
                case SendMessage(peer, message):
                    self._say(peer, message)
                case StartTransfer() as start:
                    self._start(start)
                case StartVerify() as start_verify:
                    self._start_verify(start_verify)
                case Event() as event:
                    self._ended.append(event)

    def _tell(self) -> None:
        """Count what has settled, and tell who waits of what has ended: last of all, as they may keep the interpreter."""
        for report, sent in self._settled:
            self.stats.add(report)
            if sent is not None:
                self._work_of("send", sent).add(report)
        self._settled.clear()
        if self._ended:
            ended, self._ended = self._ended, []
            self._on_events([(event, self._work.pop((event.direction, event.peer, event.key), _NOTHING)) for event in ended])

    def _say(self, peer: PeerRank, message: Message) -> None:
        """What cannot be sent now is said again by the protocol. What cannot be encoded, for all that was checked before, ends
        nothing but the request that waits for it.
        """
        link = self._links.link(peer)
        if link is None:
            return
        try:
            data = encode(message)
        except Exception:
            logger.exception("%s: no %s could be sent to %s", self._handshake.me, type(message).__name__, peer)
            return
        self._channel.send(link.address, data)

    def _start(self, start: StartTransfer) -> None:
        """Hand a transfer to the worker; before its rank is connected it waits."""
        ticket = start.ticket
        rank = self._handshake.rank(ticket.peer)
        session = self.sessions.sends.sessions.get((ticket.peer.instance, ticket.key))
        if session is None:
            return
        if rank is None:
            self._early.setdefault(ticket.peer, []).append(start)
            return
        destination = session.destinations[ticket.peer]
        if rank.prepared is not None:
            bind = functools.partial(bind_prepared, rank.prepared, rank.plan, start)
        else:
            bind = functools.partial(
                bind_outgoing,
                rank.plan,
                start,
                pack_below=rank.threshold.nbytes,
                has_ring=rank.ring is not None,
                gathers_from=rank.gathers_from,
                stream_of=rank.pack,
            )
        job = Job(
            ticket,
            rank.engine,
            bind,
            lambda: destination.reason != "",
            start.chunk.ready,
            rank.ring,
            num_rows=_num_rows(start.chunk.rows.values()),
        )
        self._worker.submit(job)
        if start.reserve.verify != "off":
            self._summing[ticket] = _Summing()
            self._sums.submit(
                ticket,
                lambda: checksum_sent(rank.checksum_plans(), start, self._digest),
                ready=start.chunk.ready,
                wanted=lambda: ticket in self._summing,
            )

    def _start_verify(self, start: StartVerify) -> None:
        self._sums.submit(start, lambda: verify_rows(self._local.checksum_plans, start, self._digest))

    def _on_summed(self, token: Any, sums: Any, error: DisaggError | None) -> None:
        """In the sums' thread: hand the result to the control thread."""

        def take(now: float) -> None:
            if isinstance(token, StartVerify):
                self.stats.verified += 1
                self.stats.mismatches += isinstance(error, VerificationFailed)
                self.sessions.receives.verified(token.peer, token.key, now, error=error)
            elif token in self._summing:
                self._summing[token].sums = sums
                self._summing[token].error = str(error or "")
                self._settle_summed(token, now)

        self.command(take)

    def _settle_summed(self, ticket: Ticket, now: float) -> None:
        """A chunk whose sums were asked for has settled once they are there as well."""
        summing = self._summing[ticket]
        if summing.packed is None or not (summing.sums is not None or summing.error):
            return
        del self._summing[ticket]
        self.sessions.sends.settled(ticket, now=now, error=summing.error, packed=summing.packed, sums=summing.sums or ())

    def _take_report(self, report: Report, now: float) -> None:
        if isinstance(report, Unpacked):
            self.stats.unpack_s += report.seconds
            session, peer, filled = self._packing.unpacked(report)
            if session.state is ReceiveState.OPEN:
                self._work_of("receive", session).unpack_s += report.seconds
            done = {"chunk": filled.chunk, "nbytes": filled.nbytes}
            self.sessions.receives.end_unpack(session, peer, **done, now=now, error=report.error)
            return
        ticket: Any = report.ticket
        if isinstance(report, SlotFilled):
            self._tell_filled(ticket, report, now)
            return
        if isinstance(report, Begun):
            self._tell_begun(ticket, report.sign, now)
            return
        self._begun.pop(ticket, None)
        foretold, known = self._foretold.pop(ticket, None), False
        if foretold is not None and not report.error:
            foretold.notice.signal()
            known = time.monotonic() < foretold.until
        if not report.unsettled:
            sent = self.sessions.sends.sessions.get((ticket.peer.instance, ticket.key))
            self._settled.append((report, sent if sent is not None and not sent.reported else None))
        if report.error:
            self._summing.pop(ticket, None)
        elif ticket in self._summing:
            self._summing[ticket].packed = report.packed
            self._settle_summed(ticket, now)
            return
        self.sessions.sends.settled(
            ticket, now=now, error=report.error, unsettled=report.unsettled, packed=report.packed, known=known
        )

    def _work_of(self, direction: str, session: SendSession | ReceiveSession) -> Work:
        return self._work.setdefault((direction, session.peer, session.key), Work())

    def _tell_begun(self, ticket: Ticket, sign: _native.Flag | _native.CudaEvent | None, now: float) -> None:
        """Have a receiver that sleeps wake up meanwhile: nothing has landed yet."""
        if sign is not None and self._foretell(ticket, sign, now):
            return
        reserve = self._reserve_of(ticket)
        if reserve is not None:
            self._say(ticket.peer, Complete(**ids(ticket.key), nonce=reserve.nonce, final=False))
        if sign is not None:
            self._begun[ticket] = sign

    def _foretell_begun(self, now: float) -> None:
        """Those that have become a request's last since: nothing more is sent, or what was under way beside them has ended."""
        for ticket, sign in list(self._begun.items()):
            if self._foretell(ticket, sign, now):
                del self._begun[ticket]

    def _foretell(self, ticket: Ticket, sign: _native.Flag | _native.CudaEvent, now: float) -> bool:
        """Tell a receiver that looks at this side's board what it will see there, and what that will mean; whether it does."""
        link = self._links.link(ticket.peer)
        board = self._channel.board(link.address) if link is not None else None
        if board is None or (complete := self.sessions.sends.foretell(ticket)) is None:
            return False
        notice, word = board.notice(sign)
        self._foretold[ticket] = _Foretold(notice, now + KNOWN_S)
        self._say(ticket.peer, msgspec.structs.replace(complete, final=False, word=word))
        return True

    def _tell_filled(self, ticket: Ticket, report: SlotFilled, now: float) -> None:
        reserve = self._reserve_of(ticket)
        if reserve is not None:
            self._packing.on_slot_filled(ticket.peer, ticket, reserve.nonce, report, now)

    def _reserve_of(self, ticket: Ticket) -> Reserve | None:
        """What a transfer is for, if its request is still known."""
        session = self.sessions.sends.sessions.get((ticket.peer.instance, ticket.key))
        destination = session.destinations.get(ticket.peer) if session is not None else None
        return destination.reserve if destination is not None else None


def _num_rows(given: Iterable[Rows]) -> int:
    """How many page ids and slots there are to bind."""
    count = 0
    for rows in given:
        count += len(rows.ids) if isinstance(rows, Pages) else 1
    return count
