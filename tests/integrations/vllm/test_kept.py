"""Requests that a server keeps after its answer, and another one goes on with: every answer is that of one engine alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from disagg.integrations.handoff import HandOff
from disagg.integrations.vllm.groups import read_groups
from disagg.integrations.vllm.kept import KeptRequests, _reason_against
from harness.vllm.engine import PREFILL, Answer, Engine
from tests.integrations.vllm.requests import check_equal, num_external, prompts, wait_empty, wait_free

KEEP = {"keep": True}
NUM_TURNS = 8
BEGINNING = 64
"""Tokens between two digests: a history that was edited is taken up to the last one before the edit."""

Start = Callable[..., Engine]


def kept(answer: Answer) -> dict[str, Any]:
    """The hand-over of a request that was kept."""
    assert answer.params is not None
    return dict(answer.params["kept"])


def turn(prefill: Engine, decode: Engine, prompt: list[int], given: dict[str, Any], **wanted: Any) -> tuple[Answer, Answer]:
    """Prefill's and decode's answers to a prompt. Prefill gets the hand-over that was kept of the turn before."""
    params = {**PREFILL, **({"kept": given} if given else {})}
    (first,) = prefill.generate([prompt], params=params)
    assert first.params is not None
    (answer,) = decode.generate([prompt], params={**first.params, **KEEP}, **wanted)
    return first, answer


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {"block_size": 32}, {"block_size": 64, "tensor_parallel_size": 2}),
    "dense, TP 2 to 1": ("llama", {"block_size": 64, "tensor_parallel_size": 2}, {"block_size": 32}),
    "windows": ("gemma3", {"block_size": 64, "tensor_parallel_size": 2}, {"block_size": 32}),
    "windows only": ("mistral", {"block_size": 32}, {"block_size": 64}),
    "latent": ("deepseek-v2", {"block_size": 16}, {"block_size": 32}),
    "recurrent": ("falcon-h1", {"block_size": 64}, {"block_size": 128, "tensor_parallel_size": 2}),
    "recurrent, TP 1 to 1": ("falcon-h1", {"block_size": 128}, {"block_size": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_conversation(case: str, start: Start) -> None:
    """Eight turns. Decode's answers end by their length or by a stop token in turn, and prefill takes them with the next."""
    model, of_prefill, of_decode = CASES[case]
    prefill, decode = start(model, **of_prefill), start(model, **of_decode)
    prefill.wait_ready()
    decode.wait_ready()
    history: list[int] = []
    given: dict[str, Any] = {}
    num_state = 0
    for number, text in enumerate(prompts((70, 40, 9, 100, 1, 64, 200, 33), seed=7)):
        prompt = history + text
        (alone,) = decode.generate([prompt], max_tokens=20)
        stop = alone.tokens[11:12] if number % 2 else []
        (expected,) = decode.generate([prompt], max_tokens=20, stop=stop)
        assert (expected.finish_reason == "stop") is bool(stop)
        first, answer = turn(prefill, decode, prompt, given, max_tokens=20, stop=stop)
        check_equal([expected], [answer])
        assert num_external([first, answer]) == [num_state, len(prompt) - 1], f"turn {number + 1}"
        history, given, num_state = prompt + answer.tokens, kept(answer), len(prompt) + len(answer.tokens) - 1
        assert given["remote_num_tokens"] == num_state
    decode.generate([[1, 2, 3]], params={"abort_request_id": given["remote_request_id"]}, max_tokens=3)
    wait_free(decode)
    wait_empty(prefill)
    assert decode.counts["failed_sends"] == prefill.counts["failed_loads"] == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_with_drafts(name: str, start: Start, model: Callable[[str], Path]) -> None:
    """Answers end at each place within the drafts of a step. The draft of `llama` is the model itself, and always accepted."""
    draft: dict[str, Any] = {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 3}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prefill = start(name, block_size=32)
    decode = start(name, block_size=64, speculative_config=draft if name == "llama" else ngram)
    (beginning, tail) = prompts((30, 20), seed=15)
    prompt, num_kept = beginning * 5, 0
    (alone,) = prefill.wait_ready().generate([prompt], max_tokens=24)
    decode.wait_ready()
    for place in range(4, 12):
        by_stop = place % 2 and alone.tokens[place] not in alone.tokens[:place]
        wanted = {"max_tokens": 24, "stop": [alone.tokens[place]]} if by_stop else {"max_tokens": place + 1}
        (answer,) = decode.generate([prompt], params=KEEP, **wanted)
        assert answer.tokens == alone.tokens[: place + 1]
        later = [*prompt, *answer.tokens, *tail]
        given = kept(answer) if answer.params else {}
        (found,) = prefill.generate([later], params={"kept": given}, max_tokens=6)
        assert found.num_external == (len(prompt) + place if given else 0)
        check_equal(prefill.generate([later], max_tokens=6), [found])
        num_kept += bool(given)
    assert num_kept >= 4
    assert decode.counts["accepted"] > 0 or name == "gemma3"  # whose drafts are rejected


