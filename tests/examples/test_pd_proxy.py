"""The example's proxy in front of stand-ins for servers: what they are asked, and what the client gets.

`make test-vllm`, `make test-sglang` and `make test-cross` run it in front of real ones.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout, web
from yarl import URL

from examples import pd_proxy
from examples.pd_proxy import DECLINED, MAX_BODY_NBYTES, Conversations, Proxy, beginnings, end, main
from harness.ports import free_ports
from tests.support.tcp import full_port

WHERE = {"remote_engine_id": "engine", "remote_address": "tcp://127.0.0.1:7000"}
COMPLETION = {"model": "model", "prompt": "Prefill computes, decode", "max_tokens": 4}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
SSE = {"Content-Type": "text/event-stream"}


@dataclass
class Asked:
    """A request that a stand-in has got."""

    method: str
    path: str
    headers: Mapping[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data)


Respond = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


@dataclass
class StandIn:
    """A server that notes what it is asked, and gives the answer of `respond`."""

    respond: Respond
    info: web.Response | None = None
    place: Mapping[str, Any] | Callable[[Asked], Mapping[str, Any]] | None = field(default_factory=lambda: WHERE)
    """What it answers to a prompt of one token that it should hand over."""
    num_located: int = 0
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    num_cut: int = 0
    """Requests whose client left."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/model_info", "/server_info"):
            return web.json_response({"detail": "Not Found"}, status=404) if self.info is None else copy_of(self.info)
        asked = Asked(request.method, request.raw_path, request.headers.copy(), await request.read())
        if b'"prompt": [0]' in asked.data and "do_remote_decode" in asked.body["kv_transfer_params"]:
            self.num_located += 1
            place = self.place(asked) if callable(self.place) else self.place
            return web.json_response({"choices": [], "kv_transfer_params": place})
        self.asked.append(asked)
        try:
            return await self.respond(request, asked)
        except asyncio.CancelledError:
            self.num_cut += 1
            raise

    def bodies(self, path: str = "/v1/completions") -> list[Any]:
        return [each.body for each in self.asked if each.path == path]


def copy_of(response: web.Response) -> web.Response:
    """A response is sent once."""
    return web.Response(status=response.status, body=response.body, headers=response.headers)


def says(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Respond:
    async def respond(_: web.Request, __: Asked) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return respond


async def prefills(_: web.Request, asked: Asked) -> web.StreamResponse:
    """VLLM as prefill."""
    params = asked.body["kv_transfer_params"]
    if "abort_request_id" in params:
        return web.json_response({})
    found = {**WHERE, "remote_request_id": params["remote_request_id"]}
    return web.json_response({"choices": [], "kv_transfer_params": found})


decodes = says(200, {"choices": [{"text": "decoded"}]})


async def waits(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Decode that waits for prefill, in vain, and answers alone."""
    is_alone = asked.body.keys().isdisjoint(("kv_transfer_params", "bootstrap_room"))
    return await (decodes if is_alone else hangs)(request, asked)


async def streams(request: web.Request, _: Asked) -> web.StreamResponse:
    """Three events, and no end until the client leaves."""
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    for index in range(3):
        await response.write(b'data: {"choices": [{"text": "%d"}]}\n\n' % index)
    await asyncio.Event().wait()
    return response


def in_two_parts(first: bytes, rest: bytes, *, between: asyncio.Event) -> Respond:
    """An answer whose second part comes a little after `between` is set, which is a little after the first."""

    async def respond(request: web.Request, _: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(first)
        await asyncio.sleep(0.05)
        between.set()
        await asyncio.sleep(0.05)
        await response.write(rest)
        return response

    return respond


async def hangs(_: web.Request, __: Asked) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def sglang(respond: Respond) -> StandIn:
    return StandIn(respond, info=web.json_response({"disaggregation_bootstrap_port": 8998, "internal_states": []}))


@dataclass
class Pair:
    """Two stand-ins, and a client of the proxy in front of them."""

    prefill: StandIn
    decode: StandIn
    client: ClientSession
    port: int

    async def post(self, body: Any, *, path: str = "/v1/completions", **headers: str) -> tuple[int, str, Mapping[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.client.post(path, data=io.BytesIO(data), headers=given) as answer:
            return answer.status, await answer.text(), answer.headers

    async def raw(self, text: bytes) -> bytes:
        """The answer to bytes on a connection of their own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)
        found = await reader.read()
        writer.close()
        await writer.wait_closed()
        return found


async def serve(stack: AsyncExitStack, application: web.Application) -> int:
    """Serve as the program does. Returns the port."""
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return int(runner.addresses[0][1])


def given_up(pair: Pair) -> list[str]:
    """The transfers that prefill was told to give up."""
    found = (body["kv_transfer_params"].get("abort_request_id") for body in pair.prefill.bodies())
    return [name for name in found if name]


@asynccontextmanager
async def started(
    prefill: StandIn,
    decode: StandIn,
    *,
    retry_s: float = 0.0,
    others: Sequence[str] = (),
    other_prefills: Sequence[str] = (),
    keep: bool = False,
    num_prefills: int = 1,
    host: str = "127.0.0.1",
) -> AsyncIterator[Pair]:
    """`others` are addresses of decode that come before that of `decode`, and `other_prefills` those of prefill.
    `num_prefills`: how often prefill is given. `host`: what the proxy calls this machine.
    """
    async with AsyncExitStack() as stack:
        for server in (prefill, decode):
            application = web.Application(client_max_size=1 << 30)
            application.router.add_route("*", "/{path:.*}", server.handle)
            server.url = f"http://{host}:{await serve(stack, application)}"
        prefills = [*other_prefills, *[prefill.url] * num_prefills]
        proxy = Proxy(prefills, [*others, decode.url], retry_s=retry_s, keep=keep)
        port = await serve(stack, proxy.application())
        client = await stack.enter_async_context(ClientSession(f"http://127.0.0.1:{port}"))
        yield Pair(prefill, decode, client, port)


def run(scenario: Callable[..., Coroutine[Any, Any, None]], prefill: StandIn, decode: StandIn, **options: Any) -> None:
    async def start() -> None:
        async with started(prefill, decode, **options) as pair, asyncio.timeout(60):
            await scenario(pair)

    asyncio.run(start())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


class DevMode(StandIn):
    """VLLM with `VLLM_SERVER_DEV_MODE=1`, which collects what it says of itself for seconds."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path != "/server_info"
        return await super().handle(request)


def test_vllm_in_dev_mode_is_no_sglang() -> None:
    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post(COMPLETION)
        assert (status, json.loads(text)) == (200, {"choices": [{"text": "decoded"}]})
        (asked,) = pair.decode.bodies()
        assert asked["kv_transfer_params"]["remote_engine_id"] == "engine"

    run(scenario, DevMode(prefills), DevMode(decodes))


def test_both_servers_are_asked_at_once() -> None:
    """Neither waits for the other one's answer. Where prefill is, the proxy asks once."""

    async def scenario(pair: Pair) -> None:
        for number in (1, 2):
            waiting = asyncio.create_task(pair.post(COMPLETION))
            await until(partial(both_are_asked, pair, number))
            goes_on.set()
            assert (await waiting)[0] == 200
            goes_on.clear()
        assert pair.prefill.num_located == 1
        assert given_up(pair) == []

    def both_are_asked(pair: Pair, number: int) -> bool:
        return len(pair.prefill.asked) == len(pair.decode.asked) == number

    goes_on = asyncio.Event()

    def later(respond: Respond) -> Respond:
        async def wait(request: web.Request, asked: Asked) -> web.StreamResponse:
            await goes_on.wait()
            return await respond(request, asked)

        return wait

    async def last(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await decodes(request, asked)

    run(scenario, StandIn(later(prefills)), StandIn(later(last)))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_prefill_server_that_is_not_where_it_was(has_begun: bool) -> None:
    """Its answer says where it is now. Decode is asked again, unless it answers already: then prefill is told to give up."""
    prefill_may_answer = asyncio.Event()

    async def moved(_: web.Request, asked: Asked) -> web.StreamResponse:
        params = asked.body["kv_transfer_params"]
        if "abort_request_id" not in params:
            await prefill_may_answer.wait()
        return web.json_response({"kv_transfer_params": {**there, "remote_request_id": params.get("remote_request_id")}})

    async def loads(request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.body["kv_transfer_params"]["remote_engine_id"] == there["remote_engine_id"]:
            return await decodes(request, asked)
        if not has_begun:
            await hangs(request, asked)
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "computed"}]}\n\n')
        await until(lambda: bool(prefill.asked))
        prefill_may_answer.set()
        await asyncio.sleep(0.05)
        return response

    async def scenario(pair: Pair) -> None:
        if not has_begun:
            prefill_may_answer.set()
        status, text, _ = await pair.post(COMPLETION)
        assert status == 200
        assert ("computed" if has_begun else "decoded") in text
        assert len(pair.decode.asked) == (1 if has_begun else 2)
        if has_begun:
            await until(lambda: given_up(pair) == [pair.prefill.bodies()[0]["kv_transfer_params"]["remote_request_id"]])
        else:
            assert pair.decode.num_cut == 1
            assert given_up(pair) == []
        pair.prefill.place = there
        assert (await pair.post(COMPLETION))[0] == 200
        assert pair.decode.bodies()[-1]["kv_transfer_params"]["remote_engine_id"] == there["remote_engine_id"]
        assert len(pair.decode.asked) == (2 if has_begun else 3)

    there = {"remote_engine_id": "other", "remote_address": "tcp://127.0.0.1:7001"}
    prefill = StandIn(moved)
    run(scenario, prefill, StandIn(loads))


