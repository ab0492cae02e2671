"""Decode's steps after a first token that came from prefill, with SGLang's own requests and batches."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import Req, RetractionBackup, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from disagg.integrations.sglang.steps import keep_output, penalize, restore, settle

PROMPT, ANSWER = [4, 5, 6], [11, 12, 13, 14]


def request(**given: Any) -> Req:
    return Req("name", "", array("q", PROMPT), SamplingParams(), **given)


def counted(request: Req, *, overlap: bool, is_decode: bool) -> int:
    """The token that SGLang counts for its penalties before the next step."""
    found: list[torch.Tensor] = []
    orchestrator = SimpleNamespace(cumulate_output_tokens=found.append)
    batch: Any = SimpleNamespace(
        reqs=[request],
        enable_overlap=overlap,
        device="cpu",
        model_config=SimpleNamespace(vocab_size=100),
        sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator),
    )
    count = ScheduleBatch.cumulate_penalty_output_tokens
    penalize(count, batch) if is_decode else count(batch)
    request.decode_batch_idx += 1
    return int(found[0].item())


@pytest.mark.parametrize("overlap", [True, False])
def test_each_token_is_penalized_once_as_by_one_server(overlap: bool) -> None:
    """With overlap a step begins before the one before it has told its token."""
    alone, handed_over = request(), request()
    handed_over.output_ids.append(ANSWER[0])  # by prefill
    expected, found = [], []
    if not overlap:
        alone.output_ids.append(ANSWER[0])
    for step, token in enumerate(ANSWER[1:]):
        expected.append(counted(alone, overlap=overlap, is_decode=False))
        found.append(counted(handed_over, overlap=overlap, is_decode=True))
        alone.output_ids.append(ANSWER[step] if overlap else token)
        if step > 0 or not overlap:
            handed_over.output_ids.append(ANSWER[step] if overlap else token)
    assert found == expected == ([PROMPT[-1], *ANSWER[:2]] if overlap else ANSWER[:3])
    assert handed_over.output_ids.tolist() == ANSWER[: 3 if overlap else 4]


def test_a_placeholder_at_the_end_of_a_prompt_is_not_penalized() -> None:
    """SGLang's ids for images lie beyond the vocabulary, and its tables of penalties end with that."""
    handed_over = request()
    handed_over.origin_input_ids[-1] = 1_000_007
    handed_over.output_ids.append(ANSWER[0])
    assert counted(handed_over, overlap=True, is_decode=True) == ANSWER[0]
    assert handed_over.output_ids.tolist() == ANSWER[:1]


def test_a_token_that_is_known_a_step_early_is_penalized_once() -> None:
    """After `settle`, in a request that stays."""
    stays = request()
    stays.decode_batch_idx = 5
    stays.output_ids.append(ANSWER[0])
    assert counted(stays, overlap=True, is_decode=True) == ANSWER[0]
    stays.output_ids.append(ANSWER[1])  # of the step before the one under way
    decode: Any = SimpleNamespace(
        enable_overlap=True,
        result_queue=deque([(object(), ANSWER[2])]),
        req_to_token_pool=object.__new__(HybridReqToTokenPool),
        process_batch_result=lambda _, token: stays.output_ids.append(token),
        forward_ct=1,
    )
    settle(lambda *_: None, decode, SimpleNamespace(check_decode_mem=lambda: False, reqs=[stays]))
    assert stays.output_ids.tolist() == ANSWER[:3]
    assert counted(stays, overlap=True, is_decode=True) == ANSWER[1]
    assert counted(stays, overlap=True, is_decode=True) == ANSWER[2]


LONG = [*ANSWER, *range(20, 30)]
KINDS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}
PENALTIES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.5, "min_new_tokens": 3},
    {},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
)


class Batch:
    """To which there are weak references."""

    sampling_info: Any


def prebuilt(requests: list[Req], *, overlap: bool) -> Any:
    """A batch of requests that a decode server has just got, as SGLang makes it."""
    batch = Batch()
    batch.__dict__ |= {
        "reqs": requests,
        "enable_overlap": overlap,
        "device": "cpu",
        "model_config": SimpleNamespace(vocab_size=100),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "sampling_info": SimpleNamespace(),
    }
    batch.sampling_info.penalizer_orchestrator = BatchedPenalizerOrchestrator(100, batch, KINDS)
    return batch


