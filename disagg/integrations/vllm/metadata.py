"""What the connector's halves exchange, and what prefill tells decode."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.core.rows import TokenRange
from disagg.integrations.handoff import HandOff

ENGINE = f"vllm {vllm.__version__}"

BlockIds = tuple[list[int], ...]
"""vLLM's block ids of a request, by KV cache group."""


@dataclass(frozen=True)
class Load:
    """Receive the tokens `[start, stop)`; of each group only `needs`. `prompt` is the digest of the first `stop`."""

    req_id: str
    hand_off: HandOff
    blocks: BlockIds
    start: int
    stop: int
    needs: tuple[TokenRange, ...]
    prompt: str


@dataclass(frozen=True)
class Opening:
    req_id: str
    request_id: bytes
    attempt: int


@dataclass(frozen=True)
class Chunk:
    """Send the tokens `[start, stop)`, which this step computes. `blocks` begin with the one of token `start`."""

    req_id: str
    request_id: bytes
    attempt: int
    blocks: BlockIds
    start: int
    stop: int


@dataclass(frozen=True)
class Finish:
    """Send what exists only at the end of a prefill or of a kept request, then a `Payload`."""

    req_id: str
    request_id: bytes
    attempt: int
    blocks: BlockIds
    payload: bytes


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, once a step. vLLM waits for `unloadable` requests. Queued requests need the
    transfers in `wanted`. The server has ended `aborts`; transfers in `given_up` will not happen. vLLM keeps the blocks of
    `held` requests until they are sent, the scheduler half those of `kept` ones.
    """

    loads: list[Load] = field(default_factory=list)
    unloadable: list[str] = field(default_factory=list)
    declines: list[HandOff] = field(default_factory=list)
    wanted: list[HandOff] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    given_up: list[bytes] = field(default_factory=list)
    idle: bool = False


@dataclass(frozen=True)
class RankAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker at start: its instance's address, and whether no other connector sees its blocks."""

    engine_id: str
    address: str
    public_key: str | None
    is_alone: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Changes in how many ranks hold a failed load's lease, and how many no longer need a kept request's blocks."""

    leases: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        leases, ended = Counter(self.leases), Counter(self.ended)
        leases.update(other.leases)
        ended.update(other.ended)
        return WorkerReport(leases, ended)


def share_logging() -> None:
    """Send log records where vLLM's go. The line for each request appears only at level DEBUG."""
    ours, theirs = logging.getLogger("disagg"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)
        per_request = logging.getLogger("disagg.requests")
        per_request.setLevel(theirs.level if theirs.isEnabledFor(logging.DEBUG) else logging.ERROR)
