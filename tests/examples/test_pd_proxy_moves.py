"""The example's proxy drains decode servers. Stand-ins take their place, some of which fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from examples.pd_proxy import Proxy
from tests.examples.test_pd_proxy import SSE, Asked, StandIn, prefills, serve, until

KEPT = {"remote_request_id": "ab" * 16, "remote_keep_s": 60.0}
STOPPED = {"max_tokens": 40, "min_tokens": 0, "temperature": 0.0}
BODY: dict[str, Any] = {
    "model": "model",
    "prompt": [1, 2, 3],
    "max_tokens": 40,
    "stream": True,
    "stop": "nowhere",
    "user": "someone",
}


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[]))
BYTES.pre_tokenizer, BYTES.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
BYTES.add_special_tokens(["<end>"])
"""A tokenizer with a token for each byte, and a special one."""


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@dataclass
class Decode:
    """A stand-in for a vLLM server that generates the numbers of positions. It stops at the second one until it is `going`, or
    told to stop.
    """

    told: Any = field(default_factory=lambda: {"stopped": STOPPED})
    """What it answers if it should stop a request. An integer is the status of an error."""
    finish_reason: str = "length"
    status: int = 200
    text: Callable[[list[int]], str] = text_of
    going: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: bool = False
    num_at_once: int = 2
    """How many tokens of an answer come before it is `going`."""
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    """When it says that it stops a request."""
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    """When it answers what it is to go on with."""
    knows_itself: asyncio.Event = field(default_factory=asyncio.Event)
    """When it says which kind of server it is."""

    def __post_init__(self) -> None:
        for event in (self.stops, self.takes, self.knows_itself):
            event.set()

    async def respond(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if request.path == "/detokenize":
            return web.json_response({"prompt": self.text(asked.body["tokens"])})
        if request.path != "/v1/completions":
            await self.going.wait()
            return web.json_response({})
        params = asked.body.get("kv_transfer_params", {})
        if "stop_request_id" in params:
            self.is_stopped = self.told == 500 or "stopped" in self.told
            self.going.set()
            await self.stops.wait()
            if isinstance(self.told, int):
                return web.Response(status=self.told)
            return web.json_response({"kv_transfer_params": self.told})
        if "kept_request_id" in params:
            return web.json_response({"kv_transfer_params": {"kept": KEPT}})
        if "abort_request_id" in params:
            return web.json_response({})
        if self.status != web.HTTPOk.status_code:
            return web.Response(status=self.status)
        if asked.body["prompt"] != BODY["prompt"]:
            await self.takes.wait()
        return await self._generate(request, asked.body)

    def parts(self, prompt: list[int], count: int) -> Iterator[tuple[list[int], str]]:
        """The tokens and the text of each event."""
        for token in range(len(prompt), len(prompt) + count):
            yield [token], text_of([token])

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        number = 0
        for tokens, text in self.parts(body["prompt"], body["max_tokens"]):
            if number >= self.num_at_once:
                await self.going.wait()
            is_last = (self.is_stopped and number >= self.num_at_once) or number + len(tokens) == body["max_tokens"]
            choice = {
                "index": 0,
                "text": text,
                "logprobs": None,
                "token_ids": tokens,
                "stop_reason": None,
                "finish_reason": self.finish_reason if is_last else None,
                **({"prompt_token_ids": body["prompt"]} if number == 0 else {}),
            }
            number += len(tokens)
            event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if is_last:
                self.is_stopped = False
                break
        await response.write(b"data: [DONE]\n\n")
        return response


@dataclass
class DecodeOfBytes(Decode):
    """One whose tokens are bytes. It makes the text of its answer as vLLM does, and puts some tokens into each event."""

    answer: list[int] = field(default_factory=list)
    size: int = 1

    def parts(self, prompt: list[int], count: int) -> Iterator[tuple[list[int], str]]:
        stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        tokens = self.answer[len(prompt) - len(BODY["prompt"]) :][:count]
        for at in range(0, count, self.size):
            part = tokens[at : at + self.size]
            yield part, "".join(stream.step(BYTES, token) or "" for token in part)


@dataclass
class DecodeStandIn(StandIn):
    """One that may take a while to say which kind of server it is."""

    knows_itself: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/server_info":
            await self.knows_itself.wait()
        return await super().handle(request)


@dataclass
class Servers:
    """Two decode servers, what they were asked, and a client of the proxy in front of them."""

    one: StandIn
    other: StandIn
    client: ClientSession

    async def drain(self, server: StandIn, path: str = "/admin/drain") -> Any:
        async with self.client.post(path, json={"server": server.url}) as answer:
            assert answer.status == 200
            return await answer.json()

    async def answer(self, **fields: Any) -> tuple[list[int], str, str]:
        """The tokens, the text and the end of an answer. Raises `ClientError` if it is cut off."""
        tokens, text, reason = [], "", ""
        async with self.client.post("/v1/completions", json={**BODY, "return_token_ids": True, **fields}) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice["token_ids"]
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
        return tokens, text, reason

    def told(self, server: StandIn, name: str) -> list[Any]:
        """The values of a parameter in what a server was asked."""
        found = (body.get("kv_transfer_params", {}).get(name) for body in server.bodies())
        return [value for value in found if value]


@asynccontextmanager
async def started(one: Decode, other: Decode, *, move: bool = True) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        prefill = StandIn(prefills)
        first, second = (DecodeStandIn(each.respond, knows_itself=each.knows_itself) for each in (one, other))
        for server in (prefill, first, second):
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", server.handle)
            server.url = f"http://127.0.0.1:{await serve(stack, application)}"
        proxy = Proxy([prefill.url], [first.url, second.url], retry_s=0.0, move=move)
        port = await serve(stack, proxy.application())
        client = await stack.enter_async_context(ClientSession(f"http://127.0.0.1:{port}"))
        yield Servers(first, second, client)


def run(scenario: Callable[[Servers], Awaitable[None]], one: Decode, other: Decode, **options: Any) -> None:
    async def start() -> None:
        async with started(one, other, **options) as servers:
            await scenario(servers)

    asyncio.run(start())


async def drained(servers: Servers) -> tuple[tuple[list[int], str, str], Any]:
    """An answer of the first server, which is drained meanwhile, and the report of that."""
    answering = asyncio.create_task(servers.answer())
    await until(lambda: bool(servers.one.bodies()))
    report = await servers.drain(servers.one)
    return await answering, report


WHOLE = (list(range(3, 43)), text_of(list(range(3, 43))), "length")


@pytest.mark.parametrize("at_once", [False, True], ids=["", "at once"])
def test_an_answer_goes_on(at_once: bool) -> None:
    """The proxy asks for the hand-over, unless the server gives it at once."""
    one, other = Decode(), Decode()
    other.going.set()
    one.told = {"stopped": STOPPED, **({"kept": KEPT} if at_once else {})}

    async def scenario(servers: Servers) -> None:
        answer, report = await drained(servers)
        assert answer == WHOLE
        assert report == {"empty": True, "moved": [{"id": "cmpl-1", "tokens": 3}], "stayed": []}
        (asked,) = servers.other.bodies()
        assert asked["prompt"] == [1, 2, 3, 3, 4, 5]
        assert (asked["max_tokens"], asked["user"], asked["temperature"]) == (37, "someone", 0.0)
        assert "stop" not in asked
        assert asked["kv_transfer_params"]["kept"] == KEPT
        assert bool(servers.told(servers.one, "kept_request_id")) is not at_once
        assert not servers.told(servers.one, "abort_request_id")

    run(scenario, one, other)


@pytest.mark.parametrize(
    "field", [{"include_stop_str_in_output": "false"}, {"return_token_ids": "yes"}, {"min_tokens": "5"}], ids=str
)
def test_an_answer_stays_whose_fields_only_the_server_can_read(field: dict[str, str]) -> None:
    """It takes texts for numbers and for booleans."""
    one, other = Decode(), Decode()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer(**field))
        await until(lambda: bool(servers.one.bodies()))
        report = asyncio.create_task(servers.drain(servers.one))
        await asyncio.sleep(0.2)
        one.going.set()
        assert await answering == WHOLE
        assert [each["reason"] for each in (await report)["stayed"]] == [f"only the server can read its {next(iter(field))}"]
        assert not servers.other.bodies()

    run(scenario, one, other)


def test_an_answer_that_moves_late_and_again() -> None:
    """It has all its tokens, wherever it moves."""
    one, other = Decode(num_at_once=30), Decode(num_at_once=5)
    other.told = {"stopped": {**STOPPED, "max_tokens": 9}}

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        report = await servers.drain(servers.one)
        assert report["moved"] == [{"id": "cmpl-1", "tokens": 31}]
        await servers.drain(servers.one, "/admin/undrain")
        report = await servers.drain(servers.other)
        assert await answering == WHOLE
        assert report["moved"] == [{"id": "cmpl-1", "tokens": 37}]

    run(scenario, one, other)


def test_a_client_that_leaves_while_its_answer_moves() -> None:
    """The server that has stopped it need not keep it."""
    other = Decode()
    other.takes.clear()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        report = asyncio.create_task(servers.drain(servers.one))
        await until(lambda: bool(servers.other.bodies()))
        answering.cancel()
        assert [each["reason"] for each in (await report)["stayed"]] == ["it has ended"]
        (stopped,) = servers.told(servers.one, "stop_request_id")
        await until(lambda: servers.told(servers.one, "abort_request_id") == [stopped])
        other.takes.set()

    run(scenario, Decode(), other)


def test_drains_of_both_servers() -> None:
    """A server is not empty while an answer is on its way there."""
    one, other = Decode(), Decode()
    other.takes.clear()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        first = asyncio.create_task(servers.drain(servers.one))
        await until(lambda: bool(servers.other.bodies()))
        second = asyncio.create_task(servers.drain(servers.other))
        await asyncio.sleep(0.3)
        assert not second.done()
        other.takes.set()
        assert [each["tokens"] for each in (await first)["moved"]] == [3]
        await asyncio.sleep(0.3)
        assert not second.done()
        other.going.set()
        assert await answering == WHOLE
        assert [each["reason"] for each in (await second)["stayed"]] == ["no other server of vLLM decodes"]

    run(scenario, one, other)


def test_an_answer_does_not_go_to_a_server_that_is_drained_meanwhile() -> None:
    """The server that has stopped it computes the rest."""
    one, other = Decode(), Decode()
    one.stops.clear()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        first = asyncio.create_task(servers.drain(servers.one))
        await until(lambda: bool(servers.told(servers.one, "stop_request_id")))
        assert (await servers.drain(servers.other))["empty"] is True
        one.stops.set()
        assert await answering == WHOLE
        assert [each["reason"][:31] for each in (await first)["stayed"]] == ["no other server goes on with it"]
        assert not servers.other.bodies()

    run(scenario, one, other)


def test_an_answer_that_has_stayed_moves_at_the_next_drain() -> None:
    other = Decode()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        await servers.drain(servers.other)
        first = asyncio.create_task(servers.drain(servers.one))
        await asyncio.sleep(0.3)
        await servers.drain(servers.one, "/admin/undrain")
        assert [each["reason"] for each in (await first)["stayed"]] == ["no other server of vLLM decodes"]
        await servers.drain(servers.other, "/admin/undrain")
        assert [each["tokens"] for each in (await servers.drain(servers.one))["moved"]] == [3]
        assert await answering == WHOLE

    run(scenario, Decode(), other)


def test_a_server_that_is_drained_while_a_request_is_on_its_way() -> None:
    """Another server gets it."""
    one, other = Decode(), Decode()
    one.knows_itself.clear()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await asyncio.sleep(0.3)
        assert (await servers.drain(servers.one))["empty"] is True
        one.knows_itself.set()
        assert await answering == WHOLE
        assert not servers.one.bodies()

    run(scenario, one, other)


def test_a_server_that_says_late_that_it_has_stopped_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full server answers the proxy once it has room. The client waits for it."""
    monkeypatch.setattr("examples.pd_proxy.KEPT_TIMEOUT_S", 0.1)
    one, other = Decode(), Decode()
    one.stops.clear()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        report = asyncio.create_task(servers.drain(servers.one))
        await until(lambda: bool(servers.told(servers.one, "stop_request_id")))
        await asyncio.sleep(0.3)
        one.stops.set()
        assert await answering == WHOLE
        assert (await report)["moved"] == [{"id": "cmpl-1", "tokens": 3}]

    run(scenario, one, other)


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_does_not_go_on(status: int) -> None:
    """The server that has stopped computes the rest."""

    async def scenario(servers: Servers) -> None:
        answer, report = await drained(servers)
        assert answer == WHOLE
        assert [each["reason"][:32] for each in report["stayed"]] == ["no other server goes on with it:"]
        (stopped,) = servers.told(servers.one, "stop_request_id")
        await until(lambda: servers.told(servers.one, "abort_request_id") == [stopped])
        (rest,) = (body for body in servers.one.bodies() if body["prompt"] == [1, 2, 3, 3, 4, 5])
        assert "kept" not in rest["kv_transfer_params"]

    run(scenario, Decode(), Decode(status=status))


