"""A backend around a real one that injects faults into transfers."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.backends import registry as backends
from disagg.backends.abilities import QuietWhenClosed, Renewable, renewal_due
from disagg.backends.base import Backend, BackendOptions, Fence, RemotePeer, StagingShape, Transfer, TransferStatus
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError
from disagg.core.memory import MemoryRegion
from disagg.machine.processes import ProcessWatch
from disagg.testing.delayed_actions import DelayedActions

logger = logging.getLogger(__name__)


class TransferFault(enum.Enum):
    FAIL = "fail"
    """Posts half of the copies, then reports `FAILED`."""
    DELAY = "delay"
    """Posts later, and reports `PENDING` meanwhile."""
    UNSETTLE = "unsettle"
    """Reports `UNSETTLED`, posts later, and reports `FAILED` once that has settled."""
    KILL = "kill"
    """Posts half of the copies, then kills the process (SIGKILL)."""
    LOSE = "lose"
    """False report: `DONE`, and nothing is posted."""
    DOUBLE = "double"
    """False report: `DONE`, and a second post follows later."""
    LATE = "late"
    """False report: `FAILED`, and a post follows later."""


def check_probabilities(what: str, faults: object, names: Sequence[str]) -> None:
    """Raise `ConfigError` unless the named fields of `faults` are probabilities with a sum up to 1."""
    odds = {name: getattr(faults, name) for name in names}
    if any(not 0 <= value <= 1 for value in odds.values()) or sum(odds.values()) > 1:
        raise ConfigError(f"{what}: expected probabilities with a sum of at most 1, found {odds}")


@dataclass(frozen=True, kw_only=True)
class BackendFaults:
    """The probability of each `TransferFault`. Delays are random within `delay_s`.

    `kill_at` is the number, from 1, of the transfer at which the process is killed. `fencing=False` reports falsely that
    nothing is in flight: `fence` returns `QUIET`, and unsettled transfers report `FAILED`. Raises `ConfigError` for impossible
    probabilities.
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
        check_probabilities("backend faults", self, [fault.value for fault in TransferFault])


class FaultyTransfer:
    """Reports `status` until `inner`, the real transfer once posted, has settled; then `final`, by default the status of
    `inner`. What `inner` cannot settle, this cannot either.
    """

    completion = None  # it would report the end of `inner`

    def __init__(self, *, status: TransferStatus, error: str | None, final: TransferStatus | None = None) -> None:
        self._status, self.error = status, error
        self._final = final
        self.inner: Transfer | None = None

    def poll(self) -> TransferStatus:
        if not self._status.settled and self.inner is not None:
            found = self.inner.poll()
            if found.settled:
                self._status = self._final or found
                self.error = self.error or self.inner.error
                self.inner.close()
            elif found is TransferStatus.UNSETTLED:
                self._status, self.error = found, self.error or self.inner.error
        return self._status

    def fail(self, error: DisaggError) -> None:
        self._status, self.error = TransferStatus.FAILED, str(error)

    def close(self) -> None:
        if not self._status.settled:
            raise LocalProtocolError(f"transfer: expected a settled one to close, found {self._status.value}")


class _Unfenced:
    """Reports `FAILED` where the real status is `UNSETTLED`."""

    def __init__(self, inner: Transfer) -> None:
        self._inner = inner
        self._reported_falsely = False

    @property
    def completion(self) -> _native.Flag | _native.CudaEvent | None:
        return self._inner.completion

    @property
    def error(self) -> str | None:
        return self._inner.error

    def poll(self) -> TransferStatus:
        found = self._inner.poll()
        self._reported_falsely = self._reported_falsely or found is TransferStatus.UNSETTLED
        return TransferStatus.FAILED if self._reported_falsely else found

    def close(self) -> None:
        if not self._reported_falsely:
            self._inner.close()


