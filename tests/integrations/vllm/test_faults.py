"""Engines that are killed or replaced: no wrong token, every request ends, and every block becomes free."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.commands.top import read
from disagg.runtime.keys import KeyPair
from harness.ports import free_ports
from harness.vllm.engine import PREFILL, Answer, Engine
from tests.integrations.vllm.requests import (
    ask_both,
    check_equal,
    connect,
    hand_over,
    num_external,
    prompts,
    wait_empty,
    wait_for,
)

logger = logging.getLogger(__name__)

LENGTHS = (1200, 30, 300, 600, 900, 1000, 800, 400)
"""The first prompt takes three steps, so its first chunk has left before the last one is computed."""

MOMENTS = ("before decode asks", "after decode has reserved", "during the transfers", "after the transfers")
NOTICED_S = 1.0
"""How soon decode knows that a prefill server has been killed, beside what it computes meanwhile."""


def num_open(port: int) -> float:
    """The requests that an engine has reserved blocks for, and has not got yet."""
    return read(f"127.0.0.1:{port}", timeout_s=30.0).total("requests", direction="receive", state="open")


def wait_open(port: int, count: int) -> None:
    """Wait until an engine has reserved blocks for `count` requests."""
    until = time.monotonic() + 60
    while num_open(port) < count:
        assert time.monotonic() < until, "decode has not reserved"
        time.sleep(0.05)


def ask_and_kill(moment: str, prefill: Engine, decode: Engine, asked: list[list[int]], port: int) -> tuple[list[str], float]:
    """Hand requests over and kill prefill at that moment. Returns decode's requests, and when prefill was killed."""
    if moment == "during the transfers":
        server = connect(prefill, decode)
        before = prefill.counts["sent_bytes"]
        _, loading = ask_both(prefill, decode, asked, server=server, max_tokens=6)
        wait_for(prefill, "sent_bytes", before + 1)  # of the first request: prefill computes one after the other
    else:
        if moment != "before decode asks":
            connect(prefill, decode)
        first = prefill.generate(asked, params=PREFILL)
        if moment == "before decode asks":
            prefill.kill()
        if moment == "after decode has reserved":
            prefill.signal(signal.SIGSTOP)
        loads = decode.counts["loads"]
        loading = [decode.add(prompt, params=one.params, max_tokens=6) for prompt, one in zip(asked, first, strict=True)]
        if moment == "after decode has reserved":
            wait_open(port, len(asked))
        if moment == "after the transfers":
            wait_for(decode, "loads", loads + len(asked))
    killed_s = time.monotonic()
    prefill.kill()
    return loading, killed_s


def test_prefill_is_killed(start: Callable[..., Engine]) -> None:
    """At four moments. Decode computes what it did not get, and a new prefill server hands over again."""
    (port,) = free_ports(1)
    prefills = {moment: start(block_size=32) for moment in MOMENTS}
    decode = start(block_size=64, extra={"metrics_port": port}).wait_ready()
    asked = prompts(LENGTHS, seed=21)
    begun_s = time.monotonic()
    expected = decode.generate(asked, max_tokens=6)
    alone_s = time.monotonic() - begun_s
    for moment in MOMENTS:
        num_failed = len(decode.failed_at)
        loading, killed_s = ask_and_kill(moment, prefills[moment].wait_ready(), decode, asked, port)
        found = decode.wait(loading, timeout_s=60)
        wait_empty(decode)
        check_equal(expected, found)
        noticed_s = [round(failed_s - killed_s, 3) for failed_s in decode.failed_at[num_failed:]]
        logger.info("%s: loads failed %s s after the kill; decode alone takes %.3f s", moment, noticed_s, alone_s)
        assert len(noticed_s) == num_external(found).count(0)
        assert all(answer.num_external in (0, len(prompt) - 1) for prompt, answer in zip(asked, found, strict=True))
        if moment == "after the transfers":
            assert noticed_s == []
            continue
        assert found[0].num_external == 0  # also if its first chunk had arrived
        assert min(noticed_s) < NOTICED_S + alone_s / 10  # the engine looks after each step, of which decode alone takes eleven
        assert max(noticed_s) < NOTICED_S + alone_s
        if moment != "during the transfers":
            assert len(noticed_s) == len(asked)
    replaced = start(block_size=32).wait_ready()
    found = hand_over(replaced, decode, asked, max_tokens=6)
    check_equal(expected, found)
    assert num_external(found) == [len(prompt) - 1 for prompt in asked]
    wait_empty(replaced, decode)


