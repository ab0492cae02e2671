"""Chats with images on real SGLang servers. Decode computes no prompt: it answers by prefill's state or not at all."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from harness.servers import Server
from harness.vllm.images import message, write_image_model

OPTIONS = ("--enable-multimodal", "--page-size", "16")
CHATS: Sequence[tuple[str | int, ...]] = (
    ("What is ", 1, " here?"),
    ("What is ", 2, " here?"),
    ("This is ", 1, ", and this ", 2, "; compare."),
    ("This is ", 2, ", and this ", 1, "; compare."),
    (3, "describes itself in many words."),
    ("Many words come before the image: ", 3),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server, Server]]:
    """One undivided server, prefill, decode, and the proxy."""
    folder = write_image_model(tmp_path_factory.mktemp("model") / "images")
    with ExitStack() as stack:
        alone, prefill, decode = (
            stack.enter_context(Server.sglang(folder, *OPTIONS, mode=mode)) for mode in (None, "prefill", "decode")
        )
        proxy = stack.enter_context(Server.proxy(prefill, decode))
        for server in (alone, prefill, decode, proxy):
            server.wait_ready()
        yield alone, prefill, decode, proxy


def ask(server: Server, parts: Sequence[str | int], **fields: Any) -> tuple[str, list[float]]:
    """The text and the log-probabilities of a greedy answer."""
    body = {"model": "model", "messages": [message(*parts)], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps({**body, "logprobs": True, **fields}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["message"]["content"], [each["logprob"] for each in choice["logprobs"]["content"]]


def test_prompts_with_images_are_handed_over(servers: tuple[Server, Server, Server, Server]) -> None:
    """One by one, then all at once, when prefill has them in its prefix cache."""
    alone, _, _, proxy = servers
    expected = [ask(alone, parts) for parts in CHATS]
    assert len({tuple(logprobs) for _, logprobs in expected}) == len(CHATS)  # each depends on its images, and on their order
    with ThreadPoolExecutor(len(CHATS)) as pool:
        for found in ([ask(proxy, parts) for parts in CHATS], list(pool.map(lambda parts: ask(proxy, parts), CHATS))):
            assert [text for text, _ in found] == [text for text, _ in expected]
            for (_, ours), (_, theirs) in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)


def test_the_state_of_another_image_is_not_taken(servers: tuple[Server, Server, Server, Server]) -> None:
    _, prefill, decode, _ = servers
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 2**40 + 7}
    with ThreadPoolExecutor() as pool:
        prefilling = pool.submit(ask, prefill, CHATS[0], **place)
        with pytest.raises(urllib.error.HTTPError) as found:
            ask(decode, CHATS[1], **place)
        assert found.value.code == 500
        assert "items" in found.value.read().decode()
        prefilling.exception()
