"""Every kind of cache that vLLM describes, moved between unequal layouts and compared with vLLM's own addressing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager

from disagg.core.errors import ConfigError, LayoutError
from disagg.integrations.vllm.groups import Kind, component_names, read_groups, shapes_of
from disagg.integrations.vllm.identity import _kv_scales
from tests.integrations.vllm.caches import Layer, Server, check_move, groups_of_stage
from tests.integrations.vllm.kinds import (
    convolved,
    dsa_index,
    gqa,
    kda,
    linear,
    m3_index,
    mla,
    model,
    nvfp4,
    planes,
    short_convolution,
    v4,
)

Options = dict[str, Any]

HEADS = {"num_key_value_heads": 4}
SIDES: dict[str, tuple[Options, Options]] = {
    "TP 1 to 1, other blocks": ({}, {"block_size": 32}),
    "TP 2 to 1, split blocks": ({"tp": 2}, {"block_size": 64, "kernel_blocks": [16]}),
    "TP 1 to 4, heads outermost": ({}, {"tp": 4, "layout": "LBHNC"}),
    "TP 4 to 8, block by block": ({"tp": 4, "layout": "BLHNC"}, {"tp": 8, "layout": "BLNHC", "block_size": 32}),
}
REQUESTS = ((1, 0, None), (100, 0, None), (147, 0, 50), (147, 64, 33))
"""Tokens, those that decode has, and the tokens of a chunk."""


def check(layers: list[Layer], sides: tuple[Options, Options], **fields: Any) -> None:
    shape = model("llama", 1 + max(int(layer.name.split(".")[2]) for layer in layers), **fields)
    prefill, decode = (Server(layers, model=shape, **options) for options in sides)
    for num_tokens, start, chunk in REQUESTS:
        check_move(prefill, decode, num_tokens=num_tokens, start=start, chunk=chunk)


FORMATS: dict[str, Callable[[], list[Layer]]] = {
    "bfloat16": lambda: gqa(range(3), 4, 64),
    "fp8": lambda: gqa(range(3), 4, 64, dtype="fp8"),
    "K and V of other widths": lambda: gqa(range(3), 4, 96, v_dim=64),
    "int8 per token and head": lambda: gqa(range(3), 4, 64, dtype="int8_per_token_head"),
    "fp8 per token and head": lambda: gqa(range(3), 4, 64, dtype="fp8_per_token_head"),
    "int4 per token and head": lambda: gqa(range(3), 4, 64, dtype="int4_per_token_head"),
    "NVFP4": lambda: nvfp4(range(3), 4, 64),
}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_attention_by_head(name: str, sides: str) -> None:
    check(FORMATS[name](), SIDES[sides], **HEADS)


def test_a_format_of_a_plug_in_is_refused() -> None:
    """Its cache may look like one of vLLM's own."""
    layers = [replace(layer, dtype="someones_fp8") for layer in gqa(range(3), 4, 64, dtype="fp8")]
    with pytest.raises(ConfigError, match=r"layer 'model.layers.0.self_attn.attn': expected .* formats, found 'someones_fp8'"):
        Server(layers, model=model("llama", 3))


def test_scales_of_nvfp4_that_mix_tokens_are_refused() -> None:
    """On SM100 a block has the same size, but those of V are in another order."""
    with pytest.raises(ConfigError, match=r"component 'kv': expected scales of V for each token .* kernel for SM100"):
        Server(nvfp4(range(3), 4, 64, fa2=False), model=model("llama", 3))


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVFP4", "FLASHINFER, MINIMAX_M3_SPARSE"), ("int8 per token and head", "MINIMAX_M3_SPARSE, TRITON_ATTN")],
)
def test_packed_layers_of_several_backends_are_refused(name: str, found: str) -> None:
    """MiniMax-M3's sparse layers have the specs of the others, and bytes in an order of their own."""
    *others, last = FORMATS[name]()
    with pytest.raises(ConfigError, match=f"found the backend {found}"):
        Server([*others, replace(last, backend="MINIMAX_M3_SPARSE")], model=model("llama", 3))


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_planes_of_k_and_v(dtype: str) -> None:
    """The b12x backend keeps K and V of a block apart."""
    layers = planes(range(3), 4, 64, dtype=dtype)
    check(layers, ({"tp": 2, "block_size": 64}, {"tp": 4, "block_size": 64, "layout": "LBHNC"}), **HEADS)