def test_a_preempted_attempt_is_taken_as_prefill_says() -> None:
    """Decode waits for attempt 0, which has ended."""

    async def again(_: web.Request, asked: Asked) -> web.StreamResponse:
        found = {**WHERE, "remote_request_id": asked.body["kv_transfer_params"]["remote_request_id"], "remote_attempt": 2}
        return web.json_response({"kv_transfer_params": found})

    async def loads(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (decodes if asked.body["kv_transfer_params"].get("remote_attempt") == 2 else hangs)(request, asked)

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == 200
        assert len(pair.prefill.asked) == 1

    run(scenario, StandIn(again), StandIn(loads))


def test_prefill_that_hands_nothing_over() -> None:
    """Decode computes it: a server without the connector is not asked to prefill, and one that cannot is asked once."""
    nothing = says(200, {"choices": [], "kv_transfer_params": None})

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == 200
        assert pair.decode.bodies()[-1] == COMPLETION
        assert len(pair.prefill.asked) == 1
        pair.prefill.place = None
        pair.prefill.respond = says(500, {})
        for _ in range(2):
            assert (await pair.post(COMPLETION))[0] == 200
        asked = len(pair.prefill.asked)
        assert (await pair.post(COMPLETION))[0] == 200
        assert len(pair.prefill.asked) == asked

    run(scenario, StandIn(nothing), StandIn(waits))


@pytest.mark.parametrize("status", [400, 401, 404])
def test_prefill_that_does_not_say_where_it_is(status: int) -> None:
    """Without its key the client learns that. Otherwise decode answers alone."""

    def refuse(_: Asked) -> Mapping[str, Any]:
        raise {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 404: web.HTTPNotFound}[status]

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == (401 if status == 401 else 200)
        assert pair.decode.bodies() == ([] if status == 401 else [COMPLETION])

    run(scenario, StandIn(prefills, place=refuse), StandIn(decodes))


def test_replicas_take_turns() -> None:
    """Each has a place of its own, and a request goes to the one that decode is told."""

    async def scenario(pair: Pair) -> None:
        for _ in range(4):
            assert (await pair.post(COMPLETION))[0] == 200
        told = [body["kv_transfer_params"]["remote_engine_id"] for body in pair.decode.bodies()]
        assert told == ["engine_0", "engine_1", "engine_0", "engine_1"]
        assert [asked.headers["X-data-parallel-rank"] for asked in pair.prefill.asked] == ["0", "1", "0", "1"]

    async def replica(_: web.Request, asked: Asked) -> web.StreamResponse:
        place = place_of(asked)
        return web.json_response({"kv_transfer_params": {**place, "remote_request_id": "ab"}})

    def place_of(asked: Asked) -> dict[str, Any]:
        return {**WHERE, "remote_engine_id": f"engine_{asked.headers.get('X-data-parallel-rank', 1)}", "remote_replicas": 2}

    run(scenario, StandIn(replica, place=place_of), StandIn(decodes))


def test_a_server_that_wants_a_key_gets_the_clients() -> None:
    """SGLang guards `/model_info` too."""
    guarded = StandIn(decodes, info=web.Response(status=401, body=b'{"error": "Unauthorized"}'))

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post(COMPLETION)
        assert (status, text) == (401, '{"error": "Unauthorized"}')

    run(scenario, StandIn(prefills), guarded)


def test_a_connection_to_a_host_that_vanishes_ends() -> None:
    """Also one that only waits for an answer, in which nothing is lost."""
    with pd_proxy.watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80))) as found:
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, count, interval = (
            found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPCNT", "TCP_KEEPINTVL")
        )
        assert idle + count * interval == 30
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0, "it would overrule the others"


def test_a_server_that_does_not_say_what_it_is_holds_up_no_request_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_proxy, "ASK_TIMEOUT", ClientTimeout(total=0.1))
    pair_decode = StandIn(decodes)

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(pair_decode, "handle", silent)

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post(COMPLETION)
        assert status == 503
        assert "does not answer" in text

    run(scenario, StandIn(prefills), pair_decode)


def test_a_cookie_of_one_answer_is_not_sent_with_other_requests() -> None:
    """They may be another client's."""

    async def scenario(pair: Pair) -> None:
        for path in ("/v1/completions", "/v1/completions", "/other"):
            assert (await pair.post(COMPLETION, path=path))[2]["Set-Cookie"] == "session=one"
        assert not [asked for asked in [*pair.prefill.asked, *pair.decode.asked] if "Cookie" in asked.headers]

    decode = StandIn(says(200, {"choices": []}, {"Set-Cookie": "session=one"}))
    run(scenario, StandIn(prefills), decode, host="localhost")


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST"])
def test_a_server_is_asked_what_it_is_after_a_lost_connection(host: str) -> None:
    """It may be another one. Its URL need not be in normal form."""

    async def restarts(request: web.Request, asked: Asked) -> web.StreamResponse:
        prefill.info, prefill.respond = web.json_response({"disaggregation_bootstrap_port": 8999}), decodes
        assert request.transport is not None
        request.transport.abort()
        return await hangs(request, asked)

    async def meets(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (hangs if len(decode.asked) == 1 else decodes)(request, asked)

    async def scenario(pair: Pair) -> None:
        assert [(await pair.post(COMPLETION))[0] for _ in range(2)] == [503, 200]
        assert [body["bootstrap_port"] for body in pair.decode.bodies()] == [8998, 8999]

    prefill, decode = sglang(restarts), sglang(meets)
    run(scenario, prefill, decode, host=host)


def test_a_server_that_is_not_ready_is_asked_again() -> None:
    decode = StandIn(decodes, info=web.Response(status=503))

    async def scenario(pair: Pair) -> None:
        waiting = asyncio.create_task(pair.post(COMPLETION))
        await asyncio.sleep(0.2)
        decode.info = sglang(decodes).info
        assert (await waiting)[0] == 200
        assert pair.decode.bodies()[0]["bootstrap_port"] == 7000

    run(scenario, StandIn(prefills), decode, retry_s=30)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 403, 413, 422, 429])
def test_an_error_of_the_request_is_for_the_client(side: str, status: int) -> None:
    """Status, body and headers are the server's."""
    error = {"error": {"message": "no", "code": status}, "detail": ["ü"]}
    headers = {"Retry-After": "7", "WWW-Authenticate": "Bearer", "X-Request-Id": "1"}
    refusing, other = StandIn(says(status, error, headers)), StandIn(prefills if side == "decode" else waits)

    async def scenario(pair: Pair) -> None:
        found, text, got = await pair.post(COMPLETION)
        assert (found, json.loads(text)) == (status, error)
        assert {name: got[name] for name in headers} == headers
        assert got["Content-Type"] == "application/json; charset=utf-8"
        assert len(refusing.asked) == 1  # it is not asked again, nor told to give up
        if side == "decode":
            await until(lambda: len(given_up(pair)) == 1)  # prefill need not keep the blocks
        else:
            await until(lambda: pair.decode.num_cut == len(pair.decode.asked))

    run(scenario, *((refusing, other) if side == "prefill" else (other, refusing)))


def test_decode_answers_alone_for_an_adapter_that_only_it_has() -> None:
    unknown = {"error": {"message": "The model `adapter` does not exist.", "code": 404}}

    async def scenario(pair: Pair) -> None:
        assert (await pair.post({**COMPLETION, "model": "adapter"}))[0] == 200
        assert pair.decode.bodies()[1:] == [{**COMPLETION, "model": "adapter"}]
        await until(lambda: pair.decode.num_cut == 1)  # it does not wait for prefill any more
        pair.decode.respond = says(404, unknown)
        status, text, _ = await pair.post({**COMPLETION, "model": "nobody's"})
        assert (status, json.loads(text)) == (404, unknown)

    run(scenario, StandIn(says(404, unknown)), StandIn(waits))


@pytest.mark.parametrize("prefill", [StandIn(prefills), sglang(decodes)], ids=["vllm", "sglang"])
def test_sglang_decode_cannot_answer_alone(prefill: StandIn) -> None:
    """So the client gets prefill's 404."""
    prefill.respond = says(404, {"error": "unknown"})

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[:2] == (404, '{"error": "unknown"}')

    run(scenario, prefill, sglang(hangs))