def penalized(batch: Any, num_steps: int) -> list[torch.Tensor]:
    """Logits after the penalties of each of the next steps."""
    found = []
    for _ in range(num_steps):
        penalize(ScheduleBatch.cumulate_penalty_output_tokens, batch)
        logits = torch.linspace(-1, 1, 100).repeat(len(batch.reqs), 1)
        batch.sampling_info.penalizer_orchestrator.apply(logits)
        found.append(logits)
        for each in batch.reqs:
            each.decode_batch_idx += 1
            if each.decode_batch_idx > 1 or not batch.enable_overlap:  # else no result is known yet
                each.output_ids.append(LONG[len(each.output_ids)])
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_retracted_requests_are_penalized_as_if_they_had_stayed(num_tokens: int, overlap: bool) -> None:
    def batch_of(count: int) -> Any:
        requests = [request() for _ in PENALTIES]
        for each, given in zip(requests, PENALTIES, strict=True):
            each.sampling_params = SamplingParams(**given)
            each.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
            each.output_ids = array("q", ANSWER[:count])
        return prebuilt(requests, overlap=overlap)

    stayed, back = batch_of(1), batch_of(num_tokens)
    restore(lambda _: None, stayed)
    expected = penalized(stayed, num_tokens + 3)[num_tokens - 1 :]
    restore(lambda _: None, back)
    for one, other in zip(penalized(back, 4), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert back.sampling_info.penalizer_orchestrator.batch is back


def test_a_grammar_takes_the_last_token_of_a_retracted_request_once() -> None:
    """Those of llguidance and outlines note no token by themselves; SGLang takes it again where none is noted."""
    one, other = request(), request()
    grammar = one.grammar = BaseGrammarObject()
    for each in (one, other):
        each.output_ids.append(ANSWER[0])
    restore(lambda _: None, prebuilt([one, other], overlap=True))
    assert grammar.current_token == ANSWER[0]
    one.output_ids.append(ANSWER[1])
    restore(lambda _: None, prebuilt([one], overlap=True))
    assert grammar.current_token == ANSWER[0]


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_retracted_request_with_embeddings_keeps_its_output_with_its_state(is_saved: bool) -> None:
    """SGLang forgets it, since one server starts over. So does decode's, if prefill computes the state again."""
    retracted = request(input_embeds=[[0.0]] * len(PROMPT))
    retracted.output_ids.extend(ANSWER)
    retracted.kv.retraction_backup = RetractionBackup(cpu_tensors=[], mamba_cpu=None) if is_saved else None
    keep_output(Req.reset_for_retract, retracted)
    assert retracted.output_ids.tolist() == (ANSWER if is_saved else [])
    assert retracted.input_embeds is not None
    assert retracted.is_retracted


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_retracted_request_that_returns_experts_fails_if_it_has_an_answer(num_tokens: int) -> None:
    """They lie by the rows that its tokens had before."""
    retracted = request(return_routed_experts=True, routed_experts_start_len=len(PROMPT))
    retracted.output_ids.extend(ANSWER[:num_tokens])
    keep_output(Req.reset_for_retract, retracted)
    if not num_tokens:
        assert retracted.to_finish is None
        return
    retracted.update_finish_state()
    assert retracted.finished()
    assert "experts are not known any more" in retracted.finished_reason.to_json()["message"]


def state_after(tokens: Iterable[int]) -> int:
    """A recurrent state."""
    return functools.reduce(lambda state, token: 31 * state + token, tokens, 0)


class Decode:
    """Decode with one request and overlap: a step's result is processed after the next one was launched."""

    enable_overlap, forward_ct = True, 1

    def __init__(self, *, is_recurrent: bool) -> None:
        self.tokens, self.state = [*PROMPT, ANSWER[0]], state_after(PROMPT)
        self.result_queue: deque[tuple[Any, int]] = deque()
        self.last_batch: Any = None
        self.req_to_token_pool = object.__new__(HybridReqToTokenPool) if is_recurrent else object()

    def launch(self, token: int) -> None:
        self.state = 31 * self.state + self.tokens[-1]
        self.last_batch = object()
        self.result_queue.append((self.last_batch, token))

    def process_batch_result(self, _: Any, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("is_test", [False, True])
@pytest.mark.parametrize(("is_recurrent", "is_full"), [(True, True), (True, False), (False, True)])
def test_a_recurrent_state_is_saved_with_the_tokens_that_it_has(
    is_recurrent: bool, is_full: bool, is_test: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang saves it as the step under way leaves it, and the tokens as the step before has told them."""
    monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT", is_test)
    monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT_INTERVAL", 1)
    decode = Decode(is_recurrent=is_recurrent)
    batch = SimpleNamespace(check_decode_mem=lambda: not is_full, reqs=[request()])
    settle(lambda *_: None, decode, batch)  # nothing is under way
    decode.launch(ANSWER[1])
    settle(lambda *_: None, decode, batch)
    may_retract = is_recurrent and (is_full or is_test)
    assert (decode.last_batch is None) is (not decode.result_queue) is may_retract
    assert (decode.state == state_after(decode.tokens[:-1])) is may_retract
    decode.enable_overlap = False
    settle(lambda *_: None, decode, SimpleNamespace())
