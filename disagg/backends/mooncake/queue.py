"""Copies to one Mooncake peer: waiting, in the engine, or unsettled; and their thread."""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from disagg.backends.base import TransferStatus
from disagg.backends.cuda.driver import CudaError, Gpu
from disagg.backends.mooncake.launch import Engine
from disagg.backends.mooncake.transfer import MooncakeTransfer, Opcodes, Pieces
from disagg.core import _native
from disagg.core.address import bracketed
from disagg.core.errors import PeerUnreachable
from disagg.machine.tcp import EngineConnections, Ports

logger = logging.getLogger(__name__)

TAIL = 4
"""Tasks of their own at the end of a chunk: one per connection that the engine keeps to a peer by default."""
_PROBE_S = 0.5
"""Interval and timeout of probes of a peer with unsettled transfers."""
_STUCK_S = 3.0
"""How long no piece may end before the thread checks whether the peer is gone (not over TCP)."""
_IDLE_S = 1.0
"""How often an idle thread checks whether the main thread has ended."""
_ENDED_S = 3.0
"""How long after the last use a peer that ends has ended."""
_PAUSE_S = (1e-4, 2e-3)
_SPIN_S, _POLL_S = 5e-3, 10e-6
"""Between GPUs: how long the thread polls without a sleep, and how long one poll takes."""
_REFUSED = (0, 2**64 - 1)
"""Posting returns these in place of a batch's number."""


class MooncakeDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's address. It also listens on `ports`."""

    host: str
    port: int
    protocol: str
    ports: Ports = ()

    @property
    def session(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


@dataclass
class _Flight:
    transfer: MooncakeTransfer
    num_pieces: int
    batch: int = 0
    tasks: deque[int] = field(default_factory=deque)


@contextmanager
def current(gpu: Gpu | None) -> Iterator[None]:
    """The engine reports a GPU that it cannot use."""
    with ExitStack() as stack:
        if gpu is not None:
            with suppress(CudaError):
                stack.enter_context(gpu.current())
        yield


class PeerQueue:
    """All work with one peer's engine, which this one knows as `session`, and its thread. `by_caller`: callers may post and
    poll a few pieces. `readable`: pieces that may be read at any time.
    """

    def __init__(
        self,
        engine: Engine,
        opcodes: Opcodes,
        descriptor: MooncakeDescriptor,
        session: str,
        limit: int,
        *,
        connections: EngineConnections,
        gpu: Gpu | None,
        readable: Pieces | None,
    ) -> None:
        self._engine = engine
        self._takes_arrays = hasattr(engine, "batch_transfer_async_write_arrays")
        self.by_caller = descriptor.protocol == "tcp"
        self._gpu = gpu
        self._opcodes = opcodes
        self._descriptor = descriptor
        self.session = session
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Lock()  # held to post, poll and judge; taken before the other lock
        self._alarm: _native.Alarm | None = _native.Alarm()
        self._waiting: deque[MooncakeTransfer] = deque()
        self._flights: deque[_Flight] = deque()
        self._unsettled = weakref.WeakSet[MooncakeTransfer]()
        """Those that somebody still has: of the others nobody asks, and a peer whose host has vanished never ends."""
        self._num_outstanding = 0
        self._num_users = 1
        self._open = True
        self._is_stopped = False
        self.readable = readable
        self._end_reason = "the engine was closed before the transfer had ended"
        self._moved_at = time.monotonic()
        self._probe_at = 0.0
        self._connections = connections
        # A daemon thread that the interpreter ends inside the engine takes the process down with it.
        self._thread = threading.Thread(target=self._run, name=f"disagg-mooncake-{descriptor.session}")
        self._thread.start()

    def acquire(self) -> bool:
        """Add a user; `False` once the thread is ending."""
        with self._lock:
            self._num_users += self._open
            return self._open

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def release(self) -> None:
        """After the last user, the thread ends when every transfer has settled."""
        with self._lock:
            self._num_users -= 1
            self._wake()

    def submit(self, transfer: MooncakeTransfer) -> None:
        """The caller posts a few pieces while nothing waits; the thread posts the rest."""
        with self._lock:
            if not self._open:
                raise PeerUnreachable(f"backend 'mooncake': the thread for peer {self._descriptor.session} has ended")
            self._waiting.append(transfer)
            if len(self._waiting) > 1 or len(transfer.pieces) > TAIL or not self._try_work():
                self._wake()
                return
        self._do_work(self._post)

    def poll(self) -> None:
        """Batches are left to the thread: the engine may take long to answer."""
        if self._flights and self._try_work():
            self._do_work(self._settle_tasks)

    def _try_work(self) -> bool:
        return self.by_caller and self._work.acquire(blocking=False)

    def _do_work(self, work: Callable[[], None]) -> None:
        """Called with the work lock, which it releases. Wakes the thread only for the rest and for errors: waiters poll
        their tasks.
        """
        try:
            work()
        except Exception as error:
            logger.exception("Mooncake peer %s", self._descriptor.session)
            self._end_reason = f"the engine failed for peer {self._descriptor.session}: {error!r}"
            self._open = False
        finally:
            self._work.release()
        if self._waiting or self._unsettled or not self._open:
            self._wake()

    def stop(self) -> None:
        """Transfers that have not settled by then are `UNSETTLED`, or `FAILED` if nothing of them was posted."""
        with self._lock:
            self._open, self._is_stopped = False, True
            self._wake()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            with current(self._gpu):
                while self._wait():
                    with self._work:
                        self._post()
                        self._settle_flights()
                        self._settle_lost()
                        self._give_up_if_gone()
                        if self._flights:
                            self._connections.note_progress(self._moved_at)
        except BaseException as error:
            logger.exception("the thread for Mooncake peer %s ended", self._descriptor.session)
            self._end(f"the thread for peer {self._descriptor.session} ended: {error!r}")
        else:
            self._end(self._end_reason)
            self._hang_up()
        finally:
            # The last reference ends the engine, and peers outlive their backend. The alarm is a descriptor.
            del self._engine
            self._alarm = None

    def _rest(self, most_s: float) -> None:
        """Only the thread, to which the alarm belongs."""
        assert self._alarm is not None
        self._alarm.wait(most_s)

    def _wake(self) -> None:
        if (alarm := self._alarm) is not None:
            alarm.set()

    def _hang_up(self) -> None:
        """Use each connection once more when the peer should have ended: the engine keeps those that it does not use for ever,
        and then closes broken ones.
        """
        if not self.by_caller or self.readable is None or not self._sleep(_ENDED_S):
            return
        tasks = [
            self._engine.batch_transfer_async(self.session, [local], [remote], [nbytes], self._opcodes.read)
            for local, remote, nbytes in zip(*self.readable.listed(0, len(self.readable)), strict=True)
        ]
        for task in tasks:
            while task not in _REFUSED and self._engine.transfer_check_status(task) not in (1, -1):
                if not self._sleep(_PROBE_S):
                    return

    def _sleep(self, seconds: float) -> bool:
        """Whether the engine is still to be used."""
        until = time.monotonic() + seconds
        while usable := not self._is_stopped and threading.main_thread().is_alive():
            if (left := until - time.monotonic()) <= 0:
                break
            self._rest(min(left, _IDLE_S))
        return usable

    def _wait(self) -> bool:
        """Sleep while there is nothing to do, and shortly between polls; `False` to end the thread."""
        while threading.main_thread().is_alive():
            with self._lock:
                if not self._open:
                    return False
                if self._may_post():
                    return True
                flying = bool(self._flights)
                if not flying and self._unsettled and time.monotonic() >= self._probe_at:
                    return True
                if not (flying or self._unsettled or self._num_users):
                    self._open = False
                    return False
            if not flying:
                self._rest(_PROBE_S if self._unsettled else _IDLE_S)
                continue
            moved_s = time.monotonic() - self._moved_at
            if not self.by_caller and moved_s < _SPIN_S:
                _native.busy_poll(_POLL_S)
            else:
                least, most = _PAUSE_S
                self._rest(min(most, max(least, moved_s / 16)))
            return self._open
        self._open = False
        return False

    def _may_post(self) -> bool:
        return bool(self._waiting) and self._num_outstanding < (self._limit if self.by_caller else 1)

    def _end(self, reason: str) -> None:
        with self._work, self._lock:
            self._open = False
            left = [*self._waiting, *(flight.transfer for flight in self._flights), *self._unsettled]
            self._waiting.clear()
            self._flights.clear()
        for transfer in left:
            if transfer.status is TransferStatus.PENDING:
                transfer.fail(reason)
                never_posted = transfer.num_posted == 0
                transfer.settle(TransferStatus.FAILED if never_posted else TransferStatus.UNSETTLED)

    def _post(self) -> None:
        group = len(self._waiting) if self._may_post() else 0
        while self._waiting and self._num_outstanding < self._limit and (self.by_caller or group > 0):
            group -= 1
            transfer = self._waiting[0]
            if not transfer.posted_wholly:
                self._post_chunk(transfer)
            if transfer.posted_wholly:
                with self._lock:
                    self._waiting.popleft()
                self._judge(transfer)
            self._settle_tasks()

    def _post_chunk(self, transfer: MooncakeTransfer) -> None:
        """Post up to half the limit, so that one chunk is under way while the next is prepared."""
        start = transfer.num_posted
        room = min(self._limit // 2, self._limit - self._num_outstanding)
        stop = min(len(transfer.pieces), start + room)
        alone = start if transfer.reads else max(start, stop - TAIL)  # the first piece that is a task of its own
        flight = _Flight(transfer, stop - start)
        opcode = self._opcodes.read if transfer.reads else self._opcodes.write
        session = self.session
        transfer.num_posted = stop
        if alone > start:
            if self._takes_arrays:
                flight.batch = self._engine.batch_transfer_async_write_arrays(session, *transfer.pieces.between(start, alone))
            else:
                flight.batch = self._engine.batch_transfer_async(session, *transfer.pieces.listed(start, alone), opcode)
            if flight.batch in _REFUSED:
                flight.batch = 0
                transfer.ended_wholly = False
                transfer.fail(f"peer {session}: the engine did not take {alone - start} pieces")
        for local, remote, nbytes in zip(*transfer.pieces.listed(alone, stop), strict=True):
            if transfer.error:
                break
            task = self._engine.batch_transfer_async(session, [local], [remote], [nbytes], opcode)
            if task in _REFUSED:
                transfer.fail(f"peer {session}: the engine did not take a piece of {nbytes} bytes")
            else:
                flight.tasks.append(task)
        transfer.num_flights += 1
        self._num_outstanding += flight.num_pieces
        self._flights.append(flight)
        self._moved_at = time.monotonic()

    def _settle_flights(self) -> None:
        while self._flights and self._has_ended(self._flights[0]):
            self._land()

    def _settle_tasks(self) -> None:
        while self._flights and not self._flights[0].batch and self._has_ended(self._flights[0]):
            self._land()

    def _land(self) -> None:
        flight = self._flights.popleft()
        self._num_outstanding -= flight.num_pieces
        flight.transfer.num_flights -= 1
        self._judge(flight.transfer)

    def _has_ended(self, flight: _Flight) -> bool:
        """Poll the tasks in order; then take the batch, which has ended but for a last few pieces."""
        while flight.tasks:
            result = self._engine.transfer_check_status(flight.tasks[0])
            if result not in (1, -1):
                return False
            flight.tasks.popleft()
            self._moved_at = time.monotonic()
            if result == -1:
                flight.transfer.fail(f"peer {self._descriptor.session}: the engine reports a failed piece (-1)")
        if flight.batch:
            # After an error the engine reports nothing more and may block for long.
            if flight.transfer.error is None and self._engine.get_batch_transfer_status([flight.batch]) != 0:
                flight.transfer.fail(f"peer {self._descriptor.session}: the engine reports a failed batch")
            flight.transfer.ended_wholly &= flight.transfer.error is None
        return True

    def _judge(self, transfer: MooncakeTransfer) -> None:
        """Called when a part of it has ended."""
        if transfer.num_flights or (self._waiting and self._waiting[0] is transfer):
            return
        if transfer.error is None:
            transfer.settle(TransferStatus.DONE)
            return
        self._unsettled.add(transfer)
        self._probe_at = 0.0

    def _settle_lost(self) -> None:
        """Only the end of the peer's engine settles a failed transfer."""
        if not self._unsettled or time.monotonic() < self._probe_at:
            return
        gone = self._is_gone()
        for transfer in list(self._unsettled):
            provable = gone and (transfer.ended_wholly or self._descriptor.protocol == "tcp")
            transfer.settle(TransferStatus.FAILED if provable else TransferStatus.UNSETTLED)
            if provable:
                self._unsettled.discard(transfer)
        self._probe_at = time.monotonic() + _PROBE_S

    def _give_up_if_gone(self) -> None:
        """Over verbs the engine may never report pieces that it had posted to a peer that died: end the queue."""
        now = time.monotonic()
        stuck_s = now - self._moved_at
        if not self._flights or self._descriptor.protocol == "tcp" or stuck_s < _STUCK_S or now < self._probe_at:
            return
        self._probe_at = now + stuck_s / 4  # a living peer's engine logs a warning for each probe
        if self._is_gone():
            self._end_reason = f"peer {self._descriptor.session} has ended, and the engine reports nothing about its pieces"
            self._open = False

    def _is_gone(self) -> bool:
        """The engine closes this port last of all. Neither a stopped process nor an unreachable host refuses."""
        try:
            socket.create_connection((self._descriptor.host, self._descriptor.port), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