def edited(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], (tokens[at] + 1) % 250, *tokens[at + 1 :]]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_edited_histories_and_caches(name: str, start: Start) -> None:
    """Prefill takes the longest common beginning, less what its own cache has, and of windows all or nothing. What both caches
    have afterwards is true.
    """
    options = {"enable_prefix_caching": True}
    prefill, decode = start(name, block_size=32, **options), start(name, block_size=64, **options)
    prefill.wait_ready()
    decode.wait_ready()
    text, tail = prompts((300, 50), seed=9)
    (before,) = decode.generate([text], max_tokens=40)
    history = text + before.tokens  # 340 tokens, 339 of them with state
    whole = [*history, *tail]
    stripped = [*text[:200], *text[250:], *before.tokens, *tail]
    for number, (prompt, expected) in enumerate([
        (whole, 339),
        (history, 339),
        (history[:-1], 320),  # the last token is computed
        (edited(whole, 338), 320),
        (edited(whole, 320), 320),
        (edited(whole, 319), 256),
        (stripped, 192),
        (edited(whole, 10), 0),
    ]):  # fmt: skip
        salted = {"cache_salt": f"{number}"}
        (before,) = decode.generate([text], params=KEEP, max_tokens=40, **salted)
        given = kept(before)
        common = expected if name == "llama" or prompt is whole else 0
        (first,) = prefill.generate([prompt], params={**PREFILL, "kept": given}, **salted)
        assert first.num_external == common, f"case {number}"
        (answer,) = decode.generate([prompt], params=first.params, max_tokens=6, **salted)
        alone = {"cache_salt": f"alone {number}"}
        check_equal(decode.generate([prompt], max_tokens=6, **alone), [answer])
        for engine in (prefill, decode):  # what their caches have now
            (again,) = engine.generate([prompt], max_tokens=6, **salted)
            check_equal([answer], [again])
            assert again.num_local > 0
    (before,) = decode.generate([text], params=KEEP, max_tokens=40)
    prefill.generate([text], max_tokens=1)
    (first,) = prefill.generate([whole], params={**PREFILL, "kept": kept(before)})
    assert first.num_local + first.num_external == 339
    assert first.num_local >= 256
    decode.generate([whole], params=first.params, max_tokens=1)
    decode.settle()
    prefill.settle()
    wait_free(decode)
    wait_empty(prefill)