@pytest.mark.parametrize("status", [400, 401, 422])
def test_sglang_prefill_refuses_while_vllm_decode_waits(status: int) -> None:
    """Decode need not wait for its time limit. It answers alone what SGLang may not take, and gets all fields; prefill gets
    none that only shape the answer.
    """

    async def refuse(_: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            return web.json_response({"rank_ip": "127.0.0.1", "rank_port": 7000})
        return web.json_response({"error": "no"}, status=status)

    body = {**COMPLETION, "max_tokens": None, "temperature": None, "top_k": 0, "repetition_penalty": 3, "logprobs": 2}

    async def scenario(pair: Pair) -> None:
        prefill.info = web.json_response({"disaggregation_bootstrap_port": int(prefill.url.rpartition(":")[2])})
        found, text, _ = await pair.post(body)
        assert (found, text) == (status, '{"error": "no"}') if status == 401 else found == 200
        await until(lambda: pair.decode.num_cut == 1)
        (asked,) = prefill.bodies()
        assert asked["max_tokens"] == 1
        assert asked["prompt"] == COMPLETION["prompt"]
        assert asked.keys().isdisjoint({"temperature", "top_k", "repetition_penalty", "logprobs"})
        assert all(body.items() <= given.items() for given in pair.decode.bodies())

    prefill = sglang(refuse)
    run(scenario, prefill, StandIn(waits))


def test_decode_asks_the_replica_of_sglangs_prefill_that_gets_the_request() -> None:
    """SGLang sends a room to the replica of its number, modulo how many there are."""

    async def answers(_: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            replica = int(URL(asked.path).query["prefill_dp_rank"])
            return web.json_response({"rank_ip": "127.0.0.1", "rank_port": 7000 + replica})
        return web.json_response({"choices": []})

    async def scenario(pair: Pair) -> None:
        port = int(prefill.url.rpartition(":")[2])
        prefill.info = web.json_response({"disaggregation_bootstrap_port": port, "dp_size": 3})
        for _ in range(8):
            assert (await pair.post(COMPLETION))[0] == 200
        for body in pair.decode.bodies():
            params = body["kv_transfer_params"]
            room = int(params["remote_request_id"], 16)
            assert params["remote_address"] == f"tcp://127.0.0.1:{7000 + room % 3}"
            assert room in [each["bootstrap_room"] for each in prefill.bodies()]

    prefill = sglang(answers)
    run(scenario, prefill, StandIn(decodes))


@pytest.mark.parametrize(
    "given",
    [
        {"enable_dp_attention": True},
        {"enable_dp_attention": True, "attn_dp_size": 2, "dp_size": 1},  # as SGLang resolves it
        {"attn_dp_size": 2, "dp_size": 1},
        {"load_balance_method": "round_robin"},
    ],
    ids=str,
)
def test_vllms_decode_answers_alone_where_no_one_knows_sglangs_replica(given: Mapping[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == 200
        assert pair.decode.bodies() == [COMPLETION]
        assert prefill.asked == []

    info = web.json_response({"disaggregation_bootstrap_port": 8998, "dp_size": 2, **given})
    prefill = StandIn(hangs, info=info)
    run(scenario, prefill, StandIn(decodes))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_sglang_prefill_has_an_ipv6_address(host: str) -> None:
    """SGLang writes it with and without brackets. In its name, and for vLLM, it has them."""

    async def respond(request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            return web.json_response({"rank_ip": host, "rank_port": 7000})
        return await decodes(request, asked)

    async def scenario(pair: Pair) -> None:
        prefill.info = web.json_response({"disaggregation_bootstrap_port": int(prefill.url.rpartition(":")[2])})
        assert (await pair.post(COMPLETION))[0] == 200
        told = pair.decode.bodies()[0]["kv_transfer_params"]
        assert (told["remote_engine_id"], told["remote_address"]) == ("[::1]:7000", "tcp://[::1]:7000")

    prefill = sglang(respond)
    run(scenario, prefill, StandIn(decodes))


@pytest.mark.parametrize("respond", [says(500, {"error": "dead"}), says(503, {"error": "busy"})], ids=["500", "503"])
def test_decode_computes_what_prefill_cannot(respond: Respond) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == 200
        assert pair.decode.bodies()[1:] == [COMPLETION]
        await until(lambda: pair.decode.num_cut == 1)
        names = [body["kv_transfer_params"].get("remote_request_id") for body in pair.prefill.bodies()]
        await until(lambda: given_up(pair) == names[:1])  # decode hears it from prefill too

    run(scenario, StandIn(respond), StandIn(waits))


def test_requests_at_once_find_the_prefill_server_that_listens() -> None:
    """Each asks every server, also while others take turns."""

    async def scenario(pair: Pair) -> None:
        answers = await asyncio.gather(*(pair.post(COMPLETION) for _ in range(8)))
        assert [status for status, _, _ in answers] == [200] * 8
        assert len(names()) == 8

    def names() -> set[str]:
        found = (body["kv_transfer_params"].get("remote_request_id") for body in prefill.bodies())
        return {name for name in found if name}

    async def loads(request: web.Request, asked: Asked) -> web.StreamResponse:
        if params := asked.body.get("kv_transfer_params"):
            await until(lambda: params["remote_request_id"] in names())
        return await decodes(request, asked)

    prefill = StandIn(prefills)
    run(scenario, prefill, StandIn(loads), other_prefills=["http://127.0.0.1:1"])


def test_a_failing_decode_server_gives_503() -> None:
    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post(COMPLETION)
        assert status == 503
        assert "dead" in json.loads(text)["error"]["message"]

    run(scenario, StandIn(prefills), StandIn(says(500, {"error": "dead"})))


@pytest.mark.parametrize("count", [2, 0, "3", [1], {"n": 1}, 1.5])
def test_sglang_is_asked_for_one_answer(count: Any) -> None:
    async def scenario(pair: Pair) -> None:
        for path, body in (
            ("/v1/completions", {**COMPLETION, "n": count}),
            ("/v1/chat/completions", {"messages": [], "n": count}),
            ("/generate", {"text": "a", "sampling_params": {"n": count}}),
            ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": count}]}),
        ):
            status, text, _ = await pair.post(body, path=path)
            assert status == 400
            assert "n: expected 1" in json.loads(text)["error"]["message"]
        assert pair.prefill.asked == pair.decode.asked == []
        assert (await pair.post({**COMPLETION, "n": 1}))[0] == 200

    run(scenario, sglang(decodes), sglang(decodes))


def test_vllm_decode_gives_several_answers_of_one_prefill() -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post({**COMPLETION, "n": 3}))[0] == 200
        assert [body["n"] for body in pair.prefill.bodies()] == [1]
        assert [body["n"] for body in pair.decode.bodies()] == [3]

    run(scenario, StandIn(prefills), StandIn(decodes))


WITH_IMAGE = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
WITH_SOUND = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]


@pytest.mark.parametrize("content", [WITH_IMAGE, WITH_SOUND], ids=["image", "sound"])
def test_items_are_not_handed_over_between_engines(content: list[Any]) -> None:
    """VLLM and SGLang write different tokens in place of an image."""
    path = "/v1/chat/completions"
    body = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}

    async def alone(pair: Pair) -> None:
        assert (await pair.post(body, path=path))[0] == 200
        assert (pair.prefill.asked, len(pair.decode.bodies(path))) == ([], 1)

    async def refused(pair: Pair) -> None:
        status, text, _ = await pair.post(body, path=path)
        assert (status, pair.prefill.asked, pair.decode.asked) == (400, [], [])
        assert "different tokens" in json.loads(text)["error"]["message"]

    async def handed_over(pair: Pair) -> None:
        assert (await pair.post(body, path=path))[0] == 200
        assert (len(pair.prefill.bodies(path)), len(pair.decode.bodies(path))) == (1, 1)

    run(alone, sglang(prefills), StandIn(decodes))
    run(refused, StandIn(prefills), sglang(decodes))
    run(handed_over, StandIn(prefills), StandIn(decodes))


def test_lists_of_prompts() -> None:
    """VLLM's decode computes them; SGLang gives each prompt a room of its own, from the one that it gets."""
    body = {**COMPLETION, "prompt": ["a", "b"]}

    async def alone(pair: Pair) -> None:
        assert (await pair.post(body))[0] == 200
        assert (pair.prefill.asked, pair.decode.bodies()) == ([], [body])

    async def refused(pair: Pair) -> None:
        status, text, _ = await pair.post(body)
        assert status == 400
        assert "one prompt" in json.loads(text)["error"]["message"]
        assert pair.prefill.asked == pair.decode.asked == []

    async def rooms(pair: Pair) -> None:
        assert (await pair.post(body))[0] == 200
        (asked,) = pair.decode.bodies()
        assert 0 <= asked["bootstrap_room"] < 2**62
        assert asked["prompt"] == ["a", "b"]

    run(alone, StandIn(prefills), StandIn(decodes))
    run(refused, StandIn(prefills), sglang(decodes))
    run(rooms, sglang(decodes), sglang(decodes))


CHOSEN = {
    "kv_transfer_params": {"do_remote_prefill": True},
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 2**63,
    "bootstrap_pair_key": "evil",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/any/other"])
def test_a_client_cannot_choose_whose_state_decode_takes(path: str) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post({"input": "a", **CHOSEN}, path=path))[0] == 200
        for asked in [*pair.prefill.bodies(path), *pair.decode.bodies(path)]:
            left = {name: asked.get(name) for name in CHOSEN}
            assert not [name for name in CHOSEN if left[name] == CHOSEN[name]]
            assert asked["input"] == "a"

    run(scenario, sglang(decodes), sglang(decodes))


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        (
            "/inference/v1/generate",  # of vLLM
            {"token_ids": [1], "sampling_params": {"extra_args": {"a": 1, "kv_transfer_params": CHOSEN["kv_transfer_params"]}}},
            {"token_ids": [1], "sampling_params": {"extra_args": {"a": 1}}},
        ),
        (
            "/vertex_generate",  # of SGLang
            {"instances": [{"text": "a", **CHOSEN}], "parameters": CHOSEN},
            {"instances": [{"text": "a"}], "parameters": {}},
        ),
    ],
)
def test_a_client_cannot_choose_it_further_inside_of_a_body(path: str, body: Any, left: Any) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post(body, path=path))[0] == 200
        assert pair.decode.bodies(path) == [left]

    run(scenario, StandIn(prefills), StandIn(decodes))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"max_tokens": 1, "n": 1}),
        ("/v1/chat/completions", {"max_tokens": 1, "n": 1}),
        ("/v1/messages", {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1, "store": False}),
    ],
)
def test_vllm_prefills_one_token_for_each_path(path: str, fields: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        body = {"model": "model", "max_tokens": 5, "max_completion_tokens": 5, "stream": True, "store": True}
        assert (await pair.post(body, path=path))[0] == 200
        (first,), (second,) = pair.prefill.bodies(path), pair.decode.bodies(path)
        assert {name: first[name] for name in fields} == fields
        assert first["stream"] is False
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert second["kv_transfer_params"]["remote_request_id"] == first["kv_transfer_params"]["remote_request_id"]
        assert {**second, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}

    run(scenario, StandIn(prefills), StandIn(decodes))


def test_decode_alone_computes_a_response_in_the_background() -> None:
    """It answers at once, and the end of its answer would end prefill."""
    body = {"input": "a", "store": True, "background": True}

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(body, path="/v1/responses"))[1] == '{"status": "queued"}'
        assert (pair.prefill.asked, pair.decode.bodies("/v1/responses")) == ([], [body])
        assert (await pair.post({**body, "background": False}, path="/v1/responses"))[0] == 200
        assert len(pair.prefill.bodies("/v1/responses")) == 1

    run(scenario, StandIn(prefills), StandIn(says(200, {"status": "queued"})))


KEPT = {"remote_request_id": "of the server", "remote_keep_s": 60.0}


async def keeps(_: web.Request, asked: Asked) -> web.StreamResponse:
    """VLLM as decode. Asked for a request that it keeps, it returns the hand-over."""
    found = asked.body["kv_transfer_params"].get("kept_request_id")
    return web.json_response({"choices": [], **({"kv_transfer_params": {"kept": {**KEPT, "by": found}}} if found else {})})


def test_the_next_turn_of_a_conversation_takes_what_decode_keeps() -> None:
    """Once, and also if the client has edited the answer. Another conversation, and another model, take nothing."""

    async def scenario(pair: Pair) -> None:
        first = [{"role": "user", "content": "one"}]
        later = [*first, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "two"}]
        asked = [("model", first), ("other", later), ("model", [{"role": "user", "content": "three"}])]
        for model, messages in [*asked, ("model", later), ("model", first)]:
            async with pair.client.post("/v1/chat/completions", json={"model": model, "messages": messages}) as answer:
                assert answer.status == 200
                assert "kv_transfer_params" not in await answer.json()
        taken = [body["kv_transfer_params"].get("kept") for body in pair.prefill.bodies("/v1/chat/completions")]
        keep = [body["kv_transfer_params"]["keep"] for body in pair.decode.bodies("/v1/chat/completions")]
        assert taken == [None, None, None, {**KEPT, "by": keep[0]}, None]
        assert len(set(keep)) == 5
        await until(lambda: len(pair.decode.bodies()) == 5)
        asked_for = [body["kv_transfer_params"]["kept_request_id"] for body in pair.decode.bodies()]
        assert asked_for == keep

    run(scenario, StandIn(prefills), StandIn(keeps), keep=True)


def test_a_client_that_leaves_after_the_end_of_a_stream_has_its_next_turn() -> None:
    """It has the whole answer with `[DONE]`, and does not wait until the server closes."""

    async def streams_and_waits(request: web.Request, asked: Asked) -> web.StreamResponse:
        if "kept_request_id" in asked.body["kv_transfer_params"]:
            return await keeps(request, asked)
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "one"}}]}\n\ndata: [DONE]\n\n')
        await asyncio.Event().wait()
        return response

    async def scenario(pair: Pair) -> None:
        messages = [{"role": "user", "content": "one"}]
        for _ in range(2):
            body, num_cut = {"model": "model", "messages": messages, "stream": True}, pair.decode.num_cut
            async with pair.client.post("/v1/chat/completions", json=body) as answer:
                while b"[DONE]" not in await answer.content.readline():
                    pass
                answer.close()
            while pair.decode.num_cut == num_cut:
                await asyncio.sleep(0.005)
            messages += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}]
        first, second = (body["kv_transfer_params"].get("kept") for body in pair.prefill.bodies("/v1/chat/completions"))
        keep = [body["kv_transfer_params"]["keep"] for body in pair.decode.bodies("/v1/chat/completions")]
        assert (first, second) == (None, {**KEPT, "by": keep[0]})

    run(scenario, StandIn(prefills), StandIn(streams_and_waits), keep=True)


