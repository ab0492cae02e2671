"""Whatever a client writes into `kv_transfer_params`: its request is computed, no other is lost, and no block stays held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg import new_request_id
from disagg.integrations.handoff import HandOff
from harness.vllm.engine import Engine
from tests.integrations.vllm.requests import prompts

KEYS = [
    *HandOff.__struct_fields__,
    "do_remote_decode",
    "do_remote_prefill",
    "remote_bootstrap_addr",
    "transfer_id",
    "first_token",
    "abort_request_id",
    "keep",
    "kept",
    "kept_request_id",
    "move_id",
    "stop_request_id",
    "is_chat",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    1.5,
    2**64 - 1,  # vLLM refuses larger ones
    float("nan"),
    [],
    {"remote_engine_id": 1},
    "no digits",
    "f" * 10_000,  # the last: an engine that has answered does not read on until its answer is read
]
LIMITS = {"hold_s": 0.3, "max_hold_s": 0.6, "load_timeout_s": 0.3, "keep_s": 0.3}


def handed_over() -> dict[str, Any]:
    """Where nobody listens."""
    where = {"remote_engine_id": "there", "remote_address": "tcp://127.0.0.1:2"}
    return {"do_remote_prefill": True, **where, "remote_request_id": new_request_id().hex(), "remote_num_tokens": 30}


FORMS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "to decode": lambda key, value: {**handed_over(), key: value},
    "to decode, of Mooncake's proxy": lambda key, value: {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://127.0.0.1:2",
        "remote_engine_id": "there@tcp://127.0.0.1:2",
        "transfer_id": new_request_id().hex(),
        key: value,
    },
    "to prefill": lambda key, value: {"do_remote_decode": True, "remote_request_id": new_request_id().hex(), key: value},
    "to prefill, with a kept request": lambda key, value: {
        "do_remote_decode": True,
        "kept": {**handed_over(), "remote_prompt": "ab", "remote_keep_s": 9.0, key: value},
    },
    "kept": lambda key, value: {"keep": True, key: value},
}


@pytest.fixture(scope="module")
def engine(model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(str(model("llama")), dtype="float32", block_size=32, extra=LIMITS) as engine:
        yield engine


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_costs_nobody_anything(key: str, engine: Engine) -> None:
    (prompt,) = prompts((40,), seed=3)
    (alone,) = engine.generate([prompt], max_tokens=3)
    asked = {
        f"{form}: {value!r:.60}": engine.add(prompt, params=make(key, value), max_tokens=3)
        for value in VALUES
        for form, make in FORMS.items()
    }
    for case, answer in zip(asked, engine.wait(asked.values()), strict=True):
        assert answer.finish_reason == "length", case
        assert answer.tokens == alone.tokens[: len(answer.tokens)], case
    (again,) = engine.generate([prompt], max_tokens=3)
    assert again.tokens == alone.tokens
    until = time.monotonic() + 60
    while engine.num_free_blocks() < engine.num_blocks - 1:
        assert time.monotonic() < until, "blocks are held"
        time.sleep(0.05)