def test_takers_expiry_and_bounds(start: Start) -> None:
    """Decode servers take from each other. Of two takers one gets it. Blocks are free if a request has expired, or if others
    need them.
    """
    first = start(block_size=32, blocks=64, extra={"keep_s": 20.0, "kept_share": 0.5})
    second, third = start(block_size=64), start(block_size=32, tensor_parallel_size=2)
    for engine in (first, second, third):
        engine.wait_ready()
    text, tail, other = prompts((300, 20, 9), seed=11)
    (before,) = first.generate([text], params=KEEP, max_tokens=10)
    whole = [*text, *before.tokens, *tail]
    (alone,) = second.generate([whole])
    asked = {"kept": kept(before)}
    answers = [*second.generate([whole], params=asked), *third.generate([whole], params=asked)]
    check_equal([alone, alone], answers)
    assert num_external(answers) == [309, 0]  # vLLM counts loads that have not failed
    assert third.counts["failed_loads"] == 2

    wait_free(first)
    (before,) = first.generate([text], params={"keep": "0123456789abcdef" * 2}, max_tokens=10)
    assert before.params is None
    assert first.num_free_blocks() < 63
    (told,) = first.generate([other[:1]], params={"kept_request_id": "0123456789abcdef" * 2}, max_tokens=1)
    (of_itself,) = first.generate([whole], params=told.params)  # its own cache has it, if it has one
    check_equal([alone], [of_itself])
    (told,) = first.generate([other[:1]], params={"kept_request_id": "0123456789abcdef" * 2}, max_tokens=1)
    assert told.params is None

    (expired,) = first.generate([text], params=KEEP, max_tokens=10)
    assert first.num_free_blocks() < 63
    time.sleep(20.5)
    wait_free(first)
    check_equal([alone], second.generate([whole], params=expired.params))

    first.generate([text, *prompts((300, 300), seed=12)], params=KEEP, max_tokens=10)
    held = first.num_free_blocks()
    assert 63 - held <= 32  # half of them: the oldest is given up
    (large,) = prompts((1500,), seed=13)
    (answer,) = first.generate([large], max_tokens=3)  # needs blocks of the others
    check_equal(second.generate([large], max_tokens=3), [answer])
    wait_free(first)


def test_room_for_others(start: Start, model: Callable[[str], Path]) -> None:
    """Kept requests give way at once: to a request whose cached blocks vLLM must still take, to one that needs another block
    after its load, and to one that needs a block for drafts.
    """
    draft = {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 3}
    options = {"enable_prefix_caching": True, "max_model_len": 768, "blocks": 16, "extra": {"kept_share": 0.5, "keep_s": 600.0}}
    prefill = start(block_size=64)
    decode = start(block_size=64, scheduler_reserve_full_isl=False, **options)
    whole, drafting = start(block_size=64, **options), start(block_size=64, speculative_config=draft, **options)
    text, cached, tail, exact = prompts((440, 200, 330, 513), seed=16)
    whole.wait_ready().generate([text], params=KEEP, max_tokens=4)
    whole.generate([cached], max_tokens=2)
    assert whole.num_free_blocks() == 8  # three of them are cached, and 9 are needed
    (answer,) = whole.wait([whole.add([*cached, *tail], max_tokens=4)], timeout_s=60)
    assert answer.num_local == 192
    decode.wait_ready().generate([text], params=KEEP, max_tokens=4)
    assert decode.num_free_blocks() == 8  # as many as the load needs
    (first,) = prefill.wait_ready().generate([exact], params=PREFILL)
    (answer,) = decode.wait([decode.add(exact, params=first.params, max_tokens=4)], timeout_s=60)
    assert answer.num_external == 512
    drafting.wait_ready().generate([text], params=KEEP, max_tokens=4)
    assert drafting.num_free_blocks() == 8
    drafting.wait([drafting.add(exact[:512], max_tokens=4)], timeout_s=60)
    wait_empty(prefill, decode, whole, drafting)


