"""Engine connections to peer ranks: made, lost, and fenced until the lost rank is proved quiet."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from disagg.backends.abilities import Renewable, renewal_due
from disagg.backends.base import Backend, Fence, RemotePeer
from disagg.core import _native
from disagg.core.errors import DisaggError, PeerIncompatible
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.machine.processes import ProcessWatch
from disagg.protocol.peer_effects import Lost, Ready
from disagg.protocol.peers import PeerTable
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import NEVER, PeerRank
from disagg.runtime.handshake import Handshake, Peer, RemoteRank
from disagg.runtime.peer_processes import PeerProcesses

logger = ThreadLog(__name__)

MAX_CONNECTING = 4
"""At once, of ranks that were not tried or could be connected last, and of those that could not."""
MAX_ATTEMPTS = 4
"""At once, of one rank: an engine may wait for long for an address that is gone."""
PROCESS_CHECK_S = 0.5
FENCE_S, MAX_FENCE_S = 0.025, 5.0
"""The first and the longest delay between fences: it doubles, and begins anew when the rank's process ends."""
RENEW_AFTER_S, RENEW_AGAIN_S = 10.0, 60.0
"""How long an engine that serves no new request is kept for those under way, and the first pause between two renewals: it
doubles while they do not help.
"""
MAX_FENCING = 4096
"""Beyond this the oldest lost ranks are given up: their rows stay quarantined."""


@dataclass
class _Fencing:
    engine: RemotePeer
    process: ProcessWatch | None
    next_at: float
    delay_s: float = FENCE_S
    has_ended: bool = False

    def check(self, now: float) -> None:
        """Once its process has ended, fence it at once, and then often."""
        if not self.has_ended and self.process is not None and self.process.has_ended():
            self.has_ended, self.delay_s, self.next_at = True, FENCE_S, now


