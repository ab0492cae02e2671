"""Prefill instances, as bootstrap servers and requests name them.

Clients choose the bootstrap server of a request. Threads ask it, so that no step of the scheduler waits for the network.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

from sglang.srt.disaggregation.common.conn import PrefillServerInfo

from disagg.core.address import bracketed, dialable
from disagg.core.errors import PeerUnreachable

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""How long a server may take for all answers of one lookup."""
WAIT_S = 0.05
"""How long a step of the scheduler waits for an answer. Most servers answer within milliseconds."""
PAUSE = 10
"""After it has waited for some time, this many times as long passes until a step waits again."""
NUM_THREADS = 16
"""How many servers are asked at a time, of those that have answered before, and as many of those that have not."""
MAX_NBYTES = 1 << 16
"""Maximum size of an answer."""
MAX_GROUPS = 1024
MAX_ASKED = 256
"""How many servers may be asked before answers that nobody came back for are forgotten, and others are not asked."""
NO_RANK = -1
"""The data-parallel rank of a room whose server gives none. No instance has it, so the request fails."""


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
    """The bootstrap servers that are being asked. `current` are those of this process, if it moves state with this backend."""

    current: ClassVar[BootstrapServers | None] = None

    def __init__(self) -> None:
        self._known = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="disagg-bootstrap")
        self._unknown = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="disagg-bootstrap-new")
        self._asked: dict[str, Future[Served]] = {}
        self._asked_ranks: dict[str, Future[dict[str, int]]] = {}
        self._wait_at = 0.0

    def close(self) -> None:
        """End the threads that wait for no answer."""
        for threads in (self._known, self._unknown):
            threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, server: str, *, is_known: bool = False) -> None:
        """Ask a server, unless it is being asked. `answers` has what it says, perhaps at once.

        Those that have answered before, which `is_known` says, do not wait for threads that others keep busy.
        """
        if server in self._asked:
            return
        if len(self._asked) >= MAX_ASKED:
            self.forget_answers()
        if is_known or len(self._asked) < MAX_ASKED:
            threads = self._known if is_known else self._unknown
            answer = self._asked[server] = threads.submit(_fetch, server)
            self._wait(answer)

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
        self._asked_ranks = {server: answer for server, answer in self._asked_ranks.items() if not answer.done()}

    def room_ranks(self, server: str, rooms: Sequence[int]) -> dict[str, int]:
        """The data-parallel ranks of rooms, as far as a known server has told them: ask again for the others. If it gives no
        ranks at all, each room has `NO_RANK`.
        """
        answer = self._asked_ranks.get(server)
        if answer is None:
            answer = self._asked_ranks[server] = self._known.submit(_fetch_ranks, server, list(rooms))
            self._wait(answer)
        if not answer.done():
            return {}
        del self._asked_ranks[server]
        try:
            return answer.result()
        except PeerUnreachable as error:
            logger.warning("%s", error)
            return dict.fromkeys(map(str, rooms), NO_RANK)

    def _wait(self, answer: Future[Any]) -> None:
        began = time.monotonic()
        if began >= self._wait_at:
            wait([answer], WAIT_S)
            self._wait_at = began + (PAUSE + 1) * (time.monotonic() - began)


def _fetch(server: str) -> Served:
    try:
        with closing(_Connection(server)) as connection:
            info = PrefillServerInfo(**_route(connection, -1, -1, -1, -1))
            _check_rank("dp_size - 1", info.dp_size - 1)
            rows = [_route(connection, dp_rank, 0, 0, 0) for dp_rank in range(info.dp_size)]
        addresses = [dialable(control_address(row["rank_ip"], row["rank_port"]), what="rank_ip") for row in rows]
    except Exception as error:  # whatever the server's answer leads to
        raise PeerUnreachable(f"bootstrap server {server} does not name a prefill instance: {error}") from error
    # Attention data parallelism: groups of one instance. SGLang's other kind: an instance for each rank.
    groups = [rank if address == addresses[0] else 0 for rank, address in enumerate(addresses)]
    found = (Prefill(name_of(address), address, group) for address, group in zip(addresses, groups, strict=True))
    return Served(info, dict(enumerate(found)))


def _route(connection: _Connection, dp_rank: int, cp_rank: int, tp_rank: int, pp_rank: int) -> dict[str, Any]:
    """The answer for one rank, or for the instance if all are -1."""
    asked = {
        "prefill_dp_rank": dp_rank,
        "prefill_cp_rank": cp_rank,
        "target_tp_rank": tp_rank,
        "target_pp_rank": pp_rank,
    }
    return connection.ask("GET", f"/route?{urlencode(asked)}")


def _fetch_ranks(server: str, rooms: list[int]) -> dict[str, int]:
    """The data-parallel ranks of rooms. Prefill has perhaps not heard of all of them yet."""
    try:
        with closing(_Connection(server)) as connection:
            found = connection.ask("POST", "/query_dp_ranks", {"bootstrap_rooms": rooms})
        ranks = {str(room): found[str(room)] for room in rooms if str(room) in found}
        for room, rank in ranks.items():
            _check_rank(f"data-parallel rank of room {room}", rank)
    except Exception as error:  # whatever the server's answer leads to
        raise PeerUnreachable(f"bootstrap server {server} does not give the ranks of rooms: {error}") from error
    return ranks


def _check_rank(what: str, rank: Any) -> None:
    if type(rank) is not int or not 0 <= rank < MAX_GROUPS:
        raise ValueError(f"{what}: expected 0 to {MAX_GROUPS - 1}, found {rank!r:.80}")


class _Connection(http.client.HTTPConnection):
    """A connection to a bootstrap server, with one time limit for everything that is asked."""

    def __init__(self, server: str) -> None:
        found = urlsplit(f"http://{server}")
        if not found.hostname or not found.port:
            raise ValueError(f"expected HOST:PORT, found {server!r:.80}")
        super().__init__(found.hostname, found.port)
        self._until = time.monotonic() + TIMEOUT_S

    def connect(self) -> None:
        """Also called for the next question, if the server has closed the connection."""
        places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(places, 1):
            connection = _Socket(family, kind, protocol)
            connection.until = self._until
            try:
                connection.limit()
                connection.connect(address)
            except OSError:
                connection.close()
                if number == len(places) or time.monotonic() >= self._until:
                    raise
            else:
                self.sock = connection
                return

    def ask(self, method: str, target: str, body: Any = None) -> dict[str, Any]:
        self.request(method, target, None if body is None else json.dumps(body))
        answer = self.getresponse()
        text = answer.read(MAX_NBYTES)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status} {text[:200].decode(errors='replace')}")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(f"expected a JSON object, found {type(found).__name__}")
        return found


class _Socket(socket.socket):
    """Waits until a time, however many bytes come one by one."""

    until: float

    def limit(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def recv_into(self, *given: Any, **named: Any) -> int:
        self.limit()
        return super().recv_into(*given, **named)


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
