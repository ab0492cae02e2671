"""What a worker keeps of each transfer.

A handle refers to its tag, so the tag is a weak reference to the transfer. A cycle would wait for a collection of all
objects, which is rare in a model server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from disagg.core.leases import Lease
from disagg.requests import Receiver, Sender


@dataclass
class TransferResults:
    """Failed receives are among the finished ones. vLLM reads the fields of its `KVConnectorTransferResults`."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Send:
    """From `finished_s` on its blocks are held until this worker reports the end. `lease` is set once the send has ended: a
    copy may still read the blocks.
    """

    req_id: str
    attempt: int
    handle: Sender | None = None
    finished_s: float | None = None
    lease: Lease | None = None
    is_kept: bool = False


@dataclass(eq=False)
class Receive:
    """The last `num_tokens` of the request's first `stop` are loaded. `prompt` is the digest of those `stop`. `has_ended`: the
    server has ended the request, so how its load ends says nothing.
    """

    req_id: str
    num_tokens: int
    stop: int
    prompt: str
    handle: Receiver | None = None
    begun_s: float = field(default_factory=time.monotonic)
    has_ended: bool = False
