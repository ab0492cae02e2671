"""Prefill instances, as bootstrap servers and requests name them. Clients choose a request's bootstrap server, so a thread
asks it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, ClassVar, TypeVar

import aiohttp
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.environ import envs

from disagg.core.address import bracketed, dialable
from disagg.core.errors import PeerUnreachable

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Fetch = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Answer]]

TIMEOUT_S = 5.0
"""The time for all answers of one lookup."""
WAIT_S = 0.05
"""How long the scheduler waits for an answer. Most servers answer within milliseconds."""
PAUSE = 10
"""After a wait the scheduler does not wait again for so many times as long."""
ASK_RANKS_AGAIN_S, MAX_ASK_RANKS_AGAIN_S = 0.01, 0.5
"""The pause before a server is asked for the same rooms again. It doubles until the server gives a rank."""
MAX_MISSES = 3
"""An instance counts as gone, and rooms get no rank, after so many failed lookups."""
TELL_AGAIN_S = (0.1, 0.5, 2.0, 5.0)
"""The pauses before a server that failed is told a room's rank again."""
FORGET_S = 10.0
"""After this time without a question, a room counts as another request's."""
MAX_NBYTES = 1 << 16
MAX_GROUPS = 1024
MAX_ASKED = 256
"""At this number of servers, answers that nobody took are dropped; if that is not enough, new servers are not asked."""
MAX_TOLD = 4096
"""At this number of ranks, more are not told, so decode does not find those requests."""
NO_RANK = -1
"""The rank of a room whose server gives none. No instance has it, so the request fails."""


@dataclass(frozen=True)
class Prefill:
    name: str
    address: str
    group: int


@dataclass(frozen=True)
class Served:
    """What a bootstrap server serves. `prefills` are the instances by data-parallel rank."""

    info: Any
    prefills: Mapping[int, Prefill]
    asked_s: float = field(default_factory=time.monotonic)


@dataclass
class Question:
    rooms: frozenset[int]
    pause_s: float = 0.0
    again_s: float = 0.0
    misses: int = 0


class BootstrapServers:
    """`current` are this process's, if it uses this backend."""

    current: ClassVar[BootstrapServers | None] = None

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="disagg-bootstrap", daemon=True).start()
        self._asked: dict[str, Future[Served]] = {}
        self._asked_ranks: dict[str, Future[dict[str, int]]] = {}
        self._questions: dict[str, Question] = {}
        self._since: dict[str, tuple[float, dict[int, float]]] = {}
        self._connector = aiohttp.TCPConnector(limit=0, loop=self._loop)  # keeps connections
        self._told: set[Future[None]] = set()
        self._wait_at = 0.0

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        await self._connector.close()
        self._loop.stop()

    def ask(self, server: str, *, is_known: bool = False) -> None:
        """Ask a server, unless it is being asked. One that has answered before (`is_known`) is asked even if there are too
        many.
        """
        if server in self._asked:
            return
        if len(self._asked) >= MAX_ASKED:
            self.forget_answers()
        if is_known or len(self._asked) < MAX_ASKED:
            self._asked[server] = self._start(_fetch, server, "does not name a prefill instance")

    def answers(self) -> Iterator[tuple[str, Served | PeerUnreachable]]:
        for server in [server for server, answer in self._asked.items() if answer.done()]:
            answer = self._asked.pop(server)
            try:
                yield server, answer.result()
            except PeerUnreachable as error:
                yield server, error

    def forget_answers(self) -> None:
        self._asked = {server: answer for server, answer in self._asked.items() if not answer.done()}
        self._asked_ranks = {server: answer for server, answer in self._asked_ranks.items() if not answer.done()}

    def room_ranks(self, server: str, rooms: Sequence[int]) -> dict[str, int]:
        """The data-parallel ranks of rooms, as far as the server has told them. Ask in each step, for all rooms that are
        still wanted. If the server fails `MAX_MISSES` times, each room gets `NO_RANK`, and so does one of which it has not
        heard after SGLang's `SGLANG_DISAGGREGATION_WAITING_TIMEOUT`.
        """
        answer = self._asked_ranks.get(server)
        if answer is None:
            if not self._may_ask(server, rooms):
                return self._late(server, rooms)
            fetch = partial(_fetch_ranks, rooms=list(rooms))
            problem = "does not give the ranks of rooms"
            answer = self._asked_ranks[server] = self._start(fetch, server, problem, connector=self._connector)
        if not answer.done():
            return {}
        del self._asked_ranks[server]
        question = self._questions.setdefault(server, Question(frozenset(rooms)))
        try:
            found = answer.result()
            question.misses = 0
        except PeerUnreachable as error:
            logger.warning("%s", error)
            question.misses += 1
            found = dict.fromkeys(map(str, rooms), NO_RANK) if question.misses == MAX_MISSES else {}
        if found:
            self._questions.pop(server, None)
        return self._late(server, rooms) | found

    def _late(self, server: str, rooms: Sequence[int]) -> dict[str, int]:
        if server not in self._since and len(self._since) >= MAX_ASKED:
            self._since.clear()
        now = time.monotonic()
        last, asked = self._since.get(server, (now, {}))
        since = {room: now if now - last > FORGET_S else asked.get(room, now) for room in rooms}
        self._since[server] = now, since
        begun = now - envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        return {str(room): NO_RANK for room in rooms if since[room] < begun}

    def _may_ask(self, server: str, rooms: Sequence[int]) -> bool:
        question, now = self._questions.get(server), time.monotonic()
        if question is None or not question.rooms.issuperset(rooms):
            if len(self._questions) >= MAX_ASKED:
                self._questions.clear()
            misses = 0 if question is None else question.misses
            question = self._questions[server] = Question(frozenset(rooms), misses=misses)
        elif now < question.again_s:
            return False
        question.pause_s = min(2 * question.pause_s or ASK_RANKS_AGAIN_S, MAX_ASK_RANKS_AGAIN_S)
        question.again_s = now + question.pause_s
        return True

    def tell_rank(self, server: str, room: int, rank: int) -> None:
        """Tell a server a room's data-parallel rank. Does not wait: decode asks until the server knows."""
        if len(self._told) >= MAX_TOLD:
            logger.warning("bootstrap server %s is not told the rank of room %s: others take too long", server, room)
            return
        told = asyncio.run_coroutine_threadsafe(_tell_rank(server, room, rank), self._loop)
        self._told.add(told)
        told.add_done_callback(self._told.discard)

    def _start(
        self, fetch: Fetch[Answer], server: str, problem: str, *, connector: aiohttp.BaseConnector | None = None
    ) -> Future[Answer]:
        answer = asyncio.run_coroutine_threadsafe(_limited(fetch, server, problem, connector), self._loop)
        began = time.monotonic()
        if began >= self._wait_at:
            wait([answer], WAIT_S)
            self._wait_at = time.monotonic() + PAUSE * min(time.monotonic() - began, WAIT_S)
        return answer


