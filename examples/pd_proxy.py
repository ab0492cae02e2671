"""A proxy in front of servers that prefill and servers that decode. Each may be vLLM or SGLang, with this library.

    python examples/pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It hands over requests for the paths in `ROUTES`; a decode server answers all others. Both servers are asked at once, so that
decode has read the request and reserved memory when prefill has computed it. Where decode finds a vLLM server's requests, the
proxy asks that server once, with a prompt of one token. A request that fails before the client has got a part of its answer is
tried again, with a new id. vLLM's decode computes a prompt that it cannot get. An error of the request (4xx) goes to the client
as the server answered it. A vLLM server that prefills a request which then fails, or whose client leaves, is told so, and need
not keep its blocks. With `--keep` decode servers keep the state of an answer, and a prefill server takes it with the next turn
of the conversation: a request whose `messages` begin with those of the one before. `POST /admin/drain` empties a decode server:
with `--move` streamed answers go on at another one of vLLM's. Requires aiohttp, which both servers require too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import re
import resource
import secrets
import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterator,
    Mapping,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    StreamReader,
    TCPConnector,
    web,
)
from multidict import CIMultiDict
from yarl import URL

logger = logging.getLogger("pd_proxy")

VLLM, SGLANG = "vLLM", "SGLang"
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
TO_SGLANG = "disagg_"
"""What a request tells SGLang's backend of this library begins so, in its `custom_params`."""
FOR_SERVERS_ONLY = (
    *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *(f"{TO_SGLANG}{name}" for name in ("keep", "kept", "kept_request_id", "move_id", "stop_request_id")),
)
"""Fields that the proxy sets. A client that could choose them would choose whose state decode takes."""
PASSED_ON = (
    *("Authorization", "X-Request-Id", "X-Vllm-Priority", "X-Session-ID", "X-SMG-Routing-Key", "Origin"),
    *("traceparent", "tracestate", "endpoint-load-metrics-format"),
)
PASSED_ON_TO_DECODE = (*PASSED_ON, "Content-Type", "Access-Control-Request-Method", "Access-Control-Request-Headers")
NOT_PASSED_BACK = {"connection", "content-encoding", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
"""Headers of one connection, or of the body as it came."""
MAX_BODY_NBYTES = 64 << 20
RETRY_AFTER_S = 0.5
MAX_SAID = 10
"""Attempts after which a client gets the HTTP 500 with which all were answered."""
CONNECT_S = 5.0
UNREACHABLE = (ClientConnectorError, ConnectionTimeoutError)
AWAY_S = 5.0
BACKLOG = 4096
"""Of connections that are not accepted yet. Clients wait for a second if there is no room."""
GIVE_UP_TIMEOUT = ClientTimeout(total=5)
ASK_TIMEOUT = ClientTimeout(total=30, sock_connect=CONNECT_S)
"""How long a server may take to say what it is. A scheduler answers between two steps."""
SILENT_S, PROBES, PROBE_S = 10, 4, 5
"""A host that has said nothing for so long is asked so often, every so many seconds. One that is gone says nothing to a
connection that waits for an answer.
"""
DP_RANK = "X-data-parallel-rank"
"""The header by which vLLM takes a request to one of its data-parallel replicas."""
MAX_DESCRIPTORS = 65_535
MAX_CONVERSATIONS = 10_000
MAX_MESSAGES = 4096
"""A request with more messages is no turn of a conversation: to name each would hold up all other requests."""
KEPT_TIMEOUT_S = 5.0
"""How long decode may take to say what it keeps of a request."""
KEEP_ALIVE_S = 2.0
"""How long a connection to a server stays open without a request. Servers close it after 5 s; a request just then fails."""
DRAIN_INTERVAL_S = 0.05
"""How often a server that drains is looked at."""
COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE = "/generate"
ITEMS = ("image", "audio", "video")
WHERE = ("remote_engine_id", "remote_address")
"""What names a replica of vLLM's."""
DONE = b"data: [DONE]\n\n"
OPENING = frozenset({"response.created", "response.in_progress", "response.queued"})
"""Events that a server sends before it has the prompt's state."""
BUDGET = "thinking_token_budget"
"""Of which 0 is a value."""
OF_ONE_ENGINE = frozenset(
    {
        *("allowed_token_ids", "bad_words", "structured_outputs", BUDGET, "truncate_prompt_tokens"),
        *("use_beam_search", "watermarking", "regex", "ebnf", "json_schema", "custom_logit_processor", "watermark"),
    }
)
"""Fields by which vLLM samples and SGLang does not, or the other way round."""
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Those of SGLang's completions; vLLM takes the model's. Both take the model's for chats."""
FOR_GOOD = (
    *("Grammar accept_token failed", "prompt: expected", "expected the state of this request's prompt"),
    "finished without component",
)
"""In errors of SGLang's decode that another attempt would most likely meet again: prefill's first token is none of its grammar,
or prefill has made other tokens of the prompt, or fewer.
"""
FAILED_INSIDE = re.compile(rb'"message": ?"5\d\d: ')
"""In SGLang's responses: an error of the server, which has the status of an error of the request."""
HAND_OVER_FAILED = re.compile("(Decode handshake|(Prefill|Decode) transfer|Prefill bootstrap) failed ")
LAST_ONLY = ("stop_reason", "weight_versions")
"""Fields of a chat's choice that only vLLM's last event has."""
INCOMPLETE = "\ufffd"
"""How a text ends whose last character is not complete."""
OF_THE_PROMPT = frozenset(
    {
        *("prompt", "messages", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "request_id"),
    }
)
CHECKED_BY_DECODE = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
        *("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens"),
        *("max_completion_tokens", "skip_special_tokens", "spaces_between_special_tokens", "structured_outputs"),
        *("response_format", "thinking_token_budget", "repetition_detection", "watermarking", "vllm_xargs"),
    }
)
"""Fields of which decode says whether another server can go on with them, and how."""
GOES_ON_WITH = frozenset(
    {"model", "user", "cache_salt", "priority", "stream_interval", "session_id", "include_stop_str_in_output"}
)
"""Fields that the other server gets as they are. The last one is also for tokens that end an answer."""
OF_LOGPROBS = frozenset({"logprobs", "logprob_token_ids", "return_tokens_as_token_ids"})
OF_SAMPLING = CHECKED_BY_DECODE | OF_LOGPROBS | {"stop", "echo", "top_logprobs", "prompt_logprobs", "stream_options"}
"""Fields that SGLang's prefill need not have if vLLM's decode samples, and of which it takes other values."""
OF_THE_FORM = frozenset({"stream", "stream_options", "stop", "return_token_ids", "n"})
MAY_MOVE = OF_THE_PROMPT | CHECKED_BY_DECODE | GOES_ON_WITH | OF_THE_FORM
"""The fields of requests whose answers may move."""
READ_BY_PROXY = {"include_stop_str_in_output": bool, "return_token_ids": bool, "min_tokens": int}
"""Of these the proxy needs the values. A server also reads texts, such as `"false"`."""
TURN_WAIT_S = 1.0
"""How long the next turn waits for that. Prefill then computes it without."""
WRITTEN = ("created_cache_tokens", "cache_write_tokens")
"""Names of vLLM's counts of tokens that a request has put into the cache."""
ANSWER_S = 1.0
"""How long a count of decode's waits for that of prefill."""
WITHOUT_KEY = (web.HTTPUnauthorized.status_code, web.HTTPForbidden.status_code)
DECLINED = "decode does not want the request"
"""In the error of SGLang's prefill: decode has all of it cached, or computes it."""
BY_ROOM = "follow_bootstrap_room"
FIRST_RANK = {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
Body = Mapping[str, Any]


class Failed(Exception):
    """A server cannot serve this request now. `answer`: what it has answered."""

    answer: Refused | None = None


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
    The servers are asked by POST, whichever of the `methods` the client has used.
    """

    pairs: frozenset[tuple[str, str]]
    fields: Body
    limit: str = ""
    methods: frozenset[str] = frozenset({"POST"})


SAME = frozenset({(VLLM, VLLM), (SGLANG, SGLANG)})
ACROSS = SAME | {(VLLM, SGLANG), (SGLANG, VLLM)}
ROUTES = {
    "/v1/completions": Route(ACROSS, {"stream": False, "n": 1}, "max_tokens"),
    "/v1/chat/completions": Route(ACROSS, {"stream": False, "n": 1}, "max_tokens"),
    "/v1/responses": Route(SAME, {"stream": False, "store": False}, "max_output_tokens"),
    "/v1/messages": Route(frozenset({(VLLM, VLLM)}), {"stream": False}, "max_tokens"),
    GENERATE: Route(frozenset({(SGLANG, SGLANG)}), {"stream": False}, methods=frozenset({"POST", "PUT"})),
}


@dataclass(frozen=True)
class Server:
    """A server at `url`. `bootstrap_port` is that of SGLang's bootstrap server, `None` for vLLM. SGLang's `num_replicas` take
    turns by room, unless `replicas_problem` says otherwise.
    """

    url: str
    bootstrap_port: int | None
    num_replicas: int = 1
    replicas_problem: str = ""

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
    hand-over of the turn before, and `own` are parameters for decode only.
    """

    prefill: Server
    decode: Server
    place: Place
    path: str
    body: Body
    headers: Mapping[str, str]
    room: int
    kept: Body | None = None
    own: Body = field(default_factory=dict)

    @property
    def transfer_id(self) -> str:
        """The room as vLLM has it, in hexadecimal digits."""
        return self.room.to_bytes(16, "big").hex()


class Client:
    """Requests to the servers."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._known: dict[str, Server] = {}
        self._places: dict[str, list[Place]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def server(self, url: str, headers: Mapping[str, str]) -> Server:
        """Which kind of server there is at `url`. VLLM has no `/model_info`; with `VLLM_SERVER_DEV_MODE=1` it has another
        `/server_info`, which takes seconds.

        Raises `ClientError` for one that was gone and is not back yet, and `Refused` for a client without its key.
        """
        if url not in self._known:
            found: Body = {}
            for path in ("/model_info", "/server_info"):
                async with self.open("GET", url + path, headers=headers, timeout=ASK_TIMEOUT) as answer:
                    if answer.status == web.HTTPNotFound.status_code:
                        break
                    found = await read_json(answer)
            self._known[url] = server_of(url, found)
        return self._known[url]

    def once_more(self, path: str, body: Body) -> Body:
        """A request that is tried again. SGLang ends an attempt that was cancelled some seconds later, by the client's id."""
        if not any(server.is_sglang for server in self._known.values()):
            return body
        own = "request_id" if path == RESPONSES else "rid"
        return {name: value for name, value in body.items() if name != own}

    async def ask(self, server: Server, path: str, body: Body, headers: Mapping[str, str]) -> Any:
        """The answer of a server. Raises `Failed` or `Refused` for one that is an error."""
        async with self.open("POST", server.url + path, headers=headers, json=body) as answer:
            return await read_json(answer)

    def give_up(self, attempt: Attempt) -> None:
        """Tell vLLM that nobody takes the request that it prefills."""
        if not attempt.prefill.is_sglang:
            asked = told(attempt.body.get("model"), abort_request_id=attempt.transfer_id)
            self.tell_later(attempt.prefill, {**attempt.headers, **attempt.place.headers}, asked)

    def tell_later(self, server: Server, headers: Mapping[str, str], asked: Body) -> None:
        """Tell a vLLM server something that nobody waits for."""
        task = asyncio.create_task(self._tell_later(server, headers, asked))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_later(self, server: Server, headers: Mapping[str, str], asked: Body) -> None:
        given = without_id(headers)
        with suppress(ClientError, Failed):
            async with self.open("POST", server.url + COMPLETIONS, headers=given, json=asked, timeout=GIVE_UP_TIMEOUT):
                pass

    async def kept(self, decode: Server, headers: Mapping[str, str], model: Any, keep: str) -> Body | None:
        """The hand-over of a request that decode has kept by this id; `None` if it has not."""
        try:
            async with asyncio.timeout(KEPT_TIMEOUT_S):
                if decode.is_sglang:
                    return await self._kept_by_sglang(decode, headers, keep)
                found: Body | None = (await self.tell(decode, headers, told(model, kept_request_id=keep))).get("kept")
        except (ClientError, Failed, Refused, TimeoutError) as error:
            logger.warning("%s does not say what it keeps: %s: %s", decode.url, type(error).__name__, error)
            return None
        return found

    async def _kept_by_sglang(self, decode: Server, headers: Mapping[str, str], keep: str) -> Body | None:
        """SGLang refuses a request without a room. Raises as `ask` does."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1 + secrets.randbelow(1 << 62)}
        asked = for_sglang({"max_new_tokens": 1}, kept_request_id=keep)
        answer = await self.ask(decode, GENERATE, {"input_ids": [0], "sampling_params": asked, **room}, without_id(headers))
        (found,) = answer["meta_info"].get(f"{TO_SGLANG}kept") or [None]
        return found if isinstance(found, dict) else None

    async def tell(self, decode: Server, headers: Mapping[str, str], asked: Body) -> Any:
        """What the connector of vLLM's decode answers to what it is told. Raises as `ask` does."""
        answer = await self.ask(decode, COMPLETIONS, asked, without_id(headers))
        return answer.get("kv_transfer_params") or {}

    async def parses_tools(self, decode: Server, headers: Mapping[str, str], model: Any) -> bool:
        """Whether a vLLM server parses answers to chats for calls of tools. Only one that does not refuses such a request."""
        tool = {"type": "function", "function": {"name": "none", "parameters": {"type": "object", "properties": {}}}}
        asked = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "auto", "max_tokens": 1}
        try:
            await self.ask(decode, CHATS, asked if model is None else {**asked, "model": model}, headers)
        except Refused as refused:
            return b"--tool-call-parser" not in refused.body
        return True

    async def max_length(self, server: Server, headers: Mapping[str, str]) -> int:
        """The most tokens of a request at a vLLM server, its answer included. vLLM shortens an answer without a word."""
        async with self.open("GET", f"{server.url}/v1/models", headers=headers, timeout=ASK_TIMEOUT) as answer:
            found = [each.get("max_model_len") for each in (await read_json(answer)).get("data") or ()]
        known = [each for each in found if isinstance(each, int)]
        if not known:
            raise Failed(f"{server.url} does not say how many tokens a request may have")
        return min(known)

    async def text(self, server: Server, headers: Mapping[str, str], model: Any, tokens: list[int]) -> str:
        """The text of tokens. Raises as `ask` does."""
        asked = {"tokens": tokens} if model is None else {"tokens": tokens, "model": model}
        return str((await self.ask(server, "/detokenize", asked, headers))["prompt"])

    async def place(self, prefill: Server, decode: Server, headers: Mapping[str, str], room: int) -> Place:
        """Where decode finds what a server prefills next, in this room. vLLM answers that to a prompt of one token, and is
        asked once.
        """
        if prefill.is_sglang:
            return Place({} if decode.is_sglang else await self._first_rank(prefill, room % prefill.num_replicas), {})
        if prefill.url not in self._places:
            first, count = await self._replica(prefill, headers, {})
            ranks = [{DP_RANK: str(rank)} for rank in range(count)] if count > 1 else []
            self._places[prefill.url] = [(await self._replica(prefill, headers, rank))[0] for rank in ranks] or [first]
        places = self._places[prefill.url]
        places.append(places.pop(0))
        return places[-1]

    def has_moved(self, prefill: Server, found: Body) -> bool:
        """Whether a vLLM server says that it is at another place than is known, or answers as one without the connector."""
        known = self._places.get(prefill.url, [])
        return not found or ("remote_address" in found and not any(is_told(found, place.params, WHERE) for place in known))

    def forget(self, url: str | URL) -> None:
        """Another server may come to this address."""
        origin = URL(url).origin()
        tables: tuple[dict[str, Any], ...] = self._known, self._places
        for table in tables:
            for known in [known for known in table if URL(known).origin() == origin]:
                del table[known]

    def ask_again(self, prefill: Server) -> None:
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

    async def _first_rank(self, prefill: Server, replica: int) -> dict[str, Any]:
        """Where vLLM finds the state of an SGLang server's replica: the control address of its first rank, which is also its
        name.
        """
        where = URL(prefill.url).with_scheme("http").with_port(prefill.bootstrap_port).with_path("/route")  # never TLS
        async with self.open("GET", str(where), params={**FIRST_RANK, "prefill_dp_rank": replica}) as answer:
            if not answer.ok:
                raise Failed(f"{answer.url}: {answer.status} {(await answer.text())[:300]}")
            rank = await read_json(answer)
        host = rank["rank_ip"].strip("[]")  # SGLang writes IPv6 addresses with and without brackets
        name = URL.build(scheme="tcp", host=host, port=int(rank["rank_port"])).raw_authority
        return {"remote_engine_id": name, "remote_address": f"tcp://{name}"}

    @asynccontextmanager
    async def open(self, method: str, url: str | URL, **content: Any) -> AsyncIterator[ClientResponse]:
        try:
            async with self._session.request(method, url, **content) as answer:
                yield answer
        except ClientError:
            self.forget(url)  # until it answers, nobody computes anything for it
            raise
        except TimeoutError as error:
            raise Failed(f"{url} does not answer") from error


