"""What shapes an SGLang request's state: the parts of its radix cache keys, in a form that other servers can compare."""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from disagg.core.errors import LocalProtocolError
from disagg.integrations.adapters import Adapters
from disagg.integrations.handoff import beginnings, prompt_digest

ELASTIC = re.compile(r"(^|\|)elastic_ep_size=\d+\Z")
"""SGLang adds it to a request's `extra_key` with elastic expert parallelism and a radix cache."""

UNREAD_OF_ADAPTERS = ("use_rslora", "rank_pattern", "alpha_pattern")
"""SGLang scales every layer of an adapter by `lora_alpha / r`."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """In `token_ids` images and other items have ids made from hashes. `embeddings` replace all ids, `replaced` is SGLang's
    `PositionalEmbeds`. `namespace` is the caller's `extra_key`.
    """

    token_ids: Sequence[int]
    adapter: Future[str] | None = None
    namespace: str = ""
    salt: str = ""
    embeddings: Any = None
    replaced: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def digest(self, num_tokens: int) -> str:
        """Waits until the adapter's files have been read."""
        return prompt_digest(self.token_ids[:num_tokens], self._beside(num_tokens))

    def beginnings(self, num_tokens: int) -> Iterator[tuple[int, str]]:
        """Those of `disagg.integrations.handoff`, of the first `num_tokens`."""
        return beginnings(self.token_ids[:num_tokens], self._beside)

    def _beside(self, num_tokens: int) -> Iterator[tuple[str, str]]:
        if self.adapter is not None:
            yield "adapter", self.adapter.result()
        if self.salt:
            yield "salt", self.salt
        if self.namespace:
            yield "extra_key", self.namespace
        if self.embeddings is not None:
            yield "embeddings", _rows_digest(self.embeddings[:num_tokens])
        if self.replaced is not None:
            yield "replaced", f"{list(self.replaced.positions)} {_rows_digest(self.replaced.embeds)}"


def prompt_of(request: Any, adapters: Adapters, paths: Any) -> Prompt:
    """`paths` are SGLang's `LoRARef` by adapter id."""
    token_ids = request.origin_input_ids
    if getattr(request, "pd_rebootstrap_in_progress", False):  # retracted: prefill also computes its output
        token_ids = array("q", [*token_ids, *request.output_ids])
    namespace, adapter = ELASTIC.sub("", request.extra_key or ""), None
    if request.lora_id is not None:
        namespace = namespace.removesuffix(request.lora_id)
        found = paths.get(request.lora_id)
        adapter = adapters.digest("" if found is None else found.lora_path or "", loaded=request.lora_id)
    return Prompt(
        token_ids=token_ids,
        adapter=adapter,
        namespace=namespace,
        salt=request.cache_salt or "",
        embeddings=request.input_embeds,
        replaced=request.positional_embed_overrides,
    )


def check_unmoved_room(request: Any) -> None:
    """Raise `LocalProtocolError` for a room that SGLang's 64 bits do not hold, if the state is not moved."""
    room = request.bootstrap_room
    if room is not None and not (isinstance(room, int) and 0 <= room < 1 << 63):
        raise LocalProtocolError(f"bootstrap_room: expected 0 to {(1 << 63) - 1}, found {room!r:.80}")


def check_tokens(request: Any, vocabulary: int) -> None:
    """Raise `LocalProtocolError` for no tokens, and ids outside the vocabulary, over which the scheduler would end. Images and
    other items may have such ids.
    """
    if not len(request.origin_input_ids):
        raise LocalProtocolError("prompt: expected at least one token, found none")
    if request.multimodal_inputs is not None or request.input_embeds is not None:
        return
    ids = np.asarray(request.origin_input_ids)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise LocalProtocolError(f"input_ids: expected 0 to {vocabulary - 1}, found {ids.min()} to {ids.max()}")


def check_logprobs(request: Any, limit: int) -> None:
    """Raise `LocalProtocolError` for more log-probabilities per token than SGLang hands over: its scheduler would end."""
    found = request.logprob.top_logprobs_num if request.return_logprob else 0
    if not (isinstance(found, int) and 0 <= found <= limit):
        raise LocalProtocolError(f"top_logprobs_num: expected 0 to {limit}, found {found!r:.80}")


def check_returned(request: Any) -> None:
    """Raise `LocalProtocolError` if decode is asked for what only prefill knows: what the prompt's tokens were routed to, which
    decode would read from its own tables, where other requests have written, and their hidden states.
    """
    length = len(request.origin_input_ids)
    if request.return_routed_experts and request.routed_experts_start_len < length:
        raise LocalProtocolError(
            f"routed_experts_start_len: expected {length}, the prompt's length, found {request.routed_experts_start_len}: "
            "decode knows the experts of its own tokens only, and prefill returns the prompt's"
        )
    if request.return_indexer_topk:
        raise LocalProtocolError("return_indexer_topk: expected false: decode knows those of its own tokens only")
    is_first = request.sampling_params.max_new_tokens is not None and request.sampling_params.max_new_tokens < 2
    if request.return_hidden_states is True or (request.return_hidden_states and is_first):
        expected = "false" if is_first else "'last' or false"
        raise LocalProtocolError(f"return_hidden_states: expected {expected}: decode has none of the prompt's tokens")


def _rows_digest(rows: Any) -> str:
    """Unique for rows in another process's GPU memory."""
    if not isinstance(rows, (torch.Tensor, list)):
        return secrets.token_hex(16)
    values = torch.as_tensor(rows, dtype=torch.float32).cpu().contiguous().numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()
