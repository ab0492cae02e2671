"""Backend `mooncake` over verbs, against the contract. A file for each engine: files run at the same time."""

from __future__ import annotations

from disagg.backends.mooncake.backend import MooncakeBackend
from tests.support.rdma_contract import RdmaContract


class TestMooncakeRdmaContract(RdmaContract):
    backend_class = MooncakeBackend
