"""Requests that are not the simple case, on one pair of Llama engines with small pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg import new_request_id
from harness.vllm.engine import PREFILL, Engine
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts, wait_empty

BLOCKS = 96
"""Blocks of 32 tokens on prefill, of 64 on decode: two of the longest prompts fit."""


@pytest.fixture(scope="module")
def pair(model: Callable[[str], Path]) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine, both with a prefix cache, that other tests use too."""
    folder = str(model("llama"))
    options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": True}
    with (
        Engine(folder, block_size=32, blocks=BLOCKS, **options) as prefill,
        Engine(folder, block_size=64, blocks=BLOCKS // 2, **options) as decode,
    ):
        yield prefill, decode


def test_prefix_that_decode_has_cached(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts((500,), seed=2)
    decode.generate([prompt[:300]], max_tokens=1)
    (found,) = hand_over(prefill, decode, [prompt])
    assert (found.num_local, found.num_external) == (256, 499 - 256)
    check_equal(decode.generate([prompt], max_tokens=16), [found])
    wait_empty(prefill, decode)


def test_prefix_that_prefill_has_cached_is_sent_as_well(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts((400,), seed=3)
    prefill.generate([prompt[:300]], max_tokens=1)
    (found,) = hand_over(prefill, decode, [prompt])
    assert found.num_external == 399
    check_equal(decode.generate([prompt], max_tokens=16), [found])
    wait_empty(prefill, decode)


def test_prompt_that_decode_has_cached_whole(pair: tuple[Engine, Engine]) -> None:
    """Decode needs nothing, and says so: prefill's blocks are free long before `hold_s`."""
    prefill, decode = pair
    (prompt,) = prompts((257,), seed=4)
    expected = decode.generate([prompt], max_tokens=16)
    (found,) = hand_over(prefill, decode, [prompt])
    assert (found.num_local, found.num_external) == (256, 0)
    check_equal(expected, [found])
    prefill.settle(timeout_s=8.0)


def test_prompt_of_one_token_is_not_handed_over(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (first,) = prefill.generate([[17]], params=PREFILL)
    assert first.params is None
    wait_empty(prefill, decode)


def test_both_are_asked_at_once(pair: tuple[Engine, Engine]) -> None:
    """A proxy that names the request itself lets decode reserve blocks before prefill computes: chunks travel meanwhile."""
    prefill, decode = pair
    (first,) = prefill.generate(prompts((40,), seed=5), params=PREFILL)
    assert first.params is not None
    decode.wait([decode.add(prompts((40,), seed=5)[0], params=first.params)])
    (prompt,) = prompts((1200,), seed=6)
    server = {name: first.params[name] for name in ("remote_engine_id", "remote_address")}
    name = {"remote_request_id": new_request_id().hex()}
    loading = decode.add(prompt, params={"do_remote_prefill": True, **server, **name}, max_tokens=8)
    prefill.generate([prompt], params={**PREFILL, **name})
    (found,) = decode.wait([loading])
    assert found.num_external == 1199
    check_equal(decode.generate([prompt], max_tokens=8), [found])
    wait_empty(prefill, decode)


@pytest.mark.parametrize(
    "damaged",
    [
        {"remote_engine_id": 7},
        {"remote_request_id": "no hexadecimal digits"},
        {"remote_address": None},
        {"remote_address": "?"},
    ],
    ids=["type", "id", "missing", "address"],
)
def test_damaged_parameters_are_computed(pair: tuple[Engine, Engine], damaged: dict[str, object]) -> None:
    """A proxy's mistake costs one request its transfer, and never the server."""
    _, decode = pair
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "nobody",
        "remote_address": "tcp://127.0.0.1:9",
        "remote_request_id": new_request_id().hex(),
    }
    (prompt,) = prompts((70,), seed=7)
    (found,) = decode.wait([decode.add(prompt, params={**params, **damaged}, max_tokens=4)])
    assert found.num_external == 0
    check_equal(decode.generate([prompt], max_tokens=4), [found])


def test_requests_that_the_proxy_gives_up(pair: tuple[Engine, Engine]) -> None:
    """One that prefill holds for decode, and one that it still computes. Both are gone long before `hold_s`."""
    prefill, _ = pair
    held, computing = prompts((300, 1200), seed=8)
    names = [new_request_id().hex() for _ in range(2)]
    (first,) = prefill.generate([held], params={**PREFILL, "remote_request_id": names[0]})
    assert first.params is not None
    assert prefill.num_free_blocks() < BLOCKS - 1
    second = prefill.add(computing, params={**PREFILL, "remote_request_id": names[1]})
    given_up = [prefill.add([0], params={"abort_request_id": name}) for name in names]
    prefill.wait([second, *given_up])
    assert prefill.answers[second].params is None
    wait_empty(prefill)


def test_aborts(pair: tuple[Engine, Engine]) -> None:
    """Whatever is aborted, in whatever state, blocks become free and other requests are right."""
    prefill, decode = pair
    asked = prompts((1100, 900, 600, 300), seed=9)
    first = prefill.generate(asked, params=PREFILL)
    computing = [prefill.add(prompt, params=PREFILL) for prompt in prompts((1200, 1100), seed=10)]
    loading = [decode.add(prompt, params=one.params) for prompt, one in zip(asked, first, strict=True)]
    for engine, requests in ((prefill, computing), (decode, loading[:3])):
        for req_id in requests:
            engine.abort(req_id)
    (found,) = decode.wait(loading[3:])
    check_equal(decode.generate(asked[3:], max_tokens=8), [found])
    wait_empty(prefill, decode)


def test_more_requests_at_once_than_fit(pair: tuple[Engine, Engine]) -> None:
    """50 requests of which ten fit: prefill waits for decode to take what it holds, and requests are preempted."""
    prefill, decode = pair
    asked = prompts([40 + 13 * number for number in range(50)], seed=11)
    asked = [[number, *prompt] for number, prompt in enumerate(asked)]
    waiting = {prefill.add(prompt, params=PREFILL): prompt for prompt in asked}
    loading: dict[str, list[int]] = {}
    while waiting:
        prefill.poll(0.05)
        decode.poll(0.0)
        for req_id in [req_id for req_id in waiting if prefill.answers[req_id].finish_reason]:
            prompt = waiting.pop(req_id)
            loading[decode.add(prompt, params=prefill.answers[req_id].params, max_tokens=6)] = prompt
    found = decode.wait(loading)
    check_equal(decode.generate(loading.values(), max_tokens=6), found)
    assert sum(num_external(found)) >= 0.9 * sum(len(prompt) - 1 - answer.num_local for prompt, answer in
        zip(loading.values(), found, strict=True))  # fmt: skip
    wait_empty(prefill, decode)
