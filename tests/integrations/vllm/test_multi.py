"""The connector inside vLLM's `MultiConnector`, beside others that store the cache in host memory or in files."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.servers import OURS, Server
from harness.vllm.engine import PREFILL, Engine
from harness.vllm.offloading import OFFLOADING
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts, wait_empty

LENGTHS = (40, 149, 500)
BLOCK = 32
HITS = "vllm:prompt_tokens_cached_by_source_total"


def in_memory(_: Path) -> dict[str, Any]:
    """VLLM's cache in host memory."""
    return OFFLOADING


def in_files(folder: Path) -> dict[str, Any]:
    """VLLM's cache in a folder."""
    folder.mkdir()
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("other", [in_memory, in_files])
def test_beside_another_connector(
    start: Callable[..., Engine], tmp_path: Path, other: Callable[[Path], dict[str, Any]]
) -> None:
    """In both orders on decode. A prompt that the other connector has stored is loaded by whichever comes first."""

    def begin(name: str, *, is_first: bool) -> Engine:
        pair = [OURS, other(tmp_path / name)]
        children = pair if is_first else pair[::-1]
        return start(connector="MultiConnector", extra={"connectors": children}, block_size=BLOCK)

    prefill, first, last = begin("prefill", is_first=True), begin("first", is_first=True), begin("last", is_first=False)
    asked = prompts(LENGTHS, seed=40)
    whole_blocks = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    expected = prefill.wait_ready().generate(asked, max_tokens=6)
    for decode in (first.wait_ready(), last.wait_ready()):
        found = hand_over(prefill, decode, asked, max_tokens=6)
        check_equal(expected, found)
        assert num_external(found) == [length - 1 for length in LENGTHS]
        wait_empty(prefill, decode)  # also what is saved behind the answer
        again = hand_over(prefill, decode, asked, max_tokens=6)
        check_equal(expected, again)
        assert num_external(again) == (num_external(found) if decode is first else whole_blocks)
        wait_empty(prefill, decode)
        assert decode.counts["loads"] == len(LENGTHS) * (2 if decode is first else 1)
        assert decode.counts["failed_loads"] == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_are_copied_to_the_host_before_a_load_fills_them(start: Callable[..., Engine], is_first: bool) -> None:
    """A request waits for blocks, and gets those of one that has just ended, which are still being copied."""
    pair = [OURS, OFFLOADING]
    prefill = start(block_size=BLOCK)
    decode = start(
        connector="MultiConnector",
        extra={"connectors": pair if is_first else pair[::-1]},
        block_size=BLOCK,
        blocks=16,
        max_model_len=448,
    )
    ended, loaded, before = prompts((5 * BLOCK + 2, 10 * BLOCK + 8, 40), seed=43)
    hand_over(prefill.wait_ready(), decode.wait_ready(), [before], max_tokens=2)  # so that they are connected
    (told,) = prefill.generate([loaded], params=PREFILL)
    first = decode.add(ended, max_tokens=2)
    second = decode.add(loaded, params=told.params, max_tokens=6)
    answer, _ = decode.wait([first, second])
    decode.settle()
    again = [*ended, *answer.tokens, 7, 8]
    (expected,) = prefill.generate([again], max_tokens=6)
    (found,) = decode.generate([again], max_tokens=6)
    assert found.num_external > 0, "nothing was taken from the host"
    check_equal([expected], [found])
    assert decode.counts["loads"] == 2


def test_pipeline_stages_beside_another_connector(start: Callable[..., Engine]) -> None:
    """With stages the addresses of all go to all connectors, and this other one refuses those of later stages."""
    both = {"connectors": [OURS, OFFLOADING]}
    prefill = start(connector="MultiConnector", extra=both, pipeline_parallel_size=2)
    decode = start(connector="MultiConnector", extra=both, block_size=64)
    asked = prompts(LENGTHS, seed=41)
    expected = prefill.wait_ready().generate(asked, max_tokens=6)
    found = hand_over(prefill, decode.wait_ready(), asked, max_tokens=6)
    check_equal(expected, found)
    assert num_external(found) == [length - 1 for length in LENGTHS]
    wait_empty(prefill, decode)


