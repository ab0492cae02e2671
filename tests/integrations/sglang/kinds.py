"""Kinds of requests that SGLang's routers are asked with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TEXT = "Prefill computes, decode answers. " * 5
OTHER = "Another prompt, longer than a page, and then some more. " * 3
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "switch", "description": "Switch it.", "parameters": SCHEMA}}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def completion(prompt: Any = TEXT, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 5, **fields}


def chat(text: Any = TEXT, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return CHAT, {"model": "model", "messages": messages, "temperature": 0, "max_completion_tokens": 5, **fields}


def generate(fields: Mapping[str, Any], **sampling: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {**fields, "sampling_params": {"temperature": 0, "max_new_tokens": 5, **sampling}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": completion(logprobs=1),
    "completion, stream": completion(stream=True, logprobs=1),
    "usage of a stream": completion(**STREAM),
    "one token": completion(max_tokens=1),
    "min_tokens": completion(min_tokens=4, max_tokens=8, stop_token_ids=list(range(0, 250, 9))),
    "stop texts": completion(max_tokens=30, stop=["a", "e", "i", "o"]),
    "stop tokens": completion(max_tokens=40, stop_token_ids=list(range(0, 250, 9))),
    "penalties": completion(presence_penalty=0.5, frequency_penalty=1.9, max_tokens=16),
    "logit_bias": completion(logit_bias={"65": 9, "66": 8}, max_tokens=6),
    "ignore_eos": completion(ignore_eos=True),
    "token ids": completion(list(range(1, 201))),
    "a long prompt": completion("x" + TEXT * 6),
    "other scripts": completion("Größe, 数量, размер, حجم, 🙂. " * 4, max_tokens=9),
    "user and unknown fields": completion(user="somebody", not_a_field=[1]),
    "a regular expression": completion(regex="[a-f]{4}", max_tokens=8),
    "a long regular expression": completion(regex="[a-f]{3}x[0-9]{24}", max_tokens=40),
    "JSON by a schema": completion(json_schema='{"type": "boolean"}', max_tokens=9),
    "chat": chat(logprobs=True, top_logprobs=2),
    "chat, stream": chat(**STREAM),
    "chat with max_tokens": chat(max_completion_tokens=None, max_tokens=6),
    "chat of several turns": chat(
        [
            {"role": "system", "content": "Be short. "},
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": "Yes. "},
            {"role": "user", "content": OTHER},
        ]
    ),
    "chat of parts": chat([{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
    "chat that stops": chat(max_completion_tokens=30, stop=["a", "e", "i", "o"]),
    "a JSON schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "switch", "schema": SCHEMA}}, max_completion_tokens=24
    ),
    "a text": generate({"text": TEXT}),
    "a text, stream": generate({"text": TEXT, "stream": True}),
    "input_ids": generate({"input_ids": list(range(1, 201))}),
    "several texts": generate({"text": [TEXT, OTHER]}),
    "several input_ids": generate({"input_ids": [list(range(1, 100)), list(range(9, 200))]}),
    "log-probabilities": generate({"text": TEXT, "return_logprob": True}),
    "a prompt that is too long": completion([7] * 9000),
    "a negative limit": completion(max_tokens=-1),
    "no prompt": (COMPLETIONS, {"model": "model"}),
    "no messages": chat([]),
}
_OF_THE_PROMPT = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
ONLY_IN_PREFILL: dict[str, tuple[str, dict[str, Any]]] = {
    "the prompt's log-probabilities": generate({"text": TEXT, **_OF_THE_PROMPT}),
    "the prompt's log-probabilities, stream": generate({"text": TEXT, "stream": True, **_OF_THE_PROMPT}),
    "the prompts' log-probabilities": generate({"text": [TEXT, OTHER], **_OF_THE_PROMPT}),
    "log-probabilities of chosen tokens": generate({"text": TEXT, **_OF_THE_PROMPT, "token_ids_logprob": [65, 66]}),
}
"""What prefill's answer has, and decode's has not."""
OF_ITS_OWN = {"token ids", "several texts", "a prompt that is too long", "a negative limit", "no prompt"}
"""What sglang-router refuses before a server sees it: its schema has neither token ids in `prompt` nor lists in `text`."""
