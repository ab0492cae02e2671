"""What the connector's halves exchange, and what prefill tells decode."""

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
"""vLLM's block ids of a request, by KV cache group."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A server, as in `kv_transfer_params`. It keeps windows from a multiple of `remote_window_page` tokens on."""

    remote_engine_id: str
    remote_address: str
    remote_public_key: str | None = None
    remote_window_page: Annotated[int, msgspec.Meta(ge=1)] = 1

    @classmethod
    def parse(cls, name: str) -> Place:
        """The reverse of `str`. Raises `ValueError`."""
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
        given = {"key": self.remote_public_key} if self.remote_public_key else {}
        pages = {"window_page": self.remote_window_page} if self.remote_window_page > 1 else {}
        query = urlencode({**given, **pages})
        return f"{self.remote_engine_id}@{self.remote_address}{f'?{query}' if query else ''}"


class HandOff(Place, frozen=True, kw_only=True):
    """Where to find a request: `kv_transfer_params` of prefill's answer and of the request to decode, or their `kept` for
    one that was kept after its answer.

    `remote_num_tokens` leading tokens are handed over; without it prefill is asked at the same time, and hands over all
    prompt tokens but the last. `remote_prompt` is their digest, without the last prompt token: vLLM gives a list's prompts
    the same parameters. A kept request may be taken in part: `remote_beginnings` are joined digests.
    """

    remote_request_id: str
    remote_num_tokens: int | None = None
    remote_attempt: int = 0
    remote_prompt: str = ""
    remote_beginnings: str = ""
    remote_keep_s: float | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> HandOff | None:
        """The unused hand-off, also of MooncakeConnector's proxies. Accepts floats for integers, as in a protobuf `Struct`.
        Raises `msgspec.ValidationError` or `ValueError`.
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
        """All of `params`, or their `kept`, if it is an unused hand-off."""
        for part in (params, (params or {}).get("kept")):
            if isinstance(part, dict) and part.get("do_remote_prefill"):
                return part
        return None

    @property
    def request_id(self) -> bytes:
        return bytes.fromhex(self.remote_request_id)

    @property
    def is_kept(self) -> bool:
        return self.remote_keep_s is not None

    def params(self) -> dict[str, Any]:
        own = msgspec.structs.asdict(self)
        if not self.is_kept:
            del own["remote_beginnings"], own["remote_keep_s"]
        return {"do_remote_prefill": True, "do_remote_decode": False, **own}


def transfer_id(params: Mapping[str, Any]) -> bytes | None:
    """The id that a proxy gave a transfer: `remote_request_id`, or any text as MooncakeConnector's `transfer_id`. Raises
    `ValueError`.
    """
    if given := params.get("remote_request_id"):
        return bytes.fromhex(str(given))
    if given := params.get("transfer_id"):
        return hashlib.blake2b(str(given).encode(), digest_size=16).digest()
    return None


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
