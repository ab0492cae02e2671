"""SGLang's own metadata buffers: what a draft model on one side, or on both, gets from prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import MetadataBuffers as SGLangBuffers

from disagg import ConfigError, RemoteProtocolError
from disagg.integrations.sglang.host import check_buffers
from disagg.integrations.sglang.payload import MetadataBuffers, check_metadata, write_first_token

SEED = 8
"""The width of the sparse top-k that GLM-5 hands to its MTP layer."""
HIDDEN = 32


def buffers(hidden_size: int) -> SGLangBuffers:
    return SGLangBuffers(4, hidden_size, torch.float32, 16, output_dsa_topk_indices_dim=SEED)


def rows(given: SGLangBuffers, *, unread: tuple[int, ...] = ()) -> MetadataBuffers:
    pointers, _, row_nbytes = given.get_buf_infos()
    return MetadataBuffers(pointers, row_nbytes, unread)


def prefilled(*, seed: list[int] | None, has_draft: bool = True) -> SGLangBuffers:
    """Prefill's buffers, of which SGLang has filled the second row."""
    found = buffers(HIDDEN if has_draft else 16)
    request: Any = SimpleNamespace(
        metadata_buffer_index=1, output_ids=[5], cached_tokens=0, cached_tokens_device=0, cached_tokens_host=0,
        cached_tokens_storage=0, get_mm_token_counts=lambda: (0, 0, 0), return_logprob=False, return_sampling_mask=False,
        hidden_states_tensor=torch.arange(HIDDEN, dtype=torch.float32) if has_draft else None,
        output_topk_p=torch.tensor([0.25]), output_topk_index=torch.tensor([7]), bootstrap_room=9,
        output_dsa_topk_indices=None if seed is None else torch.tensor(seed, dtype=torch.int32),
    )  # fmt: skip
    found.set_buf(request)
    return found


@pytest.mark.parametrize("seed", [[3, 1, 0, 0, -1, -1, -1, -1], None])
def test_a_draft_gets_hidden_states_and_the_seed(seed: list[int] | None) -> None:
    source, destination = prefilled(seed=seed), buffers(HIDDEN)
    for array in (destination.output_dsa_topk_indices, destination.output_hidden_states, destination.output_topk_index):
        array[2] = 99  # an earlier request's
    rows(destination).write(2, rows(source).read(1))
    for ours, theirs in zip(source.get_buf(1), destination.get_buf(2), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert destination.output_dsa_topk_indices[2].tolist() == (seed or [-1] * SEED)


def test_decode_without_a_draft_drops_hidden_states() -> None:
    source, destination = prefilled(seed=[1] * SEED), buffers(16)
    with pytest.raises(RemoteProtocolError, match="expected at most 64 bytes, found 128"):
        rows(destination).write(2, rows(source).read(1))
    unread = (destination.output_hidden_states.data_ptr(),)
    rows(destination, unread=unread).write(2, rows(source).read(1))
    assert not destination.output_hidden_states.any()
    assert destination.output_ids[2, 0] == 5
    assert destination.bootstrap_room[2, 0] == 9


def test_decode_with_a_draft_gets_no_seed_from_prefill_without_one() -> None:
    source, destination = prefilled(seed=None, has_draft=False), buffers(HIDDEN)
    destination.output_hidden_states[2] = destination.output_dsa_topk_indices[2] = 99
    rows(destination).write(2, rows(source).read(1))
    assert not destination.output_hidden_states[2].any()
    assert destination.output_dsa_topk_indices[2].tolist() == [-1] * SEED


def test_rows_of_sglang_itself_are_accepted() -> None:
    check_metadata(prefilled(seed=[1] * SEED), 1, room=9, vocabulary=8)


@pytest.mark.parametrize("name", ["output_ids", "output_token_logprobs_idx", "output_top_logprobs_idx", "output_topk_index"])
@pytest.mark.parametrize("value", [-1, 8, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(name: str, value: int) -> None:
    rows = prefilled(seed=None)
    getattr(rows, name)[1, 3] = value
    with pytest.raises(RemoteProtocolError, match=f"payload: {name}: expected 0 to 7, found .*{value}"):
        check_metadata(rows, 1, room=9, vocabulary=8)


@pytest.mark.parametrize("length", [-1, 17])
def test_a_sampling_mask_that_is_longer_than_its_row_is_refused(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", "1")
    rows = prefilled(seed=None)
    check_metadata(rows, 1, room=9, vocabulary=8)
    rows.output_token_sampling_mask_len[1, 0] = length
    with pytest.raises(RemoteProtocolError, match="output_token_sampling_mask_len: expected 0 to 16"):
        check_metadata(rows, 1, room=9, vocabulary=8)


@pytest.mark.parametrize("room", [0, 10])
def test_rows_of_another_room_are_refused(room: int) -> None:
    rows = prefilled(seed=None)
    rows.bootstrap_room[1, 0] = room
    with pytest.raises(RemoteProtocolError, match=f"payload: bootstrap_room: expected 9, found {room}"):
        check_metadata(rows, 1, room=9, vocabulary=8)


def test_buffers_in_gpu_memory_are_refused() -> None:
    """SGLang puts them there for one value of a variable of Mooncake."""
    rows = buffers(HIDDEN)
    check_buffers(rows)
    rows.output_ids = rows.output_ids.to("meta")
    with pytest.raises(ConfigError, match=r"SGLANG_MOONCAKE_CUSTOM_MEM_POOL: expected .* in host memory, found .* on meta"):
        check_buffers(rows)


def test_buffers_that_do_not_fit_into_a_message_are_refused() -> None:
    check_buffers(buffers(15_000))
    with pytest.raises(ConfigError, match=r"metadata of a request: expected at most 65024 bytes, found 6\d{4}"):
        check_buffers(buffers(16_400))


def test_the_first_token_of_another_server() -> None:
    rows = buffers(HIDDEN)
    for token in (-1, 8, 2**40):
        with pytest.raises(RemoteProtocolError, match=f"first_token: expected 0 to 7, found {token}"):
            write_first_token(rows, 2, token, room=9, vocabulary=8)
        assert not rows.bootstrap_room.any()
    rows.output_token_sampling_mask_len, rows.output_token_sampling_mask_idx = torch.ones(4, 16), torch.ones(4, 8)
    rows.output_token_sampling_logprobs = torch.ones(4, 8)
    write_first_token(rows, 2, 7, room=9, vocabulary=8)
    assert rows.output_ids[2, 0] == 7
    assert not rows.output_token_sampling_mask_len[2].any()  # of an earlier request
    assert not rows.output_token_sampling_logprobs[2].any()
    check_metadata(rows, 2, room=9, vocabulary=8)