async def _limited(fetch: Fetch[Answer], server: str, problem: str, connector: aiohttp.BaseConnector | None = None) -> Answer:
    """Raises `PeerUnreachable`, also if an answer's bytes come too slowly."""
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            aiohttp.ClientSession(f"http://{server}", connector=connector, connector_owner=connector is None) as session,
        ):
            return await fetch(session)
    except TimeoutError as error:
        raise PeerUnreachable(f"bootstrap server {server} {problem}: no answer within {TIMEOUT_S:g} s") from error
    except Exception as error:  # whatever the server's answer leads to
        raise PeerUnreachable(f"bootstrap server {server} {problem}: {error}") from error


async def _fetch(session: aiohttp.ClientSession) -> Served:
    info = PrefillServerInfo(**await _route(session, -1, -1, -1, -1))
    _check_rank("dp_size - 1", info.dp_size - 1)
    rows = [await _route(session, dp_rank, 0, 0, 0) for dp_rank in range(info.dp_size)]
    addresses = [dialable(control_address(row["rank_ip"], row["rank_port"]), what="rank_ip") for row in rows]
    # Attention data parallelism: groups of one instance. SGLang's other kind: an instance per rank.
    groups = [rank if address == addresses[0] else 0 for rank, address in enumerate(addresses)]
    found = (Prefill(name_of(address), address, group) for address, group in zip(addresses, groups, strict=True))
    return Served(info, dict(enumerate(found)))


async def _route(session: aiohttp.ClientSession, dp_rank: int, cp_rank: int, tp_rank: int, pp_rank: int) -> dict[str, Any]:
    """Ask for one rank, or for the instance if all are -1."""
    asked = {
        "prefill_dp_rank": dp_rank,
        "prefill_cp_rank": cp_rank,
        "target_tp_rank": tp_rank,
        "target_pp_rank": pp_rank,
    }
    return await _read(session.get("/route", params=asked, allow_redirects=False))


async def _fetch_ranks(session: aiohttp.ClientSession, *, rooms: list[int]) -> dict[str, int]:
    """Prefill may not have heard of all rooms yet."""

    async def ask() -> dict[str, Any]:
        return await _read(session.post("/query_dp_ranks", json={"bootstrap_rooms": rooms}, allow_redirects=False))

    try:
        found = await ask()
    except aiohttp.ClientConnectionError:  # the server may have closed a kept connection
        found = await ask()
    ranks = {str(room): found[str(room)] for room in rooms if str(room) in found}
    for room, rank in ranks.items():
        _check_rank(f"data-parallel rank of room {room}", rank)
    return ranks


async def _tell_rank(server: str, room: int, rank: int) -> None:
    async def post(session: aiohttp.ClientSession) -> None:
        told = {"bootstrap_room": room, "dp_rank": rank}
        async with session.post("/register_dp_rank", json=told, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")

    problem = None
    for pause_s in (0.0, *TELL_AGAIN_S):
        await asyncio.sleep(pause_s)
        try:
            await _limited(post, server, f"does not take the data-parallel rank of room {room}")
        except PeerUnreachable as error:
            problem = error
        else:
            return
    logger.warning("%s", problem)


async def _read(asked: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
    async with asked as answer:
        text = b""
        async for part in answer.content.iter_any():
            text += part
            if len(text) > MAX_NBYTES:
                raise ValueError(f"an answer of more than {MAX_NBYTES} bytes")
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status} {text[:200].decode(errors='replace')}")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _check_rank(what: str, rank: Any) -> None:
    if type(rank) is not int or not 0 <= rank < MAX_GROUPS:
        raise ValueError(f"{what}: expected 0 to {MAX_GROUPS - 1}, found {rank!r:.80}")


def named(server: str) -> Prefill | None:
    """The instance of a `bootstrap_host` such as `NAME@HOST`, whose control address the request gives."""
    name, at, address = server.rpartition("@")
    host, _, port = address.rpartition(":")
    return Prefill(name, control_address(host, port), 0) if at else None


def control_address(host: str, port: int | str) -> str:
    """SGLang writes IPv6 addresses with and without brackets, and with capital letters if it was given these."""
    return f"tcp://{bracketed(host.strip('[]').lower())}:{port}"


def name_of(address: str) -> str:
    return address.removeprefix("tcp://")
