"""The example's proxy drains decode servers. Stand-ins take their place, some of which fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from tokenizers import Tokenizer, decoders, models
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


LETTERS = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS += [byte for byte in range(256) if byte not in LETTERS]
"""The bytes for which tokenizers by bytes have a letter, and those that have one from 256 on."""


def by_bytes(*pieces: bytes) -> tuple[Tokenizer, dict[bytes, int]]:
    """A tokenizer with a token for each byte, for some pieces, and a special one. Also its tokens."""
    letters = {byte: chr(byte if number < 188 else 256 + number - 188) for number, byte in enumerate(LETTERS)}
    tokens = {piece: number for number, piece in enumerate([*(bytes([byte]) for byte in range(256)), *pieces])}
    vocabulary = {"".join(letters[byte] for byte in piece): number for piece, number in tokens.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer, tokens


def with_byte_fallback() -> tuple[Tokenizer, dict[bytes, int]]:
    """A tokenizer like that of Llama 2, which spells in bytes what its vocabulary lacks. Also its tokens."""
    characters = ["\u2581", "a", "b", "\u00e9"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<end>"])
    tokens = {bytes([byte]): 1 + byte for byte in range(256)}
    return tokenizer, tokens | {each.replace("\u2581", " ").encode(): vocabulary[each] for each in characters}


@dataclass
class StreamInPython:
    """How vLLM makes text of the tokens of tokenizers in Python: it looks at the last ones only."""

    tokenizer: Tokenizer
    ids: list[int]

    def __post_init__(self) -> None:
        self.ids = list(self.ids)
        self.read = len(self.ids)
        self.start = max(0, self.read - 5)

    def step(self, token: int) -> str:
        self.ids.append(token)
        known, text = (self.tokenizer.decode(self.ids[self.start : stop]) for stop in (self.read, None))
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self.start, self.read = self.read, len(self.ids)
        return text[len(known) :]


@dataclass
class StreamOfLetters:
    """Each token is a letter."""

    ids: list[int]

    def step(self, token: int) -> str:
        return text_of([token])


@dataclass
class FastStream:
    """How vLLM makes text of the tokens of all others."""

    tokenizer: Tokenizer
    ids: list[int]

    def __post_init__(self) -> None:
        self.stream = DecodeStream(ids=self.ids, skip_special_tokens=True)

    def step(self, token: int) -> str:
        return self.stream.step(self.tokenizer, token) or ""


PIECES = (b" \xf0\x9f", b"\xf0\x9f\x98", b" \xe2\x80", b"\n\xe2", b"\x8a!")
TOKENIZERS: dict[str, tuple[Tokenizer, dict[bytes, int], Callable[[Tokenizer, list[int]], Any]]] = {
    "bytes": (*by_bytes(), FastStream),
    "pieces": (*by_bytes(*PIECES), FastStream),
    "byte fallback": (*with_byte_fallback(), FastStream),
    "in Python": (*by_bytes(*PIECES), StreamInPython),
}


def encoded(text: str, tokens: dict[bytes, int]) -> list[int]:
    """Its tokens, of the longest pieces."""
    data, found = text.encode(), []
    while data:
        piece = max((each for each in tokens if data.startswith(each)), key=len)
        found.append(tokens[piece])
        data = data[len(piece) :]
    return found


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
    max_length: int | None = 4096
    num_at_once: int = 2
    """How many tokens of an answer come before it is `going`."""
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    """When it says that it stops a request."""
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    """When it answers what it is to go on with."""
    knows_itself: asyncio.Event = field(default_factory=asyncio.Event)
    """When it says which kind of server it is."""
    refuses: bool = False
    """Whether it does not stop a request if `told` is an error."""

    def __post_init__(self) -> None:
        for event in (self.stops, self.takes, self.knows_itself):
            event.set()

    async def respond(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if request.path == "/detokenize":
            return web.json_response({"prompt": self.text(asked.body["tokens"])})
        if request.path == "/v1/models":
            adapter = {"id": "adapter", "max_model_len": None}
            return web.json_response({"data": [{"id": "model", "max_model_len": self.max_length}, adapter]})
        if request.path != "/v1/completions":
            await self.going.wait()
            return web.json_response({})
        params = asked.body.get("kv_transfer_params", {})
        if "stop_request_id" in params:
            self.is_stopped = not self.refuses if isinstance(self.told, int) else "stopped" in self.told
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
        if len(asked.body["prompt"]) != len(BODY["prompt"]):
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
        most = 4096 if self.max_length is None else self.max_length
        body["max_tokens"] = min(body["max_tokens"], most - len(body["prompt"]))  # without a word, as vLLM
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
class DecodeOfTokens(Decode):
    """One that makes the text of its answer as vLLM does, and puts some tokens into each event."""

    stream: Callable[[list[int]], Any] | None = None
    answer: list[int] = field(default_factory=list)
    size: int = 1

    def parts(self, prompt: list[int], count: int) -> Iterator[tuple[list[int], str]]:
        assert self.stream is not None
        stream = self.stream(prompt)
        tokens = self.answer[len(prompt) - len(BODY["prompt"]) :][:count]
        for at in range(0, count, self.size):
            part = tokens[at : at + self.size]
            yield part, "".join(stream.step(token) for token in part)


@dataclass
class DecodeStandIn(StandIn):
    """One that may take a while to say which kind of server it is."""

    knows_itself: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/model_info":
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


async def drained(servers: Servers, **fields: Any) -> tuple[tuple[list[int], str, str], Any]:
    """An answer of the first server, which is drained meanwhile, and the report of that."""
    answering = asyncio.create_task(servers.answer(**fields))
    await until(lambda: bool(servers.one.bodies()))
    report = await servers.drain(servers.one)
    return await answering, report


async def stopping(servers: Servers) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """An answer of the first server, and the report of a drain that has asked to stop it."""
    answering = asyncio.create_task(servers.answer())
    await until(lambda: bool(servers.one.bodies()))
    report = asyncio.create_task(servers.drain(servers.one))
    await until(lambda: bool(servers.told(servers.one, "stop_request_id")))
    return answering, report


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


def test_an_answer_does_not_go_to_a_server_that_came_back_with_a_smaller_limit() -> None:
    """It would shorten the answer without a word."""
    one, other = Decode(num_at_once=30), Decode(num_at_once=5)
    other.told = {"stopped": {**STOPPED, "max_tokens": 9}}

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer())
        await until(lambda: bool(servers.one.bodies()))
        assert [each["tokens"] for each in (await servers.drain(servers.one))["moved"]] == [31]
        one.max_length = 42
        await servers.drain(servers.one, "/admin/undrain")
        draining = asyncio.create_task(servers.drain(servers.other))
        await asyncio.sleep(0.2)
        other.going.set()
        assert await answering == WHOLE
        assert [each["reason"][:32] for each in (await draining)["stayed"]] == ["no other server goes on with it:"]

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
        answering, first = await stopping(servers)
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
        answering, report = await stopping(servers)
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


@pytest.mark.parametrize("has_special", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(40))
def test_an_answer_that_moves_within_a_character(seed: int, name: str, has_special: bool) -> None:
    """Its text is that of one server, wherever it moves, however many tokens an event has, and if special tokens are between
    the parts of a character.
    """
    tokenizer, tokens, kind = TOKENIZERS[name]
    special = tokenizer.encode("<end>").ids
    draw = Random(seed)
    texts = ["a", "\u00e9", "\u4e16", "\U0001f389", " \U0001f60a", " \u201c", "\n\u2019"]
    answer: list[int] = []
    while len(answer) < BODY["max_tokens"]:
        is_text = name != "bytes" or draw.random() < 0.8
        more = encoded(draw.choice(texts), tokens) if is_text else [draw.randrange(256)]
        answer += [each for token in more for each in ([token, *special] if has_special and draw.random() < 0.2 else [token])]
    answer = answer[: BODY["max_tokens"]]
    prompt = encoded("b\u00e9a" if name == "byte fallback" else "abc", tokens)
    stream = kind(tokenizer, prompt)
    text = "".join(stream.step(token) for token in answer)
    one, other = (
        DecodeOfTokens(
            stream=partial(kind, tokenizer),
            answer=answer,
            size=draw.randint(1, 3),
            num_at_once=draw.randint(1, 30),
            text=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
            told={"stopped": {**STOPPED, "left_out_token_ids": special}},
        )
        for _ in range(2)
    )
    other.going.set()

    async def scenario(servers: Servers) -> None:
        found, report = await drained(servers, prompt=prompt)
        assert found == (answer, text, "length")
        assert len(report["moved"]) == 1

    run(scenario, one, other)


@pytest.mark.parametrize("names_tokens", [False, True])
def test_events_that_a_server_sends_to_name_tokens_only(names_tokens: bool) -> None:
    """A chat's parser holds text back. A client that does not ask for tokens gets no event for them."""
    deltas: list[tuple[dict[str, str], list[int]]] = [
        ({"role": "assistant", "content": ""}, []),
        ({}, [5]),
        ({"content": "a"}, [6]),
    ]

    async def respond(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        for delta, tokens in deltas:
            assert asked.body["return_token_ids"] is True
            choice = {"index": 0, "delta": delta, "token_ids": tokens, "finish_reason": None}
            await response.write(b"data: " + json.dumps({"id": "chat", "choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    one = Decode()
    one.respond = respond  # type: ignore[method-assign]

    async def scenario(servers: Servers) -> None:
        body = {"model": "model", "messages": [], "stream": True, **({"return_token_ids": True} if names_tokens else {})}
        async with servers.client.post("/v1/chat/completions", json=body, headers={"X-Vllm-Priority": "3"}) as answer:
            lines = [line async for line in answer.content if line.startswith(b"data: {")]
        found = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
        assert found == [delta for delta, _ in deltas if delta or names_tokens]
        assert servers.one.asked[-1].headers["X-Vllm-Priority"] == "3"

    run(scenario, one, Decode())


def test_stop_tokens_in_the_text_of_an_answer_that_has_moved() -> None:
    """The other server has to know that the client wants them."""
    other = Decode()
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer(include_stop_str_in_output=True, stop_token_ids=[7]))
        await until(lambda: bool(servers.one.bodies()))
        await servers.drain(servers.one)
        await answering
        (asked,) = servers.other.bodies()
        assert asked["include_stop_str_in_output"] is True

    run(scenario, Decode(), other)


@pytest.mark.parametrize("status", [429, 503])
def test_an_answer_that_ends_after_its_server_was_too_busy_to_stop_it(status: int) -> None:
    """It has all its tokens, and the client gets its end."""
    one = Decode(told=status, refuses=True)

    async def scenario(servers: Servers) -> None:
        answer, report = await drained(servers)
        assert answer == WHOLE
        assert [str(status) in each["reason"] for each in report["stayed"]] == [True]
        assert not servers.other.bodies()

    run(scenario, one, Decode())


def test_stop_strings_within_an_event_that_reaches_min_tokens() -> None:
    """Those that end before the answer has so many tokens do not end it."""
    other = DecodeOfTokens(size=8, answer=[*range(3, 43)], stream=StreamOfLetters, text=text_of)
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answering = asyncio.create_task(servers.answer(stop=["g", "n"], min_tokens=5))
        await until(lambda: bool(servers.one.bodies()))
        await servers.drain(servers.one)
        tokens, text, reason = await answering
        assert (text, reason) == ("defghijklm", "stop")
        assert tokens[:10] == list(range(3, 13))

    run(scenario, Decode(), other)


@pytest.mark.parametrize("case", ["no word of the stop", "another text"])
def test_an_answer_that_cannot_go_on_is_cut_off(case: str) -> None:
    """The client does not take it for a whole one."""

    async def scenario(servers: Servers) -> None:
        with pytest.raises(ClientError):
            await drained(servers)

    if case == "another text":
        run(scenario, *(Decode(text=lambda tokens: f"{len(tokens)}" + "\ufffd" * (4 < len(tokens) < 7)) for _ in range(2)))
    else:
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


@pytest.mark.parametrize(("max_length", "moves"), [(43, True), (42, False), (None, False)])
def test_an_answer_stays_whole(max_length: int | None, moves: bool) -> None:
    """A server whose requests are shorter would cut it without a word."""
    one, other = Decode(), Decode(max_length=max_length)
    other.going.set()

    async def scenario(servers: Servers) -> None:
        answer, report = await drained(servers)
        assert answer == WHOLE
        assert len(report["moved"]) == moves
        assert len(servers.other.bodies()) == moves
        if not moves:
            expected = "expected room for 43 tokens" if max_length else "does not say how many tokens"
            assert expected in report["stayed"][0]["reason"]

    run(scenario, one, other)


def test_a_client_that_leaves_while_a_server_has_not_said_that_it_stops_ends_no_drain() -> None:
    one, other = Decode(), Decode()
    one.stops.clear()

    async def scenario(servers: Servers) -> None:
        answering, report = await stopping(servers)
        await asyncio.sleep(0.3)
        answering.cancel()
        await asyncio.sleep(0.3)
        one.stops.set()
        assert [each["reason"] for each in (await report)["stayed"]] == ["it has ended"]
        assert (await servers.drain(servers.one))["empty"]

    run(scenario, one, other)