class FaultyBackend:
    def __init__(self, inner: Backend, faults: BackendFaults, staging: StagingShape | None = None) -> None:
        self.inner = inner
        self._staging = staging
        self.name = inner.name
        self.faults = faults
        self.counts: Counter[TransferFault] = Counter()
        self._rng = random.Random(faults.seed)
        self._delayed = DelayedActions()
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

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> RemotePeer:
        return self.inner.connect(endpoint, epoch=epoch, process=process)

    def disconnect(self, peer: RemotePeer) -> None:
        self.inner.disconnect(peer)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        found = self.inner.fence(peer, epoch=epoch)
        return found if self.faults.fencing else Fence.QUIET

    def renewal_due(self) -> str:
        return renewal_due(self.inner)

    def renew(self) -> bool:
        return isinstance(self.inner, Renewable) and self.inner.renew()

    def is_renewed(self, peer: RemotePeer) -> bool:
        return isinstance(self.inner, Renewable) and self.inner.is_renewed(peer)

    def reads_no_more(self, peer: RemotePeer) -> bool:
        return isinstance(self.inner, Renewable) and self.inner.reads_no_more(peer)

    def is_quiet_when_closed(self) -> bool:
        """Delayed transfers are not posted after `close`."""
        return isinstance(self.inner, QuietWhenClosed) and self.inner.is_quiet_when_closed()

    @property
    def num_delayed(self) -> int:
        return len(self._delayed)

    def post_delayed(self) -> None:
        self._delayed.run_now()

    def close(self) -> None:
        self._delayed.close()
        self.inner.close()

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        fault, seconds = self._draw()
        if fault is None or not len(copies):
            return self._post(peer, copies)
        with self._lock:
            self.counts[fault] += 1
        logger.debug("fault: %s of %d copies", fault.value, len(copies))
        match fault:
            case TransferFault.FAIL:
                transfer = FaultyTransfer(status=TransferStatus.PENDING, error="injected fault", final=TransferStatus.FAILED)
                transfer.inner = self.inner.submit(peer, _half(copies))
                return transfer
            case TransferFault.KILL:
                self.inner.submit(peer, _half(copies))
                os.kill(os.getpid(), signal.SIGKILL)
            case TransferFault.DELAY:
                return self._post_later(peer, copies, seconds, FaultyTransfer(status=TransferStatus.PENDING, error=None))
            case TransferFault.UNSETTLE:
                status = TransferStatus.UNSETTLED if self.faults.fencing else TransferStatus.FAILED
                transfer = FaultyTransfer(status=status, error="injected fault: not settled", final=TransferStatus.FAILED)
                return self._post_later(peer, copies, seconds, transfer)
            case TransferFault.LATE:
                transfer = FaultyTransfer(status=TransferStatus.FAILED, error="injected fault: it lands later")
                return self._post_later(peer, copies, seconds, transfer)
            case TransferFault.DOUBLE:
                self._delayed.run_after(seconds, lambda: self._close_when_settled(self.inner.submit(peer, copies)))
                return self._post(peer, copies)
            case TransferFault.LOSE:
                return FaultyTransfer(status=TransferStatus.DONE, error=None)
        raise AssertionError("the process was killed")

    def _draw(self) -> tuple[TransferFault | None, float]:
        with self._lock:
            draw, share = self._rng.random(), self._rng.random()
            low, high = self.faults.delay_s
            seconds = low + share * (high - low)
            if next(self._number) == self.faults.kill_at:
                return TransferFault.KILL, seconds
            for fault in TransferFault:
                draw -= getattr(self.faults, fault.value)
                if draw < 0:
                    return fault, seconds
            return None, seconds

    def _post(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        transfer = self.inner.submit(peer, copies)
        return transfer if self.faults.fencing else _Unfenced(transfer)

    def _post_later(self, peer: RemotePeer, copies: CopyBatch, seconds: float, transfer: FaultyTransfer) -> FaultyTransfer:
        def post() -> None:
            try:
                transfer.inner = self.inner.submit(peer, copies)
            except DisaggError as error:
                transfer.fail(error)

        self._delayed.run_after(seconds, post)
        return transfer

    def _close_when_settled(self, transfer: Transfer) -> None:
        """For a transfer that no caller holds."""
        if not transfer.poll().settled:
            self._delayed.run_after(0.001, lambda: self._close_when_settled(transfer))
            return
        transfer.close()


def _half(copies: CopyBatch) -> CopyBatch:
    count = (len(copies) + 1) // 2
    return CopyBatch(copies.source[:count], copies.destination[:count], copies.nbytes[:count])


def inject(
    backend: str | Callable[[BackendOptions], Backend], faults: BackendFaults, *, staging: StagingShape | None = None
) -> Callable[[BackendOptions], Backend]:
    """A `backend` for `KVManager`: that one, with faults, and with `staging` if given."""

    def make(options: BackendOptions) -> Backend:
        inner = backend(options) if callable(backend) else backends.load(backend, options)
        return FaultyBackend(inner, faults, staging)

    return make