CPUS: dict[str, tuple[str, bool, torch.dtype, int, str, str]] = {
    "bfloat16 with AMX": ("X86", True, torch.bfloat16, 64, "auto", "found kernel amx; use --dtype float32"),
    "bfloat16 with AMX, cache in FP8": ("X86", True, torch.bfloat16, 64, "fp8", "found kernel amx; use --dtype float32"),
    "bfloat16 with AMX, heads of 80": ("X86", True, torch.bfloat16, 80, "auto", ""),
    "float32 with AMX": ("X86", True, torch.float32, 64, "float32", ""),
    "bfloat16 without AMX": ("X86", False, torch.bfloat16, 64, "auto", ""),
    "bfloat16 on ARM": ("ARM", False, torch.bfloat16, 64, "auto", "found kernel neon$"),
}
"""The architecture, whether it has AMX, the model's dtype, its heads' size, the cache's format, and the refusal."""


@pytest.mark.parametrize("case", CPUS)
def test_tiles_of_cpus_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM itself chooses the kernel, by what it takes the CPU for."""
    architecture, has_amx, dtype, dim, cache, refusal = CPUS[case]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda _: CpuArchEnum[architecture])
    layers = [replace(layer, backend="CPU_ATTN") for layer in gqa(range(2), 4, dim, dtype=cache)]
    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        Server(layers, model=model("llama", 2, **HEADS), layout="LBHNC", block_size=32, dtype=dtype)


def test_scales_that_have_been_received_are_kept() -> None:
    """VLLM's Triton backend sets all scales of a cache to 1 when it first uses it."""
    server = Server(gqa(range(2), 4, 64, dtype="int8_per_token_head"), model=model("llama", 2, **HEADS))
    rank = server.ranks[0]
    rank.write(server.request(100, seed=1), [(0, 100)])
    written = rank.bytes.clone()
    for name, layer in rank.config.compilation_config.static_forward_context.items():
        layer.impl._pth_key_value_caches(rank.views[name])
    assert rank.bytes.equal(written)


