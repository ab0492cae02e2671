"""Chats with images: a prompt's state is taken for the same images only, and decode runs no vision tower for it."""

from __future__ import annotations

import json
import string
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from harness.servers import Reply, Server
from harness.vllm.engine import PREFILL
from harness.vllm.images import NUM_IMAGE_TOKENS, VISION_IMPORTS, message, write_image_model

LETTERS = [sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in string.ascii_lowercase]
CHATS: dict[str, tuple[str | int, ...]] = {
    "one": ("What is ", 1, " here?"),
    "of two, the other one": ("What is ", 2, " here?"),
    "two": ("This is ", 1, ", and this ", 2, "; compare."),
    "two, the other way round": ("This is ", 2, ", and this ", 1, "; compare."),
    "first": (3, "describes itself in many words, which follow, and go on for some time."),
    "last": ("Many words come before the image, which is here: ", 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("model") / "images")


def begin(folder: Path, *options: str) -> Server:
    patient = {"connection_limits": {"heartbeat_timeout_s": 30.0}}
    parts = ("--chat-template-content-format", "openai")
    return Server.vllm(folder, *parts, *options, extra=patient, PYTHONPATH=VISION_IMPORTS)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill at TP 1 with blocks of 32, decode at TP 2 with blocks of 64, and the proxy, which keeps turns."""
    with (
        begin(folder, "--block-size", "32") as prefill,
        begin(folder, "--tensor-parallel-size", "2", "--block-size", "64") as decode,
        Server.proxy(prefill, decode, "--keep") as proxy,
    ):
        yield prefill.wait_ready(), decode.wait_ready(), proxy.wait_ready()


def ask(server: Server, messages: Sequence[dict[str, Any]], **fields: Any) -> Any:
    """The body of a greedy answer of twelve letters, whose text is split into the same tokens again."""
    body = {"model": "model", "messages": messages, "temperature": 0, "ignore_eos": True, "max_completion_tokens": 12}
    body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "allowed_token_ids": LETTERS, **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def chat(server: Server, messages: Sequence[dict[str, Any]], **fields: Any) -> tuple[Reply, str, int]:
    """The answer, its text, and the number of prompt tokens."""
    found = ask(server, messages, **fields)
    (choice,) = found["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return Reply(choice["token_ids"], logprobs, 0.0), choice["message"]["content"], found["usage"]["prompt_tokens"]


def check_equal(found: Reply, expected: Reply) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_prompts_with_images_are_handed_over(servers: tuple[Server, Server, Server]) -> None:
    _, decode, proxy = servers
    answers = {}
    for name, parts in CHATS.items():
        expected, _, length = chat(decode, [message(*parts)])
        moved = decode.num_moved()
        found, _, _ = chat(proxy, [message(*parts)])
        check_equal(found, expected)
        assert (name, decode.num_moved() - moved) == (name, length - 1)
        answers[name] = tuple(found.logprobs)
    assert len(set(answers.values())) == len(CHATS)  # each depends on its images, and on their order
    assert decode.metric("vllm:disagg_failed_loads_total") == 0


def test_a_turn_with_another_image_takes_the_turn_before(servers: tuple[Server, Server, Server]) -> None:
    prefill, decode, proxy = servers
    first = [message("What is ", 5, " here?")]
    _, said, length = chat(proxy, first)
    second = [*first, {"role": "assistant", "content": said}, message("And is ", 6, " another?")]
    expected, _, _ = chat(decode, second)
    taken = prefill.num_moved()
    found, _, _ = chat(proxy, second)
    check_equal(found, expected)
    assert prefill.num_moved() - taken > length > NUM_IMAGE_TOKENS


def test_a_kept_turn_is_taken_for_its_own_image_only(servers: tuple[Server, Server, Server]) -> None:
    prefill, decode, _ = servers
    for image, is_taken in ((7, False), (8, True)):
        kept = {"keep": True}
        found = ask(decode, [message("The text is the same: ", 8, " and ends alike.")], kv_transfer_params=kept)
        said, given = found["choices"][0]["message"]["content"], found["kv_transfer_params"]["kept"]
        second = [message("The text is the same: ", image, " and ends alike."), {"role": "assistant", "content": said}]
        second += [message("What now?")]
        expected, _, _ = chat(decode, second)
        before = prefill.num_moved()
        answer, _, _ = chat(prefill, second, kv_transfer_params={"kept": given})
        check_equal(answer, expected)
        assert (prefill.num_moved() > before) is is_taken


def test_images_that_vllm_counts_instead_of_hashing_are_not_handed_over(folder: Path) -> None:
    with begin(folder, "--mm-processor-cache-gb", "0").wait_ready() as server:
        for parts, is_handed_over in ((("What is ", 1), False), (("What is it?",), True)):
            asked = [message(*parts)]
            params = ask(server, asked, kv_transfer_params=PREFILL, max_completion_tokens=1)["kv_transfer_params"]
            assert params["do_remote_prefill"] is is_handed_over
            params = ask(server, asked, kv_transfer_params={"keep": True})["kv_transfer_params"]
            assert bool(params and params.get("kept")) is is_handed_over
