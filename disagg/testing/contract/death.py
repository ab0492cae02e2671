"""The contract, third part: what a backend may report after the death of a peer."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from disagg.backends.abilities import QuietWhenClosed
from disagg.backends.base import Backend, Fence, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendError, LocalProtocolError
from disagg.testing.contract.arena import Arena, Bytes, batch_of, expected_after
from disagg.testing.contract.base import ContractBase
from disagg.testing.contract.targets import settle


class DeathContract(ContractBase):
    def test_a_killed_peer_never_gives_missing_bytes(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """The peer is stopped, posted to, then killed: a `DONE` transfer has every byte, others are `FAILED` or `UNSETTLED`."""
        victim, survivor = self.new_process(stack), self.new_target(stack)
        peer, other = (backend.connect(t.endpoint, process=t.process, epoch=1) for t in (victim, survivor))
        pieces = [(0, i * 1000, 0, i * 1000, 1000) for i in range(1500)]
        after = expected_after(local, victim.arena, pieces)
        victim.stop()
        transfer = backend.submit(peer, batch_of(local, victim.arena, pieces))
        transfer.poll()
        victim.kill()
        status = settle(transfer, patience_s=self.patience_s)
        self._judge(status, transfer, victim.arena.memory, after)
        self._after_a_death(backend, peer, batch_of(local, victim.arena, pieces[:1]))
        self.run(backend.submit(other, batch_of(local, survivor.arena, pieces)))
        self.round_trip(backend, local, self.new_target(stack))

    def _judge(self, status: TransferStatus, transfer: Transfer, memory: Bytes, after: Bytes) -> None:
        if status is TransferStatus.DONE:
            np.testing.assert_array_equal(memory, after)
        else:
            assert transfer.error
        if status.settled:
            transfer.close()
        else:
            with suppress(LocalProtocolError):
                transfer.close()
                assert transfer.poll().settled  # it settled meanwhile

    def _after_a_death(self, backend: Backend, peer: object, batch: CopyBatch) -> None:
        try:
            again = backend.submit(peer, batch)  # type: ignore[arg-type]
        except BackendError:
            pass
        else:
            assert settle(again, patience_s=self.patience_s) is not TransferStatus.DONE
        backend.fence(peer, epoch=1)  # type: ignore[arg-type]
        backend.disconnect(peer)  # type: ignore[arg-type]

    def test_a_fence_is_quiet_only_once_nothing_more_can_land(self, stack: ExitStack) -> None:
        """A writer posts to a stopped target and is killed. Nothing may land once the target's engine reports `QUIET`."""
        target, writer = self.new_process(stack), self.new_process(stack)
        writer.arena.view(0)[:] = 0xA5
        writer.connect(target)
        target.connect(writer)
        target.begin_fence(writer.endpoint, patience_s=1)
        assert target.end_fence()[0] is Fence.UNKNOWN  # it lives
        target.stop()
        writer.write(target.endpoint, target.arena.address(0))
        time.sleep(0.1)  # let the writer's sockets take bytes
        writer.kill()
        target.begin_fence(writer.endpoint, patience_s=int(self.patience_s / 2) if self.fences_dead_neighbours else 1)
        target.go_on()
        fence, memory = target.end_fence()
        if fence is not Fence.QUIET:
            assert not self.fences_dead_neighbours, "a dead peer of this host stays unfenced"
            return
        time.sleep(0.3)
        now = hashlib.sha256(target.arena.memory.data).digest()
        assert now == memory, "bytes landed after the fence had returned QUIET"

    def test_an_engine_that_is_quiet_when_closed_takes_no_late_write(self, stack: ExitStack) -> None:
        """A writer posts to a stopped target, which closes its engine as soon as it goes on. The writer lives on."""
        backend = self.factory()(self.options())
        backend.close()
        if not isinstance(backend, QuietWhenClosed):
            pytest.skip("closing this engine is no proof")
        target, writer = self.new_process(stack), self.new_process(stack)
        writer.arena.view(0)[:] = 0xA5
        writer.connect(target)
        target.connect(writer)
        target.stop()
        writer.write(target.endpoint, target.arena.address(0))
        time.sleep(0.1)  # let the writer's sockets take bytes
        target.begin_close()
        target.go_on()
        memory = target.end_close()
        time.sleep(0.3)
        now = hashlib.sha256(target.arena.memory.data).digest()
        assert now == memory, "bytes landed after the engine had been closed"

    def test_the_endpoint_of_a_dead_peer(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """Connecting fails with an error of this library, or the transfer fails."""
        dead = self.new_process(stack)
        dead.kill()
        with suppress(BackendError):
            peer = backend.connect(dead.endpoint, process=dead.process, epoch=1)
            transfer = backend.submit(peer, batch_of(local, dead.arena, [(0, 0, 0, 0, 10)]))
            assert settle(transfer, patience_s=self.patience_s) is not TransferStatus.DONE
        self.round_trip(backend, local, self.new_target(stack))
