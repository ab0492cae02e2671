"""The contract, first part: which bytes are copied, and which addresses are refused."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from disagg.backends.base import Backend, TransferStatus
from disagg.core.errors import LocalProtocolError, NotRegistered
from disagg.core.memory import MemoryRegion
from disagg.testing.contract.arena import SHAPES, Arena, Piece, batch, batch_of, expected_after, outside, random_pieces
from disagg.testing.contract.base import ContractBase
from disagg.testing.contract.targets import Target


class CopyingContract(ContractBase):
    def test_copies_exactly_the_pieces(self, backend: Backend, local: Arena, target: Target) -> None:
        """Compares every byte of both sides, guards included."""
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        for seed, (name, shape) in enumerate(SHAPES.items()):
            local.scramble(2 * seed + 10)
            target.arena.scramble(2 * seed + 11)
            pieces = random_pieces(random.Random(seed), nbytes=shape.nbytes, gap=shape.gap)
            before, after = local.memory.copy(), expected_after(local, target.arena, pieces)
            self.run(backend.submit(peer, batch_of(local, target.arena, pieces)))
            np.testing.assert_array_equal(target.arena.memory, after, err_msg=name)
            np.testing.assert_array_equal(local.memory, before, err_msg=name)

    def test_an_empty_batch_is_done_at_once(self, backend: Backend, target: Target) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        transfer = backend.submit(peer, batch([], [], []))
        assert transfer.poll() is TransferStatus.DONE
        transfer.close()

    def test_regions_that_touch_or_overlap_are_one(self, local: Arena, target: Target, stack: ExitStack) -> None:
        backend = self.factory()(self.options())
        stack.callback(backend.close)
        start, nbytes = local.address(0), local.sizes[0]
        parts = [(0, 1000), (1000, 5000), (3000, 10_000), (4000, 10), (13_000, nbytes - 13_000)]
        backend.register([MemoryRegion(start + offset, size) for offset, size in parts])
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        pieces = [(0, 0, 0, 0, nbytes)]
        after = expected_after(local, target.arena, pieces)
        self.run(backend.submit(peer, batch_of(local, target.arena, pieces)))
        np.testing.assert_array_equal(target.arena.memory, after)

    def test_several_threads_submit(self, backend: Backend, local: Arena, target: Target) -> None:
        """Four threads write stripes of the same regions at the same time, three batches each."""
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        stripes = [[(0, i * 300, 0, i * 300, 300) for i in range(1200) if i % 12 == s] for s in range(12)]
        after = expected_after(local, target.arena, [piece for stripe in stripes for piece in stripe])
        failures: list[BaseException] = []

        def work(mine: list[list[Piece]]) -> None:
            try:
                for pieces in mine:
                    self.run(backend.submit(peer, batch_of(local, target.arena, pieces)))
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
        peers = [backend.connect(target.endpoint, process=target.process, epoch=1) for target in targets]
        batches = [random_pieces(random.Random(i), nbytes=(1000,) * 200, gap=50) for i in range(2)]
        after = [expected_after(local, t.arena, b) for t, b in zip(targets, batches, strict=True)]
        transfers = [
            backend.submit(peer, batch_of(local, target.arena, pieces))
            for peer, target, pieces in zip(peers, targets, batches, strict=True)
        ]
        for transfer in transfers:
            self.run(transfer)
        for target, memory in zip(targets, after, strict=True):
            np.testing.assert_array_equal(target.arena.memory, memory)

    def test_addresses_outside_the_regions_are_refused(self, backend: Backend, local: Arena, target: Target) -> None:
        """The whole batch is refused, with the good pieces around the bad one."""
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        good = (0, 0, 0, 0, 64)
        images = local.memory.copy(), target.arena.memory.copy()
        for arena, column in ((local, 0), (target.arena, 1)):
            for bad in outside(arena):
                rows = [[local.address(0), target.arena.address(0), 64] for _ in range(3)]
                rows[1][column], rows[1][2] = bad
                rows[2][0], rows[2][1] = rows[2][0] + 100, rows[2][1] + 100
                here, there, nbytes = zip(*rows, strict=True)
                with pytest.raises(NotRegistered):
                    backend.submit(peer, batch(here, there, nbytes))
        # Anything posted before this transfer has had time to arrive.
        self.run(backend.submit(peer, batch_of(local, target.arena, [good])))
        at = target.arena.offsets[0]
        images[1][at : at + 64] = local.view(0)[:64]
        np.testing.assert_array_equal(local.memory, images[0])
        np.testing.assert_array_equal(target.arena.memory, images[1])

    def test_register_is_called_once(self, backend: Backend, local: Arena) -> None:
        with pytest.raises(LocalProtocolError):
            backend.register(local.regions)
