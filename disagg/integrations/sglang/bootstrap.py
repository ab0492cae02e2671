"""Prefill instances, as bootstrap servers and requests name them.

Clients choose the bootstrap server of a request. Threads ask it, so that no step of the scheduler waits for the network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import requests
from sglang.srt.disaggregation.common.conn import PrefillServerInfo

from disagg.core.address import bracketed, dialable
from disagg.core.errors import PeerUnreachable

TIMEOUT_S = 5.0
"""How long a server may take to answer."""
WAIT_S = 0.05
"""How long a step of the scheduler waits for an answer. Most servers answer within milliseconds."""
PAUSE = 10
"""After it has waited for some time, this many times as long passes until a step waits again."""
NUM_THREADS = 16
MAX_NBYTES = 1 << 16
"""Maximum size of an answer."""
MAX_GROUPS = 1024
MAX_ASKED = 256
"""How many servers may be asked before answers that nobody came back for are forgotten."""


@dataclass(frozen=True)
class Prefill:
    """A prefill instance as decode finds it. `group` is the data-parallel group of a request."""

    name: str
    address: str
    group: int


@dataclass(frozen=True)
class Served:
    """What a bootstrap server serves: SGLang's description, and where requests of each data-parallel rank go."""

    info: Any
    prefills: Mapping[int, Prefill]
    asked_s: float = field(default_factory=time.monotonic)


class BootstrapServers:
    """The bootstrap servers that are being asked."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="disagg-bootstrap")
        self._asked: dict[str, Future[Served]] = {}
        self._wait_at = 0.0

    def close(self) -> None:
        """End the threads that wait for no answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, server: str) -> None:
        """Ask a server, unless it is being asked. `answers` has what it says, perhaps at once."""
        if server in self._asked:
            return
        if len(self._asked) >= MAX_ASKED:
            self.forget_answers()
        answer = self._asked[server] = self._threads.submit(_fetch, server)
        began = time.monotonic()
        if began >= self._wait_at:
            wait([answer], WAIT_S)
            self._wait_at = began + (PAUSE + 1) * (time.monotonic() - began)

    def answers(self) -> Iterator[tuple[str, Served | PeerUnreachable]]:
        """The servers that have answered since the last call, and what they serve, or why they name no instance."""
        for server in [server for server, answer in self._asked.items() if answer.done()]:
            answer = self._asked.pop(server)
            try:
                yield server, answer.result()
            except PeerUnreachable as error:
                yield server, error

    def forget_answers(self) -> None:
        """Drop the answers that nobody has come for."""
        self._asked = {server: answer for server, answer in self._asked.items() if not answer.done()}


def _fetch(server: str) -> Served:
    try:
        with requests.Session() as session:
            info = PrefillServerInfo(**_get(session, server, -1, -1, -1, -1))
            rows = [_get(session, server, dp_rank, 0, 0, 0) for dp_rank in range(min(info.dp_size, MAX_GROUPS))]
        addresses = [dialable(control_address(row["rank_ip"], row["rank_port"]), what="rank_ip") for row in rows]
    except Exception as error:  # whatever the server's answer leads to
        raise PeerUnreachable(f"bootstrap server {server} does not name a prefill instance: {error}") from error
    # Attention data parallelism: groups of one instance. SGLang's other kind: an instance for each rank.
    groups = [rank if address == addresses[0] else 0 for rank, address in enumerate(addresses)]
    found = (Prefill(name_of(address), address, group) for address, group in zip(addresses, groups, strict=True))
    return Served(info, dict(enumerate(found)))


def _get(session: requests.Session, server: str, dp_rank: int, cp_rank: int, tp_rank: int, pp_rank: int) -> dict[str, Any]:
    """The answer for one rank, or for the instance if all are -1."""
    asked = {
        "prefill_dp_rank": dp_rank,
        "prefill_cp_rank": cp_rank,
        "target_tp_rank": tp_rank,
        "target_pp_rank": pp_rank,
    }
    with session.get(f"http://{server}/route", params=asked, timeout=TIMEOUT_S, stream=True, allow_redirects=False) as answer:
        text = answer.raw.read(MAX_NBYTES, decode_content=True)
        if answer.status_code != 200:
            raise ValueError(f"HTTP {answer.status_code} {text[:200].decode(errors='replace')}")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, found {type(found).__name__}")
    return found


def named(server: str) -> Prefill | None:
    """The instance in a `bootstrap_host` of the form `NAME@HOST`: another server, whose control address is given."""
    name, at, address = server.rpartition("@")
    host, _, port = address.rpartition(":")
    return Prefill(name, control_address(host, port), 0) if at else None


def control_address(host: str, port: int | str) -> str:
    """`tcp://host:port`. SGLang writes IPv6 addresses with and without brackets."""
    return f"tcp://{bracketed(host.strip('[]'))}:{port}"


def name_of(address: str) -> str:
    """The name of the instance whose rank 0 has this control address."""
    return address.removeprefix("tcp://")