def test_decode_is_killed(start: Callable[..., Engine]) -> None:
    """While a request is on its way. Prefill gives blocks back long before `hold_s`, and serves the server in its place."""
    (port,) = free_ports(1)
    prefill = start(block_size=32)
    decodes = [start(block_size=64, extra={"metrics_port": port}), start(block_size=64)]
    asked = prompts(LENGTHS, seed=23)
    expected = prefill.wait_ready().generate(asked, max_tokens=6)
    server = connect(prefill, decodes[0].wait_ready())
    before = prefill.counts["sent_bytes"]
    names, _ = ask_both(prefill, decodes[0], asked, server=server, max_tokens=6)
    wait_for(prefill, "sent_bytes", before + 1)
    prefill.signal(signal.SIGSTOP)
    assert num_open(port) > 0  # the first of them has got bytes, and is not complete
    decodes[0].kill()
    prefill.signal(signal.SIGCONT)
    wait_for(prefill, "failed_sends", 1)
    for name in names.values():  # the proxy gives up the others, which prefill had not begun to send
        prefill.add([0], params={"abort_request_id": name}, max_tokens=1)
    wait_empty(prefill)
    found = hand_over(prefill, decodes[1].wait_ready(), asked, max_tokens=6)
    check_equal(expected, found)
    assert num_external(found) == [len(prompt) - 1 for prompt in asked]
    wait_empty(prefill, decodes[1])


class Router:
    """Keeps eight requests under way, and asks those of a killed engine again."""

    def __init__(self, prefill: Engine, decode: Engine, asked: list[list[int]]) -> None:
        self.prefill, self.decode = prefill, decode
        self.asked = asked
        self.waiting = list(range(len(asked)))
        self.prefilling: dict[str, int] = {}
        self.decoding: dict[str, tuple[int, dict[str, Any] | None]] = {}
        self.found: dict[int, Answer] = {}

    def run(self, *, until: int, busy: str = "") -> None:
        """Until so many requests have ended, and a side has some under way: `prefilling` or `decoding`."""
        while len(self.found) < until or (busy and not getattr(self, busy)):
            while self.waiting and len(self.prefilling) + len(self.decoding) < 8:
                number = self.waiting.pop(0)
                self.prefilling[self.prefill.add(self.asked[number], params=PREFILL)] = number
            self.prefill.poll(0.005)
            self.decode.poll(0.005)
            for req_id in [each for each in self.prefilling if self.prefill.answers[each].finish_reason]:
                number, params = self.prefilling.pop(req_id), self.prefill.answers[req_id].params
                self.decoding[self.decode.add(self.asked[number], params=params, max_tokens=6)] = number, params
            for req_id in [each for each in self.decoding if self.decode.answers[each].finish_reason]:
                self.found[self.decoding.pop(req_id)[0]] = self.decode.answers[req_id]

    def replace_prefill(self, engine: Engine) -> None:
        """Kill prefill, and ask another engine."""
        assert self.prefilling
        self.prefill.kill()
        self.prefill, self.waiting = engine, [*self.prefilling.values(), *self.waiting]
        self.prefilling.clear()

    def replace_decode(self, engine: Engine) -> None:
        """Kill decode, and give up what prefill holds for it."""
        assert self.decoding
        self.decode.kill()
        for number, params in self.decoding.values():
            self.waiting.insert(0, number)
            if params is not None:
                self.prefill.add([0], params={"abort_request_id": params["remote_request_id"]}, max_tokens=1)
        self.decode = engine
        self.decoding.clear()


