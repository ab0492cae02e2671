"""Backend `nixl` over verbs, against the contract. A file for each engine: files run at the same time."""

from __future__ import annotations

import pytest

from disagg.backends.nixl.backend import NixlBackend
from tests.support.rdma_contract import RdmaContract


class TestNixlRdmaContract(RdmaContract):
    backend_class = NixlBackend

    @pytest.fixture(autouse=True)
    @staticmethod
    def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
        """Peers' processes are of another machine than this one."""
        monkeypatch.setattr("disagg.backends.nixl.backend.machine_identity", lambda: "another")
