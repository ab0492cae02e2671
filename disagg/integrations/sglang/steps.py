"""What decode's steps would do otherwise than those of one SGLang server, because the first token came from prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch

SETTLED = "disagg_settled"
"""Marks requests of which SGLang knows the last token a step early."""


def penalize(original: Callable[[Any], None], batch: Any) -> None:
    """Count each token once. With overlap SGLang counts a token a step after it was sampled, and in a request's first step the
    prompt's last token; decode, which has the first token by then, would count that one in two steps. So it would the last one
    after `settle`. A prompt may end in an image's placeholder, which SGLang would count and end over: then the first token is
    counted twice.
    """
    early = [
        each
        for each in batch.reqs
        if batch.enable_overlap
        and (_is_at_start(each) or getattr(each, SETTLED, False))
        and (len(each.output_ids) > 1 or each.origin_input_ids[-1] < batch.model_config.vocab_size)
    ]
    taken = [(request, request.output_ids.pop()) for request in early]
    try:
        original(batch)
    finally:
        for request, token in taken:
            request.output_ids.append(token)
            setattr(request, SETTLED, False)


def _is_at_start(request: Any) -> bool:
    return request.decode_batch_idx == 0 and len(request.output_ids) > 0


def _counted(batch: Any, request: Any) -> list[int]:
    """The tokens that steps before a retraction have counted, without those that `penalize` counts in the next ones."""
    output = list(request.output_ids)
    if len(output) < 2 or not batch.enable_overlap:
        return output[:-1]
    last = request.origin_input_ids[-1]
    return [last if last < batch.model_config.vocab_size else output[0], *output[:-2]]


@dataclass
class _Requests:
    """What SGLang's penalties read of a batch."""

    reqs: list[Any]
    device: Any


def _count_again(batch: Any) -> None:
    """SGLang counts for penalties and `min_new_tokens` from nothing once a retracted request is back. They stay in their order,
    which counts: some are subtracted, one is a factor.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    if not penalties.is_required or not batch.spec_algorithm.is_none():  # draft models: SGLang counts some of the tokens
        return
    if not any(len(request.output_ids) > 1 for request in batch.reqs):
        return
    parts = [_Requests([request], batch.device) for request in batch.reqs]
    counts = [type(penalties)(penalties.vocab_size, part, tuple(penalties.penalizers)) for part in parts]
    for request, count in zip(batch.reqs, counts, strict=True):
        tokens = _counted(batch, request) if count.is_required else []
        for token in torch.tensor(tokens, dtype=torch.int64, device=batch.device).split(1) if tokens else ():
            count.cumulate_output_tokens(token)
    found = counts[0]
    for request, count in zip(batch.reqs[1:], counts[1:], strict=True):
        found.merge(count)  # reads the requests that it has so far
        parts[0].reqs.append(request)
    found.batch = batch
    batch.sampling_info.penalizer_orchestrator = found


def restore(original: Callable[..., None], batch: Any, *given: Any, **named: Any) -> None:
    """A retracted request is back with its penalties, and grammars have taken the first token. Those of llguidance and outlines
    do not note it, and would take a retracted request's last token twice.
    """
    original(batch, *given, **named)
    _count_again(batch)
    for request in batch.reqs:
        if request.grammar is not None and request.grammar.current_token is None:
            request.grammar.current_token = request.output_ids[-1]


def keep_output(original: Callable[[Any], None], request: Any) -> None:
    """SGLang forgets the output of a retracted request with `input_embeds`, which would start over. Decode restores its saved
    state, with the output's. What the output's tokens were routed to is in no saved state, so a request that returns it fails.
    """
    embeddings = request.input_embeds
    if request.kv.retraction_backup is not None:
        request.input_embeds = None
    try:
        original(request)
    finally:
        request.input_embeds = embeddings
    if request.return_routed_experts and len(request.output_ids) > 0:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        message = "return_routed_experts: the request was retracted, and its first tokens' experts are not known any more"
        request.to_finish = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE)


def settle(original: Callable[[Any, Any], Any], scheduler: Any, batch: Any) -> Any:
    """Process the result of the step under way before SGLang may retract requests. It copies a recurrent state as that step
    leaves it, which has taken the last known token, and drops the step's result; so the request would take this token twice.
    """
    has_result = scheduler.enable_overlap and getattr(scheduler, "result_queue", None)
    if has_result and _has_recurrent_state(scheduler) and (_is_test(scheduler) or not batch.check_decode_mem()):
        before = {request: len(request.output_ids) for request in batch.reqs}
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = None  # of which the loop would process the result
        for request, count in before.items():
            setattr(request, SETTLED, len(request.output_ids) > count)
    return original(scheduler, batch)


def _has_recurrent_state(scheduler: Any) -> bool:
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    return isinstance(scheduler.req_to_token_pool, HybridReqToTokenPool)


def _is_test(scheduler: Any) -> bool:
    """SGLang retracts every so many steps if its own variable says so."""
    from sglang.srt.managers import scheduler as module

    return bool(module.TEST_RETRACT and scheduler.forward_ct % module.TEST_RETRACT_INTERVAL == 0)
