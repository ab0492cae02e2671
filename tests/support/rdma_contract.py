"""The contract of backends over verbs, for the test module of each engine."""

from __future__ import annotations

import multiprocessing
from typing import ClassVar

from disagg.backends.base import Backend, BackendOptions
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.testing.contract import Arena, BackendContract, BackendFactory, Target
from disagg.testing.contract.arena import SHAPES
from disagg.testing.contract.targets import StartContext
from tests.support.rdma import MTU, assert_sent, rdma_options, sent_packets

COPIED = sum(sum(shape.nbytes) for shape in SHAPES.values())


class RdmaContract(BackendContract):
    """Adds to the contract that the bytes went through the device."""

    backend_class: type[MooncakeBackend] | type[NixlBackend]
    closes_when_renewed = True
    context: ClassVar[StartContext] = multiprocessing.get_context("forkserver")

    def factory(self) -> BackendFactory:
        return self.backend_class

    def options(self) -> BackendOptions:
        return rdma_options(self.backend_class.name)

    def test_copies_exactly_the_pieces(self, backend: Backend, local: Arena, target: Target) -> None:
        since = sent_packets(backend.name)
        super().test_copies_exactly_the_pieces(backend, local, target)
        assert_sent(backend.name, COPIED // MTU, since=since)
        assert backend.transport == "rdma"
