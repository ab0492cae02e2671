"""A proxy in front of servers that prefill and servers that decode. Each may be vLLM or SGLang, with this library.

    python examples/pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It hands over requests for the paths in `ROUTES`; a decode server answers all others. Both servers are asked at once, so that
decode has read the request and reserved memory when prefill has computed it. Where decode finds a vLLM server's requests, the
proxy asks that server once, with a prompt of one token. A request that fails before the client has got a part of its answer is
tried again, with a new id. vLLM's decode computes a prompt that it cannot get. An error of the request (4xx) goes to the client
as the server answered it. A vLLM server that prefills a request which then fails, or whose client leaves, is told so, and need
not keep its blocks. With `--keep` vLLM's decode servers keep the state of an answer, and a prefill server takes it with the
next turn of the conversation: a request whose `messages` begin with those of the one before. Requires aiohttp, which both
servers require too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    StreamReader,
    TCPConnector,
    web,
)
from multidict import CIMultiDict
from yarl import URL

logger = logging.getLogger("pd_proxy")

VLLM, SGLANG = "vLLM", "SGLang"
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
FOR_SERVERS_ONLY = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")
"""Fields that the proxy sets. A client that could choose them would choose whose state decode takes."""
PASSED_ON = ("Authorization", "X-Request-Id")
PASSED_ON_TO_DECODE = (*PASSED_ON, "Content-Type")
NOT_PASSED_BACK = {"connection", "content-encoding", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
"""Headers of one connection, or of the body as it came."""
MAX_BODY_NBYTES = 64 << 20
RETRY_AFTER_S = 0.5
GIVE_UP_TIMEOUT = ClientTimeout(total=5)
DP_RANK = "X-data-parallel-rank"
"""The header by which vLLM takes a request to one of its data-parallel replicas."""
MAX_CONVERSATIONS = 10_000
MAX_MESSAGES = 4096
"""A request with more messages is no turn of a conversation: to name each would hold up all other requests."""
KEPT_TIMEOUT_S = 5.0
"""How long decode may take to say what it keeps of a request."""
TURN_WAIT_S = 1.0
"""How long the next turn waits for that. Prefill then computes it without."""
WITHOUT_KEY = (web.HTTPUnauthorized.status_code, web.HTTPForbidden.status_code)
DECLINED = "decode does not want the request"
"""In the error of SGLang's prefill: decode has all of it cached, or computes it."""
FIRST_RANK = {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
Body = Mapping[str, Any]


class Failed(Exception):
    """A server cannot serve this request now."""


class NotPrefilled(Exception):
    """The prefill server has failed, or refused the request, while decode waited for it."""

    def __init__(self, cause: ClientError | Failed | Refused) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Refused(Exception):
    """The request is at fault. The client gets this answer."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {body[:300].decode(errors='replace')}")
        self.status, self.body, self.headers = status, body, headers

    @classmethod
    def because(cls, message: str, *, status: int = 400) -> Refused:
        """An answer of the proxy itself, as servers of OpenAI's API give it."""
        error = {"message": message, "type": "pd_proxy", "param": None, "code": status}
        return cls(status, json.dumps({"error": error}).encode(), {"Content-Type": "application/json"})

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, headers=self.headers)


@dataclass(frozen=True)
class Route:
    """A path whose requests are handed over between servers of these `pairs` (prefill, decode): both take the fields of a
    hand-over there, and make the same tokens of a request. Prefill is asked with `fields`, and vLLM for 1 token by `limit`.
    """

    pairs: frozenset[tuple[str, str]]
    fields: Body
    limit: str = ""


SAME = frozenset({(VLLM, VLLM), (SGLANG, SGLANG)})
ACROSS = SAME | {(VLLM, SGLANG), (SGLANG, VLLM)}
ROUTES = {
    "/v1/completions": Route(ACROSS, {"stream": False, "n": 1}, "max_tokens"),
    "/v1/chat/completions": Route(ACROSS, {"stream": False, "n": 1}, "max_tokens"),
    "/v1/responses": Route(SAME, {"stream": False, "store": False, "background": False}, "max_output_tokens"),
    "/v1/messages": Route(frozenset({(VLLM, VLLM)}), {"stream": False}, "max_tokens"),
    "/generate": Route(frozenset({(SGLANG, SGLANG)}), {"stream": False}),
}


