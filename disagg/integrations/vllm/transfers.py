"""What a worker keeps of each transfer.

The tag of a transfer is a weak reference to it: its handle has the tag. A cycle would stay until Python looks through all
objects of the process, which it does once in thousands of requests where a model server has millions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from disagg.core.leases import Lease
from disagg.requests import Receiver, Sender


@dataclass
class TransferResults:
    """The requests whose transfers have ended. Failed receives are among the finished ones.

    vLLM reads the fields of its own `KVConnectorTransferResults`.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Send:
    """A request that this worker sends. From `finished_s` on vLLM keeps its blocks until this worker reports the end; of one
    that `is_kept` the scheduler half does. `lease` is that of a send that has ended: a copy may still read the blocks.
    """

    req_id: str
    attempt: int
    handle: Sender | None = None
    finished_s: float | None = None
    lease: Lease | None = None
    is_kept: bool = False


@dataclass(eq=False)
class Receive:
    """A request of which this worker loads `num_tokens` tokens, the last of its first `stop`. `prompt` is the digest of these.
    The server may have ended it meanwhile.
    """

    req_id: str
    num_tokens: int
    stop: int
    prompt: str
    handle: Receiver | None = None
    is_aborted: bool = False
    begun_s: float = field(default_factory=time.monotonic)
