"""Running requests that move from one server to another, once or twice: every answer is that of an unmoved one."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from disagg import new_request_id
from disagg.integrations.vllm.moves import Moves
from harness.servers import Server
from harness.vllm.engine import Answer, Engine
from harness.vllm.models import BOS, EOS, write_tokenizer
from tests.integrations.vllm.requests import USED, check_equal, prompts, wait_empty, wait_free, wait_unused

Start = Callable[..., Engine]
NUM_TOKENS = 64


def stop(engine: Engine, move_id: str) -> dict[str, Any]:
    """Ask an engine to stop a request, and return its answer."""
    (told,) = engine.generate([[1]], params={"stop_request_id": move_id}, max_tokens=1)
    assert told.params is not None
    return told.params


def kept(engine: Engine, move_id: str) -> dict[str, Any]:
    """The hand-over of a request that was stopped."""
    (told,) = engine.generate([[1]], params={"kept_request_id": move_id}, max_tokens=1)
    assert told.params is not None
    return dict(told.params["kept"])


def run(engine: Engine, prompt: list[int], *, until: int, given: dict[str, Any] | None, left: int) -> tuple[Answer, str]:
    """An answer that is stopped when it has `until` tokens, of the `left` that it may have, and the id of its move."""
    move_id = new_request_id().hex()
    params = {"move_id": move_id, **({} if given is None else {"kept": given})}
    req_id = engine.add(prompt, params=params, max_tokens=left, hold_at=until)
    assert stop_running(engine, req_id, move_id, num_tokens=until)["stopped"]["max_tokens"] == left
    (answer,) = engine.wait([req_id])
    assert answer.finish_reason == "length"
    assert until < len(answer.tokens) <= until + 2  # steps that are under way are taken
    return answer, move_id


def stop_running(engine: Engine, req_id: str, move_id: str, *, num_tokens: int = 1) -> dict[str, Any]:
    """Stop a request that the engine holds at so many tokens."""
    while len(engine.answers[req_id].tokens) < num_tokens:
        engine.poll(60)
    return stop(engine, move_id)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {"block_size": 32}, {"block_size": 64, "tensor_parallel_size": 2}),
    "windows": ("gemma3", {"block_size": 64, "tensor_parallel_size": 2}, {"block_size": 32}),
    "recurrent": ("falcon-h1", {"block_size": 64}, {"block_size": 128, "tensor_parallel_size": 2, "async_scheduling": True}),
    "latent": ("deepseek-v2", {"block_size": 16}, {"block_size": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_moves_and_returns(case: str, start: Start) -> None:
    """From the first server to the second and back, after tokens early, in the middle, late, and around the end of a block.
    Nothing is computed twice, and nothing is left behind.
    """
    model, of_first, of_second = CASES[case]
    first, second = start(model, **of_first), start(model, **of_second)
    first.wait_ready()
    second.wait_ready()
    for number, (length, early, late) in enumerate([(70, 1, 40), (63, 1, 1), (100, 27, 3), (33, 30, 25), (200, 53, 5)]):
        (prompt,) = prompts((length,), seed=60 + number)
        (expected,) = first.generate([prompt], max_tokens=NUM_TOKENS)
        found = Answer()
        given: dict[str, Any] | None = None
        for engine, until in ((first, early), (second, late)):
            asked = prompt + found.tokens
            answer, move_id = run(engine, asked, until=until, given=given, left=NUM_TOKENS - len(found.tokens))
            assert answer.num_external == (0 if given is None else len(asked) - 1)
            found.tokens, found.logprobs = found.tokens + answer.tokens, found.logprobs + answer.logprobs
            given = kept(engine, move_id)
            assert given["remote_num_tokens"] == len(prompt) + len(found.tokens) - 1
        asked = prompt + found.tokens
        (answer,) = first.generate([asked], params={"kept": given}, max_tokens=NUM_TOKENS - len(found.tokens))
        assert answer.num_external == len(asked) - 1
        found.tokens, found.logprobs = found.tokens + answer.tokens, found.logprobs + answer.logprobs
        check_equal([expected], [found])
    wait_free(first, second)
    wait_empty(first, second)
    assert first.counts["failed_loads"] == second.counts["failed_loads"] == 0


@pytest.mark.parametrize("engine_options", [{}, {"async_scheduling": True}], ids=["", "asynchronous"])
def test_what_is_not_stopped(start: Start, engine_options: dict[str, Any]) -> None:
    """It says why, and goes on. A request that has ended by itself meanwhile is not kept."""
    engine = start(block_size=32, blocks=64, extra={"kept_share": 0.1}, **engine_options).wait_ready()
    (text,) = prompts((300,), seed=70)
    assert stop(engine, "ab" * 16)["not_stopped"].startswith("this server does not compute it")
    for move_id, sampling, reason in (
        ("not an id", {}, "move_id: expected 32 hexadecimal digits"),
        ("01" * 16, {"temperature": 0.5, "seed": 3}, "seed"),
        ("02" * 16, {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("03" * 16, {"presence_penalty": 0.1}, "presence_penalty"),
        ("04" * 16, {"frequency_penalty": 0.1}, "frequency_penalty"),
        ("05" * 16, {"extra_args": {"other": 1}}, "other parameters: kv_transfer_params, other"),
        ("06" * 16, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        req_id = engine.add(text, params={"move_id": move_id}, max_tokens=40, sampling=sampling, hold_at=1)
        assert stop_running(engine, req_id, move_id)["not_stopped"].startswith(reason)
        (answer,) = engine.wait([req_id])
        assert len(answer.tokens) == 40
    # More blocks than `kept_share` have, which bounds only requests that have ended by themselves.
    greedy = {"seed": 5, "min_tokens": 9, "min_p": 0.0, "logit_bias": {7: 1.0}}
    req_id = engine.add(text, params={"move_id": "07" * 16}, max_tokens=40, sampling=greedy, hold_at=1)
    stopped = stop_running(engine, req_id, "07" * 16)
    told = stopped["stopped"]
    expected = {"max_tokens": 40, "min_tokens": 9, "temperature": 0.0, "ignore_eos": True, "logit_bias": {7: 1.0}}
    expected |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: told[name] for name in expected} == expected
    engine.wait([req_id])
    assert stopped["kept"] == kept(engine, "07" * 16)
    assert stopped["kept"]["remote_num_tokens"] == 299 + len(engine.answers[req_id].tokens)
    engine.generate([[1]], params={"abort_request_id": "07" * 16}, max_tokens=1)
    wait_free(engine)
    wait_empty(engine)


MOVE_ID = "ab" * 16


def movable(moves: Moves, number: int, *, is_told: bool = False, **sampling: Any) -> Request:
    """A request that `moves` knows: one that may move, or is told to stop it."""
    told = {"stop_request_id": MOVE_ID} if is_told else {"move_id": MOVE_ID}
    params = SamplingParams(max_tokens=40, extra_args={"kv_transfer_params": told}, **sampling)
    request = Request(f"request-{number}", [1, 2, 3], params, None)
    moves.add(request, reason="")
    return request


def told_to_stop(moves: Moves) -> dict[str, Any]:
    """What a server answers that is to stop the request."""
    _, told = moves.remove(movable(moves, 99, is_told=True))
    assert told is not None
    return told


def ended(moves: Moves, request: Request, status: RequestStatus, num_tokens: int) -> str:
    """The id by which a request is kept that has ended after so many tokens."""
    request.append_output_token_ids([5] * num_tokens)
    request.status = status
    return moves.remove(request)[0]


@pytest.fixture
def moves(model: Callable[[str], Path]) -> Moves:
    """Of a server without options that matter."""
    folder = str(model("llama"))
    read: dict[str, Any] = {"runner_type": "generate", "tokenizer_mode": "auto", "tokenizer_revision": None}
    read |= {"trust_remote_code": False, "logits_processors": None, "skip_tokenizer_init": False, "max_model_len": 1024}
    config = SimpleNamespace(model=folder, tokenizer=folder, **read)
    return Moves(SimpleNamespace(model_config=config, watermark_config=None))


def test_a_server_with_an_installed_logits_processor_keeps_its_answers(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM loads those of other packages without an option."""
    installed = {"vllm.logits_processors": ["one"]}
    monkeypatch.setattr("disagg.integrations.vllm.moves.entry_points", lambda group: installed[group])
    movable(moves, 1)
    assert told_to_stop(moves)["not_stopped"] == "the server has logits processors of its own"
    installed["vllm.logits_processors"].clear()
    assert told_to_stop(moves)["stopped"]


