"""Requests that are not the simple case, on one pair of Llama engines with small pools."""

from __future__ import annotations

import logging
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.metrics.loggers import PrometheusStatLogger

from disagg import new_request_id
from disagg.integrations.handoff import Place
from disagg.integrations.vllm import DisaggConnector, worker
from disagg.integrations.vllm.metrics import TransferStats
from disagg.integrations.vllm.scheduler import SchedulerHalf
from harness.vllm.engine import PREFILL, Engine
from tests.integrations.vllm.requests import (
    ask_both,
    check_equal,
    connect,
    hand_over,
    num_external,
    prompts,
    wait_empty,
    wait_waiting,
)

BLOCKS = 96
"""Blocks of 32 tokens on prefill, of 64 on decode: two of the longest prompts fit."""


@pytest.fixture(scope="module")
def pair(model: Callable[[str], Path]) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine, both with a prefix cache, that other tests use too. Prefill admits prompts that may not
    fit, and preempts them.
    """
    folder = str(model("llama"))
    options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": True}
    with (
        Engine(folder, block_size=32, blocks=BLOCKS, scheduler_reserve_full_isl=False, **options) as prefill,
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
    """The answer says where decode finds other requests, so that a proxy can ask both servers at once from then on. Decode does
    not take it for a hand-over, nor wait for one that has been asked at the same time.
    """
    prefill, decode = pair
    (first,) = prefill.generate([[17]], params=PREFILL)
    server = connect(prefill, decode)
    assert first.params is not None
    assert {**first.params, **server} == first.params
    assert (first.params["do_remote_prefill"], first.params["remote_replicas"]) == (False, 1)
    expected = decode.generate([[17]], max_tokens=4)
    check_equal(expected, decode.generate([[17]], params=first.params, max_tokens=4))
    (computing, *_), asked = ask_both(prefill, decode, [[17]], server=server, max_tokens=4)
    check_equal(expected, decode.wait(asked, timeout_s=20))
    prefill.wait([computing])
    wait_empty(prefill, decode)


def test_both_are_asked_at_once(pair: tuple[Engine, Engine]) -> None:
    """Decode reserves blocks before prefill computes, so the first chunk has left when prefill computes the last one."""
    prefill, decode = pair
    server = connect(prefill, decode, seed=5)
    (prompt,) = prompts((1200,), seed=6)
    before = prefill.counts["sent_bytes"]
    (computing, *_), (loading,) = ask_both(prefill, decode, [prompt], server=server, max_tokens=8)
    num_sent = 0
    while prefill.answers[computing].finish_reason is None:
        num_sent = prefill.counts["sent_bytes"] - before
        prefill.poll(60)
    assert num_sent > 0  # before the answer
    (found,) = decode.wait([loading])
    assert found.num_external == 1199
    check_equal(decode.generate([prompt], max_tokens=8), [found])
    wait_empty(prefill, decode)
    assert prefill.counts["sent_bytes"] - before > num_sent


def hold_samples(core: Any, told: Path) -> None:
    """In an engine's process: draw no token until the file `told` is there."""
    runner = core.model_executor.driver_worker.worker.model_runner
    draw = runner.sample_tokens

    def wait(*args: Any, **options: Any) -> Any:
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return draw(*args, **options)

    runner.sample_tokens = wait


