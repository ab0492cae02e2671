"""Backend `nixl` over verbs, against the contract. A file for each engine: files run at the same time."""

from __future__ import annotations

from disagg.backends.nixl.backend import NixlBackend
from tests.support.rdma_contract import RdmaContract


class TestNixlRdmaContract(RdmaContract):
    backend_class = NixlBackend
