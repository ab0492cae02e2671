"""What of SGLang's own requests is compared."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import lora
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from disagg import LocalProtocolError
from disagg.integrations.adapters import Adapters
from disagg.integrations.sglang.prompts import (
    UNREAD_OF_ADAPTERS,
    Prompt,
    check_logprobs,
    check_returned,
    check_tokens,
    prompt_of,
)

TOKENS = array("q", range(40))


def prompt(*, paths: dict[str, LoRARef] | None = None, tokens: array[int] = TOKENS, **fields: Any) -> Prompt:
    """The prompt of a request as a server with these adapters has it."""
    return prompt_of(Req("name", "", tokens, SamplingParams(), **fields), Adapters(), paths or {})


def test_sglang_reads_no_more_of_an_adapters_configuration_than_is_known() -> None:
    sources = "".join(file.read_text() for file in Path(lora.__path__[0]).rglob("*.py"))
    assert "self.config.lora_alpha / self.config.r" in sources
    assert not [name for name in UNREAD_OF_ADAPTERS if name in sources]


def test_every_part_of_a_prompt_counts() -> None:
    rows = torch.randn(2, 40, 4).tolist()
    first, second = torch.randn(2, 1, 4)
    every = [
        prompt(),
        prompt(tokens=array("q", [*TOKENS[:-1], 2**61])),  # as SGLang writes the last token of an image
        prompt(cache_salt="x"),
        prompt(extra_key="x"),
        *(prompt(input_embeds=each) for each in rows),
        prompt(positional_embed_overrides=PositionalEmbeds(first, [3])),
        prompt(positional_embed_overrides=PositionalEmbeds(first, [4])),
        prompt(positional_embed_overrides=PositionalEmbeds(second, [3])),
    ]
    assert len({each.digest(40) for each in every}) == len(every)
    assert every[0].digest(39) == every[1].digest(39) != every[0].digest(40)
    elastic = "elastic_ep_size=8"  # as SGLang adds it to the key that a request has, if any
    assert prompt(extra_key=f"x|{elastic}").digest(40) == every[3].digest(40)
    assert prompt(extra_key=elastic).digest(40) == every[0].digest(40)
    assert prompt(extra_key=f"{elastic}|x").digest(40) not in (every[0].digest(40), every[3].digest(40))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], LoRARef]:
    """Writes an adapter, and returns what a server that has loaded it calls it."""
    numbers = itertools.count()

    def one(weights: bytes) -> LoRARef:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return LoRARef(lora_name=f"the adapter in {folder.name}", lora_path=str(folder))

    return one


def test_adapters_count_by_their_weights(write: Callable[[bytes], LoRARef]) -> None:
    """SGLang's own ids of them differ from server to server."""

    def digest(adapter: LoRARef, *, is_loaded: bool = True, **fields: Any) -> str:
        paths = {adapter.lora_id: adapter} if is_loaded else {}
        return prompt(paths=paths, lora_id=adapter.lora_id, **fields).digest(40)

    one, copy, other = write(b"one"), write(b"one"), write(b"other")
    assert digest(one) == digest(copy)
    assert digest(one, extra_key="x") == digest(copy, extra_key="x")
    unknown = [digest(one, is_loaded=False) for _ in range(2)]
    assert len({prompt().digest(40), digest(one), digest(other), digest(one, extra_key="x"), *unknown}) == 6


def test_a_retracted_request_is_computed_again_with_its_output() -> None:
    request = Req("name", "", TOKENS[:30], SamplingParams())
    request.output_ids.extend(TOKENS[30:])
    request.pd_rebootstrap_in_progress = True
    assert prompt_of(request, Adapters(), {}).digest(40) == prompt().digest(40)


@pytest.mark.parametrize(("ids", "is_refused"), [([0, 9], False), ([10], True), ([-1], True)])
def test_token_ids_that_the_model_does_not_have(ids: list[int], is_refused: bool) -> None:
    """The scheduler would end over them. Ids that SGLang makes for images are larger than its vocabulary."""
    request = SimpleNamespace(origin_input_ids=array("q", ids), multimodal_inputs=None, input_embeds=None)
    with pytest.raises(LocalProtocolError, match="input_ids: expected 0 to 9, found") if is_refused else nullcontext():
        check_tokens(request, 10)
    check_tokens(SimpleNamespace(**{**vars(request), "multimodal_inputs": object()}), 10)


def test_a_prompt_without_tokens() -> None:
    """Both schedulers would end over it."""
    request = SimpleNamespace(origin_input_ids=array("q"), multimodal_inputs=None, input_embeds=None)
    with pytest.raises(LocalProtocolError, match="prompt: expected at least one token, found none"):
        check_tokens(request, 10)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"return_routed_experts": True}, "routed_experts_start_len: expected 3"),
        ({"return_routed_experts": True, "routed_experts_start_len": 2}, "routed_experts_start_len: expected 3"),
        ({"return_routed_experts": True, "routed_experts_start_len": 3}, ""),
        ({"return_indexer_topk": True}, "return_indexer_topk: expected false"),
        ({"return_hidden_states": True}, "return_hidden_states: expected 'last' or false"),
        ({"return_hidden_states": True, "max_new_tokens": 1}, "return_hidden_states: expected false"),
        ({"return_hidden_states": "last", "max_new_tokens": 1}, "return_hidden_states: expected false"),
        ({"return_hidden_states": "last", "max_new_tokens": 2}, ""),
        ({"return_hidden_states": False, "max_new_tokens": 1}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_decode_returns_nothing_that_only_prefill_has(given: dict[str, Any], refused: str) -> None:
    """SGLang would return what other requests have left there, or leave it out."""
    options = {name: value for name, value in given.items() if name != "max_new_tokens"}
    sampling = SamplingParams(max_new_tokens=given.get("max_new_tokens", 128))
    request = Req("name", "", array("q", [4, 5, 6]), sampling, **options)
    with pytest.raises(LocalProtocolError, match=refused) if refused else nullcontext():
        check_returned(request)


@pytest.mark.parametrize(("number", "is_refused"), [(0, False), (128, False), (129, True), (-1, True), ([5], True)])
def test_numbers_of_log_probabilities_that_sglang_does_not_hand_over(number: Any, is_refused: bool) -> None:
    request = Req("name", "", TOKENS, SamplingParams(), return_logprob=True, top_logprobs_num=number)
    with pytest.raises(LocalProtocolError, match="top_logprobs_num: expected 0 to 128") if is_refused else nullcontext():
        check_logprobs(request, 128)