def test_a_second_prefill_server_does_not_take_what_the_first_has_asked_for() -> None:
    """What decode keeps is used up once. A server that failed may have asked for it."""

    async def fails_once(request: web.Request, asked: Asked) -> web.StreamResponse:
        has_kept = "kept" in asked.body["kv_transfer_params"]
        return await (says(500, {}) if has_kept else prefills)(request, asked)

    async def keeps_and_waits(request: web.Request, asked: Asked) -> web.StreamResponse:
        """Decode waits in vain for the server that fails."""
        numbers[asked.path] += 1
        is_second = asked.path == "/v1/chat/completions" and numbers[asked.path] == 2
        return await (hangs if is_second else keeps)(request, asked)

    numbers: Counter[str] = Counter()

    async def scenario(pair: Pair) -> None:
        messages: list[dict[str, str]] = []
        for content in ("one", "two"):
            messages.append({"role": "user", "content": content})
            async with pair.client.post("/v1/chat/completions", json={"model": "model", "messages": messages}) as answer:
                assert answer.status == 200
        taken = ["kept" in body["kv_transfer_params"] for body in pair.prefill.bodies("/v1/chat/completions")]
        assert taken == [False, True, False]

    run(scenario, StandIn(fails_once), StandIn(keeps_and_waits), keep=True, num_prefills=2)


def test_an_expired_turn_is_not_taken() -> None:
    async def keeps_briefly(_: web.Request, __: Asked) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": {"kept": {**KEPT, "remote_keep_s": 0.01}}})

    async def scenario(pair: Pair) -> None:
        body = {"model": "model", "messages": [{"role": "user", "content": "one"}]}
        for _ in range(2):
            async with pair.client.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            await asyncio.sleep(0.05)
        assert all("kept" not in each["kv_transfer_params"] for each in pair.prefill.bodies("/v1/chat/completions"))

    run(scenario, StandIn(prefills), StandIn(keeps_briefly), keep=True)


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([{"role": "user"}] * 4096, 4096),
        ([{"role": "user"}] * 4097, 0),
        ([{"role": "user"}, []], 0),
        ([0] * 4, 0),
        ({"role": "user"}, 0),
        (None, 0),
    ],
    ids=["as many as may be", "too many", "a list among them", "numbers", "no list", "none"],
)
def test_only_conversations_are_named(messages: Any, count: int) -> None:
    """Each name costs the proxy a digest, while all other requests wait."""
    assert len(list(beginnings({"messages": messages}))) == count


def test_a_conversation_is_named_once_in_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counting(body: Mapping[str, Any]) -> Any:
        asked.append(body)
        return beginnings(body)

    async def scenario(pair: Pair) -> None:
        for _ in range(2):
            body = {"model": "model", "messages": [{"role": "user", "content": "one"}]}
            async with pair.client.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
        assert len(asked) == 2

    monkeypatch.setattr("examples.pd_proxy.beginnings", counting)
    run(scenario, StandIn(prefills), StandIn(keeps), keep=True)


def test_a_silent_decode_server_does_not_delay_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers requests, and says nothing of what it keeps. The proxy does not ask for ever."""

    async def says_nothing(request: web.Request, asked: Asked) -> web.StreamResponse:
        is_question = "kept_request_id" in asked.body.get("kv_transfer_params", {})
        return await (hangs if is_question else decodes)(request, asked)

    async def scenario(pair: Pair) -> None:
        body = {"model": "model", "messages": [{"role": "user", "content": "one"}]}
        for count in (1, 2):
            async with asyncio.timeout(5), pair.client.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            while len(pair.decode.bodies()) < count:
                await asyncio.sleep(0.005)
        assert all("kept" not in each["kv_transfer_params"] for each in pair.prefill.bodies("/v1/chat/completions"))
        await until(lambda: pair.decode.num_cut == 2)

    monkeypatch.setattr("examples.pd_proxy.TURN_WAIT_S", 0.05, raising=False)
    monkeypatch.setattr("examples.pd_proxy.KEPT_TIMEOUT_S", 0.2, raising=False)
    run(scenario, StandIn(prefills), StandIn(says_nothing), keep=True)


def test_a_conversation_keeps_its_name_when_its_client_moves_a_mark() -> None:
    """Of Anthropic's API: at most four parts have one, usually the last ones. VLLM does not read it."""

    def asked(*marked: int) -> list[bytes]:
        texts = [{"type": "text", "text": str(number)} for number in range(3)]
        parts = [{**part, "cache_control": {"type": "ephemeral"}} if i in marked else part for i, part in enumerate(texts)]
        return beginnings({"messages": [{"role": "user", "content": [part]} for part in parts]})

    assert asked(0) == asked(1) == asked(2, 1) == asked()
    assert len(set(asked())) == 3


@pytest.mark.parametrize("of_vllm", ["", "prefill", "decode"])
def test_sglang_keeps_and_takes(of_vllm: str) -> None:
    """It is told so in `custom_params`, beside what the client says there, except for such fields."""

    async def keeps_too(request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path != "/generate":
            return await decodes(request, asked)
        by = asked.body["sampling_params"]["custom_params"]["disagg_kept_request_id"]
        return web.json_response({"output_ids": [0], "meta_info": {"disagg_kept": [{**KEPT, "by": by}]}})

    async def prefills_too(request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            return web.json_response({"rank_ip": "127.0.0.1", "rank_port": 7000})
        return await decodes(request, asked)

    async def scenario(pair: Pair) -> None:
        if of_vllm != "prefill":
            port = int(pair.prefill.url.rpartition(":")[2])
            pair.prefill.info = web.json_response({"disaggregation_bootstrap_port": port, "internal_states": []})
        first = [{"role": "user", "content": "one"}]
        later = [*first, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "two"}]
        own = {} if of_vllm else {"custom_params": {"own": 1, "disagg_kept": {"remote_address": "of a client"}}}
        for messages in (first, later):
            async with pair.client.post("/v1/chat/completions", json={"messages": messages, **own}) as answer:
                assert answer.status == 200
        (_, prefilled), (decoded, _) = pair.prefill.bodies(path), pair.decode.bodies(path)
        if of_vllm == "decode":
            keep = decoded["kv_transfer_params"]["keep"]
        else:
            keep = decoded["custom_params"]["disagg_keep"]
            assert decoded["custom_params"] == {"disagg_keep": keep, **({} if of_vllm else {"own": 1})}
        if of_vllm == "prefill":
            assert prefilled["kv_transfer_params"]["kept"] == {**KEPT, "by": keep}
            assert "custom_params" not in prefilled
        else:
            expected = {"disagg_kept": {**KEPT, "by": keep}, **({} if of_vllm else {"own": 1})}
            assert prefilled["custom_params"] == expected

    path = "/v1/chat/completions"
    prefill = StandIn(prefills) if of_vllm == "prefill" else sglang(prefills_too)
    run(scenario, prefill, StandIn(keeps) if of_vllm == "decode" else sglang(keeps_too), keep=True)


def test_several_answers_are_not_kept() -> None:
    async def scenario(pair: Pair) -> None:
        body = {"model": "model", "n": 2, "messages": [{"role": "user", "content": "one"}]}
        async with pair.client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        assert "keep" not in pair.decode.bodies("/v1/chat/completions")[0]["kv_transfer_params"]

    run(scenario, StandIn(prefills), StandIn(keeps), keep=True)


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_sglang_generates_on_both_servers_at_once(method: str) -> None:
    async def scenario(pair: Pair) -> None:
        async with pair.client.request(method, "/generate", json={"text": "a", "stream": True}) as answer:
            assert answer.status == 200
        (first,), (second,) = pair.prefill.bodies("/generate"), pair.decode.bodies("/generate")
        assert first == {**second, "stream": False}
        assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 8998)

    run(scenario, sglang(decodes), sglang(decodes))


def test_sglang_prefill_answers_a_list() -> None:
    """As it does for a list of texts. Its answer may come before that of decode."""

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await until(lambda: bool(prefill.asked))
        await asyncio.sleep(0.05)
        return await says(200, [{"text": "a"}, {"text": "b"}])(request, asked)

    async def scenario(pair: Pair) -> None:
        assert (await pair.post({"text": ["a", "b"]}, path="/generate"))[0] == 200
        assert len(pair.decode.asked) == 1

    prefill = sglang(says(200, [{"text": "a"}, {"text": "b"}]))
    run(scenario, prefill, sglang(later))


@pytest.mark.parametrize("status", [400, 500])
def test_sglang_prefill_fails_after_decode_has_begun(status: int) -> None:
    """Decode has what it needs: its answer goes on."""
    goes_on = asyncio.Event()

    async def fails(_: web.Request, __: Asked) -> web.StreamResponse:
        await goes_on.wait()
        return web.json_response({"error": "late"}, status=status)

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({"text": "a", "stream": True}, path="/generate")
        assert (status, text) == (200, 'data: {"text": "a"}\n\ndata: [DONE]\n\n')
        assert len(pair.decode.asked) == 1

    run(scenario, sglang(fails), sglang(in_two_parts(b'data: {"text": "a"}\n\n', b"data: [DONE]\n\n", between=goes_on)))


@pytest.mark.parametrize("status", [400, 500])
def test_vllm_prefill_fails_after_sglang_decode_has_begun(status: int) -> None:
    """SGLang's first event says who speaks. The log-probabilities of the first token, which prefill has, stay open."""
    opening, token = (
        {"delta": {"role": "assistant"}, "logprobs": None},
        {"delta": {"content": "a"}, "logprobs": {"content": [None]}},
    )
    events = [b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode() for choice in (opening, token)]
    goes_on = asyncio.Event()

    async def fails(_: web.Request, __: Asked) -> web.StreamResponse:
        await goes_on.wait()
        return web.json_response({"error": "late"}, status=status)

    async def scenario(pair: Pair) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "logprobs": True}
        status, text, _ = await pair.post(body, path="/v1/chat/completions")
        found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        assert (status, found) == (200, [{"choices": [opening]}, {"choices": [token]}])
        assert text.endswith("data: [DONE]\n\n")
        assert len(pair.decode.asked) == 1

    decode = sglang(in_two_parts(events[0], events[1] + b"data: [DONE]\n\n", between=goes_on))
    run(scenario, StandIn(fails), decode, retry_s=2.0)


