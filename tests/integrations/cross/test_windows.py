"""A window that only one of the engines applies: states differ from the second layer on, so the servers refuse each other."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from harness.vllm.models import write_model
from tests.integrations.cross.cases import Pair
from tests.integrations.cross.test_pairs import ROOMS, Servers, check, decode_on_sglang, meeting, prefill_on_vllm, start
from tests.integrations.vllm.requests import prompts

PAIR = Pair(model="mistral", killed="vllm", vllm=(), sglang_decode=("--page-size", "16"), sglang_prefill=("--page-size", "16"))
PROMPTS = prompts((33, 300), seed=71)
"""Shorter and longer than the window of 64 tokens."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Of Mistral, whose window vLLM applies and SGLang ignores."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "5")  # how long prefill waits for a decode that is refused
        yield start(write_model(PAIR.model, tmp_path_factory.mktemp("model") / PAIR.model), PAIR, stack)


def test_vllm_computes_what_sglang_has_prefilled_without_the_window(servers: Servers) -> None:
    for prompt in PROMPTS:
        met, params = meeting(servers)
        with ThreadPoolExecutor() as pool:
            answered = pool.submit(servers.vllm.complete, prompt, stream=False, kv_transfer_params=params)
            with suppress(urllib.error.HTTPError):
                servers.sglang_prefill.complete(prompt, stream=False, **met)
            check([servers.vllm.complete(prompt, cache_salt="alone")], [answered.result()])
    assert servers.vllm.num_moved() == 0
    assert servers.vllm.metric("vllm:disagg_failed_loads_total") == len(PROMPTS)
    log = servers.vllm.log(length=1 << 20)
    assert "'windows=63@0-3' at " in log
    assert "'windows=none' at " in log


def test_sglang_takes_nothing_that_vllm_has_prefilled_with_the_window(servers: Servers) -> None:
    for prompt in PROMPTS:
        with pytest.raises(urllib.error.HTTPError, match="500") as refused:
            decode_on_sglang(servers, prompt, prefill_on_vllm(servers, next(ROOMS), prompt))
        reason = refused.value.read().decode()
        assert "'windows=63@0-3' at " in reason
        assert "'windows=none' at " in reason