def server_of(url: str, info: Body) -> Server:
    """`info` is SGLang's `/server_info`; empty for vLLM."""
    num_replicas, problem = info.get("dp_size") or 1, ""
    if info.get("enable_dp_attention") or (info.get("attn_dp_size") or 1) > 1:
        problem = "SGLang's prefill with attention data parallelism"
    elif num_replicas > 1 and info.get("load_balance_method") not in (None, BY_ROOM):
        problem = f"SGLang's prefill with several replicas and without --load-balance-method {BY_ROOM}"
    return Server(url, info.get("disaggregation_bootstrap_port"), num_replicas, problem)


class Conversations:
    """The hand-overs that decode servers keep, by the messages of their requests. Each is taken once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[float, asyncio.Task[Body | None]]] = OrderedDict()

    def put(self, names: list[bytes], kept: asyncio.Task[Body | None]) -> None:
        """Note what decode keeps of a request that it has answered. `names` are its `beginnings`."""
        while self._kept and has_expired(*next(iter(self._kept.values()))):
            self._kept.popitem(last=False)
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
                    async with asyncio.timeout(TURN_WAIT_S):
                        kept = await task
                    return None if has_expired(since_s, task) else kept
                return None
        return None


def has_expired(since_s: float, task: asyncio.Task[Body | None]) -> bool:
    """Whether a server has said that it keeps nothing, or no longer than until now."""
    if not task.done():
        return False
    kept = None if task.cancelled() or task.exception() is not None else task.result()
    return not kept or time.monotonic() >= since_s + kept["remote_keep_s"]


def beginnings(body: Body) -> list[bytes]:
    """A name for the conversation after each message of a request; none if it has no messages, or not as a conversation has."""
    messages, name = body.get("messages"), json.dumps(body.get("model")).encode()
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES or not all(isinstance(each, dict) for each in messages):
        return []
    names = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        unmarked = [
            {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, dict) else part for part in parts
        ]
        text = json.dumps({**message, "content": unmarked or content}, sort_keys=True)  # clients move the marks
        name = hashlib.blake2b(name + text.encode(), digest_size=16).digest()
        names.append(name)
    return names


def passed_back(answer: ClientResponse) -> CIMultiDict[str]:
    """The headers of an answer that are also for the client."""
    return CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_BACK)


def failure(url: URL, message: str) -> Exception:
    """For an error of a server: `Refused` if another attempt would fail in the same way."""
    if known := next((each for each in FOR_GOOD if each in message), ""):
        return Refused.because(f"{url}: {message[message.index(known) :][:300]}")
    return Failed(f"{url}: {message[:300]}")


async def check(answer: ClientResponse) -> None:
    """Raises `Failed` for an error of the server, and `Refused` for an error of the request."""
    is_hidden = answer.status == web.HTTPBadRequest.status_code and answer.url.path.endswith(RESPONSES)
    said = None if answer.ok else Refused(answer.status, await answer.read(), passed_back(answer))
    is_not_implemented = answer.status == web.HTTPNotImplemented.status_code  # such as for an image of another format
    if (answer.status >= 500 and not is_not_implemented) or (is_hidden and FAILED_INSIDE.search(await answer.read())):
        error = failure(answer.url, f"{answer.status} {await answer.text()}")
        if isinstance(error, Failed):
            error.answer = said
        raise error
    if said is not None:
        raise said


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
    return {
        name: cleaned(value) if name in ("custom_params", "sampling_params") else value
        for name, value in body.items()
        if name not in FOR_SERVERS_ONLY
    }


def cleaned(value: Any) -> Any:
    """A body for another path with only such fields: servers have paths that take the others further inside."""
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    if isinstance(value, dict):
        return {name: cleaned(each) for name, each in of_client(value).items()}
    return value


@dataclass
class HandOver:
    """What both servers are asked in one attempt. It has `begun` once the client gets decode's answer."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    fill: Fill | None = None
    begun: bool = False


