"""The model side of the example: `decode` needs all state that `prefill` returns, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.backends.conftest import require_engine

torch = require_engine("torch", "torch")
require_engine("transformers", "transformers")

from examples.transformers_pd import architectures, components  # noqa: E402 - after the skip
from examples.transformers_pd.architectures import ARCHITECTURES, describe  # noqa: E402
from examples.transformers_pd.components import TensorSpec  # noqa: E402
from examples.transformers_pd.content import CacheContent, Generation  # noqa: E402
from examples.transformers_pd.model import build, decode, prefill, undivided  # noqa: E402


def prompt_of(num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(num_tokens).integers(0, 256, num_tokens)]


def assert_same(found: Generation, expected: Generation) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_resumed_run_equals_an_undivided_one(name: str) -> None:
    model = build(name)
    expected = undivided(model, prompt_of(37), num_new_tokens=24)
    first_token, content = prefill(model, prompt_of(37))
    assert_same(decode(model, content, first_token=first_token, num_new_tokens=24), expected)
    assert len(set(expected.tokens)) > 4, "tokens hardly vary, so they would not show wrong state"

    cache = model.network(input_ids=torch.tensor([prompt_of(37)]), use_cache=True).past_key_values
    unread = sum(array.nbytes // array.shape[1] for _, _, tensor, array in content.walk() if tensor.role == "conv")
    declared = sum(array.nbytes for *_, array in content.walk())
    assert declared + unread == held_nbytes(cache), (
        "the declaration must cover the whole cache, except for the conv column that no step reads"
    )

    unseen = [
        what for what, wrong in corrupted(content)
        if decode(model, wrong, first_token=first_token, num_new_tokens=24).logits.tobytes() == expected.logits.tobytes()
    ]  # fmt: skip
    assert not unseen


def corrupted(content: CacheContent) -> Iterator[tuple[str, CacheContent]]:
    """Copies of `content`, each with the sign bits of one tensor flipped in one layer."""
    for component in describe(content.name):
        layer = component.layers[-1]
        for tensor in component.tensors:
            wrong = copy.deepcopy(content)
            piece = wrong.arrays[component.name][layer][tensor.role]
            np.negative(piece, out=piece) if piece.dtype == np.float32 else np.bitwise_xor(piece, 0x8000, out=piece)
            yield f"{component.name}, layer {layer}, {tensor.role}", wrong


def held_nbytes(cache: object) -> int:
    """Bytes of all floating-point tensors in a cache; a tensor with two names counts once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors_in(cache)}.values())


def tensors_in(value: object) -> Iterator[Any]:
    match value:
        case torch.Tensor() if value.is_floating_point():
            yield value
        case dict():
            for item in value.values():
                yield from tensors_in(item)
        case list():
            for item in value:
                yield from tensors_in(item)
        case _ if type(value).__module__.startswith("transformers."):
            yield from tensors_in(vars(value))


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_prompts_about_as_long_as_kernels_and_windows(name: str, num_tokens: int) -> None:
    model = build(name)
    first_token, content = prefill(model, prompt_of(num_tokens))
    assert_same(
        decode(model, content, first_token=first_token, num_new_tokens=4),
        undivided(model, prompt_of(num_tokens), num_new_tokens=4),
    )


def test_one_new_token_needs_no_step() -> None:
    model = build("llama")
    first_token, content = prefill(model, prompt_of(9))
    assert decode(model, content, first_token=first_token, num_new_tokens=1).tokens == (first_token,)


def test_a_wrong_declaration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(ARCHITECTURES["llama"], components=(components.gqa(range(4), heads=8, dim=16),))
    monkeypatch.setattr(architectures, "ARCHITECTURES", {"llama": wrong})
    with pytest.raises(ValueError, match=r"llama, layer 0, kv.k: declared \(9, 8, 16\)"):
        prefill(build("llama"), prompt_of(9))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_declarations_name_every_stateful_layer_once(name: str) -> None:
    for component in describe(name):
        assert component.layers == tuple(sorted(set(component.layers)))
        assert set(component.layers) <= set(range(ARCHITECTURES[name].num_layers))
    assert len({component.name for component in describe(name)}) == len(describe(name))


def test_blocks_must_fill_the_axis() -> None:
    with pytest.raises(ValueError, match="blocks add up to 3, axis 'head' has 4"):
        TensorSpec("temporal", ("head", "dim"), (4, 8), "head", (components.Block("head", 3, 1),))


def test_a_window_holds_the_tokens_that_the_next_one_attends_to() -> None:
    window = components.gqa([0], heads=1, dim=1, window=16)
    assert [window.tokens(n) for n in (1, 15, 16, 37)] == [(0, 1), (0, 15), (1, 16), (22, 37)]


def test_compressed_entries_and_their_open_inputs_are_separate() -> None:
    csa, opened, before = components.compressed("csa", [0], ratio=4, dims={"compressor": 8}, overlapping=True)
    assert [csa.num_rows(csa.tokens(n)) for n in (1, 3, 4, 37)] == [0, 0, 1, 9]
    assert [opened.tokens(n) for n in (1, 3, 4, 37)] == [(0, 1), (0, 3), (4, 4), (36, 37)]
    assert [before.tokens(n) for n in (1, 3, 4, 37)] == [(0, 0), (0, 0), (0, 4), (32, 36)]
