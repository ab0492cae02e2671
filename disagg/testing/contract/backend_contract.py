"""What every backend must do, as a pytest class.

A backend's test module has one subclass, which says how to make the backend and where its peers may live::

    class TestMyBackend(BackendContract):
        def factory(self) -> BackendFactory:
            return MyBackend        # picklable: a target process imports it by name

        def options(self) -> BackendOptions:
            return BackendOptions(host="127.0.0.1")

The *initiator* is the pytest process. *Targets* are processes of their own (`separate_processes = False`: engines of the
pytest process). A target's memory is an anonymous shared file that the test maps too, so that expectations are compared
with raw bytes, whatever state the target or the engine is in.

No test asserts a duration: `patience_s` only bounds a hang.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt
import pytest

from disagg.backends.abilities import Preparing, Progressive, QuietWhenClosed
from disagg.backends.base import Backend, BackendOptions, Fence, Op, RemotePeer, Transfer, TransferStatus
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    BackendError,
    DisaggError,
    LocalProtocolError,
    NotRegistered,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import MemoryRegion

BackendFactory = Callable[[BackendOptions], Backend]
Bytes = npt.NDArray[np.uint8]
Piece = tuple[int, int, int, int, int]
"""`(local region, offset, remote region, offset, nbytes)`."""

GUARD = 4099
"""Bytes before and after each region, in the same mapping but not registered."""
REGION_NBYTES = (1_500_001, 70_000)
"""Sizes of the two regions on each side."""


class Arena:
    """Regions of one side, apart from each other, in one shared file; guard bytes lie around each of them."""

    def __init__(self, fd: int, sizes: Sequence[int], *, base: int | None = None) -> None:
        total = sum(sizes) + GUARD * (len(sizes) + 1)
        self.fd = fd
        self._map = mmap.mmap(fd, total)
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.sizes = tuple(sizes)
        self.offsets = tuple(GUARD * (i + 1) + sum(sizes[:i]) for i in range(len(sizes)))
        self.base = self.memory.ctypes.data if base is None else base

    @classmethod
    def create(cls, sizes: Sequence[int]) -> Arena:
        fd = os.memfd_create("disagg-backend-contract")
        os.ftruncate(fd, sum(sizes) + GUARD * (len(sizes) + 1))
        return cls(fd, sizes)

    def address(self, region: int, offset: int = 0) -> int:
        """In the *owner's* process."""
        return self.base + self.offsets[region] + offset

    @property
    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(self.address(i), size) for i, size in enumerate(self.sizes)]

    def view(self, region: int) -> Bytes:
        return self.memory[self.offsets[region] : self.offsets[region] + self.sizes[region]]

    def scramble(self, seed: int) -> None:
        """Other bytes everywhere, guards too."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)


@contextmanager
def progressed(backend: Backend) -> Iterator[None]:
    """Within, an engine of this process that needs to be called is called."""
    if not isinstance(backend, Progressive):
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.001):
            backend.progress()

    thread = threading.Thread(target=run, name="progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _fence(backend: Backend, peer: RemotePeer, arena: Arena, *, patience_s: int) -> tuple[Fence, bytes]:
    """Fence until that is `QUIET`, at most so long; what the fence said last, and a hash of the memory right after."""
    deadline = time.monotonic() + patience_s
    while True:
        fence, memory = backend.fence(peer, epoch=1), hashlib.sha256(arena.memory.data).digest()
        if fence is Fence.QUIET or time.monotonic() > deadline:
            return fence, memory


def _serve(pipe: Connection, factory: BackendFactory, options: BackendOptions, sizes: Sequence[int]) -> None:
    """A target process: tell where the memory is, then connect and post as told, until told to end."""
    arena = Arena.create(sizes)
    arena.memory[:] = 0
    backend = factory(options)
    backend.register(arena.regions)
    with progressed(backend), suppress(EOFError):
        pipe.send((arena.fd, arena.base, backend.endpoint()))
        peers = {}
        while (order := pipe.recv()) is not None:
            endpoint, address = order
            if address is None:
                pipe.send(peers.update({endpoint: backend.connect(endpoint, epoch=1)}))
            elif address == 0:
                backend.close()
                pipe.send(hashlib.sha256(arena.memory.data).digest())
            elif address < 0:
                pipe.send(_fence(backend, peers[endpoint], arena, patience_s=-address))
            else:
                batch = _batch([arena.address(0)], [address], [arena.sizes[0]])
                pipe.send(backend.submit(Op.WRITE, peers[endpoint], batch).poll())
    backend.close()


def _initiate(
    factory: BackendFactory, options: BackendOptions, endpoint: bytes, remote: tuple[int, int], orderly: bool
) -> None:
    """An initiator process: write one piece to `remote` (address, nbytes); `orderly` says whether it then closes."""
    address, nbytes = remote
    memory = np.full(nbytes, 0xA5, dtype=np.uint8)
    backend = factory(options)
    backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
    peer = backend.connect(endpoint, epoch=1)
    transfer = backend.submit(Op.WRITE, peer, _batch([memory.ctypes.data], [address], [nbytes]))
    assert settle(transfer, backend) is TransferStatus.DONE, transfer.error
    if orderly:
        transfer.close()
        backend.disconnect(peer)
        backend.close()


class Target(Protocol):
    """A peer of the test's backend."""

    arena: Arena
    endpoint: bytes

    def close(self) -> None:
        """Close the engine in order; raises `AssertionError` where its process does not end with status 0."""