@pytest.mark.parametrize(("outer", "inner"), [("recompute", "fail"), ("fail", "recompute")])
def test_the_outer_policy_decides(start: Callable[..., Engine], outer: str, inner: str) -> None:
    """What becomes of a failed load: decode computes the request, or ends it with an error."""
    prefill = start(block_size=BLOCK)
    children = [{**OURS, "kv_load_failure_policy": inner}, OFFLOADING]
    policy = {"kv_load_failure_policy": outer}
    decode = start(connector="MultiConnector", extra={"connectors": children}, transfer=policy, block_size=64)
    (prompt,) = prompts((149,), seed=42)
    (first,) = prefill.wait_ready().generate([prompt], params=PREFILL)
    decode.wait_ready()
    prefill.kill()
    found, alone = decode.generate([prompt], params=first.params, max_tokens=6), decode.generate([prompt], max_tokens=6)
    assert decode.counts["failed_loads"] == 1
    assert (found[0].num_external, found[0].finish_reason) == (0, "length" if outer == "recompute" else "error")
    if outer == "recompute":
        check_equal(alone, found)
    wait_empty(decode)


def wait_logged(server: Server, text: str) -> str:
    """The log of a server once it has this text. Statistics are printed every 10 s."""
    until = time.monotonic() + 60
    while text not in (log := server.log(length=1 << 20)):
        assert time.monotonic() < until, log[-3000:]
        time.sleep(0.2)
    return log


def test_servers(model: Callable[[str], Path]) -> None:
    """They print statistics, and no line for a request that was served. A request whose load fails ends with an error here, and
    the server goes on. vLLM counts failed loads as hits, also by the source of hits, but not as tokens that have arrived.
    """
    children = [{**OURS, "kv_load_failure_policy": "recompute"}, OFFLOADING]
    config: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    config["kv_connector_extra_config"] = {"connectors": children}
    options = ("--kv-transfer-config", json.dumps(config), "--block-size")
    with (
        Server.vllm(model("llama"), *options, "32", VLLM_LOGGING_LEVEL="INFO") as prefill,
        Server.vllm(model("llama"), *options, "64", VLLM_LOGGING_LEVEL="INFO") as decode,
    ):
        asked = prompts((*LENGTHS, 70), seed=41)
        expected = [prefill.wait_ready().complete(prompt).tokens for prompt in asked]
        decode.wait_ready()
        params = []
        for prompt in asked:
            with prefill.ask(prompt, max_tokens=1, kv_transfer_params=PREFILL) as answer:
                params.append(json.load(answer)["kv_transfer_params"])
        found = [
            decode.complete(prompt, kv_transfer_params=each).tokens for prompt, each in zip(asked, params[:-1], strict=False)
        ]
        assert found == expected[:-1]
        num_tokens = sum(length - 1 for length in LENGTHS)
        assert decode.num_moved() == num_tokens
        assert decode.metric(HITS, label='source="p2p"') == num_tokens
        for server in (prefill, decode):
            assert "outcome=" not in wait_logged(server, "DisaggConnector={")
        prefill.kill()
        with pytest.raises(urllib.error.HTTPError, match="500"):
            decode.complete(asked[-1], stream=False, kv_transfer_params=params[-1])
        assert decode.metric_from("vllm:disagg_failed_loads_total", 1) == 1
        assert decode.complete(asked[-1]).tokens == expected[-1]
        assert decode.metric("vllm:kv_cache_usage_perc") == 0
        assert decode.num_moved() == num_tokens
        assert decode.metric("vllm:external_prefix_cache_hits_total") == num_tokens + 69
        assert decode.metric(HITS, label='source="p2p"') == num_tokens + 69
