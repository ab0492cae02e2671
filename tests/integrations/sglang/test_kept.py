"""Requests that a real decode server keeps after its answer, or stops, and another server goes on with: every answer is that of
one undivided server.
"""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from yarl import URL

from disagg import Topology
from disagg.integrations.sglang.facts import DraftFacts, Facts, PageFacts
from disagg.integrations.sglang.kept import reason_against
from harness.servers import Server
from harness.vllm.models import write_model
from tests.integrations.sglang.test_answers import num_computed
from tests.integrations.vllm.requests import prompts

ROOMS = itertools.count(2**59)
JSON = {"Content-Type": "application/json"}
PAGE_SIZE = 16
"""Prefill's."""
KEEP_S = 120.0
MAX_TOKENS = 24


@dataclass
class Servers:
    """`other` is another decode server, which divides the model and caches prompts."""

    alone: Server
    prefill: Server
    decode: Server
    other: Server


@dataclass
class Found:
    tokens: list[int]
    logprobs: list[float]
    about: dict[str, Any]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = write_model("llama", tmp_path_factory.mktemp("models") / "llama")
    cached = "--disaggregation-decode-enable-radix-cache"
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISAGG_VERIFY", "full")

        def start(*options: str, mode: str | None = None, share: str = "0.25") -> Server:
            server = Server.sglang(model, *options, mode=mode, DISAGG_KEPT_SHARE=share)
            return stack.enter_context(server).wait_ready(timeout_s=300)

        yield Servers(
            start(),
            start("--tp", "2", "--page-size", str(PAGE_SIZE), mode="prefill"),
            start("--page-size", "32", "--max-total-tokens", "2048", mode="decode", share="0.5"),
            start("--tp", "2", "--page-size", "8", cached, mode="decode"),
        )


def body_of(prompt: Sequence[int], told: Mapping[str, Any], max_tokens: int, **fields: Any) -> bytes:
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True, "custom_params": told}
    return json.dumps({"input_ids": list(prompt), "sampling_params": params, "return_logprob": True, **fields}).encode()


def generate(
    server: Server, prompt: Sequence[int], told: Mapping[str, Any] | None = None, *, max_tokens: int = MAX_TOKENS, **fields: Any
) -> Found:
    """The greedy answer of a server that is told something."""
    asked = urllib.request.Request(
        f"{server.url}/generate", data=body_of(prompt, told or {}, max_tokens, **fields), headers=JSON
    )
    with urllib.request.urlopen(asked, timeout=90) as answer:
        found = json.load(answer)
    about = found["meta_info"]
    return Found(found["output_ids"], [each[0] for each in about["output_token_logprobs"]], about)


def ask(servers: Servers, prompt: Sequence[int], keep: str, kept: Any = None, **fields: Any) -> tuple[Found, int]:
    """Decode's answer, which it keeps, and how many tokens prefill did not compute. Its own cache has none; it takes the state
    that is `kept` of another request.
    """
    servers.prefill.flush()
    where = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.prefill.bootstrap_port,
        "bootstrap_room": next(ROOMS),
        **fields,
    }
    with ThreadPoolExecutor() as pool:
        prefilled = pool.submit(generate, servers.prefill, prompt, {"disagg_kept": kept} if kept else {}, **where)
        found = generate(servers.decode, prompt, {"disagg_keep": keep}, **where)
        about = prefilled.result().about
    return found, about["cached_tokens"]


