"""What shows that it is an engine: the contract that ships with disagg. `pytest test_disagg_cma.py`."""

from __future__ import annotations

from disagg_cma import CmaBackend

from disagg.testing.contract.backend_contract import BackendContract, BackendFactory


class TestCma(BackendContract):
    fences_dead_neighbours = True

    def factory(self) -> BackendFactory:
        factory: BackendFactory = CmaBackend
        return factory