@pytest.mark.parametrize(("given", "expected"), [({}, [BOS, EOS]), ({"skip_special_tokens": False}, [])])
def test_the_proxy_learns_which_tokens_have_no_text(moves: Moves, given: dict[str, Any], expected: list[int]) -> None:
    movable(moves, 1, **given)
    assert told_to_stop(moves)["stopped"]["left_out_token_ids"] == expected


def test_another_server_gets_the_penalties_too(moves: Moves) -> None:
    """A request may turn off those that its model's `generation_config.json` has, which that server reads too."""
    movable(moves, 1, repetition_penalty=1.0)
    stopped = told_to_stop(moves)["stopped"]
    assert (stopped["repetition_penalty"], stopped["presence_penalty"], stopped["frequency_penalty"]) == (1.0, 0.0, 0.0)


def test_several_answers_to_a_prompt_stay(moves: Moves) -> None:
    """They have one id, also when one of them has ended. None is kept by it."""
    one, other = movable(moves, 1), movable(moves, 2)
    reason = "several answers have this move_id: one cannot be continued alone"
    assert told_to_stop(moves) == {"not_stopped": reason}
    assert not ended(moves, one, RequestStatus.FINISHED_LENGTH_CAPPED, 40)
    assert told_to_stop(moves) == {"not_stopped": reason}
    assert (one.max_tokens, other.max_tokens) == (40, 40)
    assert not ended(moves, other, RequestStatus.FINISHED_LENGTH_CAPPED, 39)
    assert told_to_stop(moves)["not_stopped"].startswith("this server does not compute it")