class ProcessTarget:
    """A target in a process of its own."""

    def __init__(self, factory: BackendFactory, options: BackendOptions, *, patience_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child would inherit engine threads' locks
        self._patience_s = patience_s
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, factory, options, REGION_NBYTES))
        self.process.start()
        theirs.close()
        if not self._pipe.poll(patience_s):
            self.process.kill()
            raise AssertionError(f"the target process said nothing for {patience_s} s")
        fd, base, self.endpoint = self._pipe.recv()
        self.arena = Arena(os.open(f"/proc/{self.process.pid}/fd/{fd}", os.O_RDWR), REGION_NBYTES, base=base)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Freeze the process; returns once it is frozen."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + self._patience_s
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in self._stats()):
            assert time.monotonic() < deadline, "the target process does not stop"
            time.sleep(0.001)

    def _stats(self) -> Iterator[Path]:
        """Of each thread."""
        return Path(f"/proc/{self.process.pid}/task").glob("*/stat")

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def connect(self, endpoint: bytes) -> None:
        """Make this target an initiator too."""
        self._ask((endpoint, None))

    def write(self, endpoint: bytes, address: int) -> TransferStatus:
        """Post its whole first region to `address` of that peer; the status right after. It is never polled again."""
        status = self._ask((endpoint, address))
        assert isinstance(status, TransferStatus)
        return status

    def begin_close(self) -> None:
        """Have this target's engine closed, also while this process is stopped: it begins when it goes on."""
        self._pipe.send((b"", 0))

    def end_close(self) -> bytes:
        """A hash of this target's memory right after its engine was closed."""
        return cast(bytes, self._answer())

    def begin_fence(self, endpoint: bytes, *, patience_s: int) -> None:
        """Have this target's engine fence that peer, also while this process is stopped: it begins when it goes on."""
        self._pipe.send((endpoint, -patience_s))

    def end_fence(self) -> tuple[Fence, bytes]:
        """What the fence said last, and a hash of this target's memory right after."""
        fence, memory = cast(tuple[Fence, bytes], self._answer())
        return fence, memory

    def _ask(self, order: tuple[bytes, int | None]) -> object:
        self._pipe.send(order)
        return self._answer()

    def _answer(self) -> object:
        assert self._pipe.poll(self._patience_s), f"the target process said nothing for {self._patience_s} s"
        answer: object = self._pipe.recv()
        return answer

    def kill(self) -> None:
        """Returns once the process has ended."""
        self.process.kill()
        self.process.join(self._patience_s)

    def close(self) -> None:
        killed = self.process.exitcode == -signal.SIGKILL
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self.process.join(self._patience_s)
        if self.process.is_alive():
            self.process.kill()
        self._pipe.close()
        os.close(self.arena.fd)
        assert killed or self.process.exitcode == 0, f"the target process ended with status {self.process.exitcode}"