@dataclass(frozen=True)
class Server:
    """A server at `url`. `bootstrap_port` is that of SGLang's bootstrap server, `None` for vLLM."""

    url: str
    bootstrap_port: int | None

    @property
    def is_sglang(self) -> bool:
        return self.bootstrap_port is not None

    @property
    def engine(self) -> str:
        return SGLANG if self.is_sglang else VLLM


@dataclass(frozen=True)
class Place:
    """Where decode finds the requests of one replica of a prefill server. `params` name it to vLLM, and `headers` take a
    request to it.
    """

    params: Body
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Attempt:
    """A request, the servers that it goes to, the place of prefill, and the room in which they meet. Prefill takes `kept`, the
    hand-over of the turn before, and decode keeps the request by the id `keep`, if there is one.
    """

    prefill: Server
    decode: Server
    place: Place
    path: str
    body: Body
    headers: Mapping[str, str]
    room: int
    kept: Body | None = None
    keep: str = ""

    @property
    def transfer_id(self) -> str:
        """The room as vLLM has it, in hexadecimal digits."""
        return self.room.to_bytes(16, "big").hex()


class Client:
    """Requests to the servers."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._known: dict[str, Server] = {}
        self._places: dict[str, Iterator[Place]] = {}
        self._giving_up: set[asyncio.Task[None]] = set()

    async def server(self, url: str, headers: Mapping[str, str]) -> Server:
        """Which kind of server there is at `url`: SGLang names its bootstrap port. vLLM has no such path, or names no port.

        Raises `ClientError` for one that was gone and is not back yet, and `Refused` for a client without its key.
        """
        if url not in self._known:
            async with self.open("GET", f"{url}/server_info", headers=headers) as answer:
                found = {} if answer.status == web.HTTPNotFound.status_code else await read_json(answer)
            self._known[url] = Server(url, found.get("disaggregation_bootstrap_port") if isinstance(found, dict) else None)
        return self._known[url]

    async def ask(self, server: Server, path: str, body: Body, headers: Mapping[str, str]) -> Any:
        """The answer of a server. Raises `Failed` or `Refused` for one that is an error."""
        async with self.open("POST", server.url + path, headers=headers, json=body) as answer:
            return await read_json(answer)

    def give_up(self, attempt: Attempt) -> None:
        """Tell vLLM that nobody takes the request that it prefills, and ask it again where it is before the next request."""
        if not attempt.prefill.is_sglang:
            self.forget(attempt.prefill)
            task = asyncio.create_task(self._give_up(attempt))
            self._giving_up.add(task)
            task.add_done_callback(self._giving_up.discard)

    async def _give_up(self, attempt: Attempt) -> None:
        """VLLM learns that with another request, of a single token."""
        asked = {"prompt": [0], "kv_transfer_params": {"abort_request_id": attempt.transfer_id}, "max_tokens": 1}
        asked |= {key: attempt.body[key] for key in ("model",) if key in attempt.body}
        headers = {name: value for name, value in attempt.headers.items() if name == "Authorization"}
        headers |= attempt.place.headers
        url = f"{attempt.prefill.url}/v1/completions"
        with suppress(ClientError, TimeoutError):
            async with self.open("POST", url, headers=headers, json=asked, timeout=GIVE_UP_TIMEOUT):
                pass

    async def kept(self, decode: Server, headers: Mapping[str, str], model: Any, keep: str) -> Body | None:
        """The hand-over of a request that decode has kept by this id; `None` if it has not."""
        asked = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kept_request_id": keep}}
        if model is not None:
            asked["model"] = model
        try:
            async with asyncio.timeout(KEPT_TIMEOUT_S):
                answer = await self.ask(decode, "/v1/completions", asked, headers)
        except (ClientError, Failed, Refused, TimeoutError) as error:
            reason = str(error) or f"no answer within {KEPT_TIMEOUT_S:g} s"
            logger.warning("%s does not say what it keeps: %s", decode.url, reason)
            return None
        return (answer.get("kv_transfer_params") or {}).get("kept")

    async def place(self, prefill: Server, decode: Server, headers: Mapping[str, str]) -> Place:
        """Where decode finds what a server prefills next. vLLM answers that to a prompt of one token, and is asked once."""
        if prefill.is_sglang:
            return Place({} if decode.is_sglang else await self._first_rank(prefill), {})
        if prefill.url not in self._places:
            first, count = await self._replica(prefill, headers, {})
            ranks = [{DP_RANK: str(rank)} for rank in range(count)] if count > 1 else []
            places = [(await self._replica(prefill, headers, rank))[0] for rank in ranks] or [first]
            self._places[prefill.url] = itertools.cycle(places)
        return next(self._places[prefill.url])

    def forget(self, prefill: Server) -> None:
        """Ask a server again where it is."""
        self._places.pop(prefill.url, None)

    async def _replica(self, prefill: Server, headers: Mapping[str, str], rank: Mapping[str, str]) -> tuple[Place, int]:
        """The place of one of vLLM's replicas, and how many there are."""
        asked = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        found = (await self.ask(prefill, "/v1/completions", asked, {**headers, **rank})).get("kv_transfer_params") or {}
        if not {"remote_engine_id", "remote_address"} <= found.keys():
            raise Failed(f"{prefill.url} hands over nothing: expected a server with DisaggConnector")
        params = {name: value for name, value in found.items() if name not in ("remote_replicas", "do_remote_decode")}
        return Place(params, rank), found.get("remote_replicas", 1)

    async def _first_rank(self, prefill: Server) -> dict[str, Any]:
        """Where vLLM finds an SGLang server's state: the control address of its first rank, which is also its name."""
        where = URL(prefill.url).with_port(prefill.bootstrap_port).with_path("/route")
        async with self.open("GET", str(where), params=FIRST_RANK) as answer:
            if not answer.ok:
                raise Failed(f"{answer.url}: {answer.status} {(await answer.text())[:300]}")
            rank = await read_json(answer)
        name = URL.build(scheme="tcp", host=rank["rank_ip"], port=int(rank["rank_port"])).authority
        return {"remote_engine_id": name, "remote_address": f"tcp://{name}"}

    @asynccontextmanager
    async def open(self, method: str, url: str | URL, **content: Any) -> AsyncIterator[ClientResponse]:
        try:
            async with self._session.request(method, url, **content) as answer:
                yield answer
        except ClientError:
            origin = str(URL(url).origin())
            self._known.pop(origin, None)  # until it answers, nobody computes anything for it
            self._places.pop(origin, None)
            raise


