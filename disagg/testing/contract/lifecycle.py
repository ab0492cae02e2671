"""The contract, second part: endpoints, and the life cycles of transfers, peers and engines."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from disagg.backends.abilities import Renewable
from disagg.backends.base import Backend, Fence, TransferStatus
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core.errors import DisaggError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.machine.processes import IdentitySocket
from disagg.testing.contract.arena import REGION_NBYTES, Arena, batch_of
from disagg.testing.contract.base import ContractBase
from disagg.testing.contract.targets import Address, ProcessTarget, Target, initiate, settle


class LifecycleContract(ContractBase):
    def test_malformed_endpoints_are_refused(self, backend: Backend, local: Arena, target: Target) -> None:
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
                backend.connect(endpoint, process=target.process, epoch=1)
        self.round_trip(backend, local, target)

    def test_a_settled_transfer_stays_settled(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        transfer = backend.submit(peer, batch_of(local, target.arena, [(0, 0, 0, 0, 1000)]))
        assert settle(transfer, patience_s=self.patience_s) is TransferStatus.DONE
        assert [transfer.poll() for _ in range(5)] == [TransferStatus.DONE] * 5
        assert transfer.error is None
        transfer.close()
        transfer.close()
        assert transfer.poll() is TransferStatus.DONE

    def test_only_a_settled_transfer_closes(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """The peer's process is stopped, so that an engine that needs it cannot finish."""
        target = self.new_target(stack)
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        if isinstance(target, ProcessTarget):
            target.stop()
        pieces = [(0, 0, 0, 0, REGION_NBYTES[0])]
        transfer = backend.submit(peer, batch_of(local, target.arena, pieces))
        if not transfer.poll().settled:
            # It may settle in between.
            with suppress(LocalProtocolError):
                transfer.close()
                assert transfer.poll().settled
        if isinstance(target, ProcessTarget):
            target.go_on()
        if settle(transfer, patience_s=self.patience_s).settled:
            transfer.close()

    def test_a_disconnected_peer_is_unreachable(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        backend.disconnect(peer)
        backend.disconnect(peer)
        with pytest.raises(PeerUnreachable):
            backend.submit(peer, batch_of(local, target.arena, [(0, 0, 0, 0, 10)]))

    @pytest.mark.parametrize("overlapping", [False, True])
    def test_connecting_anew_for_another_epoch(self, overlapping: bool, backend: Backend, local: Arena, target: Target) -> None:
        """The old peer is disconnected before or after the new one connects, and does not disturb it."""
        old = backend.connect(target.endpoint, process=target.process, epoch=1)
        batch = batch_of(local, target.arena, [(0, 0, 0, 0, 10)])
        if not overlapping:
            backend.disconnect(old)
        new = backend.connect(target.endpoint, process=target.process, epoch=2)
        if overlapping:
            backend.disconnect(old)
        with pytest.raises(PeerUnreachable):
            backend.submit(old, batch)
        self.run(backend.submit(new, batch))

    def test_a_fence_of_an_idle_peer_is_no_error(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        self.run(backend.submit(peer, batch_of(local, target.arena, [(0, 0, 0, 0, 10)])))
        assert backend.fence(peer, epoch=1) in Fence
        assert backend.fence(peer, epoch=2) is Fence.UNKNOWN
        backend.disconnect(peer)
        assert backend.fence(peer, epoch=1) in Fence

    def test_a_renewed_engine_serves_and_reaches_peers_anew(self, backend: Backend, local: Arena, target: Target) -> None:
        if not isinstance(backend, Renewable):
            pytest.skip("this engine cannot be started again")
        piece = [(0, 0, 0, 0, 10)]
        old, endpoint = backend.connect(target.endpoint, process=target.process, epoch=1), backend.endpoint()
        self.run(backend.submit(old, batch_of(local, target.arena, piece)))
        assert not backend.is_renewed(old)
        assert not backend.reads_no_more(old)
        for _ in range(2):
            backend.renew()
            if backend.is_renewed(old):
                assert backend.endpoint() != endpoint
            assert backend.is_renewed(old) or not backend.reads_no_more(old)
            with suppress(PeerUnreachable):  # another engine of several may still reach it
                self.run(backend.submit(old, batch_of(local, target.arena, piece)))
            self.round_trip(backend, local, target, epoch=2)
        backend.disconnect(old)
        assert backend.fence(old, epoch=1) in Fence

    def test_a_renewed_engine_gives_up_what_was_under_way(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        if not isinstance(backend, Renewable):
            pytest.skip("this engine cannot be started again")
        target = self.new_process(stack)
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        target.stop()
        transfer = backend.submit(peer, batch_of(local, target.arena, [(0, 0, 0, 0, REGION_NBYTES[0])]))
        transfer.poll()
        backend.renew()
        status = transfer.poll()
        assert status is not TransferStatus.PENDING
        if status is TransferStatus.DONE:  # by an engine that needs nothing of the peer's process
            np.testing.assert_array_equal(target.arena.view(0), local.view(0))
        target.go_on()
        self.round_trip(backend, local, self.new_target(stack))

    def test_a_writer_that_goes_on_writes_nothing_to_a_renewed_engine(
        self, backend: Backend, local: Arena, stack: ExitStack
    ) -> None:
        """A stopped peer, whose process the kernel does not attest, knows nothing of the renewal."""
        if not (self.closes_when_renewed and isinstance(backend, Renewable)):
            pytest.skip("this engine's end proves nothing")
        writer = self.new_process(stack)
        identity = stack.enter_context(closing(IdentitySocket()))
        peer, own = backend.connect(writer.endpoint, epoch=1), backend.endpoint()
        writer.arena.view(0)[:] = 0xA5
        writer.connect(Address(own, identity.name))
        writer.write(own, local.address(0))
        deadline = time.monotonic() + self.patience_s
        while (local.view(0) != 0xA5).any():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
        writer.stop()
        backend.renew()
        assert backend.fence(peer, epoch=1) is Fence.CLOSED
        local.view(0)[:] = 1
        writer.go_on()
        writer.write(own, local.address(0))
        writer.begin_close()
        writer.end_close()
        assert (local.view(0) == 1).all(), "bytes have landed"

    def test_closing_twice(self, backend: Backend, local: Arena, target: Target) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        backend.close()
        backend.close()
        with pytest.raises(DisaggError):
            backend.submit(peer, batch_of(local, target.arena, [(0, 0, 0, 0, 10)]))
        with pytest.raises(DisaggError):
            backend.connect(target.endpoint, process=target.process, epoch=2)

    def test_closing_with_nothing_registered(self) -> None:
        backend = self.factory()(self.options())
        assert backend.transport
        backend.close()

    @pytest.mark.parametrize("orderly", [True, False])
    def test_the_process_ends_with_status_0(self, orderly: bool, target: Target) -> None:
        """Whether or not it closed the engine."""
        if not isinstance(target, ProcessTarget):
            pytest.skip("this backend reaches no other process")
        remote = target.arena.regions[0].address, 5000
        process = self.context.Process(
            target=initiate, args=(self.factory(), self.options(), (target.endpoint, target.identity), remote, orderly)
        )
        process.start()
        process.join(self.patience_s)
        assert process.exitcode == 0
        assert (target.arena.view(0)[:5000] == 0xA5).all()
