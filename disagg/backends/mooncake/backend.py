"""Backend `mooncake`: Mooncake's transfer engine over TCP, RDMA, or NVLink inside a node. Measured with 0.3.13.post1.

A batch goes out in chunks. Of each chunk all but the last few pieces are one asynchronous batch call, given arrays where the
installed version takes them (0.3.14 and later); the last few are tasks of their own, because the status of a batch of one task
is all that this engine tells without blocking and without giving up. When these have ended, the batch before them in the
engine's first-in first-out queue has ended too, or is about to, and the call that waits for it returns at once. One thread per
peer posts and asks; nobody spins, and no caller waits.
Over TCP a few pieces are posted by the caller, and asked for by whoever polls: a thread's turn would take longer than they do.
Between GPUs only the thread calls the engine, which has refused pieces once when several threads did. There a task is seen to
have ended only once nothing that was posted behind it is under way: what waits is posted together when that is so, and then
asked for without a sleep.

Pieces that are read are tasks of their own, all of them: after a failure it must be known of every one whether the engine
may still write to local memory, and of a batch with a failed piece the engine tells nothing about the others.

| what the engine says | status | because (each row is tested, but those marked *) |
|---|---|---|
| 1 for the tasks, 0 for the batch | `DONE` | the peer acknowledged every piece when it was in place |
| 0, or -2 (slow *) | `PENDING` | it goes on |
| -1, or it takes no piece | `UNSETTLED` | it gave up, but a stopped peer still puts in place what its socket holds |
| the same, and the peer's port refuses (TCP) | `FAILED` | its process or engine has ended: nobody is left to touch its memory |
| the same, not over TCP * | `UNSETTLED` | tasks have no order there; `FAILED` if no piece went in a batch |
| nothing, as this engine was closed | `UNSETTLED` | this side is quiet, its threads being joined; the other is not known |

An `UNSETTLED` transfer becomes `FAILED` when the peer's port refuses. What a peer wrote may still lie in a socket buffer of
this process, after the peer's end as well; writes come by connections that this engine has accepted. So `fence` is `QUIET`,
over TCP, where both are seen: the peer's process has ended, which only its own machine can tell, and none of the accepted
connections has a far end without an owner (`processes`). It is `UNKNOWN` otherwise.

The engine has no authentication, and listens on all addresses whatever it is told: on another host than loopback it wants
`trusted_network=True`. Device memory goes the same way as host memory, where the installed wheel was built for it: over
TCP it is staged through the host. `nvlink_intra` is taken with transport `auto` when the engine's own switch,
`MC_INTRANODE_NVLINK` or `MC_INTRA_NVLINK`, is in the environment.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from disagg.backends.base import BackendOptions, Fence, Op, RemotePeer, StagingShape, TransferStatus, Transport, check_rdma
from disagg.backends.cuda.driver import CudaError, Gpu
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessIdentity

_log = logging.getLogger(__name__)

MAX_OUTSTANDING = 1024
"""Pieces posted to one peer and not ended: beyond its queue the engine rejects pieces and may never serve the peer again."""
SPLIT_NBYTES = 8 << 20
"""Longer pieces are cut, so that the engine's connections to the peer share them."""
NVLINK_SPLIT_NBYTES = 1 << 30
"""Between GPUs there are none; each piece of its own costs 40 us there."""
_TAIL = 4
"""Tasks of their own at the end of a written chunk: one per connection that the engine keeps to a peer by default."""
_WARM_S = 10.0
_PROBE_S = 0.5
"""How often a peer with unsettled transfers is asked whether it is still there, and how long its answer may take."""
_IDLE_S = 1.0
"""How often a thread with nothing to do looks whether the main thread has ended."""
_PAUSE_S = (1e-4, 2e-3)
_SPIN_S, _LOOK_S = 5e-3, 10e-6
"""Between GPUs: for how long work is looked at without a sleep, and how long a look waits."""
_REFUSED = (0, 2**64 - 1)
"""What posting returns instead of a batch's number."""
_NVLINK_SWITCHES = ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class _Engine(Protocol):
    """What is called of `mooncake.engine.TransferEngine`."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], nbytes: list[int], /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def batch_transfer_async(
        self, session: str, local: list[int], remote: list[int], nbytes: list[int], opcode: object, /
    ) -> int: ...
    def batch_transfer_async_write_arrays(self, session: str, local: Addresses, remote: Addresses, nbytes: Addresses, /) -> int:
        """From 0.3.14 on."""

    def transfer_check_status(self, batch: int, /) -> int: ...
    def get_batch_transfer_status(self, batches: list[int], /) -> int: ...


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine is reached, and by what it moves bytes."""

    host: str
    port: int
    protocol: str
    process: ProcessIdentity

    @property
    def session(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_DECODER = msgspec.msgpack.Decoder(_Descriptor)


# -- starting the engine ----------------------------------------------------------------------------------------------


def _import_engine() -> Any:
    """The engine's module; raises `BackendUnavailable` naming what is missing and what brings it."""
    wheels = "mooncake-transfer-engine-non-cuda without CUDA, mooncake-transfer-engine (CUDA 12) or -cuda13 with it"
    try:
        # Read when it is loaded; below this level it logs a line per chunk.
        with _environment({"MC_LOG_LEVEL": "WARNING"}):
            return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"backend 'mooncake': no Python module {error.name!r}; install one of the packages {wheels}", name=error.name
        ) from error
    except ImportError as error:
        library = str(error).partition(":")[0]
        raise BackendUnavailable(
            f"backend 'mooncake': the engine cannot be loaded: {error}. Where {library!r} is missing: Debian's libibverbs1 "
            "ibverbs-providers libnuma1 libcurl4 bring what every build needs, TCP or not; libcudart and libcuda come with "
            f"CUDA, and a machine without it wants another wheel: {wheels}",
            name=library,
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else ()


def _choose_protocol(options: BackendOptions) -> str:
    """What `options` ask of this machine; raises `BackendUnavailable` for a transport that is not to be had."""
    wanted, present = options.wanted, _rdma_devices()
    if wanted is Transport.SHM:
        raise BackendUnavailable("backend 'mooncake': no transport 'shm' (expected 'auto', 'rdma' or 'tcp'); 'nixl' has one")
    check_rdma("mooncake", options)
    if wanted is Transport.TCP:
        return "tcp"
    if wanted is Transport.AUTO and any(name in os.environ for name in _NVLINK_SWITCHES):
        return "nvlink_intra"
    usable = [name for name in options.devices if name in present] if options.devices else list(present)
    if usable and "MC_FORCE_TCP" not in os.environ:
        return "rdma"
    if wanted is Transport.RDMA:
        raise BackendUnavailable("backend 'mooncake': transport 'rdma', but MC_FORCE_TCP is set; to fix it: unset MC_FORCE_TCP")
    return "tcp"


def _check_environment(options: BackendOptions, protocol: str) -> None:
    """Raises `ConfigError` for settings under which this backend's promises would not hold."""
    if protocol != "tcp":
        return
    if not _is_loopback(options.host) and not options.trusted_network:
        raise ConfigError(
            f"backend 'mooncake', host {options.host!r}: its TCP data plane listens on every address and lets anyone read and "
            "write the registered memory; expected a loopback host, or trusted_network=True, or transport 'rdma'"
        )
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError("MC_TCP_PROTO=1: completions without acknowledgement prove nothing; expected it unset")
    if os.environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "1").lower() in ("0", "false", "no"):
        raise ConfigError("MC_TCP_ENABLE_CONNECTION_POOL: expected it on; without it posting blocks, and in no order")


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Within, `settings` are in the environment where the user has not set them: the engine has no other way in."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _start_engine(module: Any, options: BackendOptions, protocol: str) -> _Engine:
    """A running engine; raises `BackendUnavailable`."""
    settings = {
        # A wait for a batch must end when the batch ends, and not before; deadlines are the manager's.
        "MC_TRANSFER_TIMEOUT": str(2**31 - 1),
    }
    if protocol == "tcp":
        settings["MC_FORCE_TCP"] = "1"  # it prefers RDMA devices whatever protocol it is given
    with _environment(settings):
        engine: _Engine = module.TransferEngine()
        status = engine.initialize(options.host, "P2PHANDSHAKE", protocol, ",".join(options.devices))
    if status != 0:
        raise BackendUnavailable(
            f"backend 'mooncake': the engine did not start on host {options.host!r} with {protocol!r} (status {status})"
        )
    return engine