class InProcessTarget:
    """A target that is another engine of the pytest process."""

    def __init__(self, factory: BackendFactory, options: BackendOptions) -> None:
        self.arena = Arena.create(REGION_NBYTES)
        self.backend = factory(options)
        self.backend.register(self.arena.regions)
        self.endpoint = self.backend.endpoint()

    def close(self) -> None:
        self.backend.close()
        os.close(self.arena.fd)


def settle(transfer: Transfer, backend: Backend, *, patience_s: float = 60.0) -> TransferStatus:
    """Poll until something other than `PENDING`; fails the test when that takes longer than `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (status := transfer.poll()) is TransferStatus.PENDING:
        assert time.monotonic() < deadline, f"still pending after {patience_s} s"
        if isinstance(backend, Progressive):
            backend.progress()
        time.sleep(0.0002)
    return status


def _batch(source: Sequence[int], destination: Sequence[int], nbytes: Sequence[int]) -> CopyBatch:
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in (source, destination, nbytes)))


def batch_of(op: Op, local: Arena, remote: Arena, pieces: Sequence[Piece]) -> CopyBatch:
    """`pieces` by address."""
    here = [local.address(region, offset) for region, offset, _, _, _ in pieces]
    there = [remote.address(region, offset) for _, _, region, offset, _ in pieces]
    nbytes = [piece[4] for piece in pieces]
    return _batch(here, there, nbytes) if op is Op.WRITE else _batch(there, here, nbytes)


def expected_after(op: Op, local: Arena, remote: Arena, pieces: Sequence[Piece]) -> Bytes:
    """What the destination's memory, guards included, must hold afterwards; to be called before."""
    source, destination = (local, remote) if op is Op.WRITE else (remote, local)
    after = destination.memory.copy()
    for local_region, local_offset, remote_region, remote_offset, nbytes in pieces:
        sides = [(local_region, local_offset), (remote_region, remote_offset)]
        (from_region, start), (to_region, stop) = sides if op is Op.WRITE else reversed(sides)
        at = destination.offsets[to_region] + stop
        after[at : at + nbytes] = source.view(from_region)[start : start + nbytes]
    return after


def random_pieces(op: Op, rng: random.Random, *, nbytes: Sequence[int], gap: int) -> list[Piece]:
    """One piece per entry of `nbytes`, in random order, from anywhere to destinations `gap` or fewer bytes apart."""
    pieces: list[Piece] = []
    ends = [rng.randint(0, gap) for _ in REGION_NBYTES]
    for size in nbytes:
        to_region = rng.choice([r for r, total in enumerate(REGION_NBYTES) if ends[r] + size <= total])
        from_region = rng.choice([r for r, total in enumerate(REGION_NBYTES) if size <= total])
        start = rng.randint(0, REGION_NBYTES[from_region] - size)
        source, destination = (from_region, start), (to_region, ends[to_region])
        pieces.append((*source, *destination, size) if op is Op.WRITE else (*destination, *source, size))
        ends[to_region] = min(ends[to_region] + size + rng.randint(0, gap), REGION_NBYTES[to_region])
    rng.shuffle(pieces)
    return pieces


@dataclass(frozen=True)
class Shape:
    """A kind of batch."""

    nbytes: tuple[int, ...]
    gap: int


_rng = random.Random(7)
SHAPES = {
    "one byte": Shape((1,), 9),
    "single bytes": Shape((1,) * 300, 3),
    "odd sizes": Shape(tuple(_rng.choice((1, 2, 3, 7, 63, 511, 4097)) for _ in range(300)), 11),
    "adjacent": Shape((512,) * 300, 0),
    "thousands": Shape((257,) * 4000, 60),
    "large": Shape((1_000_003,), 1000),
    "mixed": Shape((600_001, 1, 300_000, 5, 65_536, 64, 17), 501),
}