def test_rolling_restart_under_load(start: Callable[..., Engine]) -> None:
    """Eight requests are under way while each side is replaced. Those of a killed engine are asked again, as a router does."""
    olds, news = (start(block_size=32), start(block_size=64)), (start(block_size=32), start(block_size=64))
    for engine in (*olds, *news):
        engine.wait_ready()
    asked = prompts([60 + 31 * number for number in range(40)], seed=25)
    expected = news[1].generate(asked, max_tokens=6)
    router = Router(*olds, asked)
    router.run(until=10, busy="prefilling")
    router.replace_prefill(news[0])
    router.run(until=22, busy="decoding")
    router.replace_decode(news[1])
    router.run(until=len(asked))
    found = [router.found[number] for number in range(len(asked))]
    check_equal(expected, found)
    counts = [answer.num_external for answer in found]
    assert all(count in (0, len(prompt) - 1) for count, prompt in zip(counts, asked, strict=True))
    assert counts.count(0) <= 8  # those whose prefill engine was killed before decode had them
    wait_empty(*news)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_a_stopped_server_may_still_write(start: Callable[..., Engine], policy: str) -> None:
    """Decode computes a request whose prefill server is stopped, in other blocks: the first may still be written. With vLLM's
    policy `fail` the request ends with an error.
    """
    prefill = start(block_size=32)
    decode = start(block_size=64, extra={"load_timeout_s": 3.0}, transfer={"kv_load_failure_policy": policy})
    (prompt, other) = prompts((900, 50), seed=26)
    while num_external(hand_over(prefill.wait_ready(), decode.wait_ready(), [other])) == [0]:
        pass  # not connected yet
    (first,) = prefill.generate([prompt], params=PREFILL)
    wait_empty(decode)
    prefill.signal(signal.SIGSTOP)
    (found,) = decode.wait([decode.add(prompt, params=first.params, max_tokens=6)])
    assert (found.num_external, found.finish_reason) == (0, "error" if policy == "fail" else "length")
    decode.settle()
    num_held = decode.num_blocks - 1 - decode.num_free_blocks()
    prefill.signal(signal.SIGCONT)
    expected = decode.generate([prompt], max_tokens=6)
    if policy == "recompute":
        check_equal(expected, [found])
    assert num_held == len(prompt) // 64 + 1
    until = time.monotonic() + 30
    while decode.num_free_blocks() < decode.num_blocks - 1:  # the engine learns it when it steps
        assert time.monotonic() < until
        decode.generate([other[:5]], max_tokens=1)


TAKEN: list[Any] = []


def take_blocks(core: Any) -> None:
    """In an engine's process: leave no block free, so that new requests wait in the queue."""
    pool = core.scheduler.kv_cache_manager.block_pool
    TAKEN.extend(pool.get_new_blocks(pool.get_num_free_blocks()))


def return_blocks(core: Any) -> None:
    """In an engine's process: the blocks are free again."""
    core.scheduler.kv_cache_manager.block_pool.free_blocks(TAKEN)
    TAKEN.clear()


HOLD_S = 3.0


def test_a_request_that_waits_in_decodes_queue(start: Callable[..., Engine]) -> None:
    """It waits for longer than prefill would keep it, and decode's workers renew it. Prefill gives a request up after
    `max_hold_s` all the same, and soon if decode is killed.
    """
    prefill = start(block_size=32, extra={"hold_s": HOLD_S, "max_hold_s": 5 * HOLD_S})
    decode = start(block_size=64, extra={"hold_s": HOLD_S})
    asked = prompts((300, 200, 100), seed=29)
    expected = prefill.wait_ready().generate(asked, max_tokens=4)
    connect(prefill, decode.wait_ready())

    def ask(prompt: list[int]) -> str:
        decode.run(take_blocks)
        (first,) = prefill.generate([prompt], params=PREFILL)
        return decode.add(prompt, params=first.params, max_tokens=4)

    kept = ask(asked[0])
    time.sleep(2 * HOLD_S)
    decode.run(return_blocks)
    found = decode.wait([kept])
    given_up = ask(asked[1])
    prefill.settle()
    decode.run(return_blocks)
    found += decode.wait([given_up])
    check_equal(expected[:2], found)
    assert num_external(found) == [299, 0]
    ask(asked[2])
    decode.kill()
    wait_empty(prefill)