def _outstanding_limit() -> int:
    """`MAX_OUTSTANDING`, or the user's smaller queue."""
    text = os.environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "")
    return max(2, min(MAX_OUTSTANDING, int(text))) if text.isdecimal() and int(text) else MAX_OUTSTANDING


# -- what is posted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pieces:
    """Pieces of one transfer, as the engine wants them: this side, the peer's side, lengths."""

    local: Addresses
    remote: Addresses
    nbytes: Addresses

    def __len__(self) -> int:
        return len(self.nbytes)

    def between(self, start: int, stop: int) -> tuple[Addresses, Addresses, Addresses]:
        return self.local[start:stop], self.remote[start:stop], self.nbytes[start:stop]

    def listed(self, start: int, stop: int) -> tuple[list[int], list[int], list[int]]:
        local, remote, nbytes = self.between(start, stop)
        return local.tolist(), remote.tolist(), nbytes.tolist()


def _pieces(op: Op, copies: CopyBatch, *, split: int) -> _Pieces:
    """The bytes of `copies` in pieces of 1 to `split` bytes."""
    local, remote = local_and_remote(op, copies)
    nbytes = copies.nbytes
    if len(nbytes) and (int(nbytes.max()) > split or int(nbytes.min()) == 0):
        limit = np.uint64(split)
        counts = ((nbytes + (limit - np.uint64(1))) // limit).astype(np.int64)
        ends = np.cumsum(counts)
        nth = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        offsets = nth.astype(np.uint64) * limit
        local, remote = np.repeat(local, counts) + offsets, np.repeat(remote, counts) + offsets
        nbytes = np.minimum(np.repeat(nbytes, counts) - offsets, limit)
    return _Pieces(local, remote, nbytes)


class MooncakeTransfer:
    """Copies for one peer's `queue`; only who has the queue's turn changes it."""

    def __init__(self, queue: _PeerQueue, op: Op, pieces: _Pieces) -> None:
        self._queue = queue
        self.op = op
        self.pieces = pieces
        self.status = TransferStatus.PENDING if len(pieces) else TransferStatus.DONE
        self.error: str | None = None
        self.sign = None if queue.by_caller else _native.Flag()  # those of a queue by its caller are over when they are asked
        self.num_posted = 0
        self.num_flights = 0
        self.ended_wholly = True
        """Every piece that was posted is known to have ended in this engine, well or badly."""

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._queue.look()
        return self.status

    def settle(self, status: TransferStatus) -> None:
        """How it ended, as far as is known."""
        self.status = status
        if self.sign is not None:
            self.sign.set()

    def close(self) -> None:
        """The engine has freed what it held when the transfer settled."""
        if not self.status.settled:
            raise LocalProtocolError(f"a transfer that is {self.status.value} cannot be closed")

    @property
    def posted_wholly(self) -> bool:
        """Nothing more will be posted."""
        return self.error is not None or self.num_posted == len(self.pieces)

    def fail(self, error: str) -> None:
        """Post no more; the first error stays."""
        self.error = self.error or error


@dataclass
class _Flight:
    """One chunk in the engine."""

    transfer: MooncakeTransfer
    num_pieces: int
    batch: int = 0
    tasks: deque[int] = field(default_factory=deque)


class _PeerQueue:
    """Everything that this engine does with one peer's engine, and the thread that does it."""

    def __init__(
        self,
        engine: _Engine,
        opcodes: Mapping[Op, object],
        descriptor: _Descriptor,
        limit: int,
        *,
        by_caller: bool,
        gpu: Gpu | None,
    ) -> None:
        self._engine = engine
        self._takes_arrays = hasattr(engine, "batch_transfer_async_write_arrays")
        self.by_caller = by_caller
        self._gpu = gpu
        self._opcodes = opcodes
        self._descriptor = descriptor
        self._limit = limit
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # who posts, asks and judges; taken before the other where both are
        self._alarm = _native.Alarm()
        self._waiting: deque[MooncakeTransfer] = deque()
        self._flights: deque[_Flight] = deque()
        self._unsettled: list[MooncakeTransfer] = []
        self._num_outstanding = 0
        self._num_users = 1
        self._open = True
        self._end_reason = "the engine was closed before the transfer had ended"
        self._moved_at = time.monotonic()
        self._probe_at = 0.0
        # Not a daemon: a daemon thread that the interpreter ends inside the engine takes the process down with it.
        self._thread = threading.Thread(target=self._run, name=f"disagg-mooncake-{descriptor.session}")
        self._thread.start()

    def acquire(self) -> bool:
        """Whether another user may have this queue: not once its thread is ending."""
        with self._lock:
            self._num_users += self._open
            return self._open

    @property
    def is_open(self) -> bool:
        return self._open

    def release(self) -> None:
        """One user less; after the last, the thread ends when nothing is left to be settled."""
        with self._lock:
            self._num_users -= 1
            self._alarm.set()

    def submit(self, transfer: MooncakeTransfer) -> None:
        """A few pieces for which nothing waits are posted here and now; the rest, by the thread."""
        with self._lock:
            if not self._open:
                raise PeerUnreachable(f"backend 'mooncake': the thread for peer {self._descriptor.session} has ended")
            self._waiting.append(transfer)
            if len(self._waiting) > 1 or len(transfer.pieces) > _TAIL or not self._gets_turn():
                self._alarm.set()
                return
        self._take_turn(self._post)

    def look(self) -> None:
        """Take what has ended, without waiting: for batches the thread asks, as the engine's answer may take long."""
        if self._flights and self._gets_turn():
            self._take_turn(self._settle_tasks)

    def _gets_turn(self) -> bool:
        """Whether a caller may do the thread's work now."""
        return self.by_caller and self._turn.acquire(blocking=False)

    def _take_turn(self, work: Callable[[], None]) -> None:
        """Do `work` in the caller, which has the turn. The thread hears of what is left to it, and of what went wrong; of
        tasks it need not hear: whoever waits for them polls.
        """
        try:
            work()
        except Exception as error:  # noqa: BLE001 - as at the thread's top: fails what the queue owned
            _log.exception("Mooncake peer %s", self._descriptor.session)
            self._end_reason = f"the engine failed for peer {self._descriptor.session}: {error!r}"
            self._open = False
        finally:
            self._turn.release()
        if self._waiting or self._unsettled or not self._open:
            self._alarm.set()

    def stop(self) -> None:
        """Returns once the thread has ended; what is not settled by then is unsettled."""
        with self._lock:
            self._open = False
            self._alarm.set()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _native.enlist_thread()
        try:
            with _current(self._gpu):
                while self._wait():
                    with self._turn:
                        self._post()
                        self._settle_flights()
                        self._settle_lost()
        except BaseException as error:  # noqa: BLE001 - the thread's top: fails what the thread owned
            _log.exception("the thread for Mooncake peer %s ended", self._descriptor.session)
            self._end(f"the thread for peer {self._descriptor.session} ended: {error!r}")
        else:
            self._end(self._end_reason)
        finally:
            # The last one who holds the engine ends it, and peers outlive their backend. Nobody asks it any more: nothing is
            # in flight, and the queue is closed.
            del self._engine

    def _wait(self) -> bool:
        """Sleep while there is nothing to do, shortly between looks at what is in the engine; False when it is over."""
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
                self._alarm.wait(_PROBE_S if self._unsettled else _IDLE_S)
                continue
            moved_s = time.monotonic() - self._moved_at
            if not self.by_caller and moved_s < _SPIN_S:
                _native.busy_poll(_LOOK_S)
            else:
                least, most = _PAUSE_S
                self._alarm.wait(min(most, max(least, moved_s / 16)))
            return self._open
        self._open = False
        return False

    def _may_post(self) -> bool:
        """Whether something waits and the engine is to have it now."""
        return bool(self._waiting) and self._num_outstanding < (self._limit if self.by_caller else 1)

    def _end(self, reason: str) -> None:
        with self._turn, self._lock:
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
        """Fill the engine's queue with what is waiting, in order."""
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
        """Post pieces up to half the limit, so that one chunk is under way while the next is prepared."""
        start = transfer.num_posted
        room = min(self._limit // 2, self._limit - self._num_outstanding)
        stop = min(len(transfer.pieces), start + room)
        alone = max(start, stop - _TAIL) if transfer.op is Op.WRITE else start  # the first piece that is a task of its own
        flight = _Flight(transfer, stop - start)
        opcode, session = self._opcodes[transfer.op], self._descriptor.session
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
        """Take what has ended out of the queue, oldest first."""
        while self._flights and self._has_ended(self._flights[0]):
            self._land()

    def _settle_tasks(self) -> None:
        """The same, up to the first flight with a batch."""
        while self._flights and not self._flights[0].batch and self._has_ended(self._flights[0]):
            self._land()

    def _land(self) -> None:
        flight = self._flights.popleft()
        self._num_outstanding -= flight.num_pieces
        flight.transfer.num_flights -= 1
        self._judge(flight.transfer)

    def _has_ended(self, flight: _Flight) -> bool:
        """Ask for the tasks, in the order of posting; then take the batch, which has ended but for a last few pieces."""
        while flight.tasks:
            result = self._engine.transfer_check_status(flight.tasks[0])
            if result not in (1, -1):
                return False
            flight.tasks.popleft()
            self._moved_at = time.monotonic()
            if result == -1:
                flight.transfer.fail(f"peer {self._descriptor.session}: the engine reports a failed piece (-1)")
        if flight.batch:
            # After an error the engine would tell nothing, and might wait for long: its record of the batch stays with it.
            if flight.transfer.error is None and self._engine.get_batch_transfer_status([flight.batch]) != 0:
                flight.transfer.fail(f"peer {self._descriptor.session}: the engine reports a failed batch")
            flight.transfer.ended_wholly &= flight.transfer.error is None
        return True

    def _judge(self, transfer: MooncakeTransfer) -> None:
        """Say how a transfer ended, once nothing of it is under way."""
        if transfer.num_flights or (self._waiting and self._waiting[0] is transfer):
            return
        if transfer.error is None:
            transfer.settle(TransferStatus.DONE)
            return
        self._unsettled.append(transfer)
        self._probe_at = 0.0

    def _settle_lost(self) -> None:
        """Failed transfers are settled by the end of the peer's engine, and by nothing else."""
        if not self._unsettled or time.monotonic() < self._probe_at:
            return
        gone = self._is_gone()
        for transfer in self._unsettled:
            provable = gone and (transfer.ended_wholly or self._descriptor.protocol == "tcp")
            transfer.settle(TransferStatus.FAILED if provable else TransferStatus.UNSETTLED)
        self._unsettled = [t for t in self._unsettled if t.status is TransferStatus.UNSETTLED]
        self._probe_at = time.monotonic() + _PROBE_S

    def _is_gone(self) -> bool:
        """Whether the peer's port refuses: its process has ended, or its engine, which closes the port last of all.

        A stopped process does not refuse (its kernel accepts), nor does a host that is out of reach.
        """
        try:
            socket.create_connection((self._descriptor.host, self._descriptor.port), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


# -- the backend ------------------------------------------------------------------------------------------------------


def _gpu_of(regions: Iterable[MemoryRegion]) -> Gpu | None:
    """The GPU that all memory is on, which is to be the calling thread's where the engine may open a peer's memory: it opens
    that for GPU 0 otherwise, and copies from another one go through the host then, at a seventh of the speed.
    """
    devices = {region.device for region in regions}
    device = devices.pop() if len(devices) == 1 else CPU
    if device.kind != "cuda":
        return None
    try:
        return Gpu(device.index)
    except (BackendUnavailable, CudaError) as error:
        _log.warning("backend 'mooncake': GPU %d is not made the engine's: %s", device.index, error)
        return None


@contextmanager
def _current(gpu: Gpu | None) -> Iterator[None]:
    """That GPU is the calling thread's within, as far as that is possible: the engine says itself what is not."""
    with ExitStack() as stack:
        if gpu is not None:
            with suppress(CudaError):
                stack.enter_context(gpu.current())
        yield


class MooncakePeer:
    """A peer's engine at one epoch."""

    def __init__(self, queue: _PeerQueue, process: ProcessIdentity, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        self.queue = queue
        self.process = process
        self.index = RegionIndex(regions)
        self.epoch = epoch
        self.connected = True
        self._regions = tuple(regions)

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        return self._regions


class MooncakePrepared:
    """Pieces that were checked, for one peer."""

    def __init__(self, peer: MooncakePeer, op: Op, pieces: _Pieces) -> None:
        self._peer = peer
        self._op = op
        self._pieces = pieces

    def post(self) -> MooncakeTransfer:
        if not self._peer.connected:
            raise PeerUnreachable(f"backend 'mooncake': the peer of epoch {self._peer.epoch} was disconnected")
        transfer = MooncakeTransfer(self._peer.queue, self._op, self._pieces)
        if len(self._pieces):
            self._peer.queue.submit(transfer)
        return transfer


class MooncakeBackend:
    """One transfer engine; see the module for what it promises.

    Raises `BackendUnavailable` where the engine, a library or the transport is missing, and `ConfigError` for options or
    environment settings that would make it unsafe.
    """

    name = "mooncake"

    def __init__(self, options: BackendOptions) -> None:
        self._protocol = _choose_protocol(options)
        _check_environment(options, self._protocol)
        module = _import_engine()
        self._opcodes = {Op.WRITE: module.TransferOpcode.Write, Op.READ: module.TransferOpcode.Read}
        self._engine: _Engine | None = _start_engine(module, options, self._protocol)
        self._descriptor = _Descriptor(options.host, self._engine.get_rpc_port(), self._protocol, ProcessIdentity.own())
        self._limit = _outstanding_limit()
        self._split = NVLINK_SPLIT_NBYTES if self._protocol == "nvlink_intra" else SPLIT_NBYTES
        self._index: RegionIndex | None = None
        self._gpu: Gpu | None = None
        self._scratch = np.zeros(8, dtype=np.uint8)
        self._queues: dict[str, _PeerQueue] = {}
        self._lock = threading.Lock()
        _log.info("Mooncake engine at %s, transport %s", self._descriptor.session, self._protocol)

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """A piece costs about 14 us over TCP: break-even with packing is about 256 KiB."""
        return StagingShape(pack_below=256 << 10, slot_nbytes=2 << 20, num_slots=8, measure=True)

    @property
    def staging(self) -> StagingShape:
        return self.staging_for(BackendOptions())

    @property
    def transport(self) -> str:
        return self._protocol

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        engine = self._running()
        if self._index is not None:
            raise LocalProtocolError("backend 'mooncake': register is called once")
        merged = merge_regions(regions)
        rows = list(merged)
        if self._protocol != "nvlink_intra":
            # The warm-up of a connection reads into memory of its own; devices want that registered as well.
            rows.append(MemoryRegion(self._scratch.ctypes.data, self._scratch.nbytes))
        elif any(region.device == CPU for region in merged):
            raise ConfigError("backend 'mooncake': 'nvlink_intra' moves memory of GPUs only, found memory of the host")
        gpu = _gpu_of(merged)
        with _current(gpu):
            status = engine.batch_register_memory([r.address for r in rows], [r.nbytes for r in rows])
        if status != 0:
            if gpu is not None:
                gpu.release()
            raise ConfigError(f"backend 'mooncake': the engine does not take {len(merged)} regions (status {status})")
        self._index, self._gpu = RegionIndex(merged), gpu

    def endpoint(self) -> bytes:
        regions = [MemoryRegion(r.address, r.nbytes, r.device) for r in self._registered().regions]
        return encode_endpoint(self.name, msgspec.msgpack.encode(self._descriptor), regions)

    def connect(self, endpoint: bytes, *, epoch: int) -> MooncakePeer:
        """See the contract. Waits up to 10 s for the peer's answer."""
        engine = self._running()
        descriptor, regions = self._decode(endpoint)
        if descriptor.protocol != self._protocol:
            raise PeerUnreachable(f"peer {descriptor.session} uses {descriptor.protocol!r}, this engine {self._protocol!r}")
        if (status := engine.send_probe(descriptor.session)) != 0:
            raise PeerUnreachable(f"backend 'mooncake': no engine answers at {descriptor.session} (status {status})")
        peer = MooncakePeer(self._queue(engine, descriptor), descriptor.process, regions, epoch=epoch)
        try:
            self._warm(peer, descriptor)
        except PeerUnreachable:
            self.disconnect(peer)
            raise
        return peer

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> MooncakeTransfer:
        return self.prepare(op, peer, copies).post()

    def prepare(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> MooncakePrepared:
        """See `Preparing`: addresses are checked and cut once. The engine itself keeps nothing."""
        self._running()
        if not isinstance(peer, MooncakePeer):
            raise LocalProtocolError(f"backend 'mooncake': expected a peer of its own, found {type(peer).__name__}")
        if not peer.connected:
            raise PeerUnreachable(f"backend 'mooncake': the peer of epoch {peer.epoch} was disconnected")
        local, remote = local_and_remote(op, copies)
        self._registered().require(local, copies.nbytes, side="local")
        peer.index.require(remote, copies.nbytes, side="remote")
        return MooncakePrepared(peer, op, _pieces(op, copies, split=self._split))

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """`QUIET` where the peer's process is proved to have ended and nothing of it can arrive any more: see the module."""
        if not isinstance(peer, MooncakePeer) or peer.epoch != epoch or self._protocol != "tcp":
            return Fence.UNKNOWN
        return Fence.QUIET if peer.process.is_quiet(by_accepted=True) else Fence.UNKNOWN

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if not isinstance(peer, MooncakePeer) or not peer.connected:
                return
            peer.connected = False
        peer.queue.release()

    def close(self) -> None:
        """Join the peers' threads, then end the engine: its threads are joined and its ports closed when this returns.

        The engine's own part takes up to 2 s with transfers under way, and holds the interpreter for that long.
        """
        with self._lock:
            queues, self._queues = list(self._queues.values()), {}
            engine, self._engine = self._engine, None
            gpu, self._gpu = self._gpu, None
        for queue in queues:
            queue.stop()
        with _current(gpu):
            del queues, engine
        if gpu is not None:
            gpu.release()

    def is_quiet_when_closed(self) -> bool:
        """Over TCP: the engine's end closes its connections, and joins the threads that read them and write to memory."""
        return self._protocol == "tcp"

    def _running(self) -> _Engine:
        if self._engine is None:
            raise LocalProtocolError("backend 'mooncake': the engine has been closed")
        return self._engine

    def _registered(self) -> RegionIndex:
        if self._index is None:
            raise LocalProtocolError("backend 'mooncake': register has not been called")
        return self._index

    def _decode(self, endpoint: bytes) -> tuple[_Descriptor, tuple[RemoteRegion, ...]]:
        """Raises `RemoteProtocolError`."""
        data, regions = decode_endpoint(self.name, endpoint)
        try:
            descriptor = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'mooncake': {error}") from error
        if not descriptor.host or not 0 < descriptor.port < 2**16:
            raise RemoteProtocolError(f"endpoint of backend 'mooncake': no address: {descriptor.session!r}")
        return descriptor, regions

    def _queue(self, engine: _Engine, descriptor: _Descriptor) -> _PeerQueue:
        """The queue of that engine: one for all epochs, as the limit on pieces is the engine's, per address."""
        with self._lock:
            queue = self._queues.get(descriptor.session)
            if queue is None or not queue.acquire():
                self._queues = {session: queue for session, queue in self._queues.items() if queue.is_open}
                queue = self._queues[descriptor.session] = _PeerQueue(
                    engine,
                    self._opcodes,
                    descriptor,
                    self._limit,
                    by_caller=self._protocol == "tcp",
                    gpu=self._gpu,
                )
            return queue

    def _warm(self, peer: MooncakePeer, descriptor: _Descriptor) -> None:
        """Have the engine's connections made, by reading a byte; raises `PeerUnreachable` where it does not come."""
        readable = [region for region in peer.regions if region.device.kind == "cpu"]
        if not readable or self._protocol == "nvlink_intra":
            return
        here, there = (np.full(_TAIL, address, np.uint64) for address in (self._scratch.ctypes.data, readable[0].address))
        transfer = MooncakeTransfer(peer.queue, Op.READ, _Pieces(here, there, np.ones(_TAIL, np.uint64)))
        peer.queue.submit(transfer)
        deadline = time.monotonic() + _WARM_S
        while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
            time.sleep(1e-3)
        if transfer.status is not TransferStatus.DONE:
            raise PeerUnreachable(f"peer {descriptor.session} does not move bytes: {transfer.error or 'no answer'}")