def test_a_server_that_does_not_stop() -> None:
    async def scenario(servers: Servers) -> None:
        answer, report = await drained(servers)
        assert answer == WHOLE
        assert report == {"empty": True, "moved": [], "stayed": [{"id": "cmpl-1", "reason": "seed: no"}]}
        assert not servers.other.bodies()

    run(scenario, Decode(told={"not_stopped": "seed: no"}), Decode())


def test_an_answer_that_ends_when_it_is_stopped() -> None:
    """The client gets its end, and the server is told that nobody takes what it may have kept."""

    async def scenario(servers: Servers) -> None:
        (_, _, reason), report = await drained(servers)
        assert reason == "stop"
        assert [each["reason"] for each in report["stayed"]] == ["it has ended"]
        (stopped,) = servers.told(servers.one, "stop_request_id")
        await until(lambda: servers.told(servers.one, "abort_request_id") == [stopped])
        assert not servers.other.bodies()

    run(scenario, Decode(finish_reason="stop"), Decode())


@pytest.mark.parametrize("has_special", [False, True], ids=["bytes", "special tokens"])
@pytest.mark.parametrize("seed", range(100))
def test_an_answer_that_moves_within_a_character(seed: int, has_special: bool) -> None:
    """Its text is that of one server, wherever it moves and however many tokens an event has. Where a special token follows a
    part of a character, it may be cut off.
    """
    draw = Random(seed)
    texts = ["a", "\u00e9", "\u4e16", "\U0001f389", "\ufffd"]
    answer: list[int] = []
    while len(answer) < BODY["max_tokens"]:
        answer += BYTES.encode(draw.choice(texts)).ids if draw.random() < 0.8 else [draw.randrange(256)]
        if has_special and draw.random() < 0.2:
            answer += BYTES.encode("<end>").ids
    answer = answer[: BODY["max_tokens"]]
    one, other = (
        DecodeOfBytes(
            answer=answer,
            size=draw.randint(1, 3),
            num_at_once=draw.randint(1, 12),
            text=lambda tokens: BYTES.decode(tokens, skip_special_tokens=False),
        )
        for _ in range(2)
    )
    other.going.set()
    stream = DecodeStream(ids=BODY["prompt"], skip_special_tokens=True)
    text = "".join(stream.step(BYTES, token) or "" for token in answer)

    async def scenario(servers: Servers) -> None:
        try:
            found, report = await drained(servers)
        except ClientError:
            assert has_special
            return
        assert found == (answer, text, "length")
        assert len(report["moved"]) == 1

    run(scenario, one, other)