class BackendContract:
    """See the module. Every test may run alone; subclasses have no state."""

    separate_processes: ClassVar[bool] = True
    fences_dead_neighbours: ClassVar[bool] = False
    """Whether `fence` is to become `QUIET` after the death of a peer's process on the same machine."""
    patience_s: ClassVar[float] = 60.0

    def factory(self) -> BackendFactory:
        raise NotImplementedError

    def options(self) -> BackendOptions:
        return BackendOptions()

    # -- what tests are made of ---------------------------------------------------------------------------------------

    @pytest.fixture
    def stack(self) -> Iterator[ExitStack]:
        """What a test opened, closed in reverse."""
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def local(self) -> Iterator[Arena]:
        arena = Arena.create(REGION_NBYTES)
        arena.scramble(1)
        yield arena
        os.close(arena.fd)

    @pytest.fixture
    def backend(self, local: Arena, stack: ExitStack) -> Backend:
        return self.open(local, stack)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_target(cls) -> Iterator[Target]:
        """For tests that leave it well: starting a process costs more than most of them."""
        with ExitStack() as stack:
            yield cls().new_target(stack)

    @pytest.fixture
    def target(self, shared_target: Target) -> Target:
        shared_target.arena.scramble(2)
        return shared_target

    def open(self, arena: Arena, stack: ExitStack) -> Backend:
        """A backend that serves `arena`."""
        backend = self.factory()(self.options())
        stack.callback(backend.close)
        backend.register(arena.regions)
        return backend

    def new_target(self, stack: ExitStack) -> Target:
        target: Target
        if self.separate_processes:
            target = ProcessTarget(self.factory(), self.options(), patience_s=self.patience_s)
        else:
            target = InProcessTarget(self.factory(), self.options())
        stack.callback(target.close)
        target.arena.scramble(2)
        return target

    def new_process(self, stack: ExitStack) -> ProcessTarget:
        target = self.new_target(stack)
        if not isinstance(target, ProcessTarget):
            pytest.skip("this backend has no other process to lose")
        return target

    def run(self, transfer: Transfer, backend: Backend) -> None:
        """To the end, which must be a good one."""
        assert settle(transfer, backend, patience_s=self.patience_s) is TransferStatus.DONE, transfer.error
        transfer.close()

    def round_trip(self, backend: Backend, local: Arena, target: Target, *, epoch: int = 1) -> None:
        """One small write arrives, byte for byte."""
        peer = backend.connect(target.endpoint, epoch=epoch)
        pieces = [(0, 5, 1, 3, 1000)]
        after = expected_after(Op.WRITE, local, target.arena, pieces)
        self.run(backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, pieces)), backend)
        np.testing.assert_array_equal(target.arena.memory, after)
        backend.disconnect(peer)

    # -- bytes --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", Op)
    def test_copies_exactly_the_pieces(self, op: Op, backend: Backend, local: Arena, target: Target) -> None:
        """Every byte of both sides is compared: pieces, what lies between them, and the guards around regions."""
        peer = backend.connect(target.endpoint, epoch=1)
        for seed, (name, shape) in enumerate(SHAPES.items()):
            local.scramble(2 * seed + 10)
            target.arena.scramble(2 * seed + 11)
            pieces = random_pieces(op, random.Random(seed), nbytes=shape.nbytes, gap=shape.gap)
            source, destination = (local, target.arena) if op is Op.WRITE else (target.arena, local)
            before, after = source.memory.copy(), expected_after(op, local, target.arena, pieces)
            self.run(backend.submit(op, peer, batch_of(op, local, target.arena, pieces)), backend)
            np.testing.assert_array_equal(destination.memory, after, err_msg=name)
            np.testing.assert_array_equal(source.memory, before, err_msg=name)

    @pytest.mark.parametrize("op", Op)
    def test_prepared_copies_are_posted_again_and_again(self, op: Op, backend: Backend, local: Arena, target: Target) -> None:
        """New bytes each time; refused like any others; and gone with their peer, of whatever state."""
        if not isinstance(backend, Preparing):
            pytest.skip(f"backend {backend.name!r} prepares nothing")
        peer, kept = (backend.connect(target.endpoint, epoch=epoch) for epoch in (1, 2))
        pieces = [(0, 7, 1, 3, 1000), (1, 0, 0, 70_001, 65_536)]
        prepared = backend.prepare(op, peer, batch_of(op, local, target.arena, pieces))
        never_posted = backend.prepare(op, peer, batch_of(op, local, target.arena, pieces[:1]))
        other = backend.prepare(op, kept, batch_of(op, local, target.arena, pieces))
        destination = target.arena if op is Op.WRITE else local
        for seed in range(3):
            local.scramble(2 * seed + 50)
            target.arena.scramble(2 * seed + 51)
            after = expected_after(op, local, target.arena, pieces)
            self.run(prepared.post(), backend)
            np.testing.assert_array_equal(destination.memory, after)
        for outside in _outside(local):
            with pytest.raises(NotRegistered):
                backend.prepare(Op.WRITE, peer, _batch([outside[0]], [target.arena.address(0)], [outside[1]]))
        under_way = prepared.post()
        backend.disconnect(peer)
        for gone in (prepared, never_posted):
            with pytest.raises((PeerUnreachable, LocalProtocolError)):
                gone.post()
        self.run(under_way, backend)
        with pytest.raises(PeerUnreachable):
            backend.prepare(op, peer, batch_of(op, local, target.arena, pieces))
        target.arena.scramble(99)
        after = expected_after(op, local, target.arena, pieces)
        self.run(other.post(), backend)
        np.testing.assert_array_equal(destination.memory, after)

    @pytest.mark.parametrize("op", Op)
    def test_an_empty_batch_is_done_at_once(self, op: Op, backend: Backend, target: Target) -> None:
        peer = backend.connect(target.endpoint, epoch=1)
        transfer = backend.submit(op, peer, _batch([], [], []))
        assert transfer.poll() is TransferStatus.DONE
        transfer.close()

    def test_regions_that_touch_or_overlap_are_one(self, local: Arena, target: Target, stack: ExitStack) -> None:
        backend = self.factory()(self.options())
        stack.callback(backend.close)
        start, nbytes = local.address(0), local.sizes[0]
        parts = [(0, 1000), (1000, 5000), (3000, 10_000), (4000, 10), (13_000, nbytes - 13_000)]
        backend.register([MemoryRegion(start + offset, size) for offset, size in parts])
        peer = backend.connect(target.endpoint, epoch=1)
        pieces = [(0, 0, 0, 0, nbytes)]
        after = expected_after(Op.WRITE, local, target.arena, pieces)
        self.run(backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, pieces)), backend)
        np.testing.assert_array_equal(target.arena.memory, after)

    def test_several_threads_submit(self, backend: Backend, local: Arena, target: Target) -> None:
        """Four threads write stripes of the same regions, all at once, three batches each."""
        peer = backend.connect(target.endpoint, epoch=1)
        stripes = [[(0, i * 300, 0, i * 300, 300) for i in range(1200) if i % 12 == s] for s in range(12)]
        after = expected_after(Op.WRITE, local, target.arena, [piece for stripe in stripes for piece in stripe])
        failures: list[BaseException] = []

        def work(mine: list[list[Piece]]) -> None:
            try:
                for pieces in mine:
                    self.run(backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, pieces)), backend)
            except BaseException as error:  # noqa: BLE001 - the thread's top: fails what the thread owned
                failures.append(error)

        threads = [threading.Thread(target=work, args=(stripes[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.patience_s)
            assert not thread.is_alive()
        assert not failures
        np.testing.assert_array_equal(target.arena.memory, after)

    def test_two_peers_at_once(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        targets = [self.new_target(stack), self.new_target(stack)]
        peers = [backend.connect(target.endpoint, epoch=1) for target in targets]
        batches = [random_pieces(Op.WRITE, random.Random(i), nbytes=(1000,) * 200, gap=50) for i in range(2)]
        after = [expected_after(Op.WRITE, local, t.arena, b) for t, b in zip(targets, batches, strict=True)]
        transfers = [
            backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, pieces))
            for peer, target, pieces in zip(peers, targets, batches, strict=True)
        ]
        for transfer in transfers:
            self.run(transfer, backend)
        for target, memory in zip(targets, after, strict=True):
            np.testing.assert_array_equal(target.arena.memory, memory)

    # -- addresses ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", Op)
    def test_addresses_outside_the_regions_are_refused(self, op: Op, backend: Backend, local: Arena, target: Target) -> None:
        """Whole batches: the good pieces before and after the bad one are not copied either."""
        peer = backend.connect(target.endpoint, epoch=1)
        good = (0, 0, 0, 0, 64)
        images = local.memory.copy(), target.arena.memory.copy()
        for arena, column in ((local, 0), (target.arena, 1)):
            for bad in _outside(arena):
                rows = [[local.address(0), target.arena.address(0), 64] for _ in range(3)]
                rows[1][column], rows[1][2] = bad
                rows[2][0], rows[2][1] = rows[2][0] + 100, rows[2][1] + 100
                here, there, nbytes = zip(*rows, strict=True)
                batch = _batch(here, there, nbytes) if op is Op.WRITE else _batch(there, here, nbytes)
                with pytest.raises(NotRegistered):
                    backend.submit(op, peer, batch)
        # A transfer that does go through, so that anything posted before it has had its time.
        self.run(backend.submit(op, peer, batch_of(op, local, target.arena, [good])), backend)
        after = images[1 if op is Op.WRITE else 0]
        source, at = (local, target.arena.offsets[0]) if op is Op.WRITE else (target.arena, local.offsets[0])
        after[at : at + 64] = source.view(0)[:64]
        np.testing.assert_array_equal(local.memory, images[0])
        np.testing.assert_array_equal(target.arena.memory, images[1])

    def test_register_is_called_once(self, backend: Backend, local: Arena) -> None:
        with pytest.raises(LocalProtocolError):
            backend.register(local.regions)

    # -- endpoints ----------------------------------------------------------------------------------------------------

    def test_what_is_no_endpoint_is_refused(self, backend: Backend, local: Arena, target: Target) -> None:
        good = target.endpoint
        descriptor, _ = decode_endpoint(backend.name, good)
        regions = target.arena.regions
        rng = random.Random(3)
        wrong = [
            b"",
            b"\x00",
            rng.randbytes(500),
            good + b"\x00",
            *(good[: rng.randrange(len(good))] for _ in range(20)),
            encode_endpoint("another", descriptor, regions),
            encode_endpoint(backend.name, b"", regions),
            encode_endpoint(backend.name, rng.randbytes(len(descriptor)), regions),
            encode_endpoint(backend.name, descriptor[: len(descriptor) // 2], regions),
        ]
        for endpoint in wrong:
            with pytest.raises(RemoteProtocolError):
                backend.connect(endpoint, epoch=1)
        self.round_trip(backend, local, target)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def test_a_settled_transfer_stays_settled(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, epoch=1)
        transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, [(0, 0, 0, 0, 1000)]))
        assert settle(transfer, backend, patience_s=self.patience_s) is TransferStatus.DONE
        assert [transfer.poll() for _ in range(5)] == [TransferStatus.DONE] * 5
        assert transfer.error is None
        transfer.close()
        transfer.close()
        assert transfer.poll() is TransferStatus.DONE

    def test_only_a_settled_transfer_closes(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """With the peer's process stopped, so that an engine that needs it cannot finish."""
        target = self.new_target(stack)
        peer = backend.connect(target.endpoint, epoch=1)
        if isinstance(target, ProcessTarget):
            target.stop()
            stack.callback(target.go_on)
        pieces = [(0, 0, 0, 0, REGION_NBYTES[0])]
        transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, pieces))
        if not transfer.poll().settled:
            # Between the two calls it may settle; closing it is then right.
            with suppress(LocalProtocolError):
                transfer.close()
                assert transfer.poll().settled
        if isinstance(target, ProcessTarget):
            target.go_on()
        if settle(transfer, backend, patience_s=self.patience_s).settled:
            transfer.close()

    def test_a_disconnected_peer_is_unreachable(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, epoch=1)
        backend.disconnect(peer)
        backend.disconnect(peer)
        with pytest.raises(PeerUnreachable):
            backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, [(0, 0, 0, 0, 10)]))

    @pytest.mark.parametrize("overlapping", [False, True])
    def test_connecting_anew_for_another_epoch(self, overlapping: bool, backend: Backend, local: Arena, target: Target) -> None:
        """The old peer, disconnected before or after the new one came, is gone, and the new one is not disturbed."""
        old = backend.connect(target.endpoint, epoch=1)
        batch = batch_of(Op.WRITE, local, target.arena, [(0, 0, 0, 0, 10)])
        if not overlapping:
            backend.disconnect(old)
        new = backend.connect(target.endpoint, epoch=2)
        if overlapping:
            backend.disconnect(old)
        with pytest.raises(PeerUnreachable):
            backend.submit(Op.WRITE, old, batch)
        self.run(backend.submit(Op.WRITE, new, batch), backend)

    def test_a_fence_of_an_idle_peer_is_no_error(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, epoch=1)
        self.run(backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, [(0, 0, 0, 0, 10)])), backend)
        assert backend.fence(peer, epoch=1) in Fence
        assert backend.fence(peer, epoch=2) is Fence.UNKNOWN
        backend.disconnect(peer)
        assert backend.fence(peer, epoch=1) in Fence

    def test_closing_twice(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, epoch=1)
        backend.close()
        backend.close()
        with pytest.raises(DisaggError):
            backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target.arena, [(0, 0, 0, 0, 10)]))
        with pytest.raises(DisaggError):
            backend.connect(target.endpoint, epoch=2)

    def test_closing_with_nothing_registered(self) -> None:
        backend = self.factory()(self.options())
        assert backend.transport
        backend.close()

    @pytest.mark.parametrize("orderly", [True, False])
    def test_the_process_ends_with_status_0(self, orderly: bool, target: Target) -> None:
        """After the engine was used, whether or not it was closed."""
        if not isinstance(target, ProcessTarget):
            pytest.skip("this backend has no other process to reach from")
        remote = target.arena.regions[0].address, 5000
        process = multiprocessing.get_context("spawn").Process(
            target=_initiate, args=(self.factory(), self.options(), target.endpoint, remote, orderly)
        )
        process.start()
        process.join(self.patience_s)
        assert process.exitcode == 0
        assert (target.arena.view(0)[:5000] == 0xA5).all()

    # -- the death of a peer ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", Op)
    def test_a_killed_peer_never_gives_missing_bytes(self, op: Op, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """Stopped, posted to, then killed: what is `DONE` is there, all else ends as `FAILED` or `UNSETTLED`."""
        victim, survivor = self.new_process(stack), self.new_target(stack)
        peer, other = (backend.connect(t.endpoint, epoch=1) for t in (victim, survivor))
        pieces = [(0, i * 1000, 0, i * 1000, 1000) for i in range(1500)]
        after = expected_after(op, local, victim.arena, pieces)
        victim.stop()
        transfer = backend.submit(op, peer, batch_of(op, local, victim.arena, pieces))
        transfer.poll()
        victim.kill()
        status = settle(transfer, backend, patience_s=self.patience_s)
        self._judge(status, transfer, (victim.arena if op is Op.WRITE else local).memory, after)
        self._after_a_death(op, backend, peer, batch_of(op, local, victim.arena, pieces[:1]))
        self.run(backend.submit(op, other, batch_of(op, local, survivor.arena, pieces)), backend)
        self.round_trip(backend, local, self.new_target(stack))

    def _judge(self, status: TransferStatus, transfer: Transfer, memory: Bytes, after: Bytes) -> None:
        """A transfer whose peer was killed."""
        if status is TransferStatus.DONE:
            np.testing.assert_array_equal(memory, after)
        else:
            assert transfer.error
        if status.settled:
            transfer.close()
        else:
            with pytest.raises(LocalProtocolError):
                transfer.close()

    def _after_a_death(self, op: Op, backend: Backend, peer: object, batch: CopyBatch) -> None:
        """A dead peer: posting to it fails one way or the other, and it can be fenced and forgotten."""
        try:
            again = backend.submit(op, peer, batch)  # type: ignore[arg-type]
        except BackendError:
            pass
        else:
            assert settle(again, backend, patience_s=self.patience_s) is not TransferStatus.DONE
        backend.fence(peer, epoch=1)  # type: ignore[arg-type]
        backend.disconnect(peer)  # type: ignore[arg-type]

    def test_a_fence_is_quiet_only_once_nothing_more_can_land(self, stack: ExitStack) -> None:
        """A writer posts to a stopped target and is killed. What the target's engine says of it then must be true."""
        target, writer = self.new_process(stack), self.new_process(stack)
        stack.callback(target.go_on)
        writer.arena.view(0)[:] = 0xA5
        writer.connect(target.endpoint)
        target.connect(writer.endpoint)
        target.begin_fence(writer.endpoint, patience_s=1)
        assert target.end_fence()[0] is Fence.UNKNOWN  # it lives
        target.stop()
        writer.write(target.endpoint, target.arena.address(0))
        time.sleep(0.1)  # what the writer's sockets take, they take
        writer.kill()
        target.begin_fence(writer.endpoint, patience_s=int(self.patience_s / 2) if self.fences_dead_neighbours else 1)
        target.go_on()
        fence, memory = target.end_fence()
        if fence is not Fence.QUIET:
            assert not self.fences_dead_neighbours, "a dead peer of this machine stays unfenced"
            return
        time.sleep(0.3)
        now = hashlib.sha256(target.arena.memory.data).digest()
        assert now == memory, "bytes landed after the fence had said that none will"

    def test_an_engine_that_is_quiet_when_closed_takes_no_late_write(self, stack: ExitStack) -> None:
        """A writer posts to a stopped target, which closes its engine as soon as it goes on. The writer lives on."""
        if not isinstance(self.factory()(self.options()), QuietWhenClosed):
            pytest.skip("this engine's end is no proof")
        target, writer = self.new_process(stack), self.new_process(stack)
        stack.callback(target.go_on)
        writer.arena.view(0)[:] = 0xA5
        writer.connect(target.endpoint)
        target.connect(writer.endpoint)
        target.stop()
        writer.write(target.endpoint, target.arena.address(0))
        time.sleep(0.1)  # what the writer's sockets take, they take
        target.begin_close()
        target.go_on()
        memory = target.end_close()
        time.sleep(0.3)
        now = hashlib.sha256(target.arena.memory.data).digest()
        assert now == memory, "bytes landed after the engine had been closed"

    def test_the_endpoint_of_a_dead_peer(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """Connecting, or else what is submitted, fails with an error of this library."""
        dead = self.new_process(stack)
        dead.kill()
        with suppress(BackendError):
            peer = backend.connect(dead.endpoint, epoch=1)
            transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, dead.arena, [(0, 0, 0, 0, 10)]))
            assert settle(transfer, backend, patience_s=self.patience_s) is not TransferStatus.DONE
        self.round_trip(backend, local, self.new_target(stack))


def _outside(arena: Arena) -> list[tuple[int, int]]:
    """`(address, nbytes)` that are not wholly within one region of `arena`."""
    start, size = arena.address(0), arena.sizes[0]
    stop = start + size
    return [
        (start - 1, 1),
        (start - 1, 64),
        (stop, 64),
        (stop - 63, 64),
        (stop - 1, size),
        (arena.address(1) - 10, 20),
        (start, arena.address(1) + arena.sizes[1] - start),
        (0, 64),
        (1, 64),
        (2**64 - 1, 1),
        (2**64 - 64, 64),
        (2**64 - 1, 2**64 - 1),
        (start, 2**64 - 1),
        (start + 10, 2**64 - start - 10),
        (stop - 1, 2**63),
    ]
