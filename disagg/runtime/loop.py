"""The control thread, which alone touches the protocol. If a thread of the manager dies, every request fails at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from disagg.core import _native
from disagg.core.errors import DisaggError, LocalProtocolError
from disagg.core.thread_log import ThreadLog
from disagg.protocol.types import NEVER
from disagg.runtime.channel import Channel
from disagg.runtime.dispatch import Dispatch
from disagg.runtime.wire import Wire
from disagg.transfer.worker import TransferWorker

logger = ThreadLog(__name__)

READY_POLL_S = 0.0005
JOIN_TIMEOUT_S = 10.0
MAX_TIMER_LATENESS_S = 2e-3
BUSY_POLL_S = 100e-6
"""The length of a busy poll if Python must poll some of the work."""


class Timed(Protocol):
    def tick(self, now: float) -> None: ...

    @property
    def next_tick(self) -> float: ...


Command = tuple[Callable[[float], None], Callable[[DisaggError], None] | None]


class CommandQueue:
    """Functions for the control thread to run. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.pending: deque[Command] = deque()

    def put(self, run: Callable[[float], None], on_error: Callable[[DisaggError], None] | None = None) -> None:
        self.pending.append((run, on_error))
        self._channel.wake()

    def run_all(self, now: float) -> None:
        for _ in range(len(self.pending)):
            run, on_error = self.pending.popleft()
            try:
                run(now)
            except BaseException as error:  # one request or peer; SystemExit would end this thread, not the process
                known = error if isinstance(error, DisaggError) else None
                if on_error is None or known is None:
                    logger.exception("a command of the control thread failed")
                if on_error is not None:
                    on_error(known or LocalProtocolError(f"{type(error).__name__}: {error}"))


class Loop:
    """The control thread of one manager. `timed` tick in this order, and the effects of the peer table are carried out
    after each. `on_death` is called if this thread or another of the manager's dies. `over` is set before requests fail, so
    that a request opened later sees it.

    For `spin_s` after the last activity it polls without a sleep, and advances transfers itself: a second awake thread
    would contend for the GIL.
    """

    def __init__(
        self,
        *,
        name: str,
        channel: Wire,
        commands: CommandQueue,
        dispatch: Dispatch,
        timed: Sequence[Timed],
        worker: TransferWorker,
        spin_s: float,
        on_death: Callable[[str], None],
    ) -> None:
        self._name = name
        self.channel = channel
        self._commands = commands
        self._dispatch = dispatch
        self._timed = timed
        self._worker = worker
        self._spin_s = spin_s
        self._on_death = on_death
        self.problem = ""
        self.over = False
        self._stopping = False
        self._cause: BaseException | None = None
        self._skipped_channel = False
        self._due = self._next_timer_check = self._awake_until = 0.0
        self._due_known = False
        self.thread = threading.Thread(target=self._run, name=f"disagg-control-{name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Commands that were put before still run."""

        def last(_: float) -> None:
            self._stopping = True

        self._commands.put(last)
        self.thread.join(JOIN_TIMEOUT_S)

    def fail(self, thread: str, error: BaseException) -> None:
        """Nothing settles without that thread, so the control thread ends too."""
        self.problem = f"the {thread} thread died: {type(error).__name__}: {error}"
        self._cause = error  # last: the control thread ends when it sees this, and keeps the problem that is there
        self.channel.wake()

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            while not self._stopping:
                self._iterate()
                self._check_threads()
            self.channel.flush()
            self.over = True
        except BaseException as error:  # the thread's top: what it owned must fail, not hang
            logger.exception("%s: the control thread died", self._name)
            self.problem = self.problem or f"the control thread died: {type(error).__name__}: {error}"
            self.over = True
            self._dispatch.transfers.carry_out_leases()
            self._on_death(self.problem)

    def _check_threads(self) -> None:
        if self._cause is not None:
            raise self._cause

    def _iterate(self) -> None:
        work, arrived = self._take_arrived()
        now = time.monotonic()
        if work or self._commands.pending or self._worker.has_reports or (self._spin_s and self._worker.step()):
            self._awake_until = max(self._awake_until, now + self._spin_s)
        elif not arrived and now < self._awake_until and now < self._next_due():
            self._busy_poll(min(self._awake_until, self._next_due()) - now)
            if not self._dispatch.transfers.not_ready:
                return
            now = time.monotonic()
        self._commands.run_all(now)
        if self._dispatch.transfers.not_ready:
            self._dispatch.transfers.take_ready(now)
        self._dispatch.carry_out(now)
        self._run_timers(now)

    def _take_arrived(self) -> tuple[bool, bool]:
        """Whether any message was about a request, and whether there was any."""
        work = arrived = False
        # Commands and reports go first, because polling takes a while, but never twice in a row.
        self._skipped_channel = not self._skipped_channel and bool(self._commands.pending or self._worker.has_reports)
        if self._skipped_channel:
            return work, arrived
        idle_s = self._idle_s()
        if self._spin_s and idle_s > 0:
            self._worker.wake()
        for each in self.channel.poll(idle_s):
            work = self._dispatch.take(each, time.monotonic()) or work
            arrived = True
        return work, arrived

    def _run_timers(self, now: float) -> None:
        if now >= self._next_timer_check:
            self._next_timer_check = now + MAX_TIMER_LATENESS_S
            self._next_due()
        if now >= self._due and not self._skipped_channel:  # messages that have arrived are read first
            self._due = NEVER
            for timed in self._timed:
                timed.tick(now)
                self._dispatch.carry_out_peers(now)
            self._dispatch.carry_out(now)
        self._due_known = False

    def _busy_poll(self, seconds: float) -> None:
        """If native code polls everything, it keeps the GIL released until there is something: a server that launches
        kernels does not have to wait for it.
        """
        completions, all_native = self._worker.completions()
        if not all_native:
            seconds = min(seconds, BUSY_POLL_S)
        elif self._dispatch.transfers.not_ready:
            seconds = min(seconds, READY_POLL_S)
        self.channel.busy_poll(seconds, completions)
        if self._worker.step():
            self._awake_until = max(self._awake_until, time.monotonic() + self._spin_s)

    def _idle_s(self) -> float:
        now = time.monotonic()
        if self._commands.pending or self._worker.has_reports or now < self._awake_until:
            return 0.0
        idle_s = self._next_due() - now
        return min(idle_s, READY_POLL_S) if self._dispatch.transfers.not_ready else idle_s

    def _next_due(self) -> float:
        if not self._due_known:
            self._due = min(timed.next_tick for timed in self._timed)
            self._due_known = True
        return self._due