@dataclass(frozen=True)
class Fill:
    """What only prefill's answer has. `fill_in` gives it to an event of decode's that has the `field`, or to its whole answer,
    and returns whether later events get nothing more.
    """

    field: bytes
    fill_in: Callable[[Any, asyncio.Task[Any]], Awaitable[bool]]
    prefilling: asyncio.Task[Any]

    async def into(self, event: Any) -> bool:
        return await self.fill_in(event, self.prefilling)


def hand_over(attempt: Attempt) -> HandOver:
    """What to ask the servers."""
    prefill, decode, body, room = attempt.prefill, attempt.decode, attempt.body, attempt.room
    route, place = ROUTES[attempt.path], attempt.place.params
    to_vllm = {**place, "do_remote_prefill": True, "remote_request_id": attempt.transfer_id}
    if prefill.is_sglang:
        where = {"bootstrap_host": URL(prefill.url).host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
        if decode.is_sglang:
            asked = for_sglang(body, kept=attempt.kept) | where
            return HandOver({**asked, **route.fields}, for_sglang(body, keep=attempt.own.get("keep")) | where)
        prompt = for_sglang({key: value for key, value in body.items() if key not in OF_SAMPLING}, kept=attempt.kept)
        if prompt.get("tools"):
            prompt["tool_choice"] = "auto"  # vLLM shows the model all tools, whichever it may call
        return HandOver({**prompt, **where, **route.fields, route.limit: 1}, for_vllm(body, to_vllm, attempt.own))
    asked = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL} | {**route.fields, route.limit: 1}
    choice = body.get("tool_choice")
    if attempt.path == MESSAGES and isinstance(choice, dict) and choice.get("type") in ("any", "tool"):
        # VLLM shows the model all tools anyway, and refuses its own answer if a call is cut off.
        asked["tool_choice"] = {"type": "none"}
    if decode.is_sglang:
        asked = as_for_sglang(asked) | for_first_token(attempt.path, body)
    asked["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_request_id": attempt.transfer_id,
        "first_token": decode.is_sglang,
    }
    if attempt.kept:
        asked["kv_transfer_params"]["kept"] = attempt.kept
    if not decode.is_sglang:
        return HandOver(asked, for_vllm(body, to_vllm, attempt.own))
    address = URL(place["remote_address"])
    host = {"bootstrap_host": f"{place['remote_engine_id']}@{address.host}", "bootstrap_port": address.port}
    return HandOver(asked, {**for_sglang(body, keep=attempt.own.get("keep")), **host, "bootstrap_room": room})


def as_for_sglang(body: Body) -> dict[str, Any]:
    """A request for vLLM's prefill, of which it makes the prompt that SGLang does: this shows the model only those tools that
    it may call. SGLang does not know `include_reasoning`, without which vLLM takes the first token for the answer's.
    """
    choice = body.get("tool_choice")
    named = function_of(choice)
    tools = [each for each in listed(body.get("tools")) if named is None or function_of(each) == named]
    left_out = {"include_reasoning", "tools"} | ({"tool_choice"} if choice == "none" else set())
    found = {key: value for key, value in body.items() if key not in left_out}
    return {**found, "tools": tools} if tools and choice != "none" else found


def function_of(tool: Any) -> Any:
    """The name of a function that a chat may call; `None` if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def for_first_token(path: str, body: Body) -> dict[str, Any]:
    """What lets vLLM's prefill sample the first token as SGLang would, whose repetition penalty is for tokens of the answer."""
    found: dict[str, Any] = {"repetition_penalty": 1.0}
    if body.get("min_tokens"):
        found["min_tokens"] = 1
    if path == COMPLETIONS:
        found |= {name: value for name, value in DEFAULTS.items() if body.get(name) is None}
    return found


def for_vllm(body: Body, params: Body, own: Body) -> dict[str, Any]:
    """A request to vLLM's decode with the parameters of a hand-over and its `own`. One that may move names its tokens."""
    given = {**params, **own}
    tokens = {"return_token_ids": True} if "move_id" in own else {}
    return {**body, **tokens, "kv_transfer_params": given} if given else dict(body)


def for_sglang(body: Body, **given: Any) -> dict[str, Any]:
    """A request to SGLang, with what is `given` for its `disagg` backend."""
    told = {f"{TO_SGLANG}{name}": value for name, value in given.items() if value}
    params = body.get("custom_params")
    return {**body, "custom_params": {**(params if isinstance(params, dict) else {}), **told}} if told else dict(body)


def told(model: Any, **params: Any) -> dict[str, Any]:
    """A request of one token that tells something to vLLM's connector."""
    asked = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
    return asked if model is None else {**asked, "model": model}