class Conversations:
    """The hand-overs that decode servers keep, by the messages of their requests. Each is taken once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[float, asyncio.Task[Body | None]]] = OrderedDict()

    def put(self, names: list[bytes], kept: asyncio.Task[Body | None]) -> None:
        """Note what decode keeps of a request that it has answered. `names` are its `beginnings`."""
        self._kept[names[-1]] = time.monotonic(), kept
        self._kept.move_to_end(names[-1])
        if len(self._kept) > MAX_CONVERSATIONS:
            self._kept.popitem(last=False)

    async def take(self, names: list[bytes]) -> Body | None:
        """The newest hand-over of the conversation that a request goes on with; `None` if there is none, it has expired, or
        decode does not say in time. `names` are the request's `beginnings`.
        """
        for name in reversed(names):
            if name in self._kept:
                since_s, task = self._kept.pop(name)
                with suppress(TimeoutError):
                    kept = await asyncio.wait_for(task, TURN_WAIT_S)
                    return kept if kept and time.monotonic() < since_s + kept["remote_keep_s"] else None
                return None
        return None


def beginnings(body: Body) -> list[bytes]:
    """A name for the conversation after each message of a request; none if it has no messages, or not as a conversation has."""
    messages, name = body.get("messages"), json.dumps(body.get("model")).encode()
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES or not all(isinstance(each, dict) for each in messages):
        return []
    names = []
    for message in messages:
        name = hashlib.blake2b(name + json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()
        names.append(name)
    return names


def passed_back(answer: ClientResponse) -> CIMultiDict[str]:
    """The headers of an answer that are also for the client."""
    return CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_BACK)


async def check(answer: ClientResponse) -> None:
    """Raises `Failed` for an error of the server, and `Refused` for an error of the request."""
    if answer.status >= 500:
        raise Failed(f"{answer.url}: {answer.status} {(await answer.text())[:300]}")
    if not answer.ok:
        raise Refused(answer.status, await answer.read(), passed_back(answer))


async def read_json(answer: ClientResponse) -> Any:
    """Raises as `check` does, and `Failed` for an answer that is no JSON."""
    await check(answer)
    try:
        return json.loads(await answer.read())
    except ValueError as error:
        raise Failed(f"{answer.url}: expected JSON: {error}") from error


async def read_lines(content: StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, of any length: an event may hold the whole request."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def read_body(data: bytes) -> Any:
    """The value in a request's body. Raises `Refused` if that is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused.because(f"the body is not JSON: {error}") from error


