"""What the scheduler half and the worker halves of the connector exchange, and what prefill tells decode."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.core.rows import TokenRange

ENGINE = f"vllm {vllm.__version__}"

BlockIds = tuple[list[int], ...]
"""vLLM's block ids of a request, for each KV cache group, from the request's first block on."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A server that hands requests over, as `kv_transfer_params` name it. It keeps sliding windows from a multiple of
    `remote_window_page` tokens on.
    """

    remote_engine_id: str
    remote_address: str
    remote_public_key: str | None = None
    remote_window_page: Annotated[int, msgspec.Meta(ge=1)] = 1

    @classmethod
    def parse(cls, name: str) -> Place:
        """The place that `str` has written. Raises `ValueError` for another text."""
        engine_id, at, rest = name.rpartition("@tcp://")
        where = urlsplit(f"tcp://{rest}")
        if not at:
            raise ValueError(f"remote_engine_id: expected NAME@tcp://HOST:PORT, found {name!r:.300}")
        given = dict(parse_qsl(where.query))
        return cls(
            remote_engine_id=engine_id,
            remote_address=f"tcp://{where.netloc}",
            remote_public_key=given.get("key"),
            remote_window_page=int(given.get("window_page", 1)),
        )

    def __str__(self) -> str:
        """The place as one text, which is the `engine_id` of `Bootstrap`."""
        given = {"key": self.remote_public_key} if self.remote_public_key else {}
        pages = {"window_page": self.remote_window_page} if self.remote_window_page > 1 else {}
        query = urlencode({**given, **pages})
        return f"{self.remote_engine_id}@{self.remote_address}{f'?{query}' if query else ''}"


class HandOff(Place, frozen=True, kw_only=True):
    """Where a server finds a request that another one has: `kv_transfer_params` in prefill's answer and in the request to
    decode, or `kept` in them, of a request that was kept after its answer.

    `remote_request_id` is the id of the transfer in hexadecimal digits. `remote_num_tokens` is the number of leading tokens
    whose state is handed over. Without it prefill is asked at the same time, and will hand over all but the last one of the
    prompt. `remote_prompt` is their `prompt_digest`, without the last one of the prompt: vLLM gives the parameters of one
    prompt to every request of a list of prompts. Of a kept request a shorter beginning may be taken too: `remote_beginnings`
    are their digests, one after the other, in hexadecimal digits. It is kept for `remote_keep_s` seconds.
    """

    remote_request_id: str
    remote_num_tokens: int | None = None
    remote_attempt: int = 0
    remote_prompt: str = ""
    remote_beginnings: str = ""
    remote_keep_s: float | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> HandOff | None:
        """The hand-off in a request's `kv_transfer_params`, also those of MooncakeConnector's proxies; `None` if there is none.

        Integers may be floats, as proxies have them whose parameters were a protobuf `Struct`. Raises `msgspec.ValidationError`
        or `ValueError` if it is not complete.
        """
        part = cls.part(params)
        if part is None:
            return None
        found = dict(part)
        if "remote_bootstrap_addr" in found:
            found |= msgspec.structs.asdict(Place.parse(str(found.get("remote_engine_id"))))
            if request_id := transfer_id(found):
                found["remote_request_id"] = request_id.hex()
        hand_off = msgspec.convert(found, cls, strict=False)
        for digits in (hand_off.remote_request_id, hand_off.remote_beginnings):
            bytes.fromhex(digits)
        return hand_off

    @staticmethod
    def part(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """What of a request's `kv_transfer_params` is a hand-off that has not been used: all of them, or `kept`; `None` if
        nothing is.
        """
        for part in (params, (params or {}).get("kept")):
            if isinstance(part, dict) and part.get("do_remote_prefill"):
                return part
        return None

    @property
    def request_id(self) -> bytes:
        return bytes.fromhex(self.remote_request_id)

    @property
    def is_kept(self) -> bool:
        """Whether it is of a request that was kept."""
        return self.remote_keep_s is not None

    def params(self) -> dict[str, Any]:
        """As `kv_transfer_params` of the request to decode, or as `kept` in them."""
        own = msgspec.structs.asdict(self)
        if not self.is_kept:
            del own["remote_beginnings"], own["remote_keep_s"]
        return {"do_remote_prefill": True, "do_remote_decode": False, **own}


def transfer_id(params: Mapping[str, Any]) -> bytes | None:
    """The id that a proxy has given to a transfer, in its `kv_transfer_params`; `None` if it has given none.

    `remote_request_id` are hexadecimal digits, and the `transfer_id` of MooncakeConnector's proxies is any text. Raises
    `ValueError` for one that cannot be.
    """
    if given := params.get("remote_request_id"):
        return bytes.fromhex(str(given))
    if given := params.get("transfer_id"):
        return hashlib.blake2b(str(given).encode(), digest_size=16).digest()
    return None


@dataclass(frozen=True)
class Load:
    """Receive the tokens `[start, stop)` of a request into its blocks, of each KV cache group those of `needs`.

    `prompt` is the `prompt_digest` of the first `stop`.
    """

    req_id: str
    hand_off: HandOff
    blocks: BlockIds
    start: int
    stop: int
    needs: tuple[TokenRange, ...]
    prompt: str


@dataclass(frozen=True)
class Opening:
    """A request that will be sent: decode may wait for it already."""

    req_id: str
    request_id: bytes
    attempt: int


@dataclass(frozen=True)
class Chunk:
    """Send the tokens `[start, stop)`, which this step computes. `blocks` begin with the one that has token `start`."""

    req_id: str
    request_id: bytes
    attempt: int
    blocks: BlockIds
    start: int
    stop: int


@dataclass(frozen=True)
class Finish:
    """Send what exists only at the end of a prefill, or of a request that is kept, and then a `Payload`."""

    req_id: str
    request_id: bytes
    attempt: int
    blocks: BlockIds
    payload: bytes


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, once a step.

    `unloadable` are requests that vLLM waits for and that cannot be loaded. `wanted` are transfers that requests in the queue
    still need. `aborts` are requests that the server has ended, `given_up` ids of transfers that will not be. Of the requests
    in `held` vLLM keeps the blocks until they have been sent, and of those in `kept` the scheduler half does.
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
    """From a worker to the scheduler, when vLLM starts: the control address of its instance's leader, and whether no other
    connector sees its blocks.
    """

    engine_id: str
    address: str
    public_key: str | None
    is_alone: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: how many ranks' leases of a failed load are still held, as changes, and how many ranks
    need the blocks of a kept request no more.
    """

    leases: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The reports of two ranks as one."""
        leases, ended = Counter(self.leases), Counter(self.ended)
        leases.update(other.leases)
        ended.update(other.ended)
        return WorkerReport(leases, ended)


def share_logging() -> None:
    """Let this library's log records go where vLLM's go: vLLM configures only its own logger.

    The line that this library writes for each request appears at level DEBUG only; the connector logs failures itself.
    """
    ours, theirs = logging.getLogger("disagg"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)
        per_request = logging.getLogger("disagg.requests")
        per_request.setLevel(theirs.level if theirs.isEnabledFor(logging.DEBUG) else logging.ERROR)
