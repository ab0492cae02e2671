"""A proxy in front of servers that prefill and servers that decode. Each may be vLLM or SGLang, with this library.

    python examples/pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It speaks OpenAI's API for completions and chats. A prefill server of vLLM is asked first, for one token, and its answer says
where decode finds the request. SGLang computes nothing until decode has reserved memory, so it is asked at the same time as
decode. A request that fails before the client has got a part of its answer is tried again, with a new id. vLLM's decode
computes a prompt that it cannot get. A vLLM server that has prefilled a request which then fails, or whose client leaves, is
told so, and need not keep its blocks. Requires aiohttp, which both servers require too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web
from yarl import URL

logger = logging.getLogger("pd_proxy")

ONE_TOKEN = {"stream": False, "max_tokens": 1, "n": 1}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
FOR_SERVERS_ONLY = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that the proxy sets. A client that could choose them would choose whose state decode takes."""
PASSED_ON = ("Authorization", "X-Request-Id")
PASSED_ON_TO_DECODE = (*PASSED_ON, "Content-Type")
BEGUN = "begun"
"""A request whose client has got a part of its answer."""
RETRY_AFTER_S = 0.5
GIVE_UP_TIMEOUT = ClientTimeout(total=5)
FIRST_RANK = {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
Body = Mapping[str, Any]


class Failed(Exception):
    """A server cannot serve this request now."""


@dataclass(frozen=True)
class Server:
    """A server at `url`. `bootstrap_port` is that of SGLang's bootstrap server, `None` for vLLM."""

    url: str
    bootstrap_port: int | None

    @property
    def is_sglang(self) -> bool:
        return self.bootstrap_port is not None


@dataclass(frozen=True)
class Attempt:
    """A request, the servers that it goes to, and the room in which they meet."""

    prefill: Server
    decode: Server
    path: str
    body: Body
    headers: Mapping[str, str]
    room: int

    @property
    def transfer_id(self) -> str:
        """The room as vLLM has it, in hexadecimal digits."""
        return self.room.to_bytes(16, "big").hex()


class Client:
    """Requests to the servers."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._known: dict[str, Server] = {}

    async def server(self, url: str) -> Server:
        """Which kind of server there is at `url`. Raises `ClientError` for one that was gone and is not back yet."""
        if url not in self._known:
            async with self._session.get(f"{url}/server_info") as answer:
                port = (await answer.json())["disaggregation_bootstrap_port"] if answer.ok else None
            self._known[url] = Server(url, port)
        return self._known[url]

    async def ask(self, server: Server, path: str, body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
        """The answer of a server. Raises `Failed` for one that is an error."""
        async with self.open("POST", server.url + path, headers=headers, json=body) as answer:
            return await read_json(answer)

    async def give_up(self, attempt: Attempt) -> None:
        """Tell vLLM that nobody takes the request that it prefills. It learns that with another one, of a single token."""
        asked = {"prompt": [0], "kv_transfer_params": {"abort_request_id": attempt.transfer_id}, **ONE_TOKEN}
        asked |= {key: attempt.body[key] for key in ("model",) if key in attempt.body}
        headers = {name: value for name, value in attempt.headers.items() if name == "Authorization"}
        url = f"{attempt.prefill.url}/v1/completions"
        with suppress(ClientError, TimeoutError):
            async with self.open("POST", url, headers=headers, json=asked, timeout=GIVE_UP_TIMEOUT):
                pass

    async def instance(self, prefill: Server) -> dict[str, Any]:
        """Where vLLM finds an SGLang server's state: the control address of its first rank, which is also its name."""
        where = URL(prefill.url).with_port(prefill.bootstrap_port).with_path("/route")
        async with self.open("GET", str(where), params=FIRST_RANK) as answer:
            rank = await read_json(answer)
        name = URL.build(scheme="tcp", host=rank["rank_ip"], port=int(rank["rank_port"])).authority
        return {"remote_engine_id": name, "remote_address": f"tcp://{name}"}

    @asynccontextmanager
    async def open(self, method: str, url: str, **content: Any) -> AsyncIterator[ClientResponse]:
        try:
            async with self._session.request(method, url, **content) as answer:
                yield answer
        except ClientError:
            self._known.pop(str(URL(url).origin()), None)  # until it answers, no prefill server computes anything for it
            raise


async def read_json(answer: ClientResponse) -> dict[str, Any]:
    """Raises `Failed` for an error of the server. Errors of the request are for the client."""
    if answer.status >= 500:
        raise Failed(f"{answer.url}: {answer.status} {(await answer.text())[:300]}")
    if not answer.ok:
        raise web.HTTPBadRequest(text=await answer.text(), content_type="application/json")
    return dict(await answer.json())


@dataclass
class HandOver:
    """One attempt: what decode is asked, what prefill is asked meanwhile (SGLang), and what it has answered (vLLM)."""

    decode: dict[str, Any]
    prefill: dict[str, Any] | None = None
    answer: dict[str, Any] | None = None


async def hand_over(client: Client, attempt: Attempt) -> HandOver:
    """The request to decode, which finds the state of the prompt at prefill."""
    prefill, decode, body, room = attempt.prefill, attempt.decode, attempt.body, attempt.room
    if prefill.is_sglang:
        where = {"bootstrap_host": URL(prefill.url).host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
        meanwhile = {**body, **where, "stream": False}
        if decode.is_sglang:
            return HandOver({**body, **where}, meanwhile)
        found = {"do_remote_prefill": True, "remote_request_id": attempt.transfer_id, **await client.instance(prefill)}
        return HandOver({**body, "kv_transfer_params": found}, meanwhile)
    asked: dict[str, Any] = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL} | ONE_TOKEN
    asked["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_request_id": attempt.transfer_id,
        "first_token": decode.is_sglang,
    }
    answer = await client.ask(prefill, attempt.path, asked, attempt.headers)
    params = answer.get("kv_transfer_params")
    if not decode.is_sglang:
        return HandOver({**body, "kv_transfer_params": params} if params else dict(body))
    if not params:
        raise Failed(f"{prefill.url} hands over nothing")
    address = URL(params["remote_address"])
    host = {"bootstrap_host": f"{params['remote_engine_id']}@{address.host}", "bootstrap_port": address.port}
    return HandOver({**body, **host, "bootstrap_room": room}, answer=answer)


def fill_in(event: dict[str, Any], answer: Body | None) -> bool:
    """Give SGLang's first token the log-probabilities that vLLM's prefill has answered. Returns whether that is done."""
    if answer is None:
        return True
    for choice, first in zip(event.get("choices", ()), answer["choices"], strict=False):
        found, known = choice.get("logprobs"), first.get("logprobs")
        if found and known:
            for key in ("content", "token_logprobs", "top_logprobs"):
                if found.get(key) and known.get(key):
                    found[key][0] = known[key][0]
            return True
    return False


def has_several_prompts(body: Body) -> bool:
    """Whether a completion is asked for a list of prompts: of texts, or of lists of tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


class Proxy:
    """Takes the servers of each side in turn."""

    def __init__(self, prefills: list[str], decodes: list[str], *, retry_s: float) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)
        self._num_prefills, self._retry_s = len(prefills), retry_s
        self._client: Client

    def application(self) -> web.Application:
        """The routes of the proxy."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._open_client)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_route("*", "/{other:.*}", self._ask_decode)
        return app

    async def _open_client(self, _: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=5), read_bufsize=1 << 20) as session:
            self._client = Client(session)
            yield

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = {name: value for name, value in (await request.json()).items() if name not in FOR_SERVERS_ONLY}
        until = time.monotonic() + self._retry_s
        while True:
            try:
                return await self._attempt(request, body)
            except (ClientError, Failed) as error:
                logger.warning("%s: %s", type(error).__name__, error)
                if BEGUN in request:  # the client has got a part of the answer: it learns of the failure by the end of it
                    if request.transport is not None:
                        request.transport.close()
                    raise
                if time.monotonic() > until:
                    raise web.HTTPServiceUnavailable(text=f"no servers: {error}") from error
            await asyncio.sleep(RETRY_AFTER_S)

    async def _attempt(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Raises `Failed` or `ClientError` if the request may be tried again."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        decode = await self._client.server(next(self._decodes))
        if has_several_prompts(body) and not decode.is_sglang:  # a hand-over is of one prompt: decode computes them itself
            return await self._answer(request, decode, headers, HandOver(dict(body)))
        failure: Exception = Failed("no prefill server")
        for url in itertools.islice(self._prefills, self._num_prefills):
            try:
                prefill = await self._client.server(url)
                attempt = Attempt(prefill, decode, request.path, body, headers, secrets.randbelow(1 << 62))
                async with self._giving_up(attempt):
                    asked = await hand_over(self._client, attempt)
            except (ClientError, Failed) as error:
                logger.warning("prefill server %s: %s", url, error)
                failure = error
                continue
            async with self._giving_up(attempt):
                return await self._decode(request, attempt, asked)
        if decode.is_sglang:
            raise failure
        return await self._answer(request, decode, headers, HandOver(dict(body)))

    @asynccontextmanager
    async def _giving_up(self, attempt: Attempt) -> AsyncIterator[None]:
        """Tell a vLLM server that prefills if the request fails, or its client leaves."""
        try:
            yield
        except BaseException:
            if not attempt.prefill.is_sglang:
                await self._client.give_up(attempt)
            raise

    async def _decode(self, request: web.Request, attempt: Attempt, asked: HandOver) -> web.StreamResponse:
        """Ask decode, and prefill meanwhile if it is SGLang."""
        answering = asyncio.create_task(self._answer(request, attempt.decode, attempt.headers, asked))
        try:
            if asked.prefill is not None:
                await self._prefill_meanwhile(answering, attempt, asked.prefill)
            return await answering
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError, ClientError, Failed, web.HTTPException):
                await answering

    async def _prefill_meanwhile(self, answering: asyncio.Task[Any], attempt: Attempt, body: Body) -> None:
        """Let SGLang prefill while decode waits for it. vLLM's decode needs no telling that prefill has failed."""
        prefilling = asyncio.create_task(self._client.ask(attempt.prefill, attempt.path, body, attempt.headers))
        try:
            await asyncio.wait({answering, prefilling}, return_when=asyncio.FIRST_COMPLETED)
            if attempt.decode.is_sglang and not answering.done():
                await prefilling
            else:
                await asyncio.wait({answering})
        finally:
            prefilling.cancel()
            with suppress(asyncio.CancelledError, ClientError, Failed, web.HTTPException):
                await prefilling

    async def _answer(
        self, request: web.Request, decode: Server, headers: Mapping[str, str], asked: HandOver
    ) -> web.StreamResponse:
        """Pass decode's answer on to the client."""
        url = decode.url + request.path
        async with self._client.open("POST", url, headers=headers, json=asked.decode) as answer:
            if answer.content_type != "text/event-stream":
                whole = await read_json(answer)
                fill_in(whole, asked.answer)
                return web.json_response(whole)
            response: web.StreamResponse | None = None
            filled = asked.answer is None
            async for line in answer.content:
                if line.startswith(b"data: {") and (response is None or not filled):
                    event = json.loads(line[6:])
                    if response is None and "error" in event:
                        raise Failed(f"{url}: {event['error']}")
                    filled = filled or fill_in(event, asked.answer)
                    line = b"data: " + json.dumps(event).encode() + b"\n"  # noqa: PLW2901
                if response is None:
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    request[BEGUN] = True
                    await response.prepare(request)
                await response.write(line)
            if response is None:
                raise Failed(f"{url}: an empty answer")
            await response.write_eof()
            return response

    async def _ask_decode(self, request: web.Request) -> web.StreamResponse:
        """Other requests, such as for the list of models."""
        url, data = next(self._decodes) + request.path_qs, await request.read()
        headers = {name: request.headers[name] for name in PASSED_ON_TO_DECODE if name in request.headers}
        async with self._client.open(request.method, url, data=data or None, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


def addresses(given: list[list[str]]) -> Iterator[str]:
    """The addresses of servers, without a slash at the end."""
    return (address.rstrip("/") for addresses in given for address in addresses)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", nargs="+", action="append", required=True, metavar="URL", help="servers that prefill")
    parser.add_argument("--decode", nargs="+", action="append", required=True, metavar="URL", help="servers that decode")
    parser.add_argument("--retry-s", type=float, default=30.0, metavar="SECONDS", help="how long to try a request again")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(list(addresses(given.prefill)), list(addresses(given.decode)), retry_s=given.retry_s)
    try:
        web.run_app(proxy.application(), host=given.host, port=given.port, handler_cancellation=True)
    except OSError as error:  # the port is in use, or not ours to take
        sys.exit(f"pd_proxy: {error}")


if __name__ == "__main__":
    main()
