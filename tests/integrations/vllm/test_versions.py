"""Servers of two versions of vLLM that hand requests over to each other.

`scripts/vllm_next_env.sh` prints the folder `TEST_OTHER_VLLM`, which has the packages of the other version.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.servers import Server
from tests.integrations.vllm.requests import prompts

OTHER = os.environ.get("TEST_OTHER_VLLM", "")
LENGTHS = (2, 33, 64, 65, 200, 700, 1153)
MAX_TOKENS = 16
PATIENT = {"connection_limits": {"heartbeat_timeout_s": 30.0}, "load_timeout_s": 120.0}
LOADED, FAILED, ACCEPTED = (
    "vllm:disagg_loaded_tokens_total",
    "vllm:disagg_failed_loads_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
MODELS = ("llama", "gemma3", "falcon-h1")


def version(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/version", timeout=60) as answer:
        return str(json.load(answer)["version"])


@pytest.mark.skipif(not OTHER, reason="TEST_OTHER_VLLM names no folder with another version of vLLM")
@pytest.mark.parametrize("name", MODELS)
def test_two_versions(name: str, model: Callable[[str], Path]) -> None:
    """Both ways, with other block sizes. Llama has a draft model that is the model itself, so that every draft is accepted, but
    not without the draft's KV.
    """
    folder = model(name)
    has_drafts = name == "llama"
    drafts = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})
    options = ("--speculative-config", drafts) if has_drafts else ()
    with (
        Server.vllm(folder, "--block-size", "64", *options, extra=PATIENT) as one,
        Server.vllm(folder, "--block-size", "128", *options, extra=PATIENT, PYTHONPATH=OTHER) as other,
    ):
        one.wait_ready(), other.wait_ready()
        assert version(one) != version(other)
        asked = prompts(LENGTHS, seed=91)
        for prefill, decode in ((one, other), (other, one)):
            expected = [decode.complete(prompt, max_tokens=MAX_TOKENS) for prompt in asked]
            moved, accepted = decode.num_moved(), decode.metric(ACCEPTED) if has_drafts else 0
            with Server.proxy(prefill, decode).wait_ready() as proxy:
                found = [proxy.complete(prompt, max_tokens=MAX_TOKENS) for prompt in asked]
            for alone, pair in zip(expected, found, strict=True):
                assert pair.tokens == alone.tokens
                assert pair.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            num_tokens = sum(length - 1 for length in LENGTHS)
            assert decode.num_moved() - moved == num_tokens
            assert decode.metric_from(LOADED, num_tokens) == num_tokens
            assert decode.metric(FAILED) == 0, decode.log()
            if has_drafts:
                assert decode.metric(ACCEPTED) - accepted == accepted > 0