def of_client(body: Body) -> dict[str, Any]:
    """The fields that a client may choose."""
    return {name: value for name, value in body.items() if name not in FOR_SERVERS_ONLY}


@dataclass
class HandOver:
    """What both servers are asked in one attempt. It has `begun` once the client gets decode's answer. SGLang's decode does not
    know the log-probabilities of the first token, which prefill's answer has (`first`).
    """

    prefill: dict[str, Any]
    decode: dict[str, Any]
    first: Awaitable[Body] | None = None
    begun: bool = False


def hand_over(attempt: Attempt) -> HandOver:
    """What to ask the servers."""
    prefill, decode, body, room = attempt.prefill, attempt.decode, attempt.body, attempt.room
    route, place = ROUTES[attempt.path], attempt.place.params
    to_vllm = {**place, "do_remote_prefill": True, "remote_request_id": attempt.transfer_id}
    if prefill.is_sglang:
        where = {"bootstrap_host": URL(prefill.url).host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
        return HandOver({**body, **where, **route.fields}, {**body, **where} if decode.is_sglang else for_vllm(body, to_vllm))
    asked = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL} | {**route.fields, route.limit: 1}
    asked["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_request_id": attempt.transfer_id,
        "first_token": decode.is_sglang,
    }
    if attempt.kept:
        asked["kv_transfer_params"]["kept"] = attempt.kept
    if not decode.is_sglang:
        return HandOver(asked, for_vllm(body, to_vllm, keep=attempt.keep))
    address = URL(place["remote_address"])
    host = {"bootstrap_host": f"{place['remote_engine_id']}@{address.host}", "bootstrap_port": address.port}
    return HandOver(asked, {**body, **host, "bootstrap_room": room})


def for_vllm(body: Body, params: Body, *, keep: str = "") -> dict[str, Any]:
    """A request to vLLM's decode with the parameters of a hand-over, which it keeps by this id."""
    given = {**params, "keep": keep} if keep else params
    return {**body, "kv_transfer_params": given} if given else dict(body)


def is_told(found: Body | None, told: Body) -> bool:
    """Whether decode was told where prefill has the request, by prefill's answer: by which server and in which attempt."""
    names = ("remote_engine_id", "remote_address", "remote_attempt")
    return found is not None and all(found.get(name, 0) == told.get(name, 0) for name in names)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a request that nobody waits for."""
    task.cancel()
    with suppress(asyncio.CancelledError, ClientError, Failed, Refused):
        await task


def reason_against(prefill: Server, decode: Server, path: str, body: Body) -> str:
    """Why these servers cannot hand over a request; empty if they can."""
    if (prefill.engine, decode.engine) not in ROUTES[path].pairs:
        return f"{path}: {prefill.engine} hands over nothing to {decode.engine} there"
    if has_several_prompts(body) and not (prefill.is_sglang and decode.is_sglang):
        return "prompt: expected one, found a list: vLLM hands over one prompt of a request"
    several = [count for count in num_answers(body) if count not in (None, 1)]
    if decode.is_sglang and several:  # they would share a room
        return f"n: expected 1, found {several[0]!r:.40}: SGLang hands over one answer to a prompt; send a request for each"
    return ""


def has_several_prompts(body: Body) -> bool:
    """Whether a completion is asked for a list of prompts: of texts, or of lists of tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def num_answers(body: Body) -> Iterator[Any]:
    """How many answers a request wants, wherever it says so."""
    given = body.get("sampling_params")
    for params in (body, *(given if isinstance(given, list) else [given])):
        if isinstance(params, Mapping):
            yield params.get("n")


