"""Injected faults: a backend around a real one, and a control channel around a manager's own.

Both are seeded: the same seed and the same order of calls give the same faults. Threads and processes may change that order.
A server's tests can use them as the tests of this library do::

    faults = BackendFaults(seed=1, fail=0.01, delay=0.2, delay_s=(0.0, 0.05))
    manager = KVManager(..., backend=inject("nixl", faults))
    mistreat(manager, MessageFaults(seed=2, lose=0.05, double=0.05, delay=0.2))

Real engines may have the faults `FAIL`, `DELAY`, `UNSETTLE` and `KILL`, and networks every fault of messages: requests must
survive these. No engine may have the others, which are false reports: `LOSE`, `DOUBLE`, `LATE` and `fencing=False`. With
these, bytes are wrong; a test that finds none then checks nothing.
"""

from disagg.testing.backend_faults import BackendFaults, FaultyBackend, FaultyTransfer, TransferFault, inject
from disagg.testing.message_faults import FaultyChannel, MessageFaults, mistreat

__all__ = [
    "BackendFaults",
    "FaultyBackend",
    "FaultyChannel",
    "FaultyTransfer",
    "MessageFaults",
    "TransferFault",
    "inject",
    "mistreat",
]