def without_id(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's request for another one beside it."""
    return {name: value for name, value in headers.items() if name != "X-Request-Id"}


def is_told(found: Body | None, told: Body, names: tuple[str, ...] = (*WHERE, "remote_attempt")) -> bool:
    """Whether decode was told where prefill has the request, by prefill's answer: by which server and in which attempt."""
    return found is not None and all(found.get(name, 0) == told.get(name, 0) for name in names)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel requests that nobody waits for. Raises `CancelledError` only if the caller is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        with suppress(asyncio.CancelledError, ClientError, Failed, Refused):
            task.result()


def reason_against(prefill: Server, decode: Server, path: str, body: Body) -> str:
    """Why these servers cannot hand over a request; empty if they can."""
    if (prefill.engine, decode.engine) not in ROUTES[path].pairs:
        return f"{path}: {prefill.engine} hands over nothing to {decode.engine} there"
    if prefill.replicas_problem and not decode.is_sglang:
        return f"{prefill.replicas_problem}: vLLM's decode does not know which of them has a request"
    if has_several_prompts(body) and not (prefill.is_sglang and decode.is_sglang):
        return "prompt: expected one, found a list: vLLM hands over one prompt of a request"
    if prefill.is_sglang != decode.is_sglang and has_items(body):
        return f"images, audio and videos: {prefill.engine} and {decode.engine} write different tokens for them"
    if path == RESPONSES and body.get("previous_response_id") and prefill.is_sglang:
        return "previous_response_id: only decode has the response before; send all messages"
    if path == RESPONSES and body.get("background"):
        return "background: decode answers before it has the state of the prompt"
    known = [name for name in sorted(OF_ONE_ENGINE & body.keys()) if body[name] or (name == BUDGET and body[name] == 0)]
    if decode.is_sglang and not prefill.is_sglang and known:
        return f"{known[0]}: vLLM samples the first token and SGLang the others, and only one of them has this field"
    is_text = isinstance(body.get("prompt", ""), str) or has_texts(body)
    has_other = is_text and body.get("add_special_tokens") not in (None, path == COMPLETIONS)
    if decode.is_sglang and not prefill.is_sglang and has_other:
        return (
            f"add_special_tokens: expected {path == COMPLETIONS}, as always at SGLang, found {body['add_special_tokens']!r:.40}"
        )
    if decode.is_sglang and body.get("echo") and body.get("logprobs") is not None:
        return "echo: SGLang's decode does not know the log-probabilities of the prompt; ask without logprobs"
    several = [count for count in num_answers(body) if count not in (None, 1)]
    if decode.is_sglang and several:  # they would share a room
        return f"n: expected 1, found {several[0]!r:.40}: SGLang hands over one answer to a prompt; send a request for each"
    return ""


def has_several_prompts(body: Body) -> bool:
    """Whether a completion is asked for a list of prompts: of texts, or of lists of tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def has_texts(body: Body) -> bool:
    return any(isinstance(each, str) for each in listed(body.get("prompt")))


def has_items(body: Body) -> bool:
    """Whether the prompt has images, audio or videos."""
    turns = [turn for name in ("messages", "input") for turn in listed(body.get(name)) if isinstance(turn, Mapping)]
    parts = [part for turn in turns for part in listed(turn.get("content")) if isinstance(part, Mapping)]
    return any(body.get(f"{kind}_data") or any(kind in str(part.get("type")) for part in parts) for kind in ITEMS)


def listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def listed_or_one(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def num_answers(body: Body) -> Iterator[Any]:
    """How many answers a request wants, wherever it says so."""
    given = body.get("sampling_params")
    for params in (body, *listed_or_one(given)):
        if isinstance(params, Mapping):
            yield params.get("n")


async def fill_in_first(event: dict[str, Any], prefilling: asyncio.Task[Any]) -> bool:
    """Give SGLang's first token the log-probabilities in the answer of vLLM's prefill. SGLang gives null for them, or leaves
    them out with a text that is empty.
    """
    choices = [choice for choice in event.get("choices", ()) if choice.get("logprobs")]
    if not choices:
        return False
    for choice, other in zip(choices, (await prefilling)["choices"], strict=False):
        found, known = choice["logprobs"], other.get("logprobs") or {}
        of_first = found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or ()]
        for key in ("content", "token_logprobs", "top_logprobs"):
            if of_first[:1] == [None] and found.get(key) and known.get(key):
                found[key][0] = known[key][-1]
    return True


async def fill_in_prompt(event: Any, prefilling: asyncio.Task[Any]) -> bool:
    """Give an answer of SGLang's decode the prompt's log-probabilities, and the first token's of chosen tokens."""
    known = listed_or_one(await prefilling)
    for at, each in enumerate(listed_or_one(event)):
        index = each.get("index") or at
        meta, other = each.get("meta_info") or {}, (known[index].get("meta_info") or {}) if index < len(known) else {}
        meta.update((key, value) for key, value in other.items() if key.startswith("input_") and "logprobs" in key)
        chosen, first = (part.get("output_token_ids_logprobs") for part in (meta, other))
        if chosen and not chosen[0] and first:
            chosen[0] = first[0]
    return False


async def fill_in_cached(event: Any, prefilling: asyncio.Task[Any]) -> bool:
    """Count as cached what prefill had cached, where vLLM's decode counts all that it did not compute, and what prefill has
    put into its cache. Later turns of the same request are decode's own.
    """
    answer = await answer_soon(prefilling)
    for known in counts_of(answer):
        for found in counts_of(event):
            by_turn = found.get("cached_tokens_per_turn") or [found["cached_tokens"]]
            num_less = by_turn[0] - known["cached_tokens"]
            if num_less > 0:
                by_turn[0] -= num_less
                found["cached_tokens"] -= num_less
                found.update((name, found[name] + (known.get(name) or 0)) for name in WRITTEN if found.get(name) is not None)
    return not answer


async def fill_in_cache_read(event: Any, prefilling: asyncio.Task[Any]) -> bool:
    """As `fill_in_cached`, in the form of `/v1/messages`, whose `input_tokens` are those that were not cached."""
    answer = await answer_soon(prefilling)
    known = answer.get("usage") or {}
    for part in (event, event.get("message") or {}):
        usage = part.get("usage") or {}
        if known.get("cache_read_input_tokens") is not None and usage.get("cache_read_input_tokens") is not None:
            num_less = max(0, usage["cache_read_input_tokens"] - known["cache_read_input_tokens"])
            usage["cache_read_input_tokens"] -= num_less
            if usage.get("cache_creation_input_tokens") is not None:
                num_written = min(num_less, known.get("cache_creation_input_tokens") or 0)
                usage["cache_creation_input_tokens"] += num_written
                num_less -= num_written
            usage["input_tokens"] += num_less
    return not answer


async def answer_soon(prefilling: asyncio.Task[Any]) -> Any:
    """Prefill's answer, which is on its way once decode has the state; empty if it does not come, or prefill has failed."""
    await asyncio.wait({prefilling}, timeout=ANSWER_S)
    has_answered = prefilling.done() and not prefilling.cancelled() and prefilling.exception() is None
    return prefilling.result() if has_answered else {}


def counts_of(answer: Any) -> Iterator[dict[str, Any]]:
    """Where an answer or an event of vLLM's says how many tokens of the prompt were cached."""
    for part in (answer, answer.get("response") or {}):
        usage = part.get("usage") or {}
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if (usage.get(name) or {}).get("cached_tokens") is not None:
                yield usage[name]


def have_equal_logprobs(attempt: Attempt) -> bool:
    """Whether vLLM's log-probabilities are SGLang's, which count the temperature, a bias, and tokens that may not come yet."""
    body = attempt.body
    temperature = body.get("temperature")
    is_one = temperature is None and attempt.path == COMPLETIONS
    return (is_one or temperature in (0, 1)) and not body.get("logit_bias") and not body.get("min_tokens")


def fill_of(attempt: Attempt, prefilling: asyncio.Task[Any]) -> Fill | None:
    pair = (attempt.prefill.engine, attempt.decode.engine)
    if pair == (VLLM, SGLANG):
        return Fill(b'"logprobs"', fill_in_first, prefilling) if have_equal_logprobs(attempt) else None
    if attempt.path == MESSAGES:
        return Fill(b'"cache_read_input_tokens"', fill_in_cache_read, prefilling)
    if pair in ((VLLM, VLLM), (SGLANG, VLLM)):
        return Fill(b'"cached_tokens"', fill_in_cached, prefilling)
    if pair == (SGLANG, SGLANG) and attempt.body.get("return_logprob"):
        return Fill(b'"meta_info"', fill_in_prompt, prefilling)
    return None


def is_server_error(event: Body) -> bool:
    """Whether an event says that the server has failed. An error of the request is for the client."""
    error = error_of(event)
    code = error.get("code") if isinstance(error, dict) else None
    return bool(error) and not (isinstance(code, int) and 400 <= code < 500)


def error_of(event: Body) -> Any:
    """Also SGLang's, whose `/generate` calls it the reason why the answer has ended, and whose responses have it inside."""
    if event.get("type") == "response.failed":
        response = event.get("response")
        error = response.get("error") if isinstance(response, dict) else None
        message = str(error.get("message")) if isinstance(error, dict) else ""
        return error if HAND_OVER_FAILED.match(message) else None  # nothing else tells it from an error of the request
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    status = reason.get("status_code") if isinstance(reason, dict) else None  # none where a client has aborted it
    return event.get("error") or (reason if isinstance(status, int) and status >= 500 else None)


async def read_events(answer: ClientResponse, fill: Fill | None) -> AsyncGenerator[bytes]:
    """The lines of a stream of events; the first part ends with the first event that is not `OPENING`.

    Raises `Failed`, or `Refused` as `failure` says, if that one is an error of the server, or there is none.
    """
    part, begun = b"", False
    async for line in read_lines(answer.content):
        data, is_opening = line, False
        fills = fill is not None and fill.field in line
        if line.startswith(b"data: {") and (fills or not begun):
            event = json.loads(line[6:])
            is_opening = event.get("type") in OPENING
            if not begun and is_server_error(event):
                said = error_of(event)
                error = failure(answer.url, str(said))
                if isinstance(error, Failed) and isinstance(said, dict) and isinstance(code := said.get("code"), int):
                    error.answer = Refused(code, json.dumps({"error": said}).encode(), {"Content-Type": "application/json"})
                raise error
            if fills and fill is not None:
                try:
                    fill = None if await fill.into(event) else fill
                except (ClientError, Failed, Refused):
                    if not begun:
                        raise
                    fill = None  # the client has a part of decode's answer, which goes on without prefill
                data = b"data: " + json.dumps(event).encode() + b"\n"
        part += data
        begun = begun or (line.startswith(b"data:") and not is_opening)
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


def has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class StopStrings:
    """Finds stop strings in the text of an answer that has moved, as vLLM does: the other server does not know the text before.

    The last characters are held back, as many as may belong to a stop string, unless the client wants it (`is_included`).
    """

    def __init__(self, stop: list[str], text: str, num_sent: int, *, is_included: bool, min_tokens: int) -> None:
        self._stop, self._text, self._is_included, self._min_tokens = stop, text, is_included, min_tokens
        self._num_held = 0 if is_included else max((len(each) - 1 for each in stop), default=0)
        self._num_sent = num_sent

    def send(self) -> str:
        """What the client may have of the text before."""
        return self._send(len(self._text) - self._num_held)

    def add(self, text: str, num_tokens: int, *, num_skipped: int = 0, is_end: bool) -> tuple[str, str]:
        """What the client gets next, and the stop string with which the answer ends there; empty if it does not. `num_tokens`
        are those of the answer with `text`, which ends if `is_end`, and whose first `num_skipped` characters end no answer.
        """
        start = len(self._text) + num_skipped
        self._text += text
        found = []
        for each in self._stop if num_tokens > self._min_tokens and text else ():
            at = self._text.find(each, max(0, start - len(each) + 1))
            if at >= 0:
                found.append((at + len(each), at, each))
        if found:
            end, at, each = min(found, key=lambda one: one[0])
            self._text = self._text[: end if self._is_included else at]
            return self._send(len(self._text)), each
        return self._send(len(self._text) - (0 if is_end else self._num_held)), ""

    def _send(self, stop: int) -> str:
        start, self._num_sent = self._num_sent, max(self._num_sent, stop)
        return self._text[start : self._num_sent]


class Answer:
    """An answer that a decode server gives. A stream of vLLM's may go on at another server, without a `reason` against it.

    The server says whether it stops the request and what it has left. The other one gets the prompt and the answer so far as
    tokens. The client gets the same fields as before, one text, and one count of tokens.
    """

    def __init__(self, client: Client, path: str, body: Body, headers: Mapping[str, str], keep: str, server: Server) -> None:
        self._client, self._path, self._body, self.headers, self._keep = client, path, body, headers, keep
        self.server, self.reason = server, reason_to_stay(path, body, server)
        self.id = ""
        self.tokens: list[int] = []
        self.has_begun = False
        self.is_whole = False
        """Whether the proxy has all of it."""
        self.target: Server | None = None
        """The server that is asked to go on."""
        self._prompt: list[int] = []
        self._text, self._num_sent = "", 0
        self._template: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._fingerprint: Any = None
        self._last: dict[str, Any] = {}
        """What only the last event of a chat has, as the first server says it."""
        self._move_id = secrets.token_hex(16)
        self._stopping: asyncio.Task[Any] | None = None
        self._targets: list[Server] = []
        self._drained: Container[str] = ()
        self._moved: asyncio.Future[str] | None = None
        """Why it stays, once its server has stopped it: empty if it has moved. `None` while nobody moves it."""
        self.num_before = 0
        """How many tokens the answer had when this server began."""
        self._limit = body.get("max_completion_tokens") or body.get("max_tokens")
        """How many tokens this server is asked for; `None` if the client does not say."""
        self._offset, self._offset_before = 0, 0
        """Where the next token begins in the text, as log-probabilities say it, and where this server's first one does."""
        self._left: dict[str, Any] | None = None
        """The sampling parameters of a request that its server has stopped, until another one goes on with them."""
        self._kept: Body | None = None
        """What that server has kept, if it has said so at once."""
        self._is_whole = False
        """Whether the text so far is that of all tokens: the last event has brought one token, and its text."""
        self._stops: StopStrings | None = None
        self._left_out: frozenset[int] = frozenset()
        """The special tokens that have no text."""
        self._seam: str | None = None
        """`_text_before` the move, until the server that goes on gives a text."""

    @property
    def own(self) -> dict[str, Any]:
        """Parameters for decode only."""
        return self._own(self._move_id)

    def _own(self, move_id: str) -> dict[str, Any]:
        return ({"keep": self._keep} if self._keep else {}) | ({} if self.reason else {"move_id": move_id})

    @property
    def is_moving(self) -> bool:
        """Whether it is to leave the server that it is at."""
        return self._moved is not None

    def is_at(self, url: str) -> bool:
        """Whether a server generates it, or is asked to go on with it."""
        return self.server.url == url or (self.target is not None and self.target.url == url)

    async def move(self, targets: list[Server], drained: Container[str]) -> str:
        """Let it go on at the first of the servers that can, and whose URL is not `drained` by then. Returns why it stays,
        nothing if it has moved. Only one call at a time.
        """
        if self.reason or not targets:
            return self.reason or "no other server of vLLM decodes"
        self._targets, self._drained, self._moved = targets, drained, asyncio.get_running_loop().create_future()
        try:
            return await self._stop() or await self._moved
        finally:
            self._moved = None

    async def _stop(self) -> str:
        """Let the server stop it. Returns why it does not. A full server answers once it has room, however long that takes."""
        is_chat, model = self._path == CHATS, self._body.get("model")
        try:
            if is_chat and await self._client.parses_tools(self.server, self.headers, model):
                return "the server may parse its answers to chats"
            asked = told(model, stop_request_id=self._move_id, is_chat=is_chat)
            self._stopping = asyncio.create_task(self._client.tell(self.server, self.headers, asked))
            answer = await asyncio.shield(self._stopping)
        except (ClientError, Failed, Refused) as error:
            return str(error)
        return "" if "stopped" in answer else str(answer.get("not_stopped") or "the server stops no requests")

    def _note_move(self, reason: str) -> None:
        """End the wait of `move`. `reason`: why the answer stays; empty if it has moved."""
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(reason)

    async def parts(self, parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """What the client gets of a server's stream."""
        async with aclosing(parts if self.reason else self._events(parts)) as events:
            async for event in events:
                self.is_whole = self.is_whole or event.startswith(DONE.rstrip())
                yield event
        self.is_whole = True

    async def _events(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """What the client gets of a server's stream, and of those that go on with it."""
        try:
            async with aclosing(self._first_events(parts)) as events:
                async for event in events:
                    yield event
            while self._left is not None:
                async with self._opened(self._left) as others, aclosing(self._later_events(others)) as events:
                    async for event in events:
                        yield event
        finally:
            self._note_move("it has ended")
            if self._stopping is not None or self._left is not None:  # the client has left meanwhile
                self._abort(self.server, self._move_id)

    async def _first_events(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Those of the server that was asked first: as they are, but without what the client has not asked for."""
        async for line in lines_of(parts):
            event = read_event(line)
            if event is None or event.get("error"):
                if self._left is None:
                    yield line + b"\n\n"
                continue
            self.id = event["id"]
            if not event["choices"]:
                self._usage = event
                if self._left is None:
                    yield write_event(event)
                continue
            (choice,) = event["choices"]
            self._prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids") or self._prompt
            self.tokens += choice.get("token_ids") or ()
            text = (choice["text"] if self._path == COMPLETIONS else choice["delta"].get("content")) or ""
            self._text += text
            self._is_whole = bool(text) and len(choice.get("token_ids") or ()) == 1 and not self._body.get("stop")
            if not self._body.get("return_token_ids"):
                hide_tokens(event)
                if choice.get("delta") == {} and not choice["finish_reason"]:
                    continue  # a parser holds the text back: the server sends it because it is to name the tokens
            if choice["finish_reason"] and await self._has_stopped(choice["finish_reason"]):
                stop = self._body.get("stop") or []
                self._stops = StopStrings(
                    [stop] if isinstance(stop, str) else stop,
                    self._text,
                    self._num_sent,
                    is_included=bool(self._body.get("include_stop_str_in_output")),
                    min_tokens=self._body.get("min_tokens") or 0,
                )
                text = self._stops.send()
                self._fingerprint = event.pop("system_fingerprint", None)
                choice["finish_reason"] = None
                if self._path == COMPLETIONS:
                    choice["text"], choice["stop_reason"] = text, None
                else:
                    choice["delta"]["content"] = text
                    self._last = {name: choice.pop(name) for name in LAST_ONLY if name in choice}
                if "kv_transfer_params" in event:
                    event["kv_transfer_params"] = None
            self._move_offset(choice)
            self._num_sent += len(text)
            self._template, self.has_begun = event, bool(self._prompt and self.tokens)
            yield write_event(event)

    async def _later_events(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Those of a server that goes on, in the form of the first one's."""
        assert self._stops is not None
        async for line in lines_of(parts):
            event = read_event(line)
            if event is None:
                if line.startswith(b":"):  # a comment, which keeps the connection alive
                    yield line + b"\n\n"
                continue
            if event.get("error"):
                yield line + b"\n\n" + DONE
                continue
            for choice in event["choices"]:
                self.tokens += choice["token_ids"] or ()
                self._is_whole = bool(choice["text"]) and len(choice["token_ids"] or ()) == 1
                reason = choice["finish_reason"]
                text = await self._new(choice["text"], is_end=bool(reason))
                if reason and await self._has_stopped(reason):
                    reason = None
                num_skipped = await self._num_skipped(text, len(choice["token_ids"] or ()))
                text, found = self._stops.add(text, len(self.tokens), num_skipped=num_skipped, is_end=bool(reason))
                ending = ("stop", found) if found else (reason, choice["stop_reason"])
                yield write_event(self._event(choice, text, *ending))
                if found or reason:
                    if self._usage is not None:
                        yield write_event(self._counted(self._usage))
                    yield DONE
                if found:
                    if self._left is not None:
                        self._left = None
                        self._abort(self.server, self._move_id)
                    return

    async def _has_stopped(self, reason: str) -> bool:
        """Whether an answer that ends for this reason was stopped to move."""
        if self._stopping is None:
            return False
        try:
            answer = await asyncio.shield(self._stopping)  # the drain waits for it too, also if this client leaves
        except Refused:
            return False
        except (ClientError, Failed) as error:
            if reason == "length" and len(self.tokens) - self.num_before != self._limit:
                raise Failed(f"{self.server.url} may have stopped the request, and has not said so: {error}") from error
            return False
        self._stopping, left = None, answer.get("stopped")
        if left is None:
            return False
        if reason != "length" or len(self.tokens) - self.num_before >= left["max_tokens"]:
            self._abort(self.server, self._move_id)
            return False
        self._left_out = frozenset(left.pop("left_out_token_ids", ()))
        self._left, self._kept = left, answer.get("kept")
        return True

    def _abort(self, server: Server, move_id: str) -> None:
        """Nobody takes what a server has kept."""
        self._client.tell_later(server, self.headers, told(self._body.get("model"), abort_request_id=move_id))

    @asynccontextmanager
    async def _opened(self, left: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The stream of the first server that goes on, at last of the one that has stopped. Raises `Failed` if none does."""
        source, model = self.server, self._body.get("model")
        kept = self._kept or await self._client.kept(source, self.headers, model, self._move_id)
        failure: Exception = Failed("the others are drained")
        for server in [*self._targets, source]:
            if server is not source and server.url in self._drained:
                continue
            self.target, move_id = server, secrets.token_hex(16)
            if server is not source:
                try:
                    await self._check_length(server, left)
                except (ClientError, Failed, Refused) as error:
                    logger.warning("%s does not go on with %s: %s", server.url, self.id, error)
                    failure = error
                    continue
            async with AsyncExitStack() as stack:
                try:
                    asked = self._continuation(left, kept, move_id)
                    limit = asked["max_tokens"]
                    answer = await stack.enter_async_context(
                        self._client.open("POST", server.url + COMPLETIONS, headers=self.headers, json=asked)
                    )
                    await check(answer)
                    others = read_events(answer, None)
                    first = await anext(others)
                    self._seam = await self._text_before(server)
                except (ClientError, Failed, Refused) as error:
                    logger.warning("%s does not go on with %s: %s", server.url, self.id, error)
                    failure = error
                    if kept is not None:
                        self._abort(source, self._move_id)
                        kept = None
                    continue
                logger.info("%s goes on at %s after %d tokens", self.id, server.url, len(self.tokens))
                self.server, self.target, self._move_id, self._left = server, None, move_id, None
                self.num_before, self._limit, self._offset_before = len(self.tokens), limit, self._offset
                self._note_move("" if server is not source else f"no other server goes on with it: {failure}")
                yield begin_with(first, others)
                return
        raise Failed(f"no server goes on with the answer: {failure}")

    async def _check_length(self, server: Server, left: dict[str, Any]) -> None:
        """Raises `Failed` if the whole answer may be longer than requests of this server."""
        longest = await self._client.max_length(server, self.headers)
        length = len(self._prompt) + self.num_before + left["max_tokens"]
        if length > longest:
            raise Failed(f"{server.url}: expected room for {length} tokens, found --max-model-len {longest}")

    def _continuation(self, left: dict[str, Any], kept: Body | None, move_id: str) -> dict[str, Any]:
        """What a server is asked that goes on. The proxy itself looks for stop strings."""
        fields = GOES_ON_WITH | OF_LOGPROBS if self._path == COMPLETIONS else GOES_ON_WITH
        num_done = len(self.tokens) - self.num_before
        counted = {"max_tokens": left["max_tokens"] - num_done, "min_tokens": max(0, left["min_tokens"] - num_done)}
        return {
            **{name: value for name, value in self._body.items() if name in fields},
            **left,
            **counted,
            "prompt": self._prompt + self.tokens,
            "stream": True,
            "return_token_ids": True,
            "kv_transfer_params": {**self._own(move_id), **({} if kept is None else {"kept": kept})},
        }

    async def _num_skipped(self, text: str, num_tokens: int) -> int:
        """How many characters of the text of the last `num_tokens` are of tokens at which no stop string ends the answer."""
        count = self._body.get("min_tokens") or 0
        if not self._body.get("stop") or not len(self.tokens) - num_tokens < count < len(self.tokens):
            return 0
        whole = await self._text_of(self.server, len(self.tokens))
        early = await self._text_of(self.server, count)
        return max(0, len(text) - (len(whole) - len(early.rstrip(INCOMPLETE))))

    async def _text_of(self, server: Server, num_tokens: int) -> str:
        """The text of the prompt and the first tokens of the answer, without the special tokens that the server leaves out."""
        tokens = [each for each in self._prompt + self.tokens[:num_tokens] if each not in self._left_out]
        return await self._client.text(server, self.headers, self._body.get("model"), tokens)

    async def _complete_text(self, server: Server) -> tuple[str, bool]:
        """The text of the prompt and the answer up to the last token at which a character is complete; whether more follow."""
        count = len(self.tokens)
        while (text := await self._text_of(server, count)).endswith(INCOMPLETE) and count:
            count -= 1
        return text, count < len(self.tokens)

    async def _text_before(self, server: Server) -> str | None:
        """The `_complete_text`; `None` if the text of a server that goes on begins after it."""
        if self._is_whole:
            return None
        text, is_cut = await self._complete_text(server)
        return text if is_cut and not text.endswith(INCOMPLETE) else None

    async def _new(self, text: str, *, is_end: bool) -> str:
        """What the client gets of `text`, as the server gives it. After an incomplete character that is all of the prompt's and
        the answer's, or (of tokenizers in Python) what follows the character. Raises `Failed` if the text before the move is
        not the beginning of all, or the server's own text is another.
        """
        if self._seam is None or not (text or is_end):
            return text
        known, self._seam = self._seam, None
        whole, _ = await self._complete_text(self.server)
        new = whole[len(known) :]
        if not whole.startswith(known) or not (text.endswith(new) or new.endswith(text)):
            raise Failed("the text so far is not that of its tokens")
        return new

    def _event(self, choice: dict[str, Any], text: str, reason: str | None, stop_reason: Any) -> dict[str, Any]:
        """An event for the client of one of a server that goes on."""
        (found,) = self._template["choices"]
        tokens = choice["token_ids"] if self._body.get("return_token_ids") else None
        self._move_offset(choice)
        new = {**found, "finish_reason": reason, "token_ids": tokens}
        if self._path == COMPLETIONS:
            new |= {"text": text, "logprobs": choice["logprobs"], "stop_reason": stop_reason, "prompt_token_ids": None}
        else:
            new |= {"delta": {"content": text}} | ({**self._last, "stop_reason": stop_reason} if reason else {})
        event = {**self._template, "choices": [new]}
        if reason and self._fingerprint is not None:
            event["system_fingerprint"] = self._fingerprint
        return self._counted(event) if event.get("usage") else event

    def _move_offset(self, choice: dict[str, Any]) -> None:
        """Let the log-probabilities of a completion say where its tokens begin in the text of the whole answer."""
        found = choice.get("logprobs")
        if self._path == COMPLETIONS and found and found["tokens"]:
            found["text_offset"] = [at + self._offset_before for at in found["text_offset"]]
            self._offset = found["text_offset"][-1] + len(found["tokens"][-1])

    def _counted(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event with the count of all tokens."""
        num_prompt, count = event["usage"]["prompt_tokens"], len(self.tokens)
        usage = {**event["usage"], "completion_tokens": count, "total_tokens": num_prompt + count}
        return {name: value for name, value in event.items() if name != "metrics"} | {"usage": usage}


def reason_to_stay(path: str, body: Body, server: Server) -> str:
    """Why an answer cannot go on at another server, as far as its request says; empty if nothing is against it."""
    if server.is_sglang:
        return "SGLang stops no requests"
    if path not in (COMPLETIONS, CHATS):
        return f"answers to {path} cannot be continued"
    if body.get("stream") is not True:
        return "the answer is not streamed"
    if has_several_prompts(body) or any(count not in (None, 1) for count in num_answers(body)):
        return "there are several answers"
    for name, kind in READ_BY_PROXY.items():
        if not isinstance(body.get(name), kind | None):
            return f"only the server can read its {name}"
    known = MAY_MOVE | OF_LOGPROBS if path == COMPLETIONS else MAY_MOVE
    others = [name for name, value in body.items() if value and name not in known]
    return f"of its fields only the server knows what they do: {', '.join(others)}" if others else ""


async def begin_with(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """All parts of a stream of which the first was read."""
    yield first
    async for part in others:
        yield part


async def lines_of(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a stream of events that are not empty."""
    async for part in parts:
        for line in part.splitlines():
            if line:
                yield line


def read_event(line: bytes) -> Any:
    """The event of a line; `None` if it has none."""
    return json.loads(line[6:]) if line.startswith(b"data: {") else None


def write_event(event: Body) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def hide_tokens(event: dict[str, Any]) -> None:
    """Take the ids of tokens from an event."""
    for part in (event, *event["choices"]):
        part.update(dict.fromkeys({"prompt_token_ids", "token_ids"} & part.keys()))


def watched_socket(address: Any) -> socket.socket:
    """A socket whose connection ends if the other host vanishes while the proxy waits for an answer."""
    family, kind, protocol, *_ = address
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": SILENT_S, "TCP_KEEPCNT": PROBES, "TCP_KEEPINTVL": PROBE_S}
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


class Proxy:
    """Takes the servers of each side in turn."""

    def __init__(
        self, prefills: list[str], decodes: list[str], *, retry_s: float, keep: bool = False, move: bool = False
    ) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)
        self._num_prefills, self._decode_urls, self._retry_s = len(prefills), frozenset(decodes), retry_s
        self._away_until: dict[str, float] = {}
        self._num_decodes, self._moves = len(decodes), move
        self._conversations = Conversations() if keep else None
        self._drains: dict[str, asyncio.Task[dict[str, Any]]] = {}
        """The servers that get no more requests."""
        self._answers: set[Answer] = set()
        self._passing: Counter[str] = Counter()
        """How many other requests each server answers."""
        self._client: Client

    def application(self) -> web.Application:
        """Every path but those of `/admin` has the same handler."""
        app = web.Application(client_max_size=MAX_BODY_NBYTES)
        app.cleanup_ctx.append(self._open_client)
        app.router.add_post("/admin/drain", self._drain)
        app.router.add_post("/admin/undrain", self._undrain)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _open_client(self, _: web.Application) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=watched_socket),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=DummyCookieJar(),  # one client's are not for others
            read_bufsize=1 << 20,
        ) as session:
            self._client = Client(session)
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in ROUTES and request.method in ROUTES[request.path].methods:
                return await self._generate(request)
            return await self._pass_on(request)
        except Refused as refused:
            refusal = refused
        except web.RequestPayloadError as error:
            refusal = Refused.because(f"the body: expected what its headers say, found {error}")
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
        said, num_said, num_away = b"", 0, 0
        while True:
            try:
                return await self._attempt(request, of_client(body), names, kept)
            except (ClientError, Failed) as error:
                logger.warning("%s: %s", type(error).__name__, error)
                if time.monotonic() > until:
                    raise
                answer = error.answer if isinstance(error, Failed) else None
                if answer is not None and answer.status == web.HTTPInternalServerError.status_code:
                    num_said = num_said + 1 if answer.body == said else 1
                    if num_said == MAX_SAID:  # by no server that ends: what the request asks for
                        raise answer from error
                said = b"" if answer is None else answer.body
                num_away = num_away + 1 if isinstance(error, UNREACHABLE) else self._num_decodes
            body, kept = self._client.once_more(request.path, body), None
            if num_away >= self._num_decodes:  # else the next server is asked at once
                await asyncio.sleep(RETRY_AFTER_S)

    async def _attempt(self, request: web.Request, body: Body, names: list[bytes], kept: Body | None) -> web.StreamResponse:
        """Raises `Failed` or `ClientError` if the request may be tried again."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        while True:
            url = next(self._open_decodes())
            with self._noted(url):
                decode = await self._client.server(url, headers)
            if url not in self._drains:  # meanwhile
                break
        is_turn = bool(names) and all(count in (None, 1) for count in num_answers(body))
        keep = secrets.token_hex(16) if is_turn and not (decode.is_sglang and request.path != CHATS) else ""
        given = Answer(self._client, request.path, body, headers, keep, decode)
        if not self._moves:
            given.reason = given.reason or "the proxy moves none"
        self._answers.add(given)
        try:
            return await self._divided(request, body, headers, given, kept)
        finally:
            self._answers.discard(given)
            if keep and given.is_whole and self._conversations is not None:  # also if the client has left since
                asking = self._client.kept(given.server, headers, body.get("model"), keep)
                self._conversations.put(names, asyncio.create_task(asking))

    def _open_decodes(self) -> Iterator[str]:
        """The decode servers that get new requests, from the next one on, and last those that could not be reached just now.
        Raises `Failed` if there is none.
        """
        urls = [url for url in itertools.islice(self._decodes, self._num_decodes) if url not in self._drains]
        if not urls:
            raise Failed("every decode server is drained")
        next(self._decodes)
        now = time.monotonic()
        yield from sorted(urls, key=lambda url: self._away_until.get(url, 0.0) > now)

    @contextmanager
    def _noted(self, url: str) -> Iterator[None]:
        """Note that a decode server cannot be reached, so that others are asked first for a while."""
        try:
            yield
        except UNREACHABLE:
            self._away_until[url] = time.monotonic() + AWAY_S
            raise

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        """Give a server no more requests, let others go on with its answers, and respond once it has none."""
        try:
            url = await self._decode_of(request)
        except Refused as refused:
            return refused.response()
        if url not in self._drains or has_failed(self._drains[url]):
            self._drains[url] = asyncio.create_task(self._empty(url))
        return web.json_response(await asyncio.shield(self._drains[url]))  # it goes on if the client leaves

    async def _undrain(self, request: web.Request) -> web.StreamResponse:
        """Give a server requests again, which may be another one than before."""
        try:
            url = await self._decode_of(request)
        except Refused as refused:
            return refused.response()
        self._client.forget(url)
        self._drains.pop(url, None)
        return web.json_response({})

    async def _empty(self, url: str) -> dict[str, Any]:
        """Let other servers go on with the answers of one that gets no more. Returns which have moved, and which have not."""
        own = asyncio.current_task()
        tried: set[Answer] = set()
        moving: dict[asyncio.Task[str], Answer] = {}
        moved: list[dict[str, Any]] = []
        stayed: list[dict[str, Any]] = []
        while self._drains.get(url) is own:
            here = [answer for answer in self._answers if answer.is_at(url)]
            if not here and not moving and not self._passing[url]:
                break
            for answer in here:
                if answer not in tried and not answer.is_moving and (answer.has_begun or answer.reason):
                    tried.add(answer)
                    moving[asyncio.create_task(self._move(answer))] = answer
            if moving:
                await asyncio.wait(moving, timeout=DRAIN_INTERVAL_S)
            else:
                await asyncio.sleep(DRAIN_INTERVAL_S)
            for task in [task for task in moving if task.done()]:
                answer = moving.pop(task)
                if reason := "it has ended" if task.cancelled() else task.result():
                    stayed.append({"id": answer.id, "reason": reason})
                else:
                    moved.append({"id": answer.id, "tokens": answer.num_before})
        return {"empty": self._drains.get(url) is own, "moved": moved, "stayed": stayed}

    async def _move(self, answer: Answer) -> str:
        """Let an answer go on at another server. Returns why it stays; empty if it has moved."""
        targets = []
        with suppress(Failed):
            for url in self._open_decodes():
                with suppress(ClientError, Failed, Refused):
                    targets.append(await self._client.server(url, answer.headers))
        others = [each for each in targets if not each.is_sglang and each.url != answer.server.url]
        reason = await answer.move(others, self._drains)
        if reason:
            logger.info("%s stays at %s: %s", answer.id or "an answer", answer.server.url, reason)
        return reason

    async def _decode_of(self, request: web.Request) -> str:
        """The decode server that a request of `/admin` names. Raises `Refused`."""
        body = read_body(await request.read())
        url = str(body.get("server")).rstrip("/") if isinstance(body, dict) else None
        if url not in self._decode_urls:
            raise Refused.because(f"server: expected one of {sorted(self._decode_urls)}, found {url!r:.100}")
        return url

    async def _divided(
        self,
        request: web.Request,
        body: Body,
        headers: Mapping[str, str],
        given: Answer,
        kept: Body | None,
    ) -> web.StreamResponse:
        """Ask a prefill server and decode, or decode alone if there is none that can prefill the request."""
        decode, own = given.server, given.own
        failure: Exception = Failed("no prefill server")
        urls = list(itertools.islice(self._prefills, self._num_prefills))  # other requests take turns meanwhile
        next(self._prefills)
        for url in urls:
            try:
                prefill = await self._client.server(url, headers)
                if reason := reason_against(prefill, decode, request.path, body):
                    failure = Refused.because(reason)
                    continue
                room = 1 + secrets.randbelow(1 << 62)
                place = await self._client.place(prefill, decode, headers, room)
            except (ClientError, Failed) as error:
                logger.warning("prefill server %s: %s", url, error)
                failure = error
                continue
            except Refused as refused:
                if refused.status in WITHOUT_KEY:
                    raise
                failure = refused
                continue
            attempt = Attempt(prefill, decode, place, request.path, body, headers, room, kept, own)
            try:
                return await self._ask_both(request, attempt, given)
            except NotPrefilled as error:
                logger.warning("prefill server %s: %s", url, error)
                failure, body, kept = error.cause, self._client.once_more(request.path, body), None  # it may have used it up
        if decode.is_sglang:
            raise Failed(str(failure)) if isinstance(failure, UNREACHABLE) else failure
        return await self._answer(request, decode, headers, HandOver({}, for_vllm(body, {}, own)), given)

    async def _ask_both(self, request: web.Request, attempt: Attempt, given: Answer) -> web.StreamResponse:
        """Ask both servers at once. Raises `NotPrefilled` if another prefill server should be asked, or decode alone."""
        asked, headers = hand_over(attempt), {**attempt.headers, **attempt.place.headers}
        prefilling = asyncio.create_task(self._client.ask(attempt.prefill, attempt.path, asked.prefill, headers))
        asked.fill = fill_of(attempt, prefilling)
        answering = self._answering(request, attempt, asked, given)
        is_right = True
        try:
            await asyncio.wait({answering, prefilling}, return_when=asyncio.FIRST_COMPLETED)
            if prefilling.done() and not answering.done():
                answering, is_right = await self._check_prefill(request, attempt, asked, given, prefilling, answering)
            return await answering
        except (ClientError, Failed):
            if not asked.begun:
                self._client.ask_again(attempt.prefill)  # it may be another server by now
            raise
        finally:
            has_ended = prefilling.done() and not prefilling.cancelled()
            is_refused = has_ended and isinstance(prefilling.exception(), Refused)
            is_taken = is_right and asked.begun and has_ended
            try:
                await end(prefilling, answering)
            finally:
                if not is_taken and not is_refused:
                    self._client.give_up(attempt)

    async def _check_prefill(
        self,
        request: web.Request,
        attempt: Attempt,
        asked: HandOver,
        given: Answer,
        prefilling: asyncio.Task[Any],
        answering: asyncio.Task[web.StreamResponse],
    ) -> tuple[asyncio.Task[web.StreamResponse], bool]:
        """Decode's answer once prefill has answered, and whether decode takes what prefill has. Decode is asked again if the
        server is not where it was, or hands over another attempt or nothing. Raises `NotPrefilled` if prefill has failed.
        """
        if (error := prefilling.exception()) is not None:
            if asked.begun or DECLINED in str(error):  # decode has what it needs
                return answering, True
            is_same = attempt.prefill.engine == attempt.decode.engine
            for_decode = {404} if is_same else {400, 404, 422}  # it may have an adapter, or take what the other engine does not
            is_final = isinstance(error, Refused) and error.status not in for_decode
            if is_final or not isinstance(error, ClientError | Failed | Refused):
                raise error
            raise NotPrefilled(error)
        found = None if attempt.prefill.is_sglang else prefilling.result().get("kv_transfer_params")
        if attempt.prefill.is_sglang or is_told(found, attempt.place.params):
            return answering, True
        if self._client.has_moved(attempt.prefill, found or {}):
            self._client.ask_again(attempt.prefill)
        if asked.begun:
            return answering, False
        if attempt.decode.is_sglang:
            raise Failed(f"{attempt.prefill.url} hands over nothing, or is another server than before")
        await end(answering)
        asked.decode = for_vllm(attempt.body, found or {}, attempt.own)
        return self._answering(request, attempt, asked, given), True

    def _answering(
        self, request: web.Request, attempt: Attempt, asked: HandOver, given: Answer
    ) -> asyncio.Task[web.StreamResponse]:
        return asyncio.create_task(self._answer(request, attempt.decode, attempt.headers, asked, given))

    async def _answer(
        self, request: web.Request, decode: Server, headers: Mapping[str, str], asked: HandOver, given: Answer
    ) -> web.StreamResponse:
        """Pass decode's answer on to the client."""
        async with AsyncExitStack() as opened:
            with self._noted(decode.url):
                asking = self._client.open("POST", decode.url + request.path, headers=headers, json=asked.decode)
                answer = await opened.enter_async_context(asking)
            await check(answer)
            if answer.content_type == "text/event-stream":
                parts = read_events(answer, asked.fill)
                async with aclosing(given.parts(parts)) as events:
                    first = await anext(events)
                    asked.begun = True
                    return await send(request, answer, first, events)
            data = await answer.read()
            asked.begun = given.is_whole = True
            if asked.fill is not None and asked.fill.field in data:
                whole = json.loads(data)
                await asked.fill.into(whole)
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
            if (left := cleaned(body)) != body:
                data = json.dumps(left).encode()
        failure: Exception = Failed("no decode server")
        for url in self._open_decodes():
            where = URL(url + request.raw_path, encoded=True)
            self._passing[url] += 1
            try:
                async with self._client.open(request.method, where, data=data, headers=headers) as answer:
                    return await send(request, answer, b"", answer.content.iter_any())
            except UNREACHABLE as error:
                self._away_until[url], failure = time.monotonic() + AWAY_S, error
            finally:
                self._passing[url] -= 1
        raise failure


def address(text: str) -> str:
    """The address of a server, without a slash at the end."""
    try:
        url = URL(text)
        is_valid = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, found {text!r}")
    return text.rstrip("/")


def port(text: str) -> int:
    """The number of a port; 0 for any that is free."""
    if not 0 <= int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected 0 to 65535, found {text!r}")
    return int(text)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for side in ("prefill", "decode"):
        parser.add_argument(
            f"--{side}", nargs="+", action="extend", type=address, required=True, metavar="URL", help=f"servers that {side}"
        )
    parser.add_argument("--retry-s", type=float, default=30.0, metavar="SECONDS", help="how long to try a request again")
    parser.add_argument("--keep", action="store_true", help="let decode keep each answer's state for prefill of the next turn")
    parser.add_argument(
        "--move", action="store_true", help="let streams of vLLM's decode servers go on at others when one of them is drained"
    )
    parser.add_argument(
        "--shutdown-s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long open answers may take once it is told to end",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:  # a request takes three
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    proxy = Proxy(given.prefill, given.decode, retry_s=given.retry_s, keep=given.keep, move=given.move)
    try:
        web.run_app(
            proxy.application(),
            host=given.host,
            port=given.port,
            handler_cancellation=True,
            shutdown_timeout=given.shutdown_s / 2,  # it waits twice
            backlog=BACKLOG,
        )
    except OSError as error:  # the port is in use, or not ours to take
        sys.exit(f"pd_proxy: {error}")


if __name__ == "__main__":
    main()