DSA = {
    "fp8_ds_mla": lambda: [*mla(range(4), dtype="fp8_ds_mla", sparse=True), *dsa_index((0, 1, 3))],
    "nvfp4_ds_mla": lambda: [*mla(range(4), dtype="nvfp4_ds_mla", sparse=True), *dsa_index((0, 1, 3))],
    "bfloat16": lambda: [*mla(range(4), sparse=True), *dsa_index(range(4))],
}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", DSA)
def test_latents_and_index_keys(name: str, sides: str) -> None:
    """DeepSeek-V3.2 and GLM-5: a layer has two caches, or uses the top-k of another layer."""
    check(DSA[name](), SIDES[sides])


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_index_keys_beside_attention_by_head(fp8: bool, sides: str) -> None:
    """MiniMax-M3: most layers have an index."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    check([*gqa(range(4), 4, 64, dtype="fp8" if fp8 else "auto"), *m3_index((1, 2, 3), dtype=dtype)], SIDES[sides], **HEADS)


@pytest.mark.parametrize("sides", SIDES)
def test_blocks_with_two_attentions(sides: str) -> None:
    """LongCat-Flash: `num_layers` blocks, with two layers of attention each."""
    found = [replace(layer, name=f"model.layers.{i // 2}.self_attn.{i % 2}.attn") for i, layer in enumerate(mla(range(6)))]
    check(found, SIDES[sides])
    (group,) = Server(found, model=model("longcat_flash", 3)).groups
    assert group.by_kind(3) == {Kind.LATENT: {i: layer.name for i, layer in enumerate(found)}}


@pytest.mark.parametrize("sides", [({}, {"tp": 2}), ({"tp": 4}, {"block_size": 32})], ids=str)
@pytest.mark.parametrize("window", [None, 24], ids=["full", "window"])
def test_layers_that_run_twice_per_token(window: int | None, sides: tuple[Options, Options]) -> None:
    """IQuest-LoopCoder: two layers with two caches each. The second time they attend to a window."""
    layers = [*gqa((0, 1), 4, 64), *gqa((2, 3), 4, 64, window=window)]
    prefill, decode = (Server(layers, model=model("other", 2, **HEADS), num_blocks=96, **options) for options in sides)
    for num_tokens in (1, 23, 100):
        check_move(prefill, decode, num_tokens=num_tokens)


def test_layers_of_one_group_with_other_shapes() -> None:
    """As `kv_cache_dtype_skip_layers` and models with other numbers of heads have them."""
    layers = [*gqa((0, 3), 4, 64), *gqa((1,), 8, 64), *gqa((2,), 4, 64, dtype="fp8")]
    check(layers, ({"tp": 2}, {"tp": 4, "block_size": 32}), num_key_value_heads=4)


@pytest.mark.parametrize(
    "other",
    [{}, {"tp": 2}, {"tp": 4, "dcp": 4, "interleave": 16}, {"tp": 8, "dcp": 2, "block_size": 32, "interleave": 8}],
    ids=str,
)
@pytest.mark.parametrize("dcp", [{"tp": 4, "dcp": 2}, {"tp": 8, "dcp": 8, "interleave": 4}], ids=str)
def test_decode_context_parallelism(dcp: Options, other: Options) -> None:
    """Prefill or decode divides the tokens of a block over ranks, in turns of any length."""
    for layers in (mla(range(2)), [*mla(range(2), dtype="fp8_ds_mla", sparse=True), *dsa_index((0,))], gqa(range(2), 1, 64)):
        check(layers, (dcp, other), num_key_value_heads=1)
        check(layers, (other, dcp), num_key_value_heads=1)


KIMI = {
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 16, "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 64, "qk_rope_head_dim": 32, "num_attention_heads": 8,
}  # fmt: skip
STATES: dict[str, tuple[Callable[[], list[Layer]], dict[str, Any]]] = {
    "Kimi Linear": (
        lambda: [*kda(range(3), 8, 16), *mla((3,), 96)],
        {"model_type": "kimi_linear", **KIMI, "num_hidden_layers": 4},
    ),
    "Kimi-K3": (
        lambda: [*kda(range(3), 8, 16), *mla((3,), 96, dtype="fp8")],
        {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", **KIMI, "num_hidden_layers": 4}},
    ),
    "Ring-2.6": (
        lambda: [*linear(range(3), 8, 16), *mla((3,), 96)],
        {"model_type": "bailing_moe_linear", "num_hidden_layers": 4},
    ),
    "LFM2": (
        lambda: [*short_convolution((0, 1, 3), 64), *gqa((2,), 4, 16)],
        {
            "model_type": "lfm2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "conv_L_cache": 3,
            "num_key_value_heads": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_states_beside_attention(name: str, tp: tuple[int, int]) -> None:
    made, shape = STATES[name]
    prefill, decode = (Server(made(), model=shape, tp=size, layout="BLHNC") for size in tp)
    for num_tokens in (1, 100):
        check_move(prefill, decode, num_tokens=num_tokens)


@pytest.mark.parametrize("dcp", [({"tp": 4, "dcp": 2}, {"tp": 2}), ({"tp": 2}, {"tp": 4, "dcp": 4, "interleave": 8})], ids=str)
def test_states_are_divided_over_all_ranks_of_a_dcp_group(dcp: tuple[Options, Options]) -> None:
    made, shape = STATES["Kimi-K3"]
    prefill, decode = (Server(made(), model=shape, layout="BLHNC", **options) for options in dcp)
    check_move(prefill, decode, num_tokens=100, chunk=33)


WINDOWS: dict[str, tuple[Callable[[], list[Layer]], dict[str, Any]]] = {
    "gpt-oss": (lambda: [*gqa((1, 3), 4, 64), *gqa((0, 2), 4, 64, window=24)], {"num_key_value_heads": 4}),
    "Llama 4": (lambda: [*gqa((3,), 4, 64), *gqa((0, 1, 2), 4, 64, chunk=32)], {"num_key_value_heads": 4}),
    "MiMo-V2": (
        lambda: [*gqa((0, 3), 2, 64, v_dim=32), *gqa((1, 2), 4, 64, v_dim=32, window=24)],
        {
            "model_type": "mimo_v2_flash", "num_attention_heads": 8, "num_key_value_heads": 2, "swa_num_key_value_heads": 4,
            "head_dim": 64, "v_head_dim": 32, "sliding_window_size": 24, "hybrid_layer_pattern": [0, 1, 1, 0],
        },
    ),
    "Inkling": (
        lambda: [
            *gqa((3,), 8, 32), *gqa((0, 1, 2), 16, 32, window=24), *convolved((3,), 8, 32, 256),
            *convolved((0, 1, 2), 16, 32, 256),
        ],
        {"model_type": "inkling_mm_model", "num_key_value_heads": 8, "swa_num_key_value_heads": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("sides", [({}, {"tp": 2}), ({"tp": 4}, {"tp": 4, "block_size": 32}), ({"tp": 4}, {})], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_beside_full_attention(name: str, sides: tuple[Options, Options]) -> None:
    made, fields = WINDOWS[name]
    shape = {"model_type": "gpt_oss", "num_hidden_layers": 4, **fields}
    prefill, decode = (Server(made(), model=shape, layout="BLHNC", num_blocks=96, **options) for options in sides)
    for num_tokens in (1, 23, 64, 100):
        check_move(prefill, decode, num_tokens=num_tokens)


def test_chunks_begin_where_vllm_frees_blocks() -> None:
    """Decode needs the tokens of a chunk before the next one: none at its beginning, and those that vLLM has not cached."""
    (group,) = Server(gqa((0,), 4, 64, chunk=32), model=model("llama", 1)).groups
    for stop in range(1, 100):
        skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(SimpleNamespace(attention_chunk_size=32), stop)
        for start in range(0, stop, 16):
            assert group.needed(start, stop) == (max(start, skipped), stop)


@pytest.mark.parametrize("name", ["gpt-oss", "Llama 4"])
def test_windows_whose_blocks_are_all_kept(name: str) -> None:
    """VLLM's hybrid KV cache manager is off on prefill. Decode takes the windows, or all tokens."""
    made, fields = WINDOWS[name]
    shape = {"model_type": "gpt_oss", "num_hidden_layers": 4, **fields}
    prefill = Server(made(), model=shape, hybrid=False)
    assert [group.window for group in prefill.groups] == [None]
    for decode in (Server(made(), model=shape, tp=2), Server(made(), model=shape, hybrid=False, block_size=32)):
        check_move(prefill, decode, num_tokens=100, chunk=33)


