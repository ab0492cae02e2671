"""The contract of backends, over verbs."""

from __future__ import annotations

import pytest

from disagg.backends.base import Backend, BackendOptions, Op
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.testing.contract import Arena, BackendContract, BackendFactory, Target
from disagg.testing.contract.arena import SHAPES
from tests.support.rdma import bytes_by_rdma, rdma_options

COPIED = sum(sum(shape.nbytes) for shape in SHAPES.values())


class _RdmaContract(BackendContract):
    """Adds to the contract that the bytes went through the device."""

    backend_class: type[NixlBackend] | type[MooncakeBackend]

    def factory(self) -> BackendFactory:
        return self.backend_class

    def options(self) -> BackendOptions:
        return rdma_options(self.backend_class.name)

    @pytest.mark.parametrize("op", Op)
    def test_copies_exactly_the_pieces(self, op: Op, backend: Backend, local: Arena, target: Target) -> None:
        with bytes_by_rdma(backend.name, COPIED):
            super().test_copies_exactly_the_pieces(op, backend, local, target)
        assert backend.transport == "rdma"


@pytest.mark.xdist_group("nixl")
class TestNixlRdmaContract(_RdmaContract):
    backend_class = NixlBackend


@pytest.mark.xdist_group("mooncake")
class TestMooncakeRdmaContract(_RdmaContract):
    backend_class = MooncakeBackend
