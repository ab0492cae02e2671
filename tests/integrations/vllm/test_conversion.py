"""One side keeps K and V in FP8: what decode holds are the bits that vLLM's own kernel stores for what prefill has computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention.attention import Attention

from disagg.integrations.vllm.identity import PLAIN
from disagg.integrations.vllm.layout import _cpu_views
from harness.vllm.engine import Engine
from tests.integrations.vllm.requests import check_equal, hand_over, prompts, wait_empty

LOADED, MAX_TOKENS = 192, 8
"""Whole blocks on both sides, and one token more: decode's prefix cache finds as many tokens as are loaded."""
SCALES = (0.013, 0.37)
Held = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""K and V by layer, `[token, head, dim]`."""


def attention(worker: Any) -> dict[str, Attention]:
    found = worker.compilation_config.static_forward_context
    return {name: each for name, each in found.items() if isinstance(each, Attention)}


def by_tokens(layer: Attention, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _cpu_views(tensor, layer)
    return k.permute(0, 3, 1, 2).flatten(0, 1), v.permute(0, 2, 1, 3).flatten(0, 1)


def held_by(worker: Any) -> Held:
    """What a worker has of its engine's first request, whose blocks are 1, 2 and so on."""
    found = {}
    for name, layer in attention(worker).items():
        size = layer.kv_cache.shape[2]
        k, v = by_tokens(layer, layer.kv_cache[1 : 1 + LOADED // size])
        found[name] = k.clone(), v.clone()
    return found


def held(core: Any) -> Held:
    """In an engine's process: what all of its workers have of the first request."""
    parts = core.model_executor.collective_rpc(held_by)
    return {name: tuple(torch.cat([part[name][i] for part in parts], dim=1) for i in range(2)) for name in parts[0]}


def store(given: Held, core: Any) -> None:
    """In an engine's process: have vLLM write K and V in place of the first request's."""
    for name, layer in attention(core.model_executor.driver_worker.worker).items():
        tensor, (k, v) = layer.kv_cache, given[name]
        num_blocks, heads, size, _ = tensor.shape
        tensor[1 : 1 + LOADED // size] = 0
        caches = tensor.view(num_blocks, heads, size * 2, -1).chunk(2, dim=2)
        isa = "vec" if size % 32 == 0 else "vec16"
        scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        ops.cpu_attn_reshape_and_cache(
            k, v, *caches, torch.arange(LOADED) + size, isa, **scales, kv_cache_dtype=layer.kv_cache_dtype
        )


def give_scales(patch: pytest.MonkeyPatch, scales: tuple[float, float]) -> None:
    """Give the layers in FP8 of engines that start afterwards these scales, as a checkpoint would."""
    finish = Attention.process_weights_after_loading

    def patched(self: Any, *arguments: Any) -> None:
        finish(self, *arguments)
        for name, scale in zip("kv", scales if self.kv_cache_dtype not in PLAIN else (), strict=False):
            getattr(self, f"_{name}_scale").fill_(scale)
            setattr(self, f"_{name}_scale_float", scale)

    patch.setattr(Attention, "process_weights_after_loading", patched)


def scales_of(core: Any) -> set[tuple[float, float]]:
    """In an engine's process: the scales of its layers."""
    layers = attention(core.model_executor.driver_worker.worker).values()
    return {(layer._k_scale_float, layer._v_scale_float) for layer in layers}


@pytest.mark.parametrize(
    ("options", "dtype", "scales"),
    [
        ({"tensor_parallel_size": 2}, "fp8_e4m3", SCALES),
        ({"dtype": "bfloat16"}, "fp8_e5m2", (1.0, 1.0)),
    ],
    ids=["float32 on 2 ranks", "bfloat16"],
)
def test_decode_in_fp8(
    options: dict[str, Any],
    dtype: str,
    scales: tuple[float, float],
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode's answer is that of a server whose cache has what vLLM's own kernel stores of the numbers that prefill has."""
    give_scales(monkeypatch, scales)
    prefill = start("llama", block_size=32, enable_prefix_caching=True, **options)
    own = {"dtype": options["dtype"]} if "dtype" in options else {}
    decode = start("llama", block_size=64, enable_prefix_caching=True, kv_cache_dtype=dtype, **own)
    asked = prompts((LOADED + 1,), seed=3)
    found = hand_over(prefill.wait_ready(), decode.wait_ready(), asked, max_tokens=MAX_TOKENS)
    assert found[0].num_external == LOADED
    assert decode.run(scales_of) == {scales}
    moved, computed = decode.run(held), prefill.run(held)
    decode.run(partial(store, computed))
    expected = decode.run(held)
    assert moved.keys() == expected.keys() == computed.keys()
    for name, sides in moved.items():
        for each, wanted in zip(sides, expected[name], strict=True):
            assert torch.equal(each.view(torch.uint8), wanted.view(torch.uint8))
            assert len(each.view(torch.uint8).unique()) > 20
    again = decode.generate(asked, max_tokens=MAX_TOKENS)
    assert again[0].num_local == LOADED
    check_equal(again, found)
    wait_empty(prefill, decode)


def test_prefill_in_fp8(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode has the numbers that prefill's attention reads."""
    give_scales(monkeypatch, SCALES)
    prefill = start("llama", block_size=64, enable_prefix_caching=True, kv_cache_dtype="fp8")
    decode = start("llama", block_size=32, enable_prefix_caching=True, tensor_parallel_size=2)
    asked = prompts((LOADED + 1,), seed=3)
    found = hand_over(prefill.wait_ready(), decode.wait_ready(), asked, max_tokens=MAX_TOKENS)
    assert found[0].num_external == LOADED
    assert prefill.run(scales_of) == {SCALES}
    computed = prefill.run(held)
    for name, sides in decode.run(held).items():
        for each, stored, scale in zip(sides, computed[name], SCALES, strict=True):
            assert torch.equal(each, stored.view(torch.float8_e4m3fn).float() * scale)
            assert len(each.unique()) > 20
    again = decode.generate(asked, max_tokens=MAX_TOKENS)
    assert again[0].num_local == LOADED
    check_equal(again, found)
    wait_empty(prefill, decode)


def reload(scales: tuple[float, float], core: Any) -> None:
    """In an engine's process: load the weights again, of a checkpoint with these scales."""
    with pytest.MonkeyPatch.context() as patch:
        give_scales(patch, scales)
        core.model_executor.collective_rpc("reload_weights")


def test_scales_that_change(start: Callable[..., Engine]) -> None:
    """Each side computes its requests itself once its weights have brought other scales of K and V."""
    prefill = start("llama", block_size=32, enable_prefix_caching=True)
    decode = start("llama", block_size=64, enable_prefix_caching=True, kv_cache_dtype="fp8")
    asked = [[prompt] for prompt in prompts((LOADED + 1,) * 4, seed=3)]
    found = hand_over(prefill.wait_ready(), decode.wait_ready(), asked[0], max_tokens=MAX_TOKENS)
    assert found[0].num_external == LOADED
    decode.run(partial(reload, (1.0, 1.0)))
    found = hand_over(prefill, decode, asked[1], max_tokens=MAX_TOKENS)
    assert found[0].num_external == LOADED
    decode.run(partial(reload, SCALES))
    assert decode.run(scales_of) == {SCALES}
    found = hand_over(prefill, decode, asked[2], max_tokens=MAX_TOKENS)
    assert found[0].num_external == 0
    check_equal(decode.generate(asked[2], max_tokens=MAX_TOKENS), found)
    found = hand_over(decode, prefill, asked[3], max_tokens=MAX_TOKENS)
    assert found[0].num_external == 0
    assert (decode.counts["dead_ranks"], prefill.counts["dead_ranks"]) == (1, 0)
    wait_empty(prefill, decode)