def test_an_answer_that_cannot_go_on_is_cut_off() -> None:
    """The client does not take it for a whole one."""

    async def scenario(servers: Servers) -> None:
        with pytest.raises(ClientError):
            await drained(servers)

    run(scenario, Decode(told=500), Decode())


def test_a_drained_server_gets_nothing() -> None:
    """Until it is to have requests again. Without another one the proxy answers HTTP 503."""
    one, other = Decode(), Decode()
    one.going.set()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        assert await servers.drain(servers.one) == {"empty": True, "moved": [], "stayed": []}
        for _ in range(3):
            assert await servers.answer() == WHOLE
        assert not servers.one.bodies()
        await servers.drain(servers.other)
        for path in ("/v1/completions", "/other"):
            async with servers.client.post(path, json=BODY) as answer:
                assert answer.status == 503
                assert "every decode server is drained" in await answer.text()
        await servers.drain(servers.one, "/admin/undrain")
        assert await servers.answer() == WHOLE
        assert servers.one.bodies()

    run(scenario, one, other)


def test_a_drain_waits_for_what_stays() -> None:
    """Also for other requests. It goes on if its client leaves, and ends if the server is to have requests again."""
    one = Decode()

    async def scenario(servers: Servers) -> None:
        asking = asyncio.create_task(servers.answer())
        other = asyncio.create_task(servers.client.post("/other", json={}))
        await until(lambda: bool(servers.one.bodies() and servers.other.asked))
        left = asyncio.create_task(servers.drain(servers.one))
        await asyncio.sleep(0.1)
        left.cancel()
        report = asyncio.create_task(servers.drain(servers.one))
        waiting = asyncio.create_task(servers.drain(servers.other))
        await asyncio.sleep(0.2)
        assert not report.done()
        assert not waiting.done()
        await servers.drain(servers.other, "/admin/undrain")
        assert (await waiting)["empty"] is False
        one.going.set()
        assert await asking == WHOLE
        assert (await report)["stayed"] == [{"id": "", "reason": "the proxy moves none"}]
        second.going.set()
        (await other).close()

    second = Decode()
    run(scenario, one, second, move=False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"server": "http://127.0.0.1:1"}'])
def test_a_server_that_there_is_not(body: bytes) -> None:
    async def scenario(servers: Servers) -> None:
        for path in ("/admin/drain", "/admin/undrain"):
            async with servers.client.post(path, data=body) as answer:
                assert answer.status == 400

    run(scenario, Decode(), Decode())