def test_a_request_that_is_asked_again_moves(moves: Moves) -> None:
    """The proxy has given the first one up, which vLLM ends later."""
    first, again = movable(moves, 1), movable(moves, 2)
    assert not ended(moves, first, RequestStatus.FINISHED_ABORTED, 0)
    assert told_to_stop(moves)["stopped"]["max_tokens"] == 40
    assert again.max_tokens == 1
    assert ended(moves, again, RequestStatus.FINISHED_LENGTH_CAPPED, 1) == MOVE_ID


def test_stopped_before_its_first_token(start: Start) -> None:
    """Requests that wait in the queue are stopped after one token. One that is aborted is not kept."""
    first, second = start(block_size=32, max_num_seqs=1), start(block_size=64)
    first.wait_ready()
    second.wait_ready()
    long, text = prompts((600, 100), seed=71)
    (expected,) = second.generate([text], max_tokens=20)
    running = first.add(long, params={"move_id": "01" * 16}, max_tokens=8)
    waiting = first.add(text, params={"move_id": "02" * 16}, max_tokens=20)
    first.add([1], params={"stop_request_id": "02" * 16}, max_tokens=1)
    (answer,) = first.wait([waiting])
    assert first.wait([running])[0].finish_reason == "length"
    assert len(answer.tokens) == 1
    (rest,) = second.generate([text + answer.tokens], params={"kept": kept(first, "02" * 16)}, max_tokens=19)
    assert rest.num_external == 100
    check_equal([expected], [Answer(answer.tokens + rest.tokens, answer.logprobs + rest.logprobs)])
    running = first.add(text, params={"move_id": "03" * 16}, max_tokens=400, hold_at=1)
    while not first.answers[running].tokens:
        first.poll(60)
    first.abort(running)
    assert "not_stopped" in stop(first, "03" * 16)
    wait_free(first, second)
    wait_empty(first, second)


# -- through the example's proxy ---------------------------------------------------------------------------------------

LOADED, FAILED = "vllm:disagg_loaded_tokens_total", "vllm:disagg_failed_loads_total"
SENDS = "vllm:disagg_sends_total"
PATIENT = {"connection_limits": {"heartbeat_timeout_s": 30.0}, "keep_s": 20.0}
TEXT = "Decode goes on elsewhere. "
LETTERS = sorted(range(65, 91))
"""Tokens that are single characters."""
NUM_STREAMED = 1000
"""So many that an answer has not ended when it is to move."""

P = ParamSpec("P")
Servers = tuple[Server, Server, Server]
"""Two decode servers, and a proxy."""


@pytest.fixture(scope="module")
def all_servers(model: Callable[[str], Path]) -> Iterator[tuple[Servers, Server]]:
    """Two decode servers, a proxy in front of them and of one that prefills, and a proxy that also keeps turns."""
    folder = model("llama")
    with (
        Server.vllm(folder, "--block-size", "32", extra=PATIENT) as prefill,
        Server.vllm(folder, "--block-size", "64", extra=PATIENT) as one,
        Server.vllm(folder, "--block-size", "32", extra=PATIENT) as other,
        Server.proxy(prefill, one, "--decode", other.url, "--move") as proxy,
        Server.proxy(prefill, one, "--decode", other.url, "--move", "--keep") as keeping,
    ):
        prefill.wait_ready()
        yield (one.wait_ready(), other.wait_ready(), proxy.wait_ready()), keeping.wait_ready()


