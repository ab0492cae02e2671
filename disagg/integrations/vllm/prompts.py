"""What shapes a vLLM request's state: what vLLM hashes for its prefix cache, in a form that other servers can compare."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.request import Request

from disagg.integrations.adapters import Adapters
from disagg.integrations.handoff import HandOff, beginnings, prompt_digest

logger = logging.getLogger(__name__)


class Prompts:
    def __init__(self, config: VllmConfig) -> None:
        self._adapters = Adapters()
        self._item_options = _item_options(config.model_config)
        self._items_problem = _items_problem(config)
        if self._items_problem:
            logger.warning("prompts with images, audio or videos are not handed over: %s", self._items_problem)

    def is_known(self, request: Request) -> bool:
        """Whether digests can be computed. The first request of a large adapter begins to read it."""
        adapter = self._adapter(request)
        return adapter is None or adapter.done()

    def problem(self, request: Request) -> str:
        """Why other servers cannot use the request's state; empty if they can."""
        return self._items_problem if request.mm_features else ""

    def digest(self, request: Request, num_tokens: int) -> str:
        """Empty while it is unknown, which equals no digest."""
        if not self.is_known(request):
            return ""
        return prompt_digest(request.all_token_ids[:num_tokens], self._beside(request, num_tokens))

    def beginnings(self, request: Request, num_tokens: int) -> Iterator[tuple[int, str]]:
        if not self.is_known(request):
            return iter(())
        return beginnings(request.all_token_ids[:num_tokens], lambda stop: self._beside(request, stop))

    def num_common(self, request: Request, hand_off: HandOff, most: int) -> int:
        """The leading tokens, at most `most`, that a request shares with a kept one, as far as digests tell. Embeddings
        share none: no server keeps such a prompt, and each digest would read them from the start.
        """
        if request.prompt_embeds is not None:
            return 0
        return hand_off.num_common(
            most, lambda num_tokens: self.digest(request, num_tokens), lambda num_tokens: self.beginnings(request, num_tokens)
        )

    def _adapter(self, request: Request) -> Future[str] | None:
        adapter = request.lora_request
        if adapter is None:
            return None
        return self._adapters.digest(adapter.lora_path, loaded=adapter.lora_int_id, may_change=adapter.load_inplace)

    def _beside(self, request: Request, num_tokens: int) -> Iterator[tuple[str, str]]:
        """The order is that of vLLM's block hashes (`generate_block_hash_extra_keys`)."""
        adapter = self._adapter(request)
        if adapter is not None:
            yield "adapter", adapter.result()
        for item in request.mm_features:
            at = item.mm_position
            if at.offset < num_tokens:
                name = secrets.token_hex(16) if self._items_problem else item.mm_hash or item.identifier
                yield "item", f"{at.offset} {at.length} {name}{self._item_options}"
        if request.cache_salt:
            yield "salt", request.cache_salt
        if request.prompt_embeds is not None:
            rows = request.prompt_embeds[:num_tokens].contiguous().view(torch.uint8)
            yield "embeddings", hashlib.blake2b(rows.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _item_options(model: ModelConfig) -> str:
    """What shapes an item's embeddings besides what vLLM hashes; empty by default."""
    options = model.multimodal_config
    if options is None:
        return ""
    found = {"processor": options.mm_processor_kwargs, "pruning": options.get_video_pruning_spec()}
    given = {name: value for name, value in found.items() if value}
    return json.dumps(given, sort_keys=True, default=repr) if given else ""


def _items_problem(config: VllmConfig) -> str:
    model = config.model_config
    options = model.multimodal_config
    if options is None:
        return ""
    if options.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        return "without prefix caching and with --mm-processor-cache-gb 0 vLLM numbers items instead of hashing them"
    if options.is_multimodal_pruning_enabled() and model.uses_mrope:
        return "with --video-pruning-rate the positions of a prompt with items come from its encoder, which decode does not run"
    return ""