async def fill_in(event: dict[str, Any], first: Awaitable[Body]) -> bool:
    """Give SGLang's first token the log-probabilities in the answer of vLLM's prefill. Returns whether that is done."""
    choices = [choice for choice in event.get("choices", ()) if choice.get("logprobs")]
    if not choices:
        return False
    for choice, other in zip(choices, (await first)["choices"], strict=False):
        found, known = choice["logprobs"], other.get("logprobs") or {}
        for key in ("content", "token_logprobs", "top_logprobs"):
            if found.get(key) and known.get(key):
                found[key][0] = known[key][0]
    return True


def is_server_error(event: Body) -> bool:
    """Whether an event says that the server has failed. An error of the request is for the client."""
    error = event.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return bool(error) and not (isinstance(code, int) and 400 <= code < 500)


async def read_events(answer: ClientResponse, first: Awaitable[Body] | None) -> AsyncIterator[bytes]:
    """The lines of a stream of events; the first part ends with the first event. `first` is as in `fill_in`.

    Raises `Failed` if the first event is an error of the server, or there is none.
    """
    part, begun, filled = b"", False, first is None
    async for line in read_lines(answer.content):
        data = line
        if line.startswith(b"data: {") and not (begun and filled):
            event = json.loads(line[6:])
            if not begun and is_server_error(event):
                raise Failed(f"{answer.url}: {event['error']}")
            if not filled and first is not None:
                try:
                    filled = await fill_in(event, first)
                except (ClientError, Failed, Refused):
                    if not begun:
                        raise
                    filled = True  # the client has a part of decode's answer, which goes on without prefill
                data = b"data: " + json.dumps(event).encode() + b"\n"
        part += data
        begun = begun or line.startswith(b"data:")
        if begun:
            yield part
            part = b""
    if not begun:
        raise Failed(f"{answer.url}: an empty answer")


async def send(request: web.Request, answer: ClientResponse, first: bytes, others: AsyncIterable[bytes]) -> web.StreamResponse:
    """Give the client a server's answer, part by part. A failure ends its connection, so that it does not take it for whole."""
    response = web.StreamResponse(status=answer.status, headers=passed_back(answer))
    await response.prepare(request)
    try:
        await response.write(first)
        async for part in others:
            await response.write(part)
        await response.write_eof()
    except (ClientError, Failed, Refused) as error:
        logger.warning("%s, in its answer: %s: %s", answer.url, type(error).__name__, error)
        if request.transport is not None:
            request.transport.close()
    return response


