"""The test class that every backend must pass.

A backend's test module has one subclass::

    class TestMyBackend(BackendContract):
        def factory(self) -> BackendFactory:
            return MyBackend        # picklable: a target process imports it by name

        def options(self) -> BackendOptions:
            return BackendOptions(host="127.0.0.1")

The *initiator* is the pytest process. *Targets* are processes of their own (`separate_processes = False`: engines of the
pytest process). The test maps a target's memory too, so it can compare raw bytes whatever state the target is in.

No test asserts a duration: `patience_s` only bounds a hang.
"""

from disagg.testing.contract.arena import REGION_NBYTES, Arena, Piece, batch_of, expected_after, random_pieces
from disagg.testing.contract.copying import CopyingContract
from disagg.testing.contract.death import DeathContract
from disagg.testing.contract.lifecycle import LifecycleContract
from disagg.testing.contract.targets import BackendFactory, InProcessTarget, ProcessTarget, Target, settle


class BackendContract(CopyingContract, LifecycleContract, DeathContract):
    """Every test of the contract; see the module for how to use it."""


__all__ = [
    "REGION_NBYTES",
    "Arena",
    "BackendContract",
    "BackendFactory",
    "CopyingContract",
    "DeathContract",
    "InProcessTarget",
    "LifecycleContract",
    "Piece",
    "ProcessTarget",
    "Target",
    "batch_of",
    "expected_after",
    "random_pieces",
    "settle",
]