class Connections:
    """The control thread calls all of this but `_run`. `command` runs a function there, and `on_connected` is called there
    for each rank that transfers may go to. `renewal_due` says why the engine must be closed and started again.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        handshake: Handshake,
        peers: PeerTable,
        sessions: Sessions,
        processes: PeerProcesses,
        command: Callable[[Callable[[float], None]], None],
        on_connected: Callable[[PeerRank], None],
        renewal_due: Callable[[], str],
    ) -> None:
        self._backend = backend
        self._handshake = handshake
        self._peers = peers
        self._sessions = sessions
        self._processes = processes
        self._command = command
        self._on_connected = on_connected
        self._renewal_due = renewal_due
        self._threads: list[threading.Thread] = []
        self._slots = {failed: threading.BoundedSemaphore(MAX_CONNECTING) for failed in (False, True)}
        self._fencing: dict[tuple[PeerRank, int], _Fencing] = {}  # by epoch
        self._fence_at = NEVER
        self._next_check = 0.0
        self._renew_at, self._serves_none_since = 0.0, NEVER
        self._renew_again_s = RENEW_AGAIN_S
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._losses = RateLimitedLog(logger)
        self.num_losses: Counter[str] = Counter()
        self.num_renewals = 0

    @property
    def num_fencing(self) -> int:
        return len(self._fencing)

    @property
    def next_tick(self) -> float:
        return min(self._next_check, self._fence_at)

    def tick(self, now: float) -> None:
        if now >= self._next_check:
            self._check(now)
        if now >= self._fence_at:
            self._fence(now)

    def _check(self, now: float) -> None:
        self._next_check = now + PROCESS_CHECK_S
        self._processes.prune()
        for fencing in self._fencing.values():
            fencing.check(now)
            self._fence_at = min(self._fence_at, fencing.next_at)
        for peer, found in self._handshake.peers() if self._processes.have_ended() else ():
            self._check_process(peer, found.remote, now)
        try:
            self._check_engine(now)
        except BaseException as error:  # noqa: BLE001 (an engine of a third party's)
            what = "%s: whether the engine must be started again is unknown: %s: %s"
            self._warnings.warning(what, self._handshake.me, type(error).__name__, error)

    def _check_engine(self, now: float) -> None:
        """Start an engine that is due again once no request is open, or late if it serves no new one."""
        due = self._renewal_due()
        if not due:
            self._renew_at, self._renew_again_s, self._serves_none_since = now, RENEW_AGAIN_S, NEVER
            return
        self._warnings.warning("%s: the engine must be closed and started again: %s", self._handshake.me, due)
        serves_none = self._sessions.lender.has_none or renewal_due(self._backend) != ""
        self._serves_none_since = min(self._serves_none_since, now) if serves_none else NEVER
        is_late = now >= self._serves_none_since + RENEW_AFTER_S
        if isinstance(self._backend, Renewable) and now >= self._renew_at and (is_late or self._sessions.are_idle):
            self.renew(self._backend, now)

    def renew(self, backend: Renewable, now: float) -> None:
        """Peers connect to the new engine anew. The end of the old one proves that lost ranks of other machines are quiet."""
        me, began = self._handshake.me, time.monotonic()
        self._renew_at, self._renew_again_s = now + self._renew_again_s, 2 * self._renew_again_s
        try:
            if not backend.renew():
                return
        except BaseException:
            logger.exception("%s: the engine does not start again, and goes on as it was", me)
            return
        self.num_renewals += 1
        logger.warning("%s: the engine was started again, in %.1f s", me, time.monotonic() - began)
        self._handshake.renewed()
        for peer, found in self._handshake.peers():
            if found.remote is None or backend.is_renewed(found.remote.engine):
                self._peers.start_anew(peer, "this rank has started its engine again", now)
        for (peer, epoch), fencing in self._fencing.items():
            fencing.next_at = self._fence_at = now
            self._end_reads(peer, epoch, fencing.engine)

    def _end_reads(self, peer: PeerRank, epoch: int, engine: RemotePeer) -> None:
        """Give back what a former engine read to write it to a lost rank."""
        if isinstance(self._backend, Renewable) and self._backend.reads_no_more(engine):
            self._sessions.sends.peer_quiet(peer, epoch=epoch)

    def _check_process(self, peer: PeerRank, rank: RemoteRank | None, now: float) -> None:
        if rank is not None and rank.process is not None and rank.process.has_ended():
            self._peers.on_ended(peer, rank.epoch, now)

    def check_soon(self) -> None:
        self._next_check = 0.0

    # -- connecting --------------------------------------------------------------------------------------------------

    def connect(self, ready: Ready) -> None:
        """In a thread of its own, once fewer than `MAX_ATTEMPTS` are under way. A peer that does not answer delays others at
        its first attempt only.
        """
        peer = self._handshake.peer(ready.peer)
        peer.failed = peer.failed or peer.num_attempts > 0  # it has not answered yet
        peer.connecting = ready
        if peer.num_attempts < MAX_ATTEMPTS:
            self._start(ready, peer)

    def _start(self, ready: Ready, peer: Peer) -> None:
        connect = self._handshake.connecting(ready.peer, ready.welcome)
        name = f"disagg-connect-{self._handshake.me}-{ready.peer}"
        thread = threading.Thread(target=self._run, args=(ready, peer, connect), name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            peer.connecting = None
            self._peers.refuse(ready.peer, f"no thread to connect with: {error}", time.monotonic())
            return
        peer.num_attempts += 1
        peer.tried = ready
        self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, ready: Ready, peer: Peer, connect: Callable[[], RemoteRank]) -> None:
        """In a thread of its own."""
        _native.allow_calls_during_capture()
        rank, problem, lasts = None, "", False
        with self._slots[peer.failed]:
            try:
                if peer.connecting is ready:  # else it was lost meanwhile, or connects again
                    rank = connect()
            except DisaggError as error:
                problem, lasts = str(error), isinstance(error, PeerIncompatible)
            except BaseException as error:  # concerns one peer, which would be connecting for ever
                logger.exception("%s: connecting to %s", self._handshake.me, ready.peer)
                problem = f"{type(error).__name__}: {error}"
        self._command(lambda now: self._finish(ready, peer, rank, problem, lasts, now))

    def _finish(self, ready: Ready, peer: Peer, rank: RemoteRank | None, problem: str, lasts: bool, now: float) -> None:
        peer.num_attempts -= 1
        if peer.connecting is not ready:  # as above
            if rank is not None:
                self._handshake.discard(ready.peer, rank)
            if peer.connecting is not None and peer.connecting is not peer.tried:
                self._start(peer.connecting, peer)
            return
        peer.connecting, peer.failed = None, rank is None
        if rank is None:
            self._warnings.warning("%s: cannot use %s: %s", self._handshake.me, ready.peer, problem)
            self._peers.refuse(ready.peer, problem, now, final=lasts)
            return
        self._handshake.add(ready.peer, rank)
        self._check_process(ready.peer, rank, now)
        self._fencing.pop((ready.peer, ready.epoch), None)
        self._sessions.receives.peer_back(ready.peer, now, epoch=ready.epoch)
        self._on_connected(ready.peer)

    # -- losing ------------------------------------------------------------------------------------------------------

    def lose(self, lost: Lost, now: float) -> None:
        log = logger.info if lost.expected else self._losses.warning
        log("%s: lost %s: %s", self._handshake.me, lost.peer, lost.cause)
        self.num_losses[lost.peer.instance] += not lost.expected
        self._handshake.peer(lost.peer).connecting = None
        direct = self._handshake.is_direct(lost.peer, lost.epoch)
        self._sessions.peer_lost(lost.peer, lost.cause, now, epoch=lost.epoch, generation=lost.generation, direct=direct)
        rank = self._handshake.disconnect(lost.peer, lost.epoch)
        if rank is not None:
            if len(self._fencing) >= MAX_FENCING:
                del self._fencing[next(iter(self._fencing))]
            self._fencing[lost.peer, lost.epoch] = _Fencing(rank.engine, rank.process, now)
            self._fence(now)
            self._end_reads(lost.peer, lost.epoch, rank.engine)

    def forget(self, instance: str) -> None:
        self.num_losses.pop(instance, None)

    def _fence(self, now: float) -> None:
        """Ranks that are proved quiet give back rows and slots. One that nothing waits for is forgotten, unless its process
        may go on here: of other hosts no proof comes, and they would be kept by the thousand.
        """
        unproved: set[tuple[PeerRank, int]] | None = None
        for (peer, epoch), fencing in list(self._fencing.items()):
            if now < fencing.next_at:
                continue
            fencing.delay_s = min(fencing.delay_s * 2, MAX_FENCE_S)
            fencing.next_at = now + fencing.delay_s
            if fencing.delay_s == MAX_FENCE_S:  # all such share one pass
                fencing.next_at -= now % MAX_FENCE_S
            try:
                fence = self._backend.fence(fencing.engine, epoch=epoch)
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is no proof, and concerns this peer only)
                self._warnings.warning("%s: fencing %s: %s: %s", self._handshake.me, peer, type(error).__name__, error)
                continue
            if fence is Fence.QUIET:
                del self._fencing[peer, epoch]
                self._sessions.peer_quiet(peer, epoch=epoch)
                logger.info("%s: lost %s is proved quiet", self._handshake.me, peer)
                continue
            if fence is Fence.CLOSED:
                self._sessions.peer_closed(peer, epoch=epoch)
            if fencing.delay_s == MAX_FENCE_S and (fencing.process is None or fencing.process.has_ended()):
                unproved = self._sessions.unproved() if unproved is None else unproved
                if (peer, epoch) not in unproved:
                    del self._fencing[peer, epoch]
        self._fence_at = min((each.next_at for each in self._fencing.values()), default=NEVER)