def test_keys(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Servers with keys serve each other, and nobody else."""
    pairs = {name: KeyPair.generate() for name in ("prefill", "decode", "stranger")}
    extra: dict[str, dict[str, Any]] = {}
    for name, keys in pairs.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(f"public = {json.dumps(keys.public)}\nsecret = {json.dumps(keys.secret)}\n")
        trusted = {"prefill": ["decode"], "decode": ["prefill"], "stranger": ["prefill"]}[name]
        extra[name] = {"keys": str(file), "trusted_keys": [pairs[each].public for each in trusted]}
    extra["stranger"]["load_timeout_s"] = 2.0
    prefill, decode, stranger = (start(extra=extra[name]) for name in pairs)
    asked = prompts((100, 300), seed=27)
    expected = decode.wait_ready().generate(asked, max_tokens=4)
    found = hand_over(prefill.wait_ready(), decode, asked, max_tokens=4)
    check_equal(expected, found)
    assert num_external(found) == [99, 299]
    refused = hand_over(prefill, stranger.wait_ready(), asked, max_tokens=4)
    check_equal(expected, refused)
    assert num_external(refused) == [0, 0]


LOGGED: list[str] = []


def log_here(_: object) -> None:
    """In an engine's process: note what this library logs."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: LOGGED.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("disagg").addHandler(handler)


def logged(_: object) -> list[str]:
    """In an engine's process: the warnings that it has logged."""
    return LOGGED


def test_servers_of_different_models(start: Callable[..., Engine]) -> None:
    """They refuse each other, and decode answers alone at once. Prefill keeps the blocks of each request for `hold_s`, and says
    once why nobody takes them.
    """
    prefill, decode = start("deepseek-v2", extra={"hold_s": 3.0}), start("llama", extra={"load_timeout_s": 60.0})
    prefill.wait_ready().run(log_here)
    decode.wait_ready()
    for number in range(3):
        asked = prompts((100, 200), seed=28 + number)
        begun_s = time.monotonic()
        found = hand_over(prefill, decode, asked, max_tokens=4)
        check_equal(decode.generate(asked, max_tokens=4), found)
        assert num_external(found) == [0, 0]
        wait_empty(prefill)
        assert time.monotonic() - begun_s > 3.0
    wait_empty(decode)
    said = prefill.run(logged)
    assert sum("rejected a hello: model: 'llama' at " in line for line in said) == 1, said
    assert [line.rpartition(": ")[2] for line in said if line.startswith("request ")] == [
        "no server has taken it within 3 s"
    ] * 6


def give_up_all_that_finish(core: Any) -> None:
    """In an engine's process: the proxy gives each request up before the step that hands it over."""
    scheduler = core.scheduler.connector.scheduler
    finish = scheduler.request_finished

    def request_finished(request: Any, blocks: Any) -> Any:
        prefill = scheduler._prefills[request.request_id]
        found = finish(request, blocks)
        scheduler._give_up(prefill.request_id)
        return found

    scheduler.request_finished = request_finished


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_requests_that_are_given_up_just_before_they_are_handed_over(name: str, start: Callable[..., Engine]) -> None:
    """Of a model with windows everything is sent when the request has ended, in the step with that news."""
    prefill = start(name, block_size=32, extra={"hold_s": 3600.0}).wait_ready()
    prefill.run(give_up_all_that_finish)
    prefill.generate(prompts((300, 70), seed=29), params=PREFILL)
    wait_empty(prefill)
