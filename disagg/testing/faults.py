"""Injected faults: a backend around a real one, and a control channel around a manager's own.

Both are seeded: the same seed and order of calls give the same faults. A server's tests can use them::

    faults = BackendFaults(seed=1, fail=0.01, delay=0.2, delay_s=(0.0, 0.05))
    manager = KVManager(..., backend=inject("nixl", faults))
    mistreat(manager, MessageFaults(seed=2, lose=0.05, double=0.05, delay=0.2))

Requests must survive `FAIL`, `DELAY`, `UNSETTLE`, `KILL` and every fault of messages. The others are false reports, which no
engine may make. With them bytes are wrong; a test that finds none wrong checks nothing.
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