def test_sglang_prefill_fails_since_decode_has_declined() -> None:
    """Decode has all of the request cached, and is asked once."""
    has_failed = asyncio.Event()

    async def fails(_: web.Request, __: Asked) -> web.StreamResponse:
        has_failed.set()
        message = f"Prefill bootstrap failed with exception KVTransferError(bootstrap_room=5): {DECLINED}"
        return web.json_response({"object": "error", "message": message}, status=500)

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await has_failed.wait()
        await asyncio.sleep(0.05)
        return await says(200, {"text": "a"})(request, asked)

    async def scenario(pair: Pair) -> None:
        assert (await pair.post({"text": "a"}, path="/generate"))[0] == 200
        assert (len(pair.prefill.asked), len(pair.decode.asked), pair.decode.num_cut) == (1, 1, 0)

    run(scenario, sglang(fails), sglang(later))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate"])
def test_a_path_that_two_servers_do_not_share(path: str) -> None:
    """VLLM's decode answers alone. SGLang's cannot, and the client learns why."""

    async def alone(pair: Pair) -> None:
        assert (await pair.post({"input": "a"}, path=path))[0] == 200
        assert (pair.prefill.asked, pair.decode.bodies(path)) == ([], [{"input": "a"}])

    async def refused(pair: Pair) -> None:
        status, text, _ = await pair.post({"input": "a"}, path=path)
        assert status == 400
        assert "vLLM hands over nothing to SGLang" in json.loads(text)["error"]["message"]

    run(alone, sglang(decodes), StandIn(decodes))
    run(refused, StandIn(prefills), sglang(decodes))


