"""Hooks of a subclass, fixtures and short forms of the contract's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import pytest

from disagg.backends.base import Backend, BackendOptions, Transfer, TransferStatus
from disagg.testing.contract.arena import REGION_NBYTES, Arena, batch_of, expected_after
from disagg.testing.contract.targets import (
    SPAWN,
    BackendFactory,
    InProcessTarget,
    ProcessTarget,
    StartContext,
    Target,
    settle,
)


class ContractBase:
    """Every test may run alone; subclasses have no state."""

    separate_processes: ClassVar[bool] = True
    fences_dead_neighbours: ClassVar[bool] = False
    """Whether `fence` is to become `QUIET` after the death of a peer's process on the same host."""
    closes_when_renewed: ClassVar[bool] = False
    """Whether `fence` is to become `CLOSED` when the engine is renewed, for a peer of another host."""
    patience_s: ClassVar[float] = 60.0
    context: ClassVar[StartContext] = SPAWN
    """How peers' processes start. A fork server is quicker where imports are slow."""

    def factory(self) -> BackendFactory:
        raise NotImplementedError

    def options(self) -> BackendOptions:
        return BackendOptions()

    @pytest.fixture
    def stack(self) -> Iterator[ExitStack]:
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
        """For tests that do not harm it: starting a process takes longer than most of them."""
        with ExitStack() as stack:
            yield cls().new_target(stack)

    @pytest.fixture
    def target(self, shared_target: Target) -> Target:
        shared_target.arena.scramble(2)
        return shared_target

    def open(self, arena: Arena, stack: ExitStack) -> Backend:
        backend = self.factory()(self.options())
        stack.callback(backend.close)
        backend.register(arena.regions)
        return backend

    def new_target(self, stack: ExitStack) -> Target:
        target: Target
        if self.separate_processes:
            target = ProcessTarget(self.factory(), self.options(), patience_s=self.patience_s, context=self.context)
        else:
            target = InProcessTarget(self.factory(), self.options())
        stack.callback(target.close)
        target.arena.scramble(2)
        return target

    def new_process(self, stack: ExitStack) -> ProcessTarget:
        target = self.new_target(stack)
        if not isinstance(target, ProcessTarget):
            pytest.skip("this backend reaches no other process")
        return target

    def run(self, transfer: Transfer) -> None:
        assert settle(transfer, patience_s=self.patience_s) is TransferStatus.DONE, transfer.error
        transfer.close()

    def round_trip(self, backend: Backend, local: Arena, target: Target, *, epoch: int = 1) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=epoch)
        pieces = [(0, 5, 1, 3, 1000)]
        after = expected_after(local, target.arena, pieces)
        self.run(backend.submit(peer, batch_of(local, target.arena, pieces)))
        np.testing.assert_array_equal(target.arena.memory, after)
        backend.disconnect(peer)