@pytest.fixture
def servers(all_servers: tuple[Servers, Server]) -> Servers:
    """Those that keep no turns."""
    return all_servers[0]


def post(server: Server, path: str, body: Any) -> Any:
    """The open answer to a request."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def drain(proxy: Server, server: Server, *, undo: bool = False) -> Any:
    with post(proxy, "/admin/undrain" if undo else "/admin/drain", {"server": server.url}) as answer:
        return json.load(answer)


def events_of(answer: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    last = ""
    for line in answer:
        last = line.decode().strip() or last
        if last.startswith("data: {") and line.strip():
            yield json.loads(last[6:])
    assert last == "data: [DONE]"


ENDED = "this server does not compute it, or not any more"


class TooLateError(AssertionError):
    """An answer has ended before it was to move. Servers that spin may keep other processes of a small machine from running for
    seconds, such as the proxy.
    """


def again_if_late(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test again whose answer has ended too early, at most four times."""

    @functools.wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        for _ in range(4):
            with contextlib.suppress(TooLateError):
                return test(*given, **named)
        return test(*given, **named)

    return run


def moved(servers: Servers, path: str, body: dict[str, Any], *, after: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
    """The events of an answer that begins at the first server and leaves the one that it is at after so many tokens each time,
    or events, if they do not name their tokens: a busy server puts many into one. Also the number of tokens that it had then.
    """
    one, other, proxy = servers
    drain(proxy, other)
    found: list[dict[str, Any]] = []
    seams: list[int] = []
    with post(proxy, path, body) as answer:
        events = events_of(answer)
        found.append(next(events))
        drain(proxy, other, undo=True)
        for source, count in zip((one, other, one, other), after, strict=False):
            while num_tokens(found) < count:
                found.append(next(events))
            report = drain(proxy, source)
            drain(proxy, source, undo=True)
            assert report["empty"], proxy.log()
            assert [each["reason"] for each in report["stayed"]] in ([], [ENDED]), proxy.log()
            if not report["moved"]:
                found += events
                raise TooLateError(proxy.log())
            assert [each["id"] for each in report["moved"]] == [found[0]["id"]], proxy.log()
            seams += [each["tokens"] for each in report["moved"]]
        found += events
    return found, seams


def num_tokens(events: Sequence[dict[str, Any]]) -> int:
    """How many tokens events have, one each at least."""
    return sum(max([1, *(len(choice.get("token_ids") or ()) for choice in event["choices"])]) for event in events)


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all events of an answer say together."""
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "same": {(event["id"], event["created"], event["model"], event["object"]) for event in events},
        "keys": {frozenset(choice) for choice in choices},
        "index": {choice["index"] for choice in choices},
        "text": "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices),
        "tokens": [token for choice in choices for token in choice.get("token_ids") or ()],
        "prompt": [ids for part in (*events, *choices) if (ids := part.get("prompt_token_ids"))],
        "values": [value for each in logprobs for value in each["token_logprobs"]],
        "offsets": [value for each in logprobs for value in each["text_offset"]],
        "names": [value for each in logprobs for value in each["tokens"]],
        "top": [sorted(value) for each in logprobs for value in each["top_logprobs"]],
        "ends": [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if not event["choices"]],
        "told": [told for event in events if (told := event.get("kv_transfer_params"))],
        "counts": [event["usage"]["completion_tokens"] for event in events if event.get("usage") and event["choices"]],
    }


COMMON = {"model": "model", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": NUM_STREAMED}
COMPLETION = {**COMMON, "prompt": TEXT * 4}
MESSAGES = [{"role": "user", "content": TEXT * 4}]
CHAT = {**COMMON, "messages": MESSAGES}
USAGE = {"stream_options": {"include_usage": True}}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STREAMS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "completion": ("/v1/completions", {**COMPLETION, "return_token_ids": True, "logprobs": 2, **USAGE}, (20, 60, 90)),
    "letters": ("/v1/completions", {**COMPLETION, "allowed_token_ids": LETTERS, "logprobs": 0, **EACH}, (2, 60)),
    "early": ("/v1/completions", {**COMPLETION, "allowed_token_ids": LETTERS, "seed": 7, "min_tokens": 90}, (1,)),
    "chat": ("/v1/chat/completions", {**CHAT, "allowed_token_ids": LETTERS, "return_token_ids": True, **USAGE}, (30, 60)),
    "chat, each count": ("/v1/chat/completions", {**CHAT, **EACH}, (40,)),
}


def check_streams(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert len(found.pop("same")) == len(expected.pop("same")) == 1
    assert found.pop("values") == pytest.approx(expected.pop("values"), abs=1e-4)
    for counts in (expected.pop("counts"), found.pop("counts")):
        assert counts == sorted(set(counts))  # an event may have several tokens
        assert not counts or counts[-1] == expected["usage"][0]["completion_tokens"]
    for key, value in expected.items():
        assert found[key] == value, key


@pytest.mark.parametrize("name", STREAMS)
@again_if_late
def test_streams_go_on(servers: Servers, name: str) -> None:
    """The client sees one stream, as of one server. Each server computes no token that another one has computed."""
    one, other, _ = servers
    path, body, after = STREAMS[name]
    with post(one, path, body) as answer:
        expected = joined(list(events_of(answer)))
    before = [server.metric(LOADED) for server in (one, other)]
    events, seams = moved(servers, path, body, after=after)
    check_streams(expected, joined(events))
    length = len(TEXT * 4)
    assert all(count <= seam < NUM_STREAMED for count, seam in zip(after, seams, strict=True))
    loaded = [length - 1 + sum(length + seam - 1 for seam in seams[1::2]), sum(length + seam - 1 for seam in seams[::2])]
    for server, count, more in zip((one, other), before, loaded, strict=True):
        assert server.metric_from(LOADED, count + more) == count + more
    wait_unused(one, other, timeout_s=60)


STOPS: dict[str, tuple[list[slice], dict[str, Any]]] = {
    "across": ([slice(30, 700)], {}),
    "across, included": ([slice(30, 700)], {"include_stop_str_in_output": True}),
    "later": ([slice(700, 706)], {"min_tokens": 700}),
    "not before": ([slice(700, 706), slice(900, 906)], {"min_tokens": 800, "include_stop_str_in_output": True}),
    "never": ([], {}),
}


@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/v1/chat/completions", marks=pytest.mark.nightly)], ids=["completion", "chat"]
)
@pytest.mark.parametrize("name", STOPS)
@again_if_late
def test_stop_strings(servers: Servers, name: str, path: str) -> None:
    """They begin before a move and end after it, or come later."""
    one, other, _ = servers
    body = {**(COMPLETION if path == "/v1/completions" else CHAT), "logit_bias": {str(each): 100 for each in LETTERS}, **USAGE}
    body["return_token_ids"] = True
    with post(one, path, body) as answer:
        text = joined(list(events_of(answer)))["text"]
    parts, given = STOPS[name]
    stop = ["nowhere", *(text[part] for part in parts)]
    with post(one, path, {**body, **given, "stop": stop}) as answer:
        expected = joined(list(events_of(answer)))
    assert (expected["ends"][0][0] == "stop") is (name != "never")
    events, _ = moved(servers, path, {**body, **given, "stop": stop}, after=(50,))
    check_streams(expected, joined(events))
    wait_unused(one, other, timeout_s=60)


@again_if_late
def test_characters_of_several_tokens(servers: Servers) -> None:
    """An answer of random bytes and special tokens moves at any of them. Its text is that of its tokens, as vLLM reads them one
    by one.
    """
    one, other, _ = servers
    tokenizer = one_byte_each()
    prompt = tokenizer.encode(TEXT * 2).ids
    body = {**COMPLETION, "prompt": prompt, "temperature": 1.0, "allowed_token_ids": list(range(258)), "return_token_ids": True}
    num_cut = 0
    for after in ((3, 40), (10, 50), (17, 60, 90), (31, 70)):
        events, seams = moved(servers, "/v1/completions", body, after=after)
        found = joined(events)
        assert len(found["tokens"]) == NUM_STREAMED
        stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        assert found["text"] == "".join(stream.step(tokenizer, token) or "" for token in found["tokens"])
        num_cut += sum(tokenizer.decode(prompt + found["tokens"][:seam]).endswith("\ufffd") for seam in seams)
    assert num_cut >= 1
    wait_unused(one, other, timeout_s=60)


STAYING: dict[str, tuple[str, dict[str, Any], str]] = {
    "seed": ("/v1/completions", {**COMPLETION, "temperature": 1.0, "seed": 5}, "seed: "),
    "penalty": ("/v1/completions", {**COMPLETION, "repetition_penalty": 1.1}, "repetition_penalty: "),
    "grammar": ("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": "[a-z]{1000}"}}, "structured_outputs: "),
    "several": ("/v1/completions", {**COMPLETION, "n": 2, "temperature": 1.0}, "there are several answers"),
    "echo": ("/v1/completions", {**COMPLETION, "echo": True}, "of its fields only the server knows"),
    "whole": ("/v1/completions", {**COMPLETION, "stream": False}, "the answer is not streamed"),
    "log-probabilities of a chat": ("/v1/chat/completions", {**CHAT, "logprobs": True}, "of its fields only the server knows"),
    "another path": ("/v1/messages", {**CHAT, "max_tokens": 40}, "answers to /v1/messages"),
}


@pytest.mark.parametrize("name", STAYING)
@again_if_late
def test_answers_that_stay(servers: Servers, name: str) -> None:
    """The server that is drained ends them, and says why they have not moved."""
    one, other, proxy = servers
    path, body, reason = STAYING[name]
    drain(proxy, other)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(lambda: post(proxy, path, body).read())
        wait_until(lambda: one.metric("vllm:num_requests_running") > 0)
        drain(proxy, other, undo=True)
        report = drain(proxy, one)
        drain(proxy, one, undo=True)
        assert report["empty"] is True
        assert report["moved"] == []
        if not report["stayed"]:
            raise TooLateError(proxy.log())
        assert [each["reason"][: len(reason)] for each in report["stayed"]] == [reason]
        assert b"data: [DONE]" in answering.result() or path != "/v1/completions" or not body["stream"]
    wait_unused(one, other, timeout_s=60)


@again_if_late
def test_next_turns_after_a_move(all_servers: tuple[Servers, Server]) -> None:
    """Prefill takes what the server keeps at which the answer has ended."""
    (one, other, _), proxy = all_servers
    body = {**CHAT, "allowed_token_ids": LETTERS}
    events, seams = moved((one, other, proxy), "/v1/chat/completions", body, after=(30,))
    assert seams
    said = [{"role": "assistant", "content": joined(events)["text"]}, {"role": "user", "content": "Then?"}]
    body = {**body, "messages": [*MESSAGES, *said], "max_tokens": 4}
    assert one.metric(USED) == 0
    assert other.metric(USED) > 0
    sends = other.metric(SENDS)
    with post(proxy, "/v1/chat/completions", body) as answer:
        found = joined(list(events_of(answer)))
    assert other.metric_from(SENDS, sends + 1) == sends + 1
    with post(one, "/v1/chat/completions", body) as answer:
        assert joined(list(events_of(answer)))["text"] == found["text"]


@again_if_late
def test_many_answers_leave_a_server(servers: Servers) -> None:
    """New requests go to the other one, and each answer is that of one server."""
    one, other, proxy = servers
    asked = prompts((40, 90, 130, 200, 64, 65), seed=80)
    num_tokens = 400
    expected = [one.complete(prompt, max_tokens=num_tokens) for prompt in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        answering = [pool.submit(proxy.complete, prompt, max_tokens=num_tokens) for prompt in asked]
        wait_until(lambda: one.metric("vllm:num_requests_running") >= 3)
        report = drain(proxy, one)
        assert report["empty"] is True
        assert {each["reason"] for each in report["stayed"]} <= {"it has ended"}
        assert one.metric("vllm:num_requests_running") == 0
        found = [each.result() for each in answering]
        later = proxy.complete(asked[0], max_tokens=num_tokens)
    assert drain(proxy, one, undo=True) == {}
    for before, after in zip([*expected, expected[0]], [*found, later], strict=True):
        assert not after.is_broken, proxy.log(length=1 << 14)
        assert after.tokens == before.tokens, proxy.log(length=1 << 14)
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    if not report["moved"]:
        raise TooLateError(proxy.log())
    wait_unused(one, other, timeout_s=60)
    assert one.metric(FAILED) == other.metric(FAILED) == 0


def one_byte_each() -> Tokenizer:
    """The tokenizer of the models."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)