def test_given_up_at_once(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    """A step keeps a request and needs its blocks for another one. Whoever asks for it is refused, without a warning here."""
    options = {"block_size": 64, "max_model_len": 768}
    prefill, decode = start(**options), start(**options, blocks=16, extra={"kept_share": 0.5}).wait_ready()
    text, other, tail = prompts((440, 600, 20), seed=17)
    before, _ = decode.wait([decode.add(text, params=KEEP, max_tokens=4), decode.add(other, max_tokens=4)])
    whole = [*text, *before.tokens, *tail]
    (found,) = prefill.wait_ready().wait([prefill.add(whole, params={"kept": kept(before)})], timeout_s=20)
    check_equal(prefill.generate([whole]), [found])
    assert prefill.counts["failed_loads"] == 1
    wait_empty(prefill, decode)
    printed, until = "", time.monotonic() + 10
    while "prefill does not hand the request over" not in printed:  # logging takes its time
        assert time.monotonic() < until, printed
        time.sleep(0.05)
        printed += "".join(capfd.readouterr())
    assert "could not be sent" not in printed


def test_what_is_not_kept(start: Start) -> None:
    """Aborted requests, ids that cannot be, and more blocks than the share."""
    engine = start(block_size=32, blocks=64, extra={"kept_share": 0.1}).wait_ready()
    text, short = prompts((300, 40), seed=14)
    running = engine.add(short, params=KEEP, max_tokens=500)
    while not engine.answers[running].tokens:
        engine.poll(0.05)
    engine.abort(running)
    for prompt, keep in ((text, True), (short, "abc"), (short, 7)):
        (answer,) = engine.generate([prompt], params={"keep": keep}, max_tokens=4)
        assert answer.params is None
    wait_empty(engine)


@pytest.mark.parametrize("non_causal", [False, True])
def test_prompts_that_attend_both_ways_are_not_kept(non_causal: bool) -> None:
    """HRM-Text: vLLM marks the specs of its layers, and has no prefix cache for it."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32, non_causal=non_causal)
    group = KVCacheGroupSpec(["model.L_module.layers.0.self_attn.attn"], spec)
    groups = read_groups(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group]))
    config: Any = SimpleNamespace(speculative_config=None)
    assert ("a longer prompt changes the states" in _reason_against(config, groups, has_states=False)) is non_causal


def test_kept_requests_are_bounded() -> None:
    """Whatever comes: those that may be taken are within the bound, the newest last, and every block comes back once."""
    choose = random.Random(5)
    kept = KeptRequests(max_blocks=20, num_ranks=2)
    open_: dict[str, tuple[HandOff, int]] = {}
    reports: dict[str, int] = {}
    blocks_out: set[int] = set()
    numbers = iter(range(1 << 20))
    for step in range(3000):
        count, name = choose.randint(1, 25), f"{step:032x}"
        given_up = []
        match choose.randrange(4):
            case 0 | 1:
                hand_off = HandOff(remote_engine_id="e", remote_address="a", remote_request_id=name)
                reason = kept.reason_against(name, name, count)
                assert bool(reason) is (count > 20)
                if not reason:
                    blocks = [next(numbers) for _ in range(count)]
                    blocks_out.update(blocks)
                    given_up = kept.add(name, hand_off, blocks)
                    reports[name] = 0
                    open_[name] = hand_off, count
                    assert kept.reason_against("other", name, 1).startswith("another request is kept by the id")
                    assert kept.reason_against(name, "other", 1) == "another request of the same id is kept"
            case 2:
                given_up = kept.give_up(choose.randint(-3, 30))
            case _:
                ended = dict.fromkeys(choose.sample(sorted(reports), min(3, len(reports))), 1)
                for name in ended:
                    reports[name] += 1
                    if reports[name] == 2:
                        del reports[name]
                        open_.pop(name, None)
                found = [block for blocks in kept.end({**ended, "unknown": 1}) for block in blocks]
                assert blocks_out.issuperset(found)
                blocks_out.difference_update(found)
        assert [each.remote_request_id for each in given_up] == list(open_)[: len(given_up)]  # the oldest
        for each in given_up:
            del open_[each.remote_request_id]
        assert sum(count for _, count in open_.values()) <= 20
        assert all(kept.find(name) is hand_off for name, (hand_off, _) in open_.items())
        assert all(kept.find(each.remote_request_id) is None for each in given_up)
    for blocks in kept.end(dict.fromkeys(reports, 2)):
        blocks_out.difference_update(blocks)
    assert not blocks_out