def test_other_paths_go_to_decode_unchanged() -> None:
    async def echo(_: web.Request, asked: Asked) -> web.StreamResponse:
        headers = {"Content-Type": "audio/wav", "X-Own": "1", "Retry-After": "3"}
        return web.Response(status=418, body=asked.data + b"\xff\x00", headers=headers)

    async def scenario(pair: Pair) -> None:
        for method, path in (("POST", "/v1/embeddings?a=%26&b=ü"), ("PUT", "/tokenize")):
            async with pair.client.request(method, path, data=b"\xfe\x00", headers={"Content-Type": "audio/wav"}) as answer:
                assert (answer.status, await answer.read()) == (418, b"\xfe\x00\xff\x00")
                assert {name: answer.headers[name] for name in ("X-Own", "Retry-After")} == {"X-Own": "1", "Retry-After": "3"}
        assert (await pair.raw(b"DELETE //127.0.0.1:1/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 418 "
        )
        asked = [(each.method, each.path) for each in pair.decode.asked]
        assert asked == [("POST", "/v1/embeddings?a=%26&b=%C3%BC"), ("PUT", "/tokenize"), ("DELETE", "//127.0.0.1:1/x")]
        async with pair.client.get("/health") as answer:
            assert answer.status == 418
        assert pair.prefill.asked == []

    run(scenario, StandIn(prefills), StandIn(echo))


def test_other_paths_stream_both_ways() -> None:
    """Nothing waits for the end of a body, and no limit holds for its size."""

    async def scenario(pair: Pair) -> None:
        async with pair.client.get("/v1/responses/1?stream=true") as answer:
            assert (await answer.content.readline()).startswith(b"data: ")
        await until(lambda: pair.decode.num_cut == 1)
        pair.decode.respond = says(200, {})

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_NBYTES // (1 << 20) + 1):
                yield bytes(1 << 20)

        async with pair.client.post("/v1/audio/transcriptions", data=parts()) as answer:
            assert answer.status == 200
        assert len(pair.decode.asked[-1].data) > MAX_BODY_NBYTES

    run(scenario, StandIn(prefills), StandIn(streams))


def test_other_paths_find_a_server_that_listens() -> None:
    async def scenario(pair: Pair) -> None:
        for _ in range(3):
            async with pair.client.get("/v1/models") as answer:
                assert answer.status == 200

    run(scenario, StandIn(prefills), StandIn(decodes), others=["http://127.0.0.1:1"])


def test_no_server_listens() -> None:
    """One that is gone is no error of the proxy itself."""

    async def scenario(pair: Pair) -> None:
        for path in ("/v1/models", "/v1/completions"):
            async with pair.client.request("POST", path, json=COMPLETION) as answer:
                assert answer.status == 503
                assert "no servers" in (await answer.json())["error"]["message"]

    class Gone(StandIn):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError

    run(scenario, StandIn(prefills), Gone(decodes))


HOSTILE = {
    "no JSON": b"{",
    "nothing": b"",
    "text": b"hello",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "a list": b"[]",
    "a string": b'"prompt"',
    "null": b"null",
    "a number": b"1" * 5000,
    "nested lists": b"[" * 100_000 + b"]" * 100_000,
    "a nested object": b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/embeddings"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_is_no_object(name: str, path: str) -> None:
    """Other paths may take a list, and a body that is left out."""

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post(HOSTILE[name], path=path)
        if path == "/v1/embeddings" and name in ("nothing", "a list", "a string", "null"):
            assert status == 200
        else:
            assert status == 400
            assert "body" in json.loads(text)["error"]["message"]
            assert pair.prefill.asked == pair.decode.asked == []
        assert (await pair.post(COMPLETION))[0] == 200

    run(scenario, StandIn(prefills), StandIn(decodes))


@pytest.mark.parametrize("engine", [StandIn, sglang], ids=["vllm", "sglang"])
@pytest.mark.parametrize("depth", range(150, 1000, 50))
def test_nested_bodies_are_passed_on_or_refused(depth: int, engine: Callable[[Respond], StandIn]) -> None:
    async def scenario(pair: Pair) -> None:
        for path in ("/v1/completions", "/v1/embeddings"):
            body = b'{"bootstrap_room": 1, "prompt": ' + b"[" * depth + b"1" + b"]" * depth + b"}"
            assert (await pair.post(body, path=path))[0] in (200, 400)

    run(scenario, engine(prefills if engine is StandIn else decodes), engine(decodes))


VALUES: tuple[Any, ...] = (None, True, -1, 2**64, 1e999, "x" * 1000, "\ud800", [], {}, [[]], [{}], {"a": [None]}, [None, 1])
FIELDS = ("model", "prompt", "messages", "n", "max_tokens", "stream", "stream_options", "sampling_params", "text", "input_ids")


@pytest.mark.parametrize("prefill_is_sglang", [False, True])
@pytest.mark.parametrize("decode_is_sglang", [False, True])
def test_fields_of_wrong_types(prefill_is_sglang: bool, decode_is_sglang: bool) -> None:
    """The servers judge them. The proxy passes them on, or says what it expected."""

    async def scenario(pair: Pair) -> None:
        for path in ("/v1/completions", "/generate", "/v1/responses"):
            for name in FIELDS:
                for value in VALUES:
                    status, text, _ = await pair.post({**COMPLETION, name: value}, path=path)
                    assert status in (200, 400), (path, name, value, text)

    async def both(request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            return web.json_response({"rank_ip": "127.0.0.1", "rank_port": 7000})
        return await (decodes if prefill_is_sglang else prefills)(request, asked)

    prefill = sglang(both) if prefill_is_sglang else StandIn(both)
    run(scenario, prefill, sglang(decodes) if decode_is_sglang else StandIn(decodes))


def test_a_body_that_is_not_encoded_as_it_says() -> None:
    async def scenario(pair: Pair) -> None:
        for path in ("/v1/completions", "/v1/embeddings"):
            status, text, _ = await pair.post(b"hello", path=path, Content_Encoding="gzip", Connection="close")
            assert status == 400
            assert "the body" in json.loads(text)["error"]["message"]

    run(scenario, StandIn(prefills), StandIn(decodes))


def test_a_huge_body_is_refused() -> None:
    async def scenario(pair: Pair) -> None:
        huge = b'{"prompt": "' + b"a" * MAX_BODY_NBYTES + b'"}'
        assert (await pair.post(huge))[0] == 413
        assert (await pair.post(COMPLETION))[0] == 200

    run(scenario, StandIn(prefills), StandIn(decodes))


def test_bytes_on_the_wire() -> None:
    """What no HTTP library would send."""

    async def scenario(pair: Pair) -> None:
        head = b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        for target in (
            b"*",
            b"@127.0.0.1:1/",
            b"http://127.0.0.1:1/v1/models",
            b"evil.example:80",
            b"/\xff\xfe",
            b"/%zz",
            b"/a#b",
        ):
            for method in (b"GET ", b"OPTIONS ", b"CONNECT "):
                found = await pair.raw(method + target + head + b"\r\n")
                assert b" 500 " not in found.partition(b"\r\n")[0], (method, target, found)
        assert not [asked for asked in pair.decode.asked if not asked.path.startswith("/")]
        odd = b"POST /v1/completions" + head + b"Content-Type: application/json\r\nAuthorization: Bearer \xff\r\n"
        body = json.dumps(COMPLETION).encode()
        found = await pair.raw(odd + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert found.startswith(b"HTTP/1.1 200 ")
        parts = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        plain = b"POST /v1/completions" + head + b"Content-Type: application/json; charset=nothing\r\n"
        assert (await pair.raw(plain + b"Transfer-Encoding: chunked\r\n\r\n" + parts)).startswith(b"HTTP/1.1 200 ")
        assert b" 200 " not in await pair.raw(plain + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}")

    run(scenario, StandIn(prefills), StandIn(decodes))


async def waits_for_prefill(pair: Pair) -> None:
    await until(lambda: bool(pair.prefill.asked))


async def waits_for_decode(pair: Pair) -> None:
    await until(lambda: bool(pair.decode.asked))


async def waits_for_both(pair: Pair) -> None:
    await until(lambda: bool(pair.decode.asked and pair.prefill.asked))
    await asyncio.sleep(0.05)  # until the proxy has their answers


@pytest.mark.parametrize(
    ("prefill", "decode", "phase"),
    [
        (hangs, decodes, waits_for_prefill),
        (prefills, hangs, waits_for_decode),
        (prefills, streams, waits_for_both),
        (prefills, says(500, {}), waits_for_decode),
    ],
    ids=["prefill computes", "decode loads", "decode streams", "asked again"],
)
def test_a_client_that_leaves(prefill: Respond, decode: Respond, phase: Callable[[Pair], Awaitable[None]]) -> None:
    """Each server sees it, and prefill need not keep the blocks, unless decode has them."""

    async def first(request: web.Request, asked: Asked) -> web.StreamResponse:
        is_last = "abort_request_id" in asked.body["kv_transfer_params"]
        return await (prefills if is_last else prefill)(request, asked)

    async def scenario(pair: Pair) -> None:
        waiting = asyncio.create_task(pair.post({**COMPLETION, "stream": decode is streams}))
        await phase(pair)
        waiting.cancel()
        (name, *_) = [body["kv_transfer_params"].get("remote_request_id") for body in pair.prefill.bodies()]
        await until(lambda: pair.prefill.num_cut == (prefill is hangs))
        await until(lambda: pair.decode.num_cut == (decode in (hangs, streams)))
        if decode is streams:
            await asyncio.sleep(0.05)
        else:
            await until(lambda: name in given_up(pair))
        assert (name in given_up(pair)) is (decode is not streams)

    run(scenario, StandIn(first), StandIn(decode), retry_s=30)


def is_cut(pair: Pair, count: int) -> bool:
    return pair.decode.num_cut == count


@pytest.mark.parametrize("decode", [streams, says(400, {})], ids=["client leaves", "decode refuses"])
def test_prefill_is_not_asked_again_where_it_is_for_what_is_no_fault_of_its_own(decode: Respond) -> None:
    """The next request would wait in its queue twice."""

    async def scenario(pair: Pair) -> None:
        for number in range(3):
            async with pair.client.post("/v1/completions", json={**COMPLETION, "stream": True}) as answer:
                assert answer.status == (200 if decode is streams else 400)
                await answer.content.readline()
                answer.close()
            await until(partial(is_cut, pair, (number + 1) * (decode is streams)))
        assert pair.prefill.num_located == 1

    run(scenario, StandIn(prefills), StandIn(decode))


@pytest.mark.parametrize(("status", "num_asked"), [(501, 1), (500, 3)])
def test_an_error_that_is_the_requests_own_reaches_the_client(
    status: int, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM answers so to an image of a format that it does not know, and to one that it cannot fetch."""
    monkeypatch.setattr("examples.pd_proxy.RETRY_AFTER_S", 0.001)
    monkeypatch.setattr("examples.pd_proxy.MAX_SAID", 3)

    async def fails(_: web.Request, __: Asked) -> web.StreamResponse:
        return web.json_response({"error": "no such image"}, status=status)

    async def scenario(pair: Pair) -> None:
        found, text, _ = await pair.post(COMPLETION)
        assert (found, text) == (status, '{"error": "no such image"}')
        assert len(pair.decode.bodies()) <= 2 * num_asked  # with prefill, and alone

    run(scenario, StandIn(fails), StandIn(fails), retry_s=60.0)


def test_an_error_in_a_stream_that_is_the_requests_own_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server has begun a stream, whose first event is the error."""
    monkeypatch.setattr("examples.pd_proxy.RETRY_AFTER_S", 0.001)
    monkeypatch.setattr("examples.pd_proxy.MAX_SAID", 3)
    said = {"error": {"message": "Internal server error", "code": 500}}

    async def fails(request: web.Request, _: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(said).encode())
        return response

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({**COMPLETION, "stream": True})
        assert (status, json.loads(text)) == (500, said)

    run(scenario, StandIn(prefills), StandIn(fails), retry_s=60.0)


@pytest.mark.parametrize(
    ("num_failed", "status", "error"),
    [
        (20, 503, lambda _: "try again later"),  # not there yet, such as those that change the number of their ranks
        (8, 500, lambda number: f"{number // 2}"),
    ],
    ids=["not-there-yet", "errors-that-differ"],
)
def test_a_failure_that_is_not_the_requests_own_is_tried_for_as_long_as_it_takes(
    num_failed: int, status: int, error: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.pd_proxy.RETRY_AFTER_S", 0.001)
    monkeypatch.setattr("examples.pd_proxy.MAX_SAID", 3)
    asked = itertools.count()

    async def starts(request: web.Request, given: Asked) -> web.StreamResponse:
        if (number := next(asked)) < num_failed:
            return web.json_response({"error": error(number)}, status=status)
        return await decodes(request, given)

    async def scenario(pair: Pair) -> None:
        assert (await pair.post(COMPLETION))[0] == 200

    run(scenario, StandIn(prefills), StandIn(starts), retry_s=60.0)


def test_a_decode_server_that_is_down_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is asked at once, and later requests begin with it."""
    monkeypatch.setattr("examples.pd_proxy.RETRY_AFTER_S", 3600.0)
    (port,) = free_ports(1)

    async def scenario(pair: Pair) -> None:
        for _ in range(6):
            assert (await pair.post(COMPLETION))[0] == 200
        assert len(pair.decode.bodies()) == 6

    run(scenario, StandIn(prefills), StandIn(decodes), retry_s=60.0, others=[f"http://127.0.0.1:{port}"])


def test_a_host_that_drops_packets_takes_a_connections_time_of_one_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pd_proxy.ASK_TIMEOUT.sock_connect == pd_proxy.CONNECT_S
    monkeypatch.setattr(pd_proxy, "CONNECT_S", 0.3)
    monkeypatch.setattr(pd_proxy, "ASK_TIMEOUT", ClientTimeout(total=30, sock_connect=0.3))

    async def scenario(pair: Pair) -> None:
        for _ in range(2):
            assert (await pair.post(COMPLETION))[0] == 200
            async with pair.client.get("/v1/models") as answer:
                assert answer.status == 200

    with full_port() as port:
        url = f"http://127.0.0.1:{port}"
        run(scenario, StandIn(prefills), StandIn(decodes), others=[url], other_prefills=[url], retry_s=30.0)


def test_a_client_that_leaves_while_decode_says_what_it_keeps() -> None:
    """Its handler does not go on, although it has what it waits for."""

    async def scenario() -> None:
        async def says_it() -> Mapping[str, Any]:
            await asyncio.sleep(0)
            handler.cancel()
            return KEPT

        conversations = Conversations()
        conversations.put([b"one"], asyncio.create_task(says_it()))
        handler = asyncio.create_task(conversations.take([b"one"]))
        with pytest.raises(asyncio.CancelledError):
            await handler

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_conversations_are_forgotten_with_what_servers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may come back to them."""

    async def says(kept: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        return kept

    async def scenario() -> None:
        conversations, told = Conversations(), [KEPT, None, {**KEPT, "remote_keep_s": 1e6}, KEPT]
        for number, kept in enumerate(told):
            task = asyncio.create_task(says(kept))
            await task
            conversations.put([bytes([number])], task)
        later_s = time.monotonic() + 60.0
        monkeypatch.setattr(pd_proxy, "time", SimpleNamespace(monotonic=lambda: later_s))
        conversations.put([b"new"], asyncio.create_task(asyncio.sleep(60)))
        assert list(conversations._kept) == [bytes([2]), bytes([3]), b"new"]
        assert await conversations.take([bytes([3])]) is None
        assert await conversations.take([bytes([2])]) == told[2]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_that_leaves_while_the_proxy_ends_requests() -> None:
    """Its handler is cancelled once, and does not go on. Each of the requests is cancelled, however long another one takes."""

    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        slow, other = asyncio.create_task(ends_slowly()), asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        handler = asyncio.create_task(end(slow, other))
        await is_ending.wait()
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        assert other.cancelled()
        assert not slow.done()

    is_ending = asyncio.Event()
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_that_leaves_while_it_sends() -> None:
    async def scenario(pair: Pair) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", pair.port)
        writer.write(head + b'{"prompt"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await pair.post(COMPLETION))[0] == 200
        assert len(pair.decode.asked) == 1

    run(scenario, StandIn(prefills), StandIn(decodes))


def sse(*lines: bytes) -> Respond:
    async def respond(request: web.Request, _: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for line in lines:
            await response.write(line)
        return response

    return respond


def test_an_event_may_be_long_and_come_in_parts() -> None:
    event = b'data: {"choices": [], "text": "' + b"a" * (5 << 20) + b'"}\n\n'
    parts = [b"event: response.created\n", event[:10], event[10:7000], event[7000:], b": ping\n\n", b"data: [DONE]"]

    async def scenario(pair: Pair) -> None:
        status, text, headers = await pair.post({**COMPLETION, "stream": True}, path="/v1/responses")
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        assert text.encode() == b"".join(parts)

    run(scenario, StandIn(prefills), StandIn(sse(*parts)))


@pytest.mark.parametrize("code", [400, 500])
def test_a_stream_that_begins_with_an_error(code: int) -> None:
    """One of the request is for the client. After one of the server the request is tried again."""
    failing = sse(b'data: {"error": {"message": "no", "code": %d}}\n\n' % code, b"data: [DONE]\n\n")

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({**COMPLETION, "stream": True})
        assert (status, "[DONE]" in text) == ((200, True) if code == 400 else (503, False))

    run(scenario, StandIn(prefills), StandIn(failing))


@pytest.mark.parametrize("code", [None, 400, 500])
def test_a_stream_of_sglang_begins_with_an_error(code: int | None) -> None:
    """Its `/generate` says it as the reason why the answer has ended. An abort of the client's has no status."""
    reason = {"type": "abort", "message": "no", "status_code": code}
    event = b"data: " + json.dumps({"text": "", "meta_info": {"finish_reason": reason}}).encode() + b"\n\n"

    async def scenario(pair: Pair) -> None:
        body = {"text": "a", "stream": True}
        status, text, _ = await pair.post(body, path="/generate")
        assert (status, "[DONE]" in text) == ((503, False) if code == 500 else (200, True))
        assert code == 500 or len(pair.decode.bodies("/generate")) == 1
        pair.decode.respond = once(sse(event), then=sse(b'data: {"text": "decoded", "meta_info": {}}\n\n'))
        if code == 500:
            assert (await pair.post(body, path="/generate"))[:2] == (200, 'data: {"text": "decoded", "meta_info": {}}\n\n')

    run(scenario, sglang(decodes), sglang(sse(event, b"data: [DONE]\n\n")), retry_s=1)


def once(first: Respond, *, then: Respond) -> Respond:
    left = [first]

    async def respond(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (left.pop() if left else then)(request, asked)

    return respond


def test_the_first_token_has_prefills_logprobs_of_chosen_tokens() -> None:
    """SGLang's decode does not get them."""
    chosen, later = [[[-1.5, 5, None]], [[-2.5, 5, None]]]
    prefill, decode = ({"text": "a", "meta_info": {"output_token_ids_logprobs": each}} for each in ([chosen], [None, later]))

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({"text": "a", "return_logprob": True, "token_ids_logprob": [5]}, path="/generate")
        assert status == 200
        assert json.loads(text)["meta_info"]["output_token_ids_logprobs"] == [chosen, later]

    run(scenario, sglang(says(200, prefill)), sglang(says(200, decode)))


@pytest.mark.parametrize("path", ["/v1/completions", "/other"])
def test_an_answer_that_is_cut_off(path: str) -> None:
    """The client does not take it for a whole one."""

    async def cut(request: web.Request, _: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        assert request.transport is not None
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    async def scenario(pair: Pair) -> None:
        async with pair.client.post(path, json=COMPLETION) as answer:
            assert answer.status == 200
            with pytest.raises(Exception, match=r"payload|[Dd]isconnected|closed|reset"):
                await read_all(answer)

    run(scenario, StandIn(prefills), StandIn(cut), retry_s=30)


async def read_all(answer: ClientResponse) -> bytes:
    return await answer.read()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("--prefill", value)
            for value in ("localhost:8100", "", "ftp://a:1", "http://:8100", "http://a:x", "http://a:70000")
        ),
        ("--decode", "a:8200"),
        ("--port", "99999"),
        ("--port", "-1"),
    ],
)
def test_a_wrong_address_or_port_is_named_at_the_start(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(web, "run_app", lambda *_, **__: pytest.fail("it serves"))
    given = {"--prefill": "http://a:8100/", "--decode": "https://b", "--port": "8000", option: value}
    monkeypatch.setattr(sys, "argv", ["pd_proxy", *(f"{name}={text}" for name, text in given.items())])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (*_, sentence) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"pd_proxy: error: argument {option}: expected ")
    assert sentence.endswith(f"found {value!r}")


def test_the_program_may_have_as_many_connections_as_the_machine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes three. Shells allow 1,024 descriptors."""
    monkeypatch.setattr(web, "run_app", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["pd_proxy", "--prefill=http://a", "--decode=http://b"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, before[1]), before[1]))
        main()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], pd_proxy.MAX_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


RESPONSE = b'event: response.created\ndata: {"type": "response.created", "response": {"usage": null}}\n\n'


def test_a_response_has_not_begun_while_decode_has_only_created_it() -> None:
    """Decode says so before it has anything of the prompt."""
    has_failed = asyncio.Event()

    async def fails(_: web.Request, asked: Asked) -> web.StreamResponse:
        if "abort_request_id" in asked.body.get("kv_transfer_params", {}):
            return web.json_response({})
        await asyncio.sleep(0.1)
        has_failed.set()
        return web.json_response({}, status=500)

    async def creates(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(RESPONSE)
        if "kv_transfer_params" in asked.body:
            await asyncio.Event().wait()
        await response.write(b'data: {"type": "response.output_text.delta", "delta": "alone"}\n\n')
        return response

    async def scenario(pair: Pair) -> None:
        asked = {"model": "model", "input": "a", "stream": True}
        status, text, _ = await pair.post(asked, path="/v1/responses")
        assert (status, text.count("response.created"), "alone" in text) == (200, 2, True)
        assert text.startswith(RESPONSE.decode())
        assert ["kv_transfer_params" in body for body in pair.decode.bodies("/v1/responses")] == [True, False]
        await until(lambda: len(given_up(pair)) == 1)

    run(scenario, StandIn(fails), StandIn(creates))


def cached(count: int, *, name: str = "prompt_tokens_details") -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 9, name: {"cached_tokens": count}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slow", ["prefill", "decode"])
@pytest.mark.parametrize(("of_prefill", "of_decode", "expected"), [(3, 8, 3), (0, 8, 0), (7, 2, 2), (None, 8, 8)])
def test_cached_tokens_are_those_of_prefill(
    of_prefill: int | None, of_decode: int, expected: int, slow: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To vLLM's decode all that prefill has computed is cached. If it has computed the prompt itself, its count is right. It
    may have answered before prefill has.
    """
    monkeypatch.setattr(pd_proxy, "ANSWER_S", 30.0)

    async def counts(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.1 * (slow == "prefill"))
        known = {} if of_prefill is None else cached(of_prefill)
        found = json.loads((await prefills(request, asked)).body)  # type: ignore[attr-defined]
        return web.json_response({**found, **known})

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.1 * (slow == "decode"))
        event = {"choices": [], **cached(of_decode)}
        data = b'data: {"choices": []}\n\ndata: ' + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
        return await (sse(data) if stream else says(200, event))(request, asked)

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({**COMPLETION, "stream": stream})
        found = json.loads(text.split("data: ")[2] if stream else text)
        assert found["usage"] == cached(expected)["usage"]

    run(scenario, StandIn(counts), StandIn(later))


@pytest.mark.parametrize(("known", "expected"), [(cached(3), 3), ({"usage": {"prompt_tokens_details": None}}, 8)])
def test_cached_tokens_are_those_of_sglangs_prefill(known: Mapping[str, Any], expected: int) -> None:
    """If it says so, which takes `--enable-cache-report`."""

    async def counts(_: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.path.startswith("/route"):
            return web.json_response({"rank_ip": "127.0.0.1", "rank_port": 7000})
        return web.json_response({"choices": [], **known})

    async def scenario(pair: Pair) -> None:
        prefill.info = web.json_response({"disaggregation_bootstrap_port": int(prefill.url.rpartition(":")[2])})
        _, text, _ = await pair.post(COMPLETION)
        assert json.loads(text)["usage"] == cached(expected)["usage"]

    prefill = sglang(counts)
    run(scenario, prefill, StandIn(says(200, {"choices": [], **cached(8)})))


def test_counts_do_not_wait_for_a_silent_prefill_again_and_again() -> None:
    """Decode has computed the prompt itself."""
    event = b"data: " + json.dumps({"choices": [], **cached(2)}).encode() + b"\n\n"

    async def scenario(pair: Pair) -> None:
        async with asyncio.timeout(30):
            _, text, _ = await pair.post({**COMPLETION, "stream": True})
        assert text.count('"cached_tokens": 2') == 60

    run(scenario, StandIn(hangs), StandIn(sse(*[event] * 60)))


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_cached_tokens_of_a_response_are_those_of_prefill(slow: str) -> None:
    async def counts(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.1 * (slow == "prefill"))
        found = json.loads((await prefills(request, asked)).body)  # type: ignore[attr-defined]
        return web.json_response({**found, **cached(0, name="input_tokens_details")})

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.1 * (slow == "decode"))
        ended = {"type": "response.completed", "response": cached(8, name="input_tokens_details")}
        return await sse(RESPONSE, b"data: " + json.dumps(ended).encode() + b"\n\n")(request, asked)

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({"input": "a", "stream": True}, path="/v1/responses")
        assert '"input_tokens_details": {"cached_tokens": 0}' in text

    run(scenario, StandIn(counts), StandIn(later))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_sglang_decode_does_not_know_the_prompts_log_probabilities(several: bool, stream: bool) -> None:
    known, none = [[-1.5, 3, None]], list[Any]()
    names = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

    def answer(found: Any, text: str) -> Any:
        one = {"text": text, "meta_info": dict.fromkeys(names, found)}
        return [one, {**one, "index": 1}] if several and not stream else one

    indices = [{"index": 0}, {"index": 1}] if several else [{}]
    events = [json.dumps({**answer(none, "a"), **index}).encode() for index in indices] if stream else []
    later = sse(*(b"data: " + event + b"\n\n" for event in events)) if stream else says(200, answer(none, "a"))

    async def scenario(pair: Pair) -> None:
        asked = {"text": ["a", "b"] if several else "a", "return_logprob": True, "logprob_start_len": 0, "stream": stream}
        _, text, _ = await pair.post(asked, path="/generate")
        assert text.count(f'"input_token_logprobs": {json.dumps(known)}') == (2 if several else 1)

    prefill = [answer(known, "first"), answer(known, "first")] if several and stream else answer(known, "first")
    run(scenario, sglang(says(200, prefill)), sglang(later))


FIRST = {"choices": [{"logprobs": {"tokens": ["p", "a"], "token_logprobs": [None, -0.5]}}], "kv_transfer_params": WHERE}


def test_the_first_token_of_sglangs_decode_has_the_log_probability_of_vllms_last() -> None:
    found = {"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -0.2]}}]}

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({**COMPLETION, "logprobs": 1})
        assert json.loads(text)["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.2]

    run(scenario, StandIn(says(200, FIRST)), sglang(says(200, found)))


def test_min_tokens_of_one_is_for_prefill() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.post({**COMPLETION, "min_tokens": 3})
        assert [body.get("min_tokens") for body in pair.prefill.bodies()] == [1]
        assert [body.get("min_tokens") for body in pair.decode.bodies()] == [3]

    run(scenario, StandIn(says(200, FIRST)), sglang(decodes))


@pytest.mark.parametrize(
    ("path", "fields", "is_known"),
    [
        ("/v1/completions", {}, True),
        ("/v1/completions", {"temperature": 0.0}, True),
        ("/v1/completions", {"temperature": 0.5}, False),
        ("/v1/completions", {"temperature": None}, True),
        ("/v1/completions", {"logit_bias": {"3": 5.0}}, False),
        ("/v1/completions", {"min_tokens": 3}, False),
        ("/v1/chat/completions", {"temperature": 1}, True),
        ("/v1/chat/completions", {}, False),  # the model's default
    ],
)
def test_a_log_probability_of_another_scale_is_not_filled_in(path: str, fields: Mapping[str, Any], is_known: bool) -> None:
    """SGLang's count the temperature and a bias, and vLLM's do not."""
    found = {"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -0.2]}}]}

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({**COMPLETION, "messages": [], "logprobs": 1, **fields}, path=path)
        assert json.loads(text)["choices"][0]["logprobs"]["token_logprobs"] == [-0.5 if is_known else None, -0.2]

    run(scenario, StandIn(says(200, FIRST)), sglang(says(200, found)))


def test_vllm_samples_the_first_token_as_sglang_would() -> None:
    """SGLang penalizes no token of the prompt, and its completions do not take the model's defaults."""
    names = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")

    async def scenario(pair: Pair) -> None:
        await pair.post({**COMPLETION, "repetition_penalty": 1.3, "top_p": 0.9})
        await pair.post({"messages": [], "repetition_penalty": 1.3}, path="/v1/chat/completions")
        completion, chat = (body for path in ("/v1/completions", "/v1/chat/completions") for body in pair.prefill.bodies(path))
        assert [completion.get(name) for name in names] == [1.0, 1.0, 0.9, -1, 0.0]
        assert [chat.get(name) for name in names] == [1.0, None, None, None, None]
        assert [body["repetition_penalty"] for body in pair.decode.bodies()] == [1.3]

    run(scenario, StandIn(says(200, FIRST)), sglang(decodes))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        "Grammar accept_token failed for req 7 with token 90: no",
        "KVTransferError: prompt: expected 9 tokens, found 8 on prefill",
        "payload: expected the state of this request's prompt, found that of other tokens",
        "request 31#0: prefill/0 finished without component 'kv': tokens [11, 12) of layer 0",
    ],
)
def test_an_error_that_every_attempt_would_meet_is_final(message: str, stream: bool) -> None:
    error = {"error": {"message": message, "code": 500}}
    event = b"data: " + json.dumps(error).encode() + b"\n\n"

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({**COMPLETION, "stream": stream})
        assert (status, message[-20:] in text) == (400, True)
        assert len(pair.decode.bodies()) == 1

    run(scenario, StandIn(says(200, FIRST)), sglang(sse(event) if stream else says(500, error)), retry_s=30.0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"regex": "[0-9]{3}"}, "regex: vLLM samples the first token and SGLang the others"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "structured_outputs: vLLM samples the first token"),
        ({"echo": True, "logprobs": 1}, "echo: SGLang's decode does not know"),
        ({"add_special_tokens": False}, "add_special_tokens: expected True"),
        ({"thinking_token_budget": 0}, "thinking_token_budget: vLLM samples the first token"),
    ],
)
def test_what_vllm_and_sglang_cannot_do_together_is_refused(fields: Mapping[str, Any], why: str) -> None:
    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({**COMPLETION, **fields})
        assert (status, why in text) == (400, True)
        assert pair.decode.asked == []

    run(scenario, StandIn(prefills), sglang(decodes))


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("one", "two")]
NAMED = {"type": "function", "function": {"name": "two"}}


@pytest.mark.parametrize(
    ("choice", "for_vllm", "for_sglang"),
    [
        ("none", {}, {"tools": TOOLS, "tool_choice": "auto"}),
        (NAMED, {"tools": TOOLS[1:], "tool_choice": NAMED}, {"tools": TOOLS, "tool_choice": "auto"}),
        ("auto", {"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "auto"}),
        ("required", {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "auto"}),
    ],
    ids=["none", "named", "auto", "required"],
)
def test_prefill_shows_the_model_the_tools_that_decode_shows(
    choice: Any, for_vllm: Any, for_sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM shows all of them, and SGLang those that may be called."""
    path = "/v1/chat/completions"
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": choice, "include_reasoning": False}

    async def scenario(pair: Pair) -> None:
        await pair.post(chat, path=path)
        (found,) = pair.prefill.bodies(path)
        expected = for_vllm if pair.prefill.info is None else for_sglang
        assert {name: found[name] for name in ("tools", "tool_choice") if name in found} == expected
        assert ("include_reasoning" in found) is (pair.prefill.info is not None)
        assert pair.decode.bodies(path)[0]["tool_choice"] == choice

    async def first_rank(*_: Any) -> Mapping[str, Any]:
        return WHERE

    monkeypatch.setattr(pd_proxy.Client, "_first_rank", first_rank)
    run(scenario, StandIn(prefills), sglang(decodes))
    run(scenario, sglang(decodes), StandIn(decodes))


@pytest.mark.parametrize("kind", ["any", "tool", "auto", "none"])
def test_prefill_is_not_asked_to_call_a_tool_in_a_message(kind: str) -> None:
    """VLLM reads the arguments of a forced call, which are not whole after one token, and refuses the request."""
    choice = {"type": kind, **({"name": "one"} if kind == "tool" else {})}

    async def scenario(pair: Pair) -> None:
        await pair.post(
            {"messages": [], "tools": [{"name": "one"}], "tool_choice": choice, "max_tokens": 4}, path="/v1/messages"
        )
        (asked,), (answered,) = (each.bodies("/v1/messages") for each in (pair.prefill, pair.decode))
        assert answered["tool_choice"] == choice
        assert asked["tool_choice"] == ({"type": "none"} if kind in ("any", "tool") else choice)
        assert asked["tools"] == answered["tools"]

    run(scenario, StandIn(prefills), StandIn(decodes))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": "a"}},
        {"tool_choice": NAMED, "tools": ["x"]},
        {"tool_choice": NAMED, "tools": [{"function": "a"}]},
        {"tool_choice": NAMED, "tools": "x"},
    ],
    ids=str,
)
def test_tools_that_are_none_are_refused_by_the_servers(fields: Mapping[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.post({"messages": [], **fields}, path="/v1/chat/completions"))[0] == 400

    run(scenario, StandIn(says(400, {})), sglang(hangs))


def test_a_response_that_fails_by_its_request_is_not_tried_again() -> None:
    """SGLang says of both that the server has failed."""
    message = "The request has 900 tokens, and exceeds the maximum number of tokens"
    failed = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": message}}}

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({"input": "a", "stream": True}, path="/v1/responses")
        assert (status, message in text, len(pair.decode.asked)) == (200, True, 1)

    event = b"data: " + json.dumps(failed).encode() + b"\n\n"
    run(scenario, sglang(decodes), sglang(sse(event)), retry_s=30.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", ["prefill", "decode"])
def test_sglangs_responses_hide_the_servers_errors(stream: bool, fails: str) -> None:
    """As errors of the request, or in the answer's last event. The request is tried again, with an id of its own."""
    failed = {
        "type": "response.failed",
        "response": {"error": {"code": "server_error", "message": "Decode transfer failed for request rank=0"}},
    }
    events = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in ({"type": "response.created"}, failed)]
    hidden = says(400, {"error": {"message": "500: no transfer", "code": 400}})
    numbers: Counter[str] = Counter()

    def fails_once(side: str) -> Respond:
        async def respond(request: web.Request, asked: Asked) -> web.StreamResponse:
            numbers[side] += 1
            if side == fails and numbers[side] == 1:
                return await (sse(*events) if asked.body["stream"] else hidden)(request, asked)
            if side == "decode" and fails == "prefill" and numbers[side] == 1:
                return await hangs(request, asked)
            return await says(200, {"status": "completed"})(request, asked)

        return respond

    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({"input": "a", "stream": stream, "request_id": "mine"}, path="/v1/responses")
        assert (status, json.loads(text)) == (200, {"status": "completed"})
        assert [body.get("request_id") for body in pair.decode.bodies("/v1/responses")] == ["mine", None]

    run(scenario, sglang(fails_once("prefill")), sglang(fails_once("decode")), retry_s=30.0)


def test_sglangs_prefill_does_not_know_the_response_before() -> None:
    async def scenario(pair: Pair) -> None:
        status, text, _ = await pair.post({"input": "a", "previous_response_id": "resp_1"}, path="/v1/responses")
        assert (status, "previous_response_id: only decode has the response before" in text) == (400, True)

    run(scenario, sglang(decodes), sglang(decodes))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_tried_again_has_an_id_of_its_own(stream: bool) -> None:
    """SGLang aborts a stream's `rid` two seconds after its client has left, whoever has it then."""
    statuses = iter((500, 200))

    async def fails_once(_: web.Request, __: Asked) -> web.StreamResponse:
        return web.json_response({"text": "decoded"}, status=next(statuses))

    async def scenario(pair: Pair) -> None:
        assert (await pair.post({"text": "a", "rid": "mine", "stream": stream}, path="/generate"))[0] == 200
        for server in (pair.prefill, pair.decode):
            assert [body.get("rid") for body in server.bodies("/generate")] == ["mine", None]

    run(scenario, sglang(fails_once), sglang(waits_once()), retry_s=30.0)


def test_vllm_gets_the_clients_id_again() -> None:
    """By which the client fetches the answer. Prefill has none of the responses that decode has stored."""

    async def scenario(pair: Pair) -> None:
        asked = {"input": "a", "previous_response_id": "resp_1", "store": True, "request_id": "mine"}
        assert (await pair.post(asked, path="/v1/responses"))[0] == 200
        assert [body.get("request_id") for body in pair.decode.bodies("/v1/responses")] == ["mine", "mine"]

    run(scenario, StandIn(says(404, {"error": {"message": "no such response"}})), StandIn(waits_once()))


def waits_once() -> Respond:
    """Decode that waits for prefill the first time."""
    times = iter((hangs, says(200, {"text": "decoded"})))

    async def respond(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await next(times)(request, asked)

    return respond


def test_a_value_that_sglangs_decode_knows_is_its_own() -> None:
    """It leaves out the first token's event if that has no text."""
    known = {"content": [{"token": "A", "logprob": -0.5}]}
    found = {"content": [{"token": "B", "logprob": -0.2}]}
    first = {"choices": [{"logprobs": known}], "kv_transfer_params": WHERE}
    event = b"data: " + json.dumps({"choices": [{"delta": {"content": "AB"}, "logprobs": found}]}).encode() + b"\n\n"

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({"messages": [], "logprobs": True, "stream": True}, path="/v1/chat/completions")
        assert json.dumps(found) in text

    run(scenario, StandIn(says(200, first)), sglang(sse(event)))


def message(read: int, written: int | None, computed: int) -> dict[str, Any]:
    found = {"input_tokens": computed, "cache_read_input_tokens": read}
    return found if written is None else {**found, "cache_creation_input_tokens": written}


def details(**counts: Any) -> dict[str, Any]:
    return {"input_tokens": 200, "input_tokens_details": counts}


@pytest.mark.parametrize(
    ("path", "known", "found", "told"),
    [
        ("/v1/messages", message(3, None, 6), message(8, None, 1), message(3, None, 6)),
        ("/v1/messages", message(0, 192, 8), message(199, 0, 1), message(0, 192, 8)),
        ("/v1/messages", message(0, 192, 8), message(0, 192, 8), message(0, 192, 8)),  # decode has computed it
        (
            "/v1/chat/completions",
            {"prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": 176}},
            {"prompt_tokens_details": {"cached_tokens": 199, "created_cache_tokens": 0}},
            {"prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": 176}},
        ),
        (
            "/v1/responses",  # two turns, the second of which has found what the first one left
            details(cached_tokens=0, cache_write_tokens=192, cached_tokens_per_turn=[0]),
            details(cached_tokens=199 + 240, cache_write_tokens=48, cached_tokens_per_turn=[199, 240]),
            details(cached_tokens=240, cache_write_tokens=240, cached_tokens_per_turn=[0, 240]),
        ),
    ],
)
def test_what_was_cached_and_written_is_counted_as_on_one_server(
    path: str, known: dict[str, Any], found: dict[str, Any], told: dict[str, Any]
) -> None:
    async def counts(request: web.Request, asked: Asked) -> web.StreamResponse:
        answer = json.loads((await prefills(request, asked)).body)  # type: ignore[attr-defined]
        return web.json_response({**answer, "usage": known})

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return web.json_response({"usage": {**found, "output_tokens": 2}})

    async def scenario(pair: Pair) -> None:
        _, text, _ = await pair.post({"messages": [], "max_tokens": 4}, path=path)
        assert json.loads(text)["usage"] == {**told, "output_tokens": 2}

    run(scenario, StandIn(counts), StandIn(later))


def test_servers_get_what_browsers_and_traces_need() -> None:
    allows = {"Access-Control-Allow-Origin": "*"}
    names = ("Origin", "traceparent", "tracestate", "endpoint-load-metrics-format")

    async def scenario(pair: Pair) -> None:
        given = {name.replace("-", "_"): "a" for name in names}
        _, _, headers = await pair.post(COMPLETION, **given)
        assert headers["Access-Control-Allow-Origin"] == "*"
        asked = {"Origin": "http://a", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "b"}
        async with pair.client.options("/v1/completions", headers=asked) as answer:
            assert answer.status == 200
        (first, preflight) = pair.decode.asked
        assert [first.headers.get(name) for name in names] == ["a"] * len(names)
        assert (preflight.method, {name: preflight.headers.get(name) for name in asked}) == ("OPTIONS", asked)

    run(scenario, StandIn(prefills), StandIn(says(200, {"choices": []}, allows)))
