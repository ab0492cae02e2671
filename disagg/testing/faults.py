"""Faults to order: a backend around any real one, and a control channel around a manager's own.

Both are seeded: the same seed and the same order of calls give the same faults (threads and processes may change that
order). A server's own tests can use them as this library's do::

    faults = BackendFaults(seed=1, fail=0.01, delay=0.2, delay_s=(0.0, 0.05))
    manager = KVManager(..., backend=inject("nixl", faults))
    mistreat(manager, MessageFaults(seed=2, lose=0.05, double=0.05, delay=0.2))

Some faults an engine may have, and everything has to survive them: `FAIL`, `DELAY`, `UNSETTLE`, `KILL`, and whatever
happens to messages. The others are lies, which no engine may tell: `LOSE`, `DOUBLE`, `LATE`, and `fencing=False`. With
them bytes are wrong, and a harness that says nothing then sees nothing.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.backends import registry as backends
from disagg.backends.base import Backend, BackendOptions, Fence, Op, RemotePeer, StagingShape, Transfer, TransferStatus
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError
from disagg.core.memory import MemoryRegion
from disagg.protocol.messages import decode
from disagg.runtime.channel import Channel, Inbound, Reply
from disagg.runtime.completion_page import CompletionPage

if TYPE_CHECKING:
    from disagg.manager import KVManager

logger = logging.getLogger(__name__)


class Trouble(enum.Enum):
    """What may become of a transfer."""

    FAIL = "fail"
    """Half of its copies are made; then it is `FAILED`."""
    DELAY = "delay"
    """It is posted later, and `PENDING` meanwhile."""
    UNSETTLE = "unsettle"
    """It is `UNSETTLED`, posted later, and `FAILED` once that has settled."""
    KILL = "kill"
    """Half of its copies are posted; then the process is killed (SIGKILL)."""
    LOSE = "lose"
    """A lie: it is `DONE`, and nothing was posted."""
    DOUBLE = "double"
    """A lie: it is `DONE`, and posted a second time later."""
    LATE = "late"
    """A lie: it is `FAILED`, and posted later."""


def _check_odds(what: str, faults: object, names: Sequence[str]) -> None:
    odds = {name: getattr(faults, name) for name in names}
    if any(not 0 <= value <= 1 for value in odds.values()) or sum(odds.values()) > 1:
        raise ConfigError(f"{what}: expected probabilities whose sum is 1 at most, found {odds}")


@dataclass(frozen=True, kw_only=True)
class BackendFaults:
    """The probability of each `Trouble` of a transfer. What happens later happens after some time within `delay_s`.

    `kill_at`: the process is killed at that transfer (from 1). `fencing=False` is a lie about everything that proves quiet:
    `fence` says `QUIET`, and what is not settled says `FAILED`.
    """

    seed: int = 0
    fail: float = 0.0
    delay: float = 0.0
    unsettle: float = 0.0
    kill: float = 0.0
    lose: float = 0.0
    double: float = 0.0
    late: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.05)
    kill_at: int | None = None
    fencing: bool = True

    def __post_init__(self) -> None:
        _check_odds("backend faults", self, [trouble.value for trouble in Trouble])


class _Later:
    """A thread that does things later."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None

    def do(self, seconds: float, action: Callable[[], None]) -> None:
        with self._changed:
            if not self._open:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disagg-faults", daemon=True)
                self._thread.start()
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), action))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if not self._open:
                    return
                _, _, action = heapq.heappop(self._due)
            try:
                action()
            except DisaggError as error:  # the peer is gone, or the engine closed
                logger.debug("a late write came to nothing: %s", error)

    def close(self) -> None:
        """What was to be done later is not done."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()


class FaultyTransfer:
    """A transfer of `FaultyBackend`. `inner` is the real one, once it was posted."""

    def __init__(self, *, said: TransferStatus, error: str | None, after: TransferStatus | None = None) -> None:
        self._said, self.error = said, error
        self._after = after
        self.inner: Transfer | None = None

    def poll(self) -> TransferStatus:
        if not self._said.settled and self.inner is not None:
            found = self.inner.poll()
            if found.settled:
                self._said = self._after or found
                self.error = self.error or self.inner.error
                self.inner.close()
        return self._said

    def fail(self, error: DisaggError) -> None:
        """It could not be posted after all."""
        self._said, self.error = TransferStatus.FAILED, str(error)

    def close(self) -> None:
        if not self._said.settled:
            raise LocalProtocolError(f"transfer: only a settled one can be closed, this one is {self._said.value}")


class _Unfenced:
    """A real transfer that says `FAILED` where it cannot tell."""

    def __init__(self, inner: Transfer) -> None:
        self._inner = inner
        self._lied = False

    @property
    def error(self) -> str | None:
        return self._inner.error

    def poll(self) -> TransferStatus:
        found = self._inner.poll()
        self._lied = self._lied or found is TransferStatus.UNSETTLED
        return TransferStatus.FAILED if self._lied else found

    def close(self) -> None:
        if not self._lied:
            self._inner.close()


class FaultyBackend:
    """`inner`, with faults. `counts` says how many of each there have been."""

    def __init__(self, inner: Backend, faults: BackendFaults, staging: StagingShape | None = None) -> None:
        self.inner = inner
        self._staging = staging
        self.name = inner.name
        self.faults = faults
        self.counts: Counter[Trouble] = Counter()
        self._rng = random.Random(faults.seed)
        self._later = _Later()
        self._number = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def staging(self) -> StagingShape:
        return self._staging or self.inner.staging

    @property
    def transport(self) -> str:
        return self.inner.transport

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.inner.register(regions)

    def endpoint(self) -> bytes:
        return self.inner.endpoint()

    def connect(self, endpoint: bytes, *, epoch: int) -> RemotePeer:
        return self.inner.connect(endpoint, epoch=epoch)

    def disconnect(self, peer: RemotePeer) -> None:
        self.inner.disconnect(peer)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        found = self.inner.fence(peer, epoch=epoch)
        return found if self.faults.fencing else Fence.QUIET

    def close(self) -> None:
        self._later.close()
        self.inner.close()

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        trouble, seconds = self._draw()
        if trouble is None or not len(copies):
            return self._posted(op, peer, copies)
        with self._lock:
            self.counts[trouble] += 1
        logger.debug("fault: %s of %d copies", trouble.value, len(copies))
        match trouble:
            case Trouble.FAIL:
                transfer = FaultyTransfer(said=TransferStatus.PENDING, error="a fault was ordered", after=TransferStatus.FAILED)
                transfer.inner = self.inner.submit(op, peer, _half(copies))
                return transfer
            case Trouble.KILL:
                self.inner.submit(op, peer, _half(copies))
                os.kill(os.getpid(), signal.SIGKILL)
            case Trouble.DELAY:
                return self._delayed(op, peer, copies, seconds, FaultyTransfer(said=TransferStatus.PENDING, error=None))
            case Trouble.UNSETTLE:
                said = TransferStatus.UNSETTLED if self.faults.fencing else TransferStatus.FAILED
                transfer = FaultyTransfer(said=said, error="a fault was ordered: not settled", after=TransferStatus.FAILED)
                return self._delayed(op, peer, copies, seconds, transfer)
            case Trouble.LATE:
                transfer = FaultyTransfer(said=TransferStatus.FAILED, error="a fault was ordered: it lands later")
                return self._delayed(op, peer, copies, seconds, transfer)
            case Trouble.DOUBLE:
                self._later.do(seconds, lambda: self._forget(self.inner.submit(op, peer, copies)))
                return self._posted(op, peer, copies)
            case Trouble.LOSE:
                return FaultyTransfer(said=TransferStatus.DONE, error=None)
        raise AssertionError("the process was killed")

    def _draw(self) -> tuple[Trouble | None, float]:
        with self._lock:
            draw, share = self._rng.random(), self._rng.random()
            low, high = self.faults.delay_s
            seconds = low + share * (high - low)
            if next(self._number) == self.faults.kill_at:
                return Trouble.KILL, seconds
            for trouble in Trouble:
                draw -= getattr(self.faults, trouble.value)
                if draw < 0:
                    return trouble, seconds
            return None, seconds

    def _posted(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        transfer = self.inner.submit(op, peer, copies)
        return transfer if self.faults.fencing else _Unfenced(transfer)

    def _delayed(self, op: Op, peer: RemotePeer, copies: CopyBatch, seconds: float, transfer: FaultyTransfer) -> FaultyTransfer:
        def post() -> None:
            try:
                transfer.inner = self.inner.submit(op, peer, copies)
            except DisaggError as error:
                transfer.fail(error)

        self._later.do(seconds, post)
        return transfer

    def _forget(self, transfer: Transfer) -> None:
        """Nobody will ask for it: see it to its end here."""
        if not transfer.poll().settled:
            self._later.do(0.001, lambda: self._forget(transfer))
            return
        transfer.close()


def _half(copies: CopyBatch) -> CopyBatch:
    count = (len(copies) + 1) // 2
    return CopyBatch(copies.source[:count], copies.destination[:count], copies.nbytes[:count])


def inject(
    backend: str | Callable[[BackendOptions], Backend], faults: BackendFaults, *, staging: StagingShape | None = None
) -> Callable[[BackendOptions], Backend]:
    """What to give `KVManager` as its `backend`: that one, with faults, and with rings of another shape if one is given."""

    def make(options: BackendOptions) -> Backend:
        inner = backend(options) if callable(backend) else backends.load(backend, options)
        return FaultyBackend(inner, faults, staging)

    return make


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MessageFaults:
    """What may become of a message that this rank sends: the probability that it is lost, comes twice, or comes later, by
    some time within `delay_s` (so that messages overtake each other). `kinds`: of which types, such as `"complete"`;
    `None`: of all. `at_most`: how many messages are mistreated, then no more.
    """

    seed: int = 0
    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.2)
    kinds: frozenset[str] | None = None
    at_most: float = float("inf")

    def __post_init__(self) -> None:
        _check_odds("message faults", self, ["lose", "double", "delay"])


@dataclass
class FaultyChannel:
    """A manager's channel, with faults in what it sends. In the control thread, as the channel itself."""

    inner: Channel
    faults: MessageFaults
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.faults.seed)
        self._due: list[tuple[float, int, Callable[[], bool]]] = []
        self._count = itertools.count()

    @property
    def address(self) -> str:
        return self.inner.address

    def connect(self, address: str, *, public_key: str | None = None) -> None:
        self.inner.connect(address, public_key=public_key)

    def disconnect(self, address: str) -> None:
        self.inner.disconnect(address)

    def wake(self) -> None:
        self.inner.wake()

    def board(self, address: str) -> CompletionPage | None:
        return self.inner.board(address)

    def busy_poll(self, seconds: float, signs: list[_native.Completion]) -> bool:
        return self.inner.busy_poll(seconds, signs)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()

    def send(self, address: str, data: bytes) -> bool:
        return self._pass_on(data, lambda: self.inner.send(address, data))

    def reply(self, connection: bytes, data: bytes, *, lane: bool = False) -> bool:
        return self._pass_on(data, lambda: self.inner.reply(connection, data, lane=lane))

    def poll(self, timeout_s: float) -> Iterator[Inbound | Reply]:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        due = self._due[0][0] - now if self._due else timeout_s
        yield from self.inner.poll(min(timeout_s, due))

    def _pass_on(self, data: bytes, go: Callable[[], bool]) -> bool:
        fate = self._draw(data)
        if fate is None:
            return go()
        self.counts[fate] += 1
        if fate == "double":
            go()
        if fate != "lose":
            low, high = self.faults.delay_s
            seconds = low + self._rng.random() * (high - low)
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), go))
        return True

    def _draw(self, data: bytes) -> str | None:
        draw = self._rng.random()
        if self.counts.total() >= self.faults.at_most:
            return None
        if self.faults.kinds is not None and type(decode(data)).__name__.lower() not in self.faults.kinds:
            return None
        for fate in ("lose", "double", "delay"):
            draw -= getattr(self.faults, fate)
            if draw < 0:
                return fate
        return None


def mistreat(manager: KVManager, faults: MessageFaults) -> FaultyChannel:
    """Have the messages that a manager sends mistreated from now on."""
    made: list[FaultyChannel] = []

    def wrap(channel: Channel) -> FaultyChannel:
        made.append(FaultyChannel(channel, faults))
        return made[0]

    manager.interpose(wrap)
    return made[0]