def tell(server: Server, **told: str) -> Any:
    """What a decode server answers to what it is told."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": next(ROOMS)}
    about = generate(server, [0], {f"disagg_{name}": value for name, value in told.items()}, max_tokens=1, **room).about
    (found,) = about["disagg_not_stopped" if "stop_request_id" in told else "disagg_kept"]
    return found


def check(servers: Servers, prompt: Sequence[int], found: Found) -> None:
    right = generate(servers.alone, prompt, max_tokens=len(found.tokens))
    assert found.tokens == right.tokens
    assert found.logprobs == pytest.approx(right.logprobs, abs=1e-5)


FULL = PageFacts(layers=(0, 1), dtype="bfloat16", dims=(64, 64), num_kv_heads=4)


@pytest.mark.parametrize(
    ("facts", "server", "reason"),
    [
        ({}, {}, ""),
        ({"kv": replace(FULL, num_kv_heads=None)}, {}, "latents"),
        ({"kv": replace(FULL, dtype="float8_e4m3fn")}, {}, "FP8"),
        ({"kv": None}, {}, "no paged keys"),
        ({"windows": {1: 64}}, {}, "windows"),
        ({"window_kv": FULL}, {}, "other state"),
        ({"drafts": (DraftFacts(kv=FULL),)}, {}, "a draft model"),
        ({}, {"draft_worker": object()}, "a draft model"),
        ({}, {"pp_size": 2}, "pipeline stages"),
        ({}, {"attn_dp_size": 2}, "data parallelism"),
        ({}, {"system_dp_size": 2}, "data parallelism"),
        ({}, {"attn_cp_size": 2}, "context parallelism"),
        ({}, {"enable_hierarchical_cache": True}, "hierarchical"),
        ({}, {"offload": True}, "offload"),
        ({}, {"strip": True}, "thinking"),
    ],
)
def test_what_was_not_tried(facts: dict[str, Any], server: dict[str, Any], reason: str) -> None:
    plain = {
        **dict.fromkeys(("pp_size", "attn_dp_size", "system_dp_size", "attn_cp_size"), 1),
        **dict.fromkeys(("enable_hierarchical_cache", "enable_decode_hicache"), False),
        "draft_worker": None,
        "server_args": SimpleNamespace(
            disaggregation_decode_enable_offload_kvcache=server.pop("offload", False),
            strip_thinking_cache=server.pop("strip", False),
        ),
        "facts": Facts(topology=Topology(), **{"kv": FULL, **facts}),
    }
    found = SimpleNamespace(**{**plain, **server})
    assert (reason in reason_against(found, found)) if reason else not reason_against(found, found)


def wait_given_back(server: Server) -> None:
    """SGLang ends if a page is missing when it empties its pools."""
    server.flush()
    server.wait_ready()


def test_turns_continue_on_prefill(servers: Servers) -> None:
    """Prefill computes nothing that decode has, but a part of a page. It takes nothing else."""
    history, *more = prompts((70, *[13] * 7), seed=61)
    kept, num_kept = None, 0
    for number, user in enumerate([[], *more], 1):
        history = [*history, *user]
        found, cached = ask(servers, history, f"{number:032x}", kept)
        check(servers, history, found)
        assert cached == num_kept // PAGE_SIZE * PAGE_SIZE
        kept = tell(servers.decode, kept_request_id=f"{number:032x}")
        num_kept = len(history) + len(found.tokens) - 1
        assert kept["remote_num_tokens"] == num_kept
        history += found.tokens
    wait_given_back(servers.decode)


def test_the_proxy_keeps_chats(servers: Servers) -> None:
    """Also if the client edits an answer. Prefill takes the beginning that both turns have."""
    messages, before = [{"role": "user", "content": "Prefill computes, decode answers. " * 9}], 0
    with Server.proxy(servers.prefill, servers.decode, "--keep") as proxy:
        proxy.wait_ready()
        for number in range(2):
            body = {"model": "model", "messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            right, found = (chat(server, {**body, "logprobs": True}) for server in (servers.alone, proxy))
            assert found["message"] == right["message"]
            given, wanted = ([each["logprob"] for each in one["logprobs"]["content"]] for one in (found, right))
            assert given == pytest.approx(wanted, abs=1e-5)
            if number == 0:
                answer = {"role": "assistant", "content": "edited"}
                messages = [*messages, answer, {"role": "user", "content": "And now?"}]
                servers.prefill.flush()
                _, before = num_computed(servers.prefill)
        until = time.monotonic() + 30
        while (cached := num_computed(servers.prefill)[1] - before) == 0 and time.monotonic() < until:
            time.sleep(0.1)  # logging takes its time
        assert cached >= 64
    wait_given_back(servers.decode)


def chat(server: Server, body: Mapping[str, Any]) -> Any:
    asked = urllib.request.Request(f"{server.url}/v1/chat/completions", data=json.dumps(body).encode(), headers=JSON)
    with urllib.request.urlopen(asked, timeout=90) as answer:
        return json.load(answer)["choices"][0]


def test_an_edited_history_takes_the_common_beginning(servers: Servers) -> None:
    text, other = prompts((200, 60), seed=62)
    for number, common in enumerate((10, 64, 130, 199), 32):
        before, _ = ask(servers, text, f"{number:032x}")
        kept = tell(servers.decode, kept_request_id=f"{number:032x}")
        assert kept["remote_num_tokens"] == len(text) + len(before.tokens) - 1
        later = [*text[:common], *other]
        found, cached = ask(servers, later, f"{2 * number:032x}", kept)
        check(servers, later, found)
        assert cached == common // 64 * 64
    wait_given_back(servers.decode)


def test_a_hand_over_is_used_once(servers: Servers) -> None:
    """Whoever comes later, or with a hand-over of nobody, computes."""
    (text, tail) = prompts((150, 20), seed=63)
    before, _ = ask(servers, text, f"{200:032x}")
    kept = tell(servers.decode, kept_request_id=f"{200:032x}")
    later = [*text, *before.tokens, *tail]
    nobody = {**kept, "remote_request_id": "ab" * 16}
    damaged = {**kept, "remote_beginnings": "not hexadecimal"}
    vanished = {**kept, "remote_address": "tcp://127.0.0.1:1", "remote_engine_id": "vanished"}
    for number, (given, expected) in enumerate(
        (
            (kept, 160),
            (kept, 0),
            (nobody, 0),
            (damaged, 0),
            (vanished, 0),
            ({"do_remote_prefill": True}, 0),
            ("text", 0),
            (7, 0),
        ),
        65,
    ):
        found, cached = ask(servers, later, f"{number:032x}", given)
        check(servers, later, found)
        assert cached == expected, given
    wait_given_back(servers.decode)
    wait_given_back(servers.prefill)


def test_a_hand_over_that_says_what_another_one_has(servers: Servers) -> None:
    """Prefill believes the server that sends the state, not who brings the hand-over: nobody else finds it in the cache."""
    mine, foreign = prompts((128, 128), seed=68)
    for name, text in (("c" * 32, mine), ("d" * 32, foreign)):
        ask(servers, text, name, max_tokens=4)
    right, other = (tell(servers.decode, kept_request_id=name) for name in ("c" * 32, "d" * 32))
    forged = {**other, "remote_prompt": right["remote_prompt"], "remote_beginnings": right["remote_beginnings"]}
    later = [*mine, *foreign[:20]]
    found, cached = ask(servers, later, "e" * 32, forged)
    check(servers, later, found)
    assert cached == 0
    assert "expected the state of this request's prompt" in servers.prefill.log()
    wait_given_back(servers.decode)


def test_what_is_told_beside_an_empty_prompt(servers: Servers) -> None:
    body = {
        "input_ids": [[5], []],
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"disagg_kept_request_id": "a" * 32}},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": [next(ROOMS), next(ROOMS)],
    }
    asked = urllib.request.Request(f"{servers.decode.url}/generate", data=json.dumps(body).encode(), headers=JSON)
    with urllib.request.urlopen(asked, timeout=90) as answer:
        assert [each["meta_info"]["disagg_kept"] for each in json.load(answer)] == [[None], [None]]


def test_what_is_not_kept(servers: Servers) -> None:
    """Ids that cannot be, more tokens than the share, and what a flush has given up."""
    (text, long) = prompts((40, 1100), seed=64)
    for keep in ("abc", "AB" * 16):
        check(servers, text, ask(servers, text, keep)[0])
        assert tell(servers.decode, kept_request_id=keep) is None
    check(servers, long, ask(servers, long, f"{81:032x}")[0])
    assert tell(servers.decode, kept_request_id=f"{81:032x}") is None
    assert "kept_share" in servers.decode.log()
    ask(servers, text, f"{82:032x}")
    kept = tell(servers.decode, kept_request_id=f"{82:032x}")
    ask(servers, long[:50], f"{82:032x}")  # another one by this id
    assert tell(servers.decode, kept_request_id=f"{82:032x}") == kept
    wait_given_back(servers.decode)
    assert tell(servers.decode, kept_request_id=f"{82:032x}") is None


def test_the_oldest_goes_first(servers: Servers) -> None:
    """Within the share, and for requests that need the memory."""
    texts = prompts((300,) * 4, seed=65)
    names = [f"{number:032x}" for number in range(90, 94)]
    for text, name in zip(texts, names, strict=True):
        ask(servers, text, name, max_tokens=4)
    assert [tell(servers.decode, kept_request_id=name) is not None for name in names] == [False, True, True, True]
    (long,) = prompts((1400,), seed=66)
    found, _ = ask(servers, long, f"{95:032x}", max_tokens=4)
    check(servers, long, found)
    assert [tell(servers.decode, kept_request_id=name) for name in names] == [None] * 4
    wait_given_back(servers.decode)
    short, texts = prompts((40,), seed=69)[0], prompts((300,) * 3, seed=70)
    for number, text in enumerate(texts, 96):
        ask(servers, text, f"{number:032x}", max_tokens=4)
    begun_s = time.monotonic()
    found, _ = ask(servers, short, "an id that cannot be", max_tokens=1300)  # SGLang reserves for what it may answer
    assert time.monotonic() - begun_s < KEEP_S
    check(servers, short, found)
    wait_given_back(servers.decode)


def stopped(server: Server, prompt: Sequence[int], room: int, port: int, num_tokens: int, total: int) -> tuple[Found, str]:
    """The answer of a request that is stopped once it has that many tokens, or the reason why it is not."""
    name = f"{room:032x}"
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room, "stream": True}
    asked = urllib.request.Request(
        f"{server.url}/generate", data=body_of(prompt, {"disagg_move_id": name}, total, **where), headers=JSON
    )
    found, reason = Found([], [], {}), "not asked"
    with urllib.request.urlopen(asked, timeout=90) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            about = event["meta_info"]
            found = Found(event["output_ids"], [each[0] for each in about["output_token_logprobs"]], about)
            if reason == "not asked" and len(found.tokens) >= num_tokens:
                reason = tell(server, stop_request_id=name)
    return found, reason


def moved(source: Server, target: Server, text: list[int], answer: Found, room: int, total: int) -> Found:
    """The answer to a prompt with its beginning, which `source` has kept, as `target` goes on with it."""
    kept = tell(source, kept_request_id=f"{room:032x}")
    assert kept["remote_num_tokens"] == len(text) + len(answer.tokens) - 1
    address = URL(kept["remote_address"])
    where = {"bootstrap_host": f"{kept['remote_engine_id']}@{address.host}", "bootstrap_port": address.port}
    return generate(
        target,
        [*text, *answer.tokens[:-1]],
        {"disagg_keep": f"{room:032x}"},
        max_tokens=total - len(answer.tokens) + 1,
        bootstrap_room=room,
        **where,
    )


@pytest.mark.parametrize("is_back", [False, True], ids=["to TP 2", "back to TP 1"])
def test_a_running_request_moves(servers: Servers, is_back: bool) -> None:
    """At every eighth step: the other server's answer goes on with the last token of the one that has stopped. What it has in
    the end goes on at the first one, with the same id.
    """
    source, target = (servers.other, servers.decode) if is_back else (servers.decode, servers.other)
    (text,) = prompts((75,), seed=67)
    total, num_moved = 64, 0
    for num_tokens in range(1, total, 8):
        room = next(ROOMS)
        with ThreadPoolExecutor() as pool:
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.prefill.bootstrap_port, "bootstrap_room": room}
            prefilled = pool.submit(generate, servers.prefill, text, {}, max_tokens=total, **where)
            first, reason = stopped(source, text, room, servers.prefill.bootstrap_port, num_tokens, total)
            prefilled.result()
        if reason:
            assert reason == "no such request is being answered"
            assert len(first.tokens) == total
            continue
        assert first.about["finish_reason"]["type"] == "length"
        if len(first.tokens) == total:
            continue
        num_moved += 1
        rest = moved(source, target, text, first, room, total)
        assert rest.tokens[0] == first.tokens[-1]
        whole = Found([*first.tokens, *rest.tokens[1:]], [*first.logprobs, *rest.logprobs[1:]], {})
        assert len(whole.tokens) == total
        check(servers, text, whole)
        again = moved(target, source, text, whole, room, total + 8)
        longer = Found([*whole.tokens, *again.tokens[1:]], [*whole.logprobs, *again.logprobs[1:]], {})
        assert len(longer.tokens) == total + 8
        check(servers, text, longer)
    assert num_moved >= 4
    assert num_computed(target) == (0, 0)
    wait_given_back(source)
    wait_given_back(target)