class Proxy:
    """Takes the servers of each side in turn."""

    def __init__(self, prefills: list[str], decodes: list[str], *, retry_s: float, keep: bool = False) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)
        self._num_prefills, self._num_decodes, self._retry_s = len(prefills), len(decodes), retry_s
        self._conversations = Conversations() if keep else None
        self._client: Client

    def application(self) -> web.Application:
        """Every path has the same handler."""
        app = web.Application(client_max_size=MAX_BODY_NBYTES)
        app.cleanup_ctx.append(self._open_client)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _open_client(self, _: web.Application) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None, sock_connect=5), read_bufsize=1 << 20
        ) as session:
            self._client = Client(session)
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.method == "POST" and request.path in ROUTES:
                return await self._generate(request)
            return await self._pass_on(request)
        except Refused as refused:
            refusal = refused
        except RecursionError:  # of a body that can be read, and not be written
            refusal = Refused.because("the body is nested too deeply")
        except (ClientError, Failed) as error:
            refusal = Refused.because(f"no servers: {error}", status=503)
        return refusal.response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Hand a request over, as often as it takes."""
        body = read_body(await request.read())
        if not isinstance(body, dict):
            raise Refused.because(f"the body: expected a JSON object, found {type(body).__name__}")
        until = time.monotonic() + self._retry_s
        names = [] if self._conversations is None else beginnings(body)
        kept = None if self._conversations is None else await self._conversations.take(names)
        while True:
            try:
                return await self._attempt(request, of_client(body), names, kept)
            except (ClientError, Failed) as error:
                logger.warning("%s: %s", type(error).__name__, error)
                if time.monotonic() > until:
                    raise
            kept = None
            await asyncio.sleep(RETRY_AFTER_S)

    async def _attempt(self, request: web.Request, body: Body, names: list[bytes], kept: Body | None) -> web.StreamResponse:
        """Raises `Failed` or `ClientError` if the request may be tried again."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        decode = await self._client.server(next(self._decodes), headers)
        is_turn = bool(names) and all(count in (None, 1) for count in num_answers(body))
        keep = secrets.token_hex(16) if is_turn and not decode.is_sglang else ""
        response = await self._divided(request, body, headers, decode, kept, keep)
        if keep and self._conversations is not None:
            asking = self._client.kept(decode, headers, body.get("model"), keep)
            self._conversations.put(names, asyncio.create_task(asking))
        return response

    async def _divided(
        self,
        request: web.Request,
        body: Body,
        headers: Mapping[str, str],
        decode: Server,
        kept: Body | None,
        keep: str,
    ) -> web.StreamResponse:
        """Ask a prefill server and decode, or decode alone if there is none that can prefill the request."""
        failure: Exception = Failed("no prefill server")
        for url in itertools.islice(self._prefills, self._num_prefills):
            try:
                prefill = await self._client.server(url, headers)
                if reason := reason_against(prefill, decode, request.path, body):
                    failure = Refused.because(reason)
                    continue
                place = await self._client.place(prefill, decode, headers)
            except (ClientError, Failed) as error:
                logger.warning("prefill server %s: %s", url, error)
                failure = error
                continue
            except Refused as refused:
                if refused.status in WITHOUT_KEY:
                    raise
                failure = refused
                continue
            attempt = Attempt(prefill, decode, place, request.path, body, headers, 1 + secrets.randbelow(1 << 62), kept, keep)
            try:
                return await self._ask_both(request, attempt)
            except NotPrefilled as error:
                logger.warning("prefill server %s: %s", url, error)
                failure = error.cause
        if decode.is_sglang:
            raise failure
        return await self._answer(request, decode, headers, HandOver({}, for_vllm(body, {}, keep=keep)))

    async def _ask_both(self, request: web.Request, attempt: Attempt) -> web.StreamResponse:
        """Ask both servers at once. Raises `NotPrefilled` if another prefill server should be asked, or decode alone."""
        asked, headers = hand_over(attempt), {**attempt.headers, **attempt.place.headers}
        prefilling = asyncio.create_task(self._client.ask(attempt.prefill, attempt.path, asked.prefill, headers))
        if attempt.decode.is_sglang and not attempt.prefill.is_sglang:
            asked.first = prefilling
        answering = self._answering(request, attempt, asked)
        is_taken = False
        try:
            await asyncio.wait({answering, prefilling}, return_when=asyncio.FIRST_COMPLETED)
            is_right = True
            if prefilling.done() and not answering.done():
                answering, is_right = await self._check_prefill(request, attempt, asked, prefilling, answering)
            response = await answering
            is_taken = is_right and prefilling.done()
            return response
        finally:
            has_ended = prefilling.done() and not prefilling.cancelled()
            is_refused = has_ended and isinstance(prefilling.exception(), Refused)
            await end(prefilling)
            await end(answering)
            if not is_taken and not is_refused:
                self._client.give_up(attempt)

    async def _check_prefill(
        self,
        request: web.Request,
        attempt: Attempt,
        asked: HandOver,
        prefilling: asyncio.Task[Any],
        answering: asyncio.Task[web.StreamResponse],
    ) -> tuple[asyncio.Task[web.StreamResponse], bool]:
        """Decode's answer once prefill has answered, and whether decode takes what prefill has. Decode is asked again if the
        server is not where it was, or hands over another attempt or nothing. Raises `NotPrefilled` if prefill has failed.
        """
        if (error := prefilling.exception()) is not None:
            if asked.begun or DECLINED in str(error):  # decode has what it needs
                return answering, True
            is_final = isinstance(error, Refused) and error.status != web.HTTPNotFound.status_code  # it may lack the adapter
            if is_final or not isinstance(error, ClientError | Failed | Refused):
                raise error
            raise NotPrefilled(error)
        found = None if attempt.prefill.is_sglang else prefilling.result().get("kv_transfer_params")
        if attempt.prefill.is_sglang or is_told(found, attempt.place.params):
            return answering, True
        if asked.begun:
            return answering, False
        if attempt.decode.is_sglang:
            raise Failed(f"{attempt.prefill.url} hands over nothing, or is another server than before")
        self._client.forget(attempt.prefill)
        await end(answering)
        asked.decode = for_vllm(attempt.body, found or {}, keep=attempt.keep)
        return self._answering(request, attempt, asked), True

    def _answering(self, request: web.Request, attempt: Attempt, asked: HandOver) -> asyncio.Task[web.StreamResponse]:
        return asyncio.create_task(self._answer(request, attempt.decode, attempt.headers, asked))

    async def _answer(
        self, request: web.Request, decode: Server, headers: Mapping[str, str], asked: HandOver
    ) -> web.StreamResponse:
        """Pass decode's answer on to the client."""
        async with self._client.open("POST", decode.url + request.path, headers=headers, json=asked.decode) as answer:
            await check(answer)
            if answer.content_type == "text/event-stream":
                events = read_events(answer, asked.first)
                first = await anext(events)
                asked.begun = True
                return await send(request, answer, first, events)
            data = await answer.read()
            if asked.first is not None:
                whole = json.loads(data)
                await fill_in(whole, asked.first)
                data = json.dumps(whole).encode()
            return web.Response(status=answer.status, body=data, headers=passed_back(answer))

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Let decode answer other requests, such as for the list of models. The next server gets what one cannot take."""
        if not request.raw_path.startswith("/"):
            raise Refused.because(f"expected a path, found {request.raw_path:.80}")
        headers = {name: request.headers[name] for name in PASSED_ON_TO_DECODE if name in request.headers}
        data: bytes | StreamReader | None = request.content if request.can_read_body else None
        if data is not None and "json" in request.content_type:
            data = await request.read()
            body = read_body(data) if data else None
            if isinstance(body, dict) and not body.keys().isdisjoint(FOR_SERVERS_ONLY):
                data = json.dumps(of_client(body)).encode()
        failure: Exception = Failed("no decode server")
        for url in itertools.islice(self._decodes, self._num_decodes):
            try:
                where = URL(url + request.raw_path, encoded=True)
                async with self._client.open(request.method, where, data=data, headers=headers) as answer:
                    return await send(request, answer, b"", answer.content.iter_any())
            except ClientConnectorError as error:
                failure = error
        raise failure


def addresses(given: list[list[str]]) -> Iterator[str]:
    """The addresses of servers, without a slash at the end."""
    return (address.rstrip("/") for addresses in given for address in addresses)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", nargs="+", action="append", required=True, metavar="URL", help="servers that prefill")
    parser.add_argument("--decode", nargs="+", action="append", required=True, metavar="URL", help="servers that decode")
    parser.add_argument("--retry-s", type=float, default=30.0, metavar="SECONDS", help="how long to try a request again")
    parser.add_argument(
        "--keep", action="store_true", help="let vLLM's decode keep each answer's state for prefill of the next turn"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(list(addresses(given.prefill)), list(addresses(given.decode)), retry_s=given.retry_s, keep=given.keep)
    try:
        web.run_app(proxy.application(), host=given.host, port=given.port, handler_cancellation=True)
    except OSError as error:  # the port is in use, or not ours to take
        sys.exit(f"pd_proxy: {error}")


if __name__ == "__main__":
    main()
