"""A prefill server on another host that is killed while its requests travel: decode computes them, and loses no block.

The hosts are two network namespaces, joined by a slow link, so only the network tells decode that prefill has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.chaos.places import Hosts, inside, missing_for_places, slow_down
from harness.servers import Reply, Server
from harness.vllm.engine import PREFILL
from tests.integrations.vllm.requests import USED, prompts, wait_unused

needs_places = pytest.mark.skipif(bool(missing_for_places()), reason=f"needs {missing_for_places()}")
RATE = "20mbit"
NUM_KILLS = int(os.environ.get("TEST_KILLS", "3"))
LENGTHS = (1200, 1100, 1000)
FAILED = "vllm:disagg_failed_loads_total"


def begin(folder: Path, address: str) -> Server:
    """A server that others reach at this address."""
    extra = {"listen": f"tcp://{address}:0", "insecure": True, "trusted_network": True, "backend": "nixl"}
    server = Server.vllm(folder, "--block-size", "32", extra=extra, VLLM_HOST_IP=address)
    server.url = f"http://{address}:{server.port}"
    return server


def prefilled(prefill: Server, prompt: list[int]) -> dict[str, Any]:
    """Where decode gets a prompt's state."""
    with prefill.ask(prompt, max_tokens=1, stream=False, kv_transfer_params=PREFILL) as answer:
        return dict(json.load(answer)["kv_transfer_params"])


@needs_places
def test_prefill_on_another_host_is_killed(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    with contextlib.closing(Hosts()) as hosts, inside(hosts.namespaces[0]), contextlib.ExitStack() as stack:
        with inside(hosts.namespaces[1]):
            slow_down(RATE)
            prefill = stack.enter_context(begin(folder, hosts.addresses[1]))
        decode = stack.enter_context(begin(folder, hosts.addresses[0])).wait_ready()
        asked = prompts(LENGTHS, seed=90)
        expected = [decode.complete(prompt, max_tokens=4) for prompt in asked]
        for killed in range(NUM_KILLS + 1):
            prefill.wait_ready()
            check(
                [decode.complete(prompt, max_tokens=4, kv_transfer_params=prefilled(prefill, prompt)) for prompt in asked],
                expected,
            )
            if killed == NUM_KILLS:
                break
            failed, given = decode.metric(FAILED), [prefilled(prefill, prompt) for prompt in asked]
            with ThreadPoolExecutor(len(asked)) as pool:
                answers = [
                    pool.submit(decode.complete, prompt, max_tokens=4, kv_transfer_params=params)
                    for prompt, params in zip(asked, given, strict=True)
                ]
                until = time.monotonic() + 60
                while decode.metric(USED) == 0:
                    assert time.monotonic() < until
                prefill.kill()
                check([answer.result() for answer in answers], expected)
            assert decode.metric_from(FAILED, failed + 1) > failed
            wait_unused(decode)
            with inside(hosts.namespaces[1]):
                prefill = stack.enter_context(begin(folder, hosts.addresses[1]))


def check(found: list[Reply], expected: list[Reply]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not one.is_broken
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
