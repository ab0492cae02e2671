"""Runs the contract that ships with disagg: `pytest test_disagg_procmem.py`."""

from __future__ import annotations

from disagg_procmem import ProcmemBackend

from disagg.testing.contract import BackendContract, BackendFactory


class TestProcmem(BackendContract):
    fences_dead_neighbours = True

    def factory(self) -> BackendFactory:
        factory: BackendFactory = ProcmemBackend
        return factory