def test_the_state_arrives_before_prefill_has_drawn_a_token(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """With the last chunk decode has all that it needs: it does not wait for another step of prefill."""
    prefill, decode = pair
    server = connect(prefill, decode, seed=36)
    (prompt,) = prompts((400,), seed=37)  # one step of prefill
    told = tmp_path / "draw"
    prefill.run(partial(hold_samples, told=told))
    (computing, *_), (loading,) = ask_both(prefill, decode, [prompt], server=server, max_tokens=8)
    (found,) = decode.wait([loading], timeout_s=60)
    assert prefill.answers[computing].finish_reason is None
    told.touch()
    prefill.wait([computing])
    assert found.num_external == 399
    check_equal(decode.generate([prompt], max_tokens=8), [found])
    wait_empty(prefill, decode)


def waits_of_steps(_: object) -> list[bool]:
    """In an engine's process, while a load is open: which of four steps without tokens wait for it. The second one reports the
    end of a transfer.
    """
    waited: list[None] = []

    def poll() -> select.poll:
        waited.append(None)
        return select.poll()

    half, found = get_kv_transfer_group().worker, []
    half.results(idle=False)
    worker.select = SimpleNamespace(poll=poll, POLLIN=select.POLLIN)  # type: ignore[assignment, attr-defined]
    try:
        for number in range(4):
            waited.clear()
            if number == 1:
                half._results.finished_sending.add("a transfer")
            half.results(idle=True)
            found.append(bool(waited))
    finally:
        worker.select = select  # type: ignore[attr-defined]
    return found


def test_the_step_after_a_report_does_not_wait(pair: tuple[Engine, Engine]) -> None:
    """With asynchronous scheduling, which the CPU does not have, vLLM takes the report of a step only after the next one."""
    prefill, decode = pair
    server = connect(prefill, decode, seed=48)
    (prompt,) = prompts((600,), seed=49)
    prefill.signal(signal.SIGSTOP)
    try:
        (computing, *_), (loading,) = ask_both(prefill, decode, [prompt], server=server, max_tokens=4)
        wait_waiting(decode)
        waits = decode.run(waits_of_steps)
    finally:
        prefill.signal(signal.SIGCONT)
    assert waits == [False, False, False, True]
    (found,) = decode.wait([loading])
    prefill.wait([computing])
    check_equal(decode.generate([prompt], max_tokens=4), [found])
    wait_empty(prefill, decode)


@pytest.mark.parametrize("late", [False, True], ids=["before decode asks", "while decode waits"])
def test_a_request_that_never_comes_to_prefill(pair: tuple[Engine, Engine], late: bool) -> None:
    """The proxy says so to prefill, which tells decode: it does not wait for `max_hold_s`, nor for `load_timeout_s`."""
    prefill, decode = pair
    server, name = connect(prefill, decode, seed=38 + late), new_request_id().hex()
    (prompt,) = prompts((300,), seed=40 + late)
    failed = decode.counts["failed_loads"]

    def give_up() -> None:
        prefill.wait([prefill.add([0], params={"abort_request_id": name}, max_tokens=1)])

    if not late:
        give_up()
    params = {"do_remote_prefill": True, **server, "remote_request_id": name}
    loading = decode.add(prompt, params=params, max_tokens=6)
    if late:
        wait_waiting(decode)
        give_up()
    (found,) = decode.wait([loading], timeout_s=20)
    assert (found.num_external, decode.counts["failed_loads"] - failed) == (0, 1)
    check_equal(decode.generate([prompt], max_tokens=6), [found])
    wait_empty(prefill, decode)


def test_prefill_is_aborted_before_it_begins(pair: tuple[Engine, Engine]) -> None:
    """While other requests have its blocks. Decode, which waits for it, learns it at once."""
    prefill, decode = pair
    server, failed = connect(prefill, decode, seed=42), decode.counts["failed_loads"]
    busy = [prefill.add(prompt, max_tokens=200) for prompt in prompts((1300, 1300), seed=43)]
    while not all(prefill.answers[req_id].tokens for req_id in busy):
        prefill.poll(60)
    (prompt,) = prompts((1200,), seed=44)
    (computing, *_), (loading,) = ask_both(prefill, decode, [prompt], server=server, max_tokens=6)
    wait_waiting(decode)
    prefill.abort(computing)
    (found,) = decode.wait([loading], timeout_s=20)
    assert (found.num_external, decode.counts["failed_loads"] - failed) == (0, 1)
    for req_id in busy:
        prefill.abort(req_id)
    check_equal(decode.generate([prompt], max_tokens=6), [found])
    wait_empty(prefill, decode)


def test_prefill_is_aborted_when_decode_may_have_all(pair: tuple[Engine, Engine]) -> None:
    """After its last chunk has left and before it has drawn a token. Its blocks are nobody else's until it has been sent."""
    prefill, decode = pair
    server = connect(prefill, decode, seed=45)
    asked = prompts((500,) * 6, seed=46)
    expected = decode.generate(asked, max_tokens=6)
    computing, loading = ask_both(prefill, decode, asked, server=server, max_tokens=6)
    for req_id in computing:
        prefill.poll(0.05)
        prefill.abort(req_id)
    check_equal(expected, decode.wait(loading, timeout_s=30))
    wait_empty(prefill, decode)


def test_servers_that_wait_for_each_other(pair: tuple[Engine, Engine]) -> None:
    """Both are full: prefill with requests that decode has no blocks for, and decode with reservations of requests that prefill
    has no blocks for. Prefill ends a hand-over, which decode computes.
    """
    prefill, decode = pair
    server = connect(prefill, decode, seed=58)
    asked = prompts((1300,) * 4, seed=59)
    expected = [decode.generate([prompt], max_tokens=4)[0] for prompt in asked]
    decode.run(reset_cache)
    held = prefill.generate(asked[:2], params=PREFILL)
    computing, loading = ask_both(prefill, decode, asked[2:], server=server, max_tokens=4)
    wait_waiting(decode, 2)
    loading = [decode.add(prompt, params=one.params, max_tokens=4) for prompt, one in zip(asked, held, strict=False)] + loading
    found = decode.wait(loading, timeout_s=60)
    prefill.wait(computing)
    check_equal(expected, found)
    assert 0 in num_external(found)
    for name in computing.values():  # of one that prefill has preempted, decode has taken nothing
        prefill.add([0], params={"abort_request_id": name}, max_tokens=1)
    wait_empty(prefill, decode)


def reset_cache(core: Any) -> None:
    """In an engine's process: forget cached prefixes."""
    assert core.scheduler.reset_prefix_cache()


def test_parameters_of_mooncakes_proxies(pair: tuple[Engine, Engine]) -> None:
    """A name for the transfer, which is no number, and the name of prefill that its bootstrap server gives."""
    prefill, decode = pair
    (first,) = prefill.generate([[17]], params=PREFILL)
    assert first.params is not None
    place = msgspec.convert(first.params, Place)
    (prompt,) = prompts((300,), seed=47)
    common = {"transfer_id": "xfer-5c1d", "remote_bootstrap_addr": "http://127.0.0.1:1"}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": str(place), **common}
    loading = decode.add(prompt, params=params, max_tokens=6)
    several = [prefill.add(prompt, params={**PREFILL, "transfer_id": "xfer-5c1d"}) for _ in range(2)]  # as for `n=2`
    prefill.wait(several)
    (found,) = decode.wait([loading])
    assert found.num_external == 299
    check_equal(decode.generate([prompt], max_tokens=6), [found])
    wait_empty(prefill, decode)


def computed(engine: Engine) -> int:
    """The hand-overs in whose place the engine has computed requests."""
    return engine.counts["refused_hand_overs"] + engine.counts["failed_loads"]


@pytest.mark.parametrize(
    "damaged",
    [
        {"remote_engine_id": 7},
        {"remote_request_id": "no hexadecimal digits"},
        {"remote_address": None},
        {"remote_address": "?"},
        {"remote_bootstrap_addr": "http://127.0.0.1:1", "transfer_id": "a"},
        {
            "remote_bootstrap_addr": "http://127.0.0.1:1",
            "remote_engine_id": "nobody@tcp://127.0.0.1:9",
            "remote_request_id": "",
        },
    ],
    ids=["type", "id", "missing", "address", "another Mooncake", "no transfer"],
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
    before = computed(decode)
    (found,) = decode.wait([decode.add(prompt, params={**params, **damaged}, max_tokens=4)])
    assert found.num_external == 0
    assert computed(decode) - before == 1
    check_equal(decode.generate([prompt], max_tokens=4), [found])


@pytest.mark.parametrize("at_once", [False, True], ids=["the hand-off tells", "the state tells"])
def test_state_of_another_prompt_is_not_used(pair: tuple[Engine, Engine], at_once: bool) -> None:
    """VLLM gives the parameters of a list of prompts to the request of each. Decode computes those that they are not of."""
    prefill, decode = pair
    right, wrong = prompts((300, 290), seed=30 + at_once)
    failed, refused = decode.counts["failed_loads"], decode.counts["refused_hand_overs"]
    if at_once:  # before prefill has told of which prompt the state is
        server, name = connect(prefill, decode, seed=32), new_request_id().hex()
        params: Any = {"do_remote_prefill": True, **server, "remote_request_id": name}
        asked = [decode.add(wrong, params=params, max_tokens=6)]
        prefill.generate([right], params={**PREFILL, "remote_request_id": name})
    else:
        (first,) = prefill.generate([right], params=PREFILL)
        asked = [decode.add(prompt, params=first.params, max_tokens=6) for prompt in (wrong, right)]
    found = decode.wait(asked)
    assert num_external(found) == ([0] if at_once else [0, 299])
    assert decode.counts["failed_loads"] - failed == at_once
    assert decode.counts["refused_hand_overs"] - refused == (not at_once)
    check_equal(decode.generate([wrong, right][: len(asked)], max_tokens=6), found)
    wait_empty(prefill, decode)


def test_a_hand_over_that_only_another_prompt_has_come_for_is_declined(pair: tuple[Engine, Engine]) -> None:
    """Also vLLM's stand-in for a request that it has rejected has another prompt: prefill's blocks are free before `hold_s`."""
    prefill, decode = pair
    right, wrong = prompts((300, 290), seed=34)
    (first,) = prefill.generate([right], params=PREFILL)
    (found,) = decode.wait([decode.add(wrong, params=first.params, max_tokens=6)])
    assert found.num_external == 0
    prefill.settle(timeout_s=8.0)


def test_several_answers_to_one_prompt(pair: tuple[Engine, Engine]) -> None:
    """One request loads the state. The others wait, find its blocks in the cache, and compute the rest."""
    prefill, decode = pair
    (prompt,) = prompts((300,), seed=33)
    failed = decode.counts["failed_loads"]
    (first,) = prefill.generate([prompt], params=PREFILL)
    found = decode.wait([decode.add(prompt, params=first.params, max_tokens=6) for _ in range(3)])
    assert [(answer.num_local, answer.num_external) for answer in found] == [(0, 299), (256, 0), (256, 0)]
    assert decode.counts["failed_loads"] == failed
    check_equal(decode.generate([prompt] * 3, max_tokens=6), found)
    wait_empty(prefill, decode)


def test_several_answers_on_prefill(pair: tuple[Engine, Engine]) -> None:
    """Some proxies pass `n` on to prefill. All answers name one hand-over, since vLLM returns the parameters of the one that
    ends last, and no block is held for the others.
    """
    prefill, decode = pair
    (prompt,) = prompts((300,), seed=34)
    names = [f"{number}_cmpl-several-0-0123abcd" for number in range(3)]
    first, *others = prefill.wait([prefill.add(prompt, params=PREFILL, max_tokens=1, name=name) for name in names])
    assert first.params is not None
    for other in others:
        assert other.params is not None
        assert other.params["remote_request_id"] == first.params["remote_request_id"]
    found = decode.wait([decode.add(prompt, params=other.params, max_tokens=6) for other in others])
    assert [answer.num_external for answer in found] == [299, 0]
    check_equal(decode.generate([prompt] * 2, max_tokens=6), found)
    wait_empty(prefill, decode)


def test_list_of_prompts_on_prefill(pair: tuple[Engine, Engine]) -> None:
    """VLLM returns the parameters of the first prompt. No block is held for the others."""
    prefill, decode = pair
    asked = prompts((300, 200), seed=35)
    names = [f"cmpl-list-{number}-0123abcd" for number in range(2)]
    first, second = prefill.wait(
        [prefill.add(prompt, params=PREFILL, max_tokens=1, name=name) for prompt, name in zip(asked, names, strict=True)]
    )
    assert second.params == {"do_remote_prefill": False, "do_remote_decode": False}
    (found,) = decode.wait([decode.add(asked[0], params=first.params, max_tokens=6)])
    assert found.num_external == 299
    check_equal(decode.generate(asked[:1], max_tokens=6), [found])
    wait_empty(prefill, decode)


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
    assert prefill.answers[second].params == {"do_remote_prefill": False, "do_remote_decode": False}
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
    """50 requests of which four fit at first: prefill waits for decode to take what it holds."""
    prefill, decode = pair
    asked = prompts([40 + 13 * number for number in reversed(range(50))], seed=11)
    waiting = {prefill.add(prompt, params=PREFILL): prompt for prompt in asked}
    held: list[tuple[list[int], dict[str, Any] | None]] = []
    loading: dict[str, list[int]] = {}
    while waiting:
        prefill.poll(0.05)
        decode.poll(0.0)
        answered = [req_id for req_id in waiting if prefill.answers[req_id].finish_reason]
        held += [(waiting.pop(req_id), prefill.answers[req_id].params) for req_id in answered]
        if loading or len(held) == 4:
            if not loading:
                assert prefill.num_free_blocks() * 32 < len(asked[4])
            loading |= {decode.add(prompt, params=params, max_tokens=6): prompt for prompt, params in held}
            held.clear()
    found = decode.wait(loading)
    assert [answer.num_local + answer.num_external for answer in found] == [len(prompt) - 1 for prompt in loading.values()]
    assert sum(answer.num_local for answer in found) == 0
    check_equal(decode.generate(loading.values(), max_tokens=6), found)
    wait_empty(prefill, decode)


def num_preemptions(core: Any) -> int:
    """In an engine's process: how often its requests have been preempted."""
    return sum(request.num_preemptions for request in core.scheduler.requests.values())


@pytest.mark.parametrize("at_once", [False, True], ids=["decode is asked later", "decode has got a part"])
def test_preemption(pair: tuple[Engine, Engine], at_once: bool) -> None:
    """Prefill loses the blocks of a request between two chunks, and computes it again once decode has taken others.

    If decode has reserved before, it has a part of the first attempt and gets no other one: it computes the request.
    """
    prefill, decode = pair
    asked = prompts((1200, 1200, 1200), seed=13 + at_once)
    server, failed = connect(prefill, decode), decode.counts["failed_loads"]
    held = prefill.generate(asked[:2], params=PREFILL)
    loading: list[str] = []
    if at_once:
        (computing,), loading = ask_both(prefill, decode, asked[2:], server=server, max_tokens=6)
    else:
        computing = prefill.add(asked[2], params=PREFILL)
    until = time.monotonic() + 20
    while prefill.run(num_preemptions) == 0:
        assert time.monotonic() < until, "no request was preempted"
    loading += [decode.add(prompt, params=one.params, max_tokens=6) for prompt, one in zip(asked, held, strict=False)]
    (again,) = prefill.wait([computing])
    if at_once:
        assert again.params == {"do_remote_prefill": False, "do_remote_decode": False}
    else:
        assert again.params is not None
        assert again.params["remote_attempt"] > 0
        loading.append(decode.add(asked[2], params=again.params, max_tokens=6))
    found = decode.wait(loading)
    assert num_external(found) == ([0, 1199, 1199] if at_once else [1199, 1199, 1199])
    assert decode.counts["failed_loads"] - failed == at_once
    check_equal(decode.generate([asked[2], *asked[:2]] if at_once else asked, max_tokens=6), found)
    wait_empty(prefill, decode)


ANSWER = threading.Event()


def block_names(_: object) -> None:
    """In an engine's process: have the name server answer only once `answer_names` is called, with an error."""
    system = socket.getaddrinfo

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        if host != "slow.test":
            return system(host, *args, **options)
        ANSWER.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    socket.getaddrinfo = look_up  # type: ignore[assignment]


def answer_names(_: object) -> bool:
    """In an engine's process: whether the name server had not answered yet. It does now."""
    was_blocked = not ANSWER.is_set()
    ANSWER.set()
    return was_blocked


def test_a_slow_name_server_holds_up_no_step(pair: tuple[Engine, Engine]) -> None:
    """Other requests are answered before it. Then the request is computed, since nobody has that name."""
    _, decode = pair
    slow, other = prompts((70, 60), seed=35)
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "nobody",
        "remote_address": "tcp://slow.test:9",
        "remote_request_id": new_request_id().hex(),
    }
    decode.run(block_names)
    waiting = decode.add(slow, params=params, max_tokens=4)
    decode.wait([decode.add(other, max_tokens=4)])
    assert decode.answers[waiting].finish_reason is None
    assert decode.run(answer_names)
    (found,) = decode.wait([waiting], timeout_s=20.0)  # `load_timeout_s` is 30
    assert found.num_external == 0
    check_equal(decode.generate([slow], max_tokens=4), [found])


OFFER = SchedulerHalf.get_num_new_matched_tokens


def offer_fewer(_: object) -> None:
    """In an engine's process: from now on vLLM takes whole blocks only, as it does where it computes the rest again itself."""

    def offer(self: SchedulerHalf, request: Any, num_computed: int) -> tuple[int | None, bool]:
        count, between_steps = OFFER(self, request, num_computed)
        return None if count is None else count - count % 64, between_steps

    SchedulerHalf.get_num_new_matched_tokens = offer  # type: ignore[method-assign]


def offer_all(_: object) -> None:
    """In an engine's process: the end of `offer_fewer`."""
    SchedulerHalf.get_num_new_matched_tokens = OFFER  # type: ignore[method-assign]


def test_requests_of_which_vllm_loads_fewer_tokens(pair: tuple[Engine, Engine]) -> None:
    """They are computed by decode, and prefill does not keep their blocks until its time is over. Others are handed over."""
    prefill, decode = pair
    asked = prompts((100, 200, 129), seed=36)
    failed = decode.counts["failed_loads"]
    decode.run(offer_fewer)
    found = hand_over(prefill, decode, asked)
    decode.run(offer_all)
    check_equal(prefill.generate(asked, max_tokens=16), found)
    assert num_external(found) == [0, 0, 128]
    wait_empty(prefill, decode)
    assert decode.counts["failed_loads"] - failed == 2
    (other,) = prompts((100,), seed=37)
    assert num_external(hand_over(prefill, decode, [other])) == [99]


RECORDS: list[logging.LogRecord] = []


class _Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        RECORDS.append(record)


def exported(core: Any) -> dict[str, set[str]]:
    """In an engine's process: the labels of vLLM's metrics, by name."""
    PrometheusStatLogger(core.vllm_config)
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return {sample.name: set(sample.labels) for sample in samples if sample.name.startswith("vllm:")}


def test_the_dashboard_and_the_alerts_query_existing_metrics(pair: tuple[Engine, Engine]) -> None:
    known = pair[0].run(exported)
    docs = Path(__file__).parents[3] / "docs"
    text = (docs / "alerts.yml").read_text() + (docs / "grafana.json").read_text()
    used = set(re.findall(r"vllm:\w+", text))
    assert {"vllm:disagg_healthy", "vllm:prompt_tokens_by_source_total"} <= used <= known.keys()
    assert "source" in known["vllm:prompt_tokens_by_source_total"]


def end_manager(_: object) -> None:
    """In an engine's process: end the manager, and record what is logged."""
    logging.getLogger("disagg").addHandler(_Recorder())
    get_kv_transfer_group().worker._manager._runtime.loop.fail("transfer", ZeroDivisionError())


def errors(_: object) -> list[str]:
    """In an engine's process: the errors that the connector has logged."""
    return [record.getMessage() for record in RECORDS if record.levelno == logging.ERROR and "integrations" in record.name]


def test_a_manager_that_has_ended(pair: tuple[Engine, Engine]) -> None:
    """Decode computes every request, says so once in its log, and its health metric becomes 0. Runs last."""
    prefill, decode = pair
    metrics = DisaggConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), {kind: kind for kind in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    )
    health = "vllm:disagg_healthy", {"engine": "0"}
    assert decode.counts["dead_ranks"] == 0
    metrics.observe(TransferStats().data)
    assert REGISTRY.get_sample_value(*health) == 1
    decode.run(end_manager)
    asked = prompts((100, 300), seed=12)
    expected = [prefill.generate([prompt], max_tokens=6)[0] for prompt in asked]
    until = time.monotonic() + 20
    while decode.counts["dead_ranks"] == 0:
        assert time.monotonic() < until
        found = hand_over(prefill, decode, asked, max_tokens=6)
        check_equal(expected, found)
    check_equal(expected, hand_over(prefill, decode, asked, max_tokens=6))
    assert decode.counts["dead_ranks"] == 1
    (error,) = decode.run(errors)
    assert "transfers nothing until the server is restarted: the transfer thread died: ZeroDivisionError" in error
    metrics.observe({**TransferStats().data, **decode.counts})
    metrics.observe(TransferStats().data)
    assert REGISTRY.get_sample_value(*health) == 0
