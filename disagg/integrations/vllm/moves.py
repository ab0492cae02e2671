"""Running requests that move to another server: this one stops them, and keeps what it has computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from disagg.integrations.handoff import problem_of_id

HANDED_OVER = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Sampling parameters that keep their meaning when an answer is continued."""
WITHOUT_EFFECT = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""These must have no effect. The other server gets them because its defaults may differ."""
COUNTED = ("max_tokens", "min_tokens")
OF_THE_FORM = (
    *("stop", "include_stop_str_in_output", "logprobs", "flat_logprobs", "logprob_token_ids", "detokenize", "output_kind"),
    *("stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"),
)
"""These concern the answer's form, which is the proxy's task."""
CHECKED = ("seed", "extra_args", "watermarking")
DEFAULTS = SamplingParams()


class Moves:
    """Requests with a `move_id` that have not ended."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._running: dict[str, list[Request]] = {}
        """By `move_id`. Several answers to one prompt share one, and stay until all have ended."""
        self._stopped: dict[str, int] = {}
        """The original `max_tokens` of stopped requests, by `move_id`."""
        self._told: dict[str, dict[str, Any]] = {}

    def add(self, request: Request, *, reason: str) -> None:
        """Note a new request, and stop the one that it names. `reason`: why this server keeps nothing, if so."""
        params = request.kv_transfer_params or {}
        if move_id := params.get("move_id"):
            self._running.setdefault(str(move_id), []).append(request)
        if move_id := params.get("stop_request_id"):
            self._told[request.request_id] = self._stop(str(move_id), reason, is_chat=bool(params.get("is_chat")))

    def remove(self, request: Request) -> tuple[str, dict[str, Any] | None]:
        """Returns the id by which the request is kept if it was stopped, and its answer if it stopped another."""
        told = self._told.pop(request.request_id, None)
        move_id = str((request.kv_transfer_params or {}).get("move_id") or "")
        requests = self._running.get(move_id, [])
        if request not in requests:
            return "", told
        if request.status == RequestStatus.FINISHED_ABORTED:
            requests.remove(request)  # the proxy may have sent it again before this end
        if not all(each.is_finished() for each in requests):
            return "", told
        del self._running[move_id]
        max_tokens = self._stopped.pop(move_id, 0)
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED and request.num_output_tokens < max_tokens
        return (move_id if is_cut and request.num_tokens < self._config.model_config.max_model_len else ""), told

    def _stop(self, move_id: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
        """End a request after the current step, unless it cannot continue elsewhere unchanged."""
        requests = self._running.get(move_id, [])
        if len(requests) != 1:
            several = "several answers have this move_id: one cannot be continued alone"
            return {"not_stopped": several if requests else "this server does not compute it, or not any more"}
        (request,) = requests
        if reason := reason or problem_of_id(move_id, "move_id") or next(self._reasons(request, is_chat=is_chat), ""):
            return {"not_stopped": reason}
        params, num_coming = request.sampling_params, max(1, request.num_output_placeholders)
        if request.num_tokens + num_coming >= self._config.model_config.max_model_len:
            return {"not_stopped": "it ends with this step, at the server's longest answer"}
        max_tokens = self._stopped.setdefault(move_id, request.max_tokens)
        # Steps under way still bring tokens. vLLM schedules none beyond `max_tokens`.
        request.max_tokens = min(max_tokens, request.num_output_tokens + num_coming)
        counted = {"max_tokens": max_tokens, "min_tokens": params.min_tokens}
        left_out = {"left_out_token_ids": self._special_tokens if params.skip_special_tokens else []}
        return {"stopped": {name: getattr(params, name) for name in HANDED_OVER + WITHOUT_EFFECT} | counted | left_out}

    @cached_property
    def _special_tokens(self) -> list[int]:
        """Tokens without text in an answer: the proxy needs them to continue a text. vLLM has read the tokenizer."""
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        if tokenizer is None:
            return []
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return sorted({*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)})

    def _reasons(self, request: Request, *, is_chat: bool) -> Iterator[str]:
        params, config = request.sampling_params, self._config
        if params is None or request.resumable or request.prompt_embeds is not None:
            yield "it is not a prompt of tokens whose answer is generated"
            return
        if request.mm_features:
            yield "a prompt of tokens cannot name its images, videos or audio"
        if params.seed is not None and params.temperature > 0:
            yield "seed: its random numbers cannot be continued"
        if (params.extra_args or {}).keys() - {"kv_transfer_params"}:
            yield f"other parameters: {', '.join(sorted(params.extra_args))}"
        known = {*HANDED_OVER, *COUNTED, *OF_THE_FORM, *CHECKED}
        for name in params.__struct_fields__:
            if name not in known and not name.startswith("_") and not _is_default(name, getattr(params, name)):
                yield f"{name}: it depends on where the prompt ends"
        if config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
            yield "the server has logits processors of its own"
        if config.watermark_config is not None:
            yield "the server marks its answers"
        if is_chat and (config.structured_outputs_config.reasoning_parser or _is_harmony(config)):
            yield "the server parses its answers to chats"


def _is_default(name: str, value: Any) -> bool:
    """Parameters are compared as text, since some are arrays."""
    return str(value) in ("None", "[]", str(getattr(DEFAULTS, name)))


def _is_harmony(config: VllmConfig) -> bool:
    return bool(config.model_config.hf_config.model_type == "gpt_oss")