def test_ranks_with_a_head_each_are_not_taken_for_replicas() -> None:
    """The model has fewer heads than ranks, but layers with a window have as many."""
    made, fields = WINDOWS["MiMo-V2"]
    known = {"model_type": "mimo_v2_flash", "num_hidden_layers": 4, **fields}
    unknown = {**known, "model_type": "unknown", "id2label": {0: "a", 1: "b"}}
    for shape in (known, unknown):
        check_move(*(Server(made(), model=shape, layout="BLHNC", tp=4) for _ in range(2)), num_tokens=100)
    decode = Server(made(), model=known, layout="BLHNC", tp=2)
    check_move(Server(made(), model=known, layout="BLHNC", tp=4), decode, num_tokens=100)
    with pytest.raises(LayoutError, match="axis 'kv_head': global size: 4 here, 2 at the peer"):
        check_move(Server(made(), model=unknown, layout="BLHNC", tp=4), decode, num_tokens=64)


@pytest.mark.parametrize(
    "made",
    [{}, {"fp4_index": True}, {"dtype": "auto"}],
    ids=["fp8_ds_mla", "fp8_ds_mla and MXFP4 index keys", "bfloat16"],
)
def test_compressed_latents(made: Options) -> None:
    """DeepSeek-V4: entries of 4 and of 128 tokens, windows, and the states of compressors."""
    layers = v4((1, 4, 128, 4), **made)
    shape = model("deepseek_v4", 4)
    options = {"block_size": 256, "layout": "BLHNC", "num_blocks": 400}
    prefill, decode = (Server(layers, model=shape, tp=tp, **options) for tp in (2, 1))
    kinds = {cache.name.partition(".")[0] for cache in decode.ranks[0].caches}
    assert kinds == {"kv", "mla", "index", "compressor", "index_compressor"}
    assert _kv_scales(decode.ranks[0].config, decode.groups, 4, 1, lambda own: [own]) == {}
    for num_tokens, chunk in ((1, None), (127, None), (300, 90), (515, 256)):
        check_move(prefill, decode, num_tokens=num_tokens, chunk=chunk)


@pytest.mark.parametrize(
    ("first", "others", "expected"),
    [
        ({}, {}, ["kv"]),
        ({}, {"dtype": "fp8"}, [f"kv.{layer}" for layer in range(6)]),
        ({"heads": 4}, {}, [f"kv.{layer}" for layer in range(6)]),
    ],
    ids=["alike", "layers whose cache has another format", "layers with fewer heads"],
)
@pytest.mark.parametrize("boundary", [2, 3])
def test_stages_name_components_as_one_stage_does(first: Options, others: Options, expected: list[str], boundary: int) -> None:
    """Also where the layers of each stage are alike: a server of one stage has both."""
    layers = [*gqa((0, 1), first.get("heads", 8), 64), *gqa((2, 3, 4, 5), 8, 64, **others)]
    server = Server(layers, model=model("llama", 6, num_key_value_heads=8), num_blocks=24)
    specs = {name: spec for group in server.groups for name, spec in group.specs.items()}
    stages = []
    for numbers in (range(boundary), range(boundary, 6)):
        own = {name: spec for name, spec in specs.items() if extract_layer_index(name) in numbers}
        groups = groups_of_stage(server, own)
        stages.append(read_groups(replace(server.kv, kv_cache_groups=groups)))
    shapes = [shapes_of(groups, num_layers=6) for groups in stages]
    named = [name for groups in stages for _, name, _ in component_names(groups, num_layers=6, stages=shapes)]
    assert list(dict.fromkeys(named)) == [cache.name for cache in server.ranks[0].caches] == expected
