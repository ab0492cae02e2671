"""Engines that are killed or replaced: no wrong token, every request ends, and every block becomes free."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.commands.top import read
from disagg.runtime.keys import KeyPair
from harness.ports import free_ports
from harness.vllm.engine import PREFILL, Answer, Engine
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts, wait_empty

LENGTHS = (30, 300, 600, 900, 1200, 1000, 800, 400)
KILLED_AFTER_S = {"before decode asks": None, "as decode asks": 0.0, "during the transfers": 0.03, "later": 0.5}


def test_prefill_is_killed(start: Callable[..., Engine]) -> None:
    """At four moments. Decode computes what it did not get, and a new prefill server hands over again."""
    prefills = {moment: start(block_size=32) for moment in KILLED_AFTER_S}
    decode = start(block_size=64, extra={"load_timeout_s": 20.0}).wait_ready()
    asked = prompts(LENGTHS, seed=21)
    expected = decode.generate(asked, max_tokens=6)
    warm = prompts((50,), seed=22)
    for moment, delay_s in KILLED_AFTER_S.items():
        prefill = prefills[moment].wait_ready()
        if delay_s is not None:
            hand_over(prefill, decode, warm)  # connects, so that the next requests are transferred at once
        first = prefill.generate(asked, params=PREFILL)
        if delay_s is None:
            prefill.kill()
        loading = [decode.add(prompt, params=one.params, max_tokens=6) for prompt, one in zip(asked, first, strict=True)]
        if delay_s is not None:
            time.sleep(delay_s)
            prefill.kill()
        found = decode.wait(loading, timeout_s=60)
        check_equal(expected, found)
        assert all(answer.num_external in (0, len(prompt) - 1) for prompt, answer in zip(asked, found, strict=True))
        if moment == "before decode asks":
            assert num_external(found) == [0] * len(asked)
        wait_empty(decode)
    replaced = start(block_size=32).wait_ready()
    found = hand_over(replaced, decode, asked, max_tokens=6)
    check_equal(expected, found)
    assert num_external(found) == [len(prompt) - 1 for prompt in asked]
    wait_empty(replaced, decode)


def test_decode_is_killed(start: Callable[..., Engine]) -> None:
    """Prefill, which was stopped meanwhile, gives blocks back long before `hold_s`, and serves the server in its place."""
    (port,) = free_ports(1)
    prefill = start(block_size=32)
    decodes = [start(block_size=64, extra={"metrics_port": port}), start(block_size=64)]
    asked = prompts(LENGTHS, seed=23)
    expected = prefill.wait_ready().generate(asked, max_tokens=6)
    hand_over(prefill, decodes[0].wait_ready(), prompts((50,), seed=24))
    first = prefill.generate(asked, params=PREFILL)
    prefill.signal(signal.SIGSTOP)  # so that no transfer ends before decode does
    for prompt, one in zip(asked, first, strict=True):
        decodes[0].add(prompt, params=one.params)
    until = time.monotonic() + 60
    while read(f"127.0.0.1:{port}", timeout_s=30.0).total("requests", direction="receive", state="open") < len(LENGTHS):
        assert time.monotonic() < until, "decode has not reserved"
        time.sleep(0.05)
    decodes[0].kill()
    prefill.signal(signal.SIGCONT)
    wait_empty(prefill)
    found = hand_over(prefill, decodes[1].wait_ready(), asked, max_tokens=6)
    check_equal(expected, found)
    assert num_external(found) == [len(prompt) - 1 for prompt in asked]
    wait_empty(prefill, decodes[1])


def test_rolling_restart_under_load(start: Callable[..., Engine]) -> None:
    """Requests flow while each side is replaced. Those of a killed engine are asked again, as a router does."""
    olds, news = (start(block_size=32), start(block_size=64)), (start(block_size=32), start(block_size=64))
    for engine in (*olds, *news):
        engine.wait_ready()
    asked = prompts([60 + 31 * number for number in range(24)], seed=25)
    expected = news[1].generate(asked, max_tokens=6)
    prefill, decode = olds
    found: list[Answer] = []
    for number, prompt in enumerate(asked):
        (first,) = prefill.generate([prompt], params=PREFILL)
        if number == 8:
            prefill.kill()
            prefill = news[0]
        req_id = decode.add(prompt, params=first.params, max_tokens=6)
        if number == 16:
            decode.kill()
            decode = news[1]
            (first,) = prefill.generate([prompt], params=PREFILL)
            req_id = decode.add(prompt, params=first.params, max_tokens=6)
        found += decode.wait([req_id])
    check_equal(expected, found)
    assert sum(not answer.num_external for answer in found) <= 1
    wait_empty(decode)
    prefill.stop()


def test_blocks_that_a_stopped_server_may_still_write(start: Callable[..., Engine]) -> None:
    """Decode computes a request whose prefill server is stopped, in other blocks: the first may still be written."""
    prefill, decode = start(block_size=32), start(block_size=64, extra={"load_timeout_s": 3.0})
    (prompt, other) = prompts((900, 50), seed=26)
    while num_external(hand_over(prefill.wait_ready(), decode.wait_ready(), [other])) == [0]:
        pass  # not connected yet
    (first,) = prefill.generate([prompt], params=PREFILL)
    wait_empty(decode)
    prefill.signal(signal.SIGSTOP)
    (found,) = decode.wait([decode.add(prompt, params=first.params, max_tokens=6)])
    assert found.num_external == 0
    decode.settle()
    num_held = decode.num_blocks - 1 - decode.num_free_blocks()
    prefill.signal(signal.SIGCONT)
    check_equal(decode.generate([prompt], max_tokens=6), [found])
    assert num_held == len(prompt) // 64 + 1
    until = time.monotonic() + 30
    while decode.num_free_blocks() < decode.num_blocks - 1:  # the engine learns it when it steps
        assert time.monotonic() < until
        decode.generate([other[:5]], max_tokens=1)


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


def test_servers_of_different_models(start: Callable[..., Engine]) -> None:
    """They refuse each other, and decode answers alone at once. Prefill gives blocks back that nobody takes."""
    prefill, decode = start("deepseek-v2", extra={"hold_s": 3.0}), start("llama", extra={"load_timeout_s": 60.0})
    asked = prompts((100, 200), seed=28)
    found = hand_over(prefill.wait_ready(), decode.wait_ready(), asked, max_tokens=4)
    check_equal(decode.generate(asked, max_tokens=4), found)
    wait_empty(prefill)
    assert num_external(found) == [0, 0]
    wait_empty(decode)
