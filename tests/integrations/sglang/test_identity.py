"""What SGLang servers say of their model, and the table of SGLang's options."""

from __future__ import annotations

import copy
import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import attention
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import base, get_rope
from sglang.srt.models.gemma3_causal import Gemma3RotaryEmbedding
from sglang.srt.models.ministral3 import Ministral3Attention
from sglang.srt.models.qwen3_moe import compute_yarn_parameters
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import Gemma3TextConfig, LlamaConfig

from disagg import ConfigError, ModelId
from disagg.core.errors import LocalProtocolError
from disagg.integrations.sglang.host import check_options
from disagg.integrations.sglang.identity import (
    attention_layers,
    check_scales,
    identify,
    kv_scales,
    read_source,
    scaled_by,
    windows,
    windows_read,
)
from disagg.integrations.shaping import SGLANG, names

LLAMA = LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


def layers(*sizes: int, attn_type: AttentionType = AttentionType.DECODER, first: int = 0) -> torch.nn.ModuleList:
    """Attention layers of SGLang with windows of these sizes."""
    return torch.nn.ModuleList(
        RadixAttention(4, 8, 1.0, 2, layer_id=first + number, sliding_window_size=size, attn_type=attn_type)
        for number, size in enumerate(sizes)
    )


def test_windows_are_those_of_the_layers() -> None:
    """A layer that attends to all tokens in one of its uses needs all of them; one without a cache needs none."""
    assert windows(layers(-1, 63, 127)) == {1: 63, 2: 127}
    assert windows(torch.nn.ModuleList([layers(63, 63), layers(-1, first=1)])) == {0: 63}
    assert windows(layers(63, attn_type=AttentionType.ENCODER_ONLY)) == {}
    assert windows(layers(63, attn_type=AttentionType.DECODER_BIDIRECTIONAL)) == {0: 63}


def config(folder: Path, **more: Any) -> SimpleNamespace:
    """The parts of SGLang's `ModelConfig` that are read."""
    return SimpleNamespace(
        **{
            "model_path": str(folder),
            "revision": None,
            "model_override_args": {},
            "hf_config": LLAMA,
            "hf_text_config": LLAMA,
            **more,
        }
    )


def identity(
    source: Any,
    *,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    stages: Any = lambda own: [own],
    options: Mapping[str, Any] = {},
    modules: Sequence[torch.nn.Module] = (),
    backend: Any = None,
    window: int | None = 63,
    **scales: float,
) -> ModelId:
    attentions = layers(-1, 63)
    for layer in attentions:
        for key, scale in scales.items():
            setattr(layer, key, scale)
    model = torch.nn.ModuleList([torch.nn.ModuleList([attentions]), *modules])
    runner = SimpleNamespace(
        model=model, dtype=torch.float32, kv_cache_dtype=dtype, attn_backend=backend, sliding_window_size=window
    )
    return identify(
        source, runner, name=name, options=options, from_stages=stages, scales=kv_scales(runner, attention_layers(model))
    )


def test_identity_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    found = identity(read_source(config(tmp_path), None, name=None))
    assert found.name == "llama"
    words = found.revision.split()
    assert {"windows=63@1", "rope.rope_theta=10000", "hidden_size=64", "keys=rotated"} <= set(words)
    two_stages = identity(read_source(config(tmp_path), None, name=None), stages=lambda own: [({5: 31}, {}, {}, set()), own])
    assert "windows=31@5;63@1" in two_stages.revision.split()
    other = json.dumps({**LLAMA.to_dict(), "hidden_size": 128})
    (tmp_path / "decrypted.json").write_text(other)
    decrypted = identity(read_source(config(tmp_path), str(tmp_path / "decrypted.json"), name=None))
    assert "hidden_size=128" in decrypted.revision.split()
    (tmp_path / "model.gguf").touch()
    assert identity(read_source(config(tmp_path / "model.gguf"), None, name=None)) == found


def test_windows_that_an_attention_backend_ignores_are_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    assert "class TorchFlexAttnBackend(" in (Path(attention.__path__[0]) / "torch_flex_backend.py").read_text()
    flex, triton = (type(name, (), {})() for name in ("TorchFlexAttnBackend", "TritonAttnBackend"))
    for backend, is_claimed in (
        (triton, True),
        (flex, False),
        (SimpleNamespace(prefill_backend=flex, decode_backend=triton), False),
    ):
        assert ("windows=63@1" in identity(source, backend=backend).revision.split()) is is_claimed


def test_a_window_that_the_server_does_not_know_is_named(tmp_path: Path) -> None:
    """FlashInfer's wrappers get the server's window; Command R7B, for example, names none."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    assert "model_runner.sliding_window_size is not None" in (Path(attention.__path__[0]) / "flashinfer_backend.py").read_text()
    flashinfer, triton = (type(name, (), {})() for name in ("FlashInferAttnBackend", "TritonAttnBackend"))
    usual = identity(source)
    assert [identity(source, backend=each, window=size) == usual for each in (flashinfer, triton) for size in (63, None)] == [
        *(True, False),
        *(True, True),
    ]


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [("TritonAttnBackend", 63, {1: 63}), ("TritonAttnBackend", None, {}), ("TorchFlexAttnBackend", 63, {})],
)
def test_all_tokens_are_moved_to_a_backend_that_reads_them(name: str, size: int | None, expected: dict[int, int]) -> None:
    runner = SimpleNamespace(model=layers(-1, 63), attn_backend=type(name, (), {})(), sliding_window_size=size)
    assert windows_read(runner) == expected


def test_caps_that_an_attention_backend_ignores_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    for file, name in (
        ("torch_native", "TorchNativeAttnBackend"),
        ("torch_flex", "TorchFlexAttnBackend"),
        ("trtllm_mha", "TRTLLMHAAttnBackend"),
    ):
        text = (Path(attention.__path__[0]) / f"{file}_backend.py").read_text()
        assert f"class {name}(" in text
        assert "logit_cap" not in text
        backend = type(name, (), {})()
        assert 'logit_cap="not_applied"' in identity(source, backend=backend, logit_cap=50.0).revision.split()
        assert "logit_cap" not in identity(source, backend=backend, logit_cap=0.0).revision
    assert "logit_cap" not in identity(source, backend=TritonAttnBackend(), logit_cap=50.0).revision


@pytest.mark.parametrize(("name", "part"), [("attention_bias", "qkv_proj"), ("mlp_bias", "gate_up_proj")])
def test_a_bias_that_a_model_of_sglang_does_not_read_is_named(name: str, part: str, tmp_path: Path) -> None:
    """SGLang's Llama has none in its MLP."""
    biased = LlamaConfig(**{**LLAMA.to_dict(), name: True})
    source = read_source(config(tmp_path, hf_config=biased, hf_text_config=biased), None, name="mine")
    linear, plain_linear = (torch.nn.Linear(2, 2, bias=bias) for bias in (True, False))
    adapted: Any = torch.nn.Module()
    adapted.base_layer = linear
    has, wrapped, lacks = (block(part, layer) for layer in (linear, adapted, plain_linear))
    image = torch.nn.ModuleList([holding(part, linear)])
    words = [
        identity(source, name="mine", modules=found).revision.split() for found in ([has], [wrapped], [lacks], [image, lacks])
    ]
    assert [f'{name}="not_read"' in each for each in words] == [False, False, True, True]
    for part_without in (holding(part, plain_linear), block(part, plain_linear)):  # a part for images, and one layer of many
        assert identity(source, name="mine", modules=[has, part_without]).revision.split() == words[0]
    plain = read_source(config(tmp_path), None, name="mine")
    assert f"{name}=" not in " ".join(set(identity(plain, name="mine", modules=[lacks]).revision.split()) - set(words[0]))


def holding(part: str, layer: torch.nn.Module) -> torch.nn.Module:
    found = torch.nn.Module()
    setattr(found, part, layer)
    return found


def block(part: str, layer: torch.nn.Module) -> torch.nn.Module:
    """A decoder's layer, whose attention is a part of its own."""
    found = holding(part, layer)
    found.self_attn = layers(-1)
    return torch.nn.ModuleList([found])


def test_what_only_sglang_reads_is_named(tmp_path: Path) -> None:
    """Ministral 3's scaling of Q in the usual format, and TeleFLM's of embeddings."""
    source = read_source(config(tmp_path), None, name="mine")
    ministral, tele = torch.nn.Module(), torch.nn.Module()
    ministral.llama_4_scaling_beta, ministral.max_position_embeddings, tele.use_mup = 0.1, 16384, True
    assert "self.llama_4_scaling_beta = config.rope_parameters" in inspect.getsource(Ministral3Attention)
    assert 'q_scaling="0.1@16384"' in identity(source, name="mine", modules=[ministral]).revision.split()
    assert 'input_mult="read"' in identity(source, name="mine", modules=[tele]).revision.split()
    ministral.llama_4_scaling_beta, tele.use_mup = None, False
    assert identity(source, name="mine", modules=[ministral, tele]) == identity(source, name="mine")


def test_the_order_of_rotated_pairs_is_compared(tmp_path: Path) -> None:
    """SGLang's parser of Mistral's own format leaves K's elements in that order; other readers of it do not."""
    mistral = LlamaConfig(**{**LLAMA.to_dict(), "rope_is_neox_style": False})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    found = [
        identity(read_source(config(tmp_path, hf_text_config=text), None, name="mine"), name="mine")
        for text in (LLAMA, mistral)
    ]
    assert 'rope_pairs="adjacent"' in found[1].revision.split()
    assert found[0] != found[1]


@pytest.mark.parametrize("fused", ["use_dsa_indexer_fusion", "use_aiter_fused_fp8_writer", ""])
def test_the_form_of_index_keys_is_compared(fused: str, tmp_path: Path) -> None:
    """Without its fused kernels SGLang stores them after a Hadamard transform. VLLM does not."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    indexer: Any = torch.nn.Module()
    for name in ("use_dsa_indexer_fusion", "use_aiter_fused_fp8_writer"):
        assert name in inspect.getsource(Indexer)
        setattr(indexer, name, name == fused)
    found = identity(source, modules=[indexer]).revision.split()
    assert ('index_keys="rotated"' in found) is (not fused)
    if fused:
        assert found == identity(source).revision.split()


def rope(kind: str, **given: Any) -> tuple[LlamaConfig, torch.nn.Module]:
    """A configuration, and SGLang's rotary embedding of it."""
    found = LlamaConfig(**{**LLAMA.to_dict(), "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **given}})
    scaling = {"rope_type": kind, **given}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_is_cpu", True)
        return found, get_rope(16, 16, found.max_position_embeddings, 10000, rope_scaling=scaling, dtype=torch.float32)


SCALED = {
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 8.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaling_that_a_model_of_sglang_does_not_read_is_named(kind: str, tmp_path: Path) -> None:
    """Gemma 2's, Phi's and OLMo's, for example. VLLM's do."""
    loaded, scaled = rope(kind, **SCALED[kind])
    _, plain = rope("default")
    source = read_source(config(tmp_path, hf_config=loaded, hf_text_config=loaded), None, name="any")
    ignores, reads, other = (identity(source, name="any", modules=each) for each in ([plain], [scaled, plain], []))
    assert 'rope_scaling="not_read"' in ignores.revision.split()
    assert reads == other
    assert "rope_scaling" not in reads.revision
    stages = identity(source, name="any", modules=[plain], stages=lambda own: [own, ({}, {}, {}, {type(scaled).__name__})])
    assert stages == reads, "a stage whose layers have no scaling"
    default = read_source(config(tmp_path), None, name="any")
    assert "rope_scaling" not in identity(default, name="any", modules=[plain]).revision


def test_a_models_own_rotary_embedding_counts(tmp_path: Path) -> None:
    """Gemma 3 gives its layers an unscaled one, and uses another, which it scales."""
    gemma = Gemma3TextConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, head_dim=16)
    gemma.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    flat = copy.deepcopy(gemma)
    flat.rope_parameters = flat.rope_parameters["full_attention"]  # as SGLang makes it
    own = Gemma3RotaryEmbedding(flat)
    assert (own.rope_type, own.inv_freq[0].item()) == ("linear", 0.125)
    source = read_source(config(tmp_path, hf_config=gemma, hf_text_config=gemma), None, name="any")
    _, plain = rope("default")
    assert "rope_scaling" not in identity(source, name="any", modules=[plain, own]).revision


@pytest.mark.parametrize(("factor", "is_named"), [(8.0, False), (4.0, True)])
def test_the_factor_that_sglangs_fused_kernel_computes_is_named(factor: float, is_named: bool, tmp_path: Path) -> None:
    """It takes the quotient of the lengths, 8 here, whatever the configuration's factor."""
    loaded, scaled = rope("yarn", factor=factor, original_max_position_embeddings=256)
    assert compute_yarn_parameters(loaded)[0] == loaded.max_position_embeddings / 256 == 8
    source = read_source(config(tmp_path, hf_config=loaded, hf_text_config=loaded), None, name="any")
    fused: Any = type("Attention", (torch.nn.Module,), {"__module__": compute_yarn_parameters.__module__})()
    fused.use_fused_qk_norm_rope = False
    unfused = identity(source, name="any", modules=[scaled, fused])
    fused.use_fused_qk_norm_rope = True
    found = identity(source, name="any", modules=[scaled, fused])
    assert ("fused_rope_factor=8" in found.revision.split()) is is_named
    assert (found == unfused) is not is_named


def test_options_that_change_states_are_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    given = {"forward_hooks": None, "rl_on_policy_target": "fsdp"}
    assert 'rl_on_policy_target="fsdp"' in identity(source, options=given).revision.split()
    assert identity(source, options={**given, "rl_on_policy_target": None}) == identity(source)


def test_scales_count_where_sglang_divides_by_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    source = read_source(config(tmp_path), None, name=None)
    assert identity(source, k_scale_float=0.5) == identity(source)
    assert identity(source, dtype=torch.bfloat16) == identity(source)
    assert identity(source, dtype=torch.bfloat16) != identity(source, dtype=torch.bfloat16, k_scale_float=0.5)
    fp8 = torch.float8_e4m3fn
    assert "kv_scales=1" in identity(source, dtype=fp8).revision.split()
    assert identity(source, dtype=fp8) == identity(source, dtype=fp8, k_scale_float=1.0, v_scale_float=1.0)
    assert identity(source, dtype=fp8) != identity(source, dtype=fp8, k_scale_float=0.5)


class TorchNativeAttnBackend:
    """Of these names: SGLang's own need a running server."""


class TritonAttnBackend:
    prefill_backend = "fa2"  # as FlashInfer's, which names a kernel so


class TRTLLMHAAttnBackend:
    pass


class WaveAttnBackend:
    pass


def test_scales_are_those_that_the_attention_backend_reads() -> None:
    named: dict[str, type] = {
        "trtllm_mha": TRTLLMHAAttnBackend,
        "torch_native": TorchNativeAttnBackend,
        "triton": TritonAttnBackend,
        "wave": WaveAttnBackend,
    }
    for module, known in named.items():
        assert f"class {known.__name__}(" in (Path(attention.__path__[0]) / f"{module}_backend.py").read_text()
    found = layers(-1, -1)
    for layer in found:
        layer.k_scale_float, layer.v_scale_float = 0.5, 1.0

    def runner(backend: Any, **more: Any) -> Any:
        return SimpleNamespace(dtype=torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn, attn_backend=backend, **more)

    def hybrid(prefill: Any, decode: Any) -> Any:
        return SimpleNamespace(full_attn_backend=SimpleNamespace(prefill_backend=prefill, decode_backend=decode))

    divides, ignores, unknown = TritonAttnBackend(), TorchNativeAttnBackend(), WaveAttnBackend()
    for backend, scale, expected in (
        (divides, 0.5, {}),
        (ignores, 1.0, {}),
        (unknown, 0.5, {"kv_scaled_by": "WaveAttnBackend"}),
        (hybrid(divides, divides), 0.5, {}),
        (SimpleNamespace(primary=hybrid(divides, TRTLLMHAAttnBackend())), 0.5, {}),
        (hybrid(ignores, ignores), 1.0, {}),
        (hybrid(ignores, divides), 0.5, {"kv_scaled_by": "TorchNativeAttnBackend,TritonAttnBackend"}),
    ):
        scales = kv_scales(runner(backend), found)
        assert scales == {0: (scale, 1.0), 1: (scale, 1.0)}
        assert scaled_by(runner(backend), scales.values()) == expected
    assert scaled_by(runner(unknown), [(1.0, 1.0)]) == {}
    e5m2 = runner(TRTLLMHAAttnBackend())
    e5m2.kv_cache_dtype = torch.float8_e5m2
    assert scaled_by(e5m2, [(0.5, 1.0)]) == {"kv_scaled_by": "TRTLLMHAAttnBackend"}
    assert scaled_by(runner(divides, use_mla_backend=True), [(0.5, 1.0)]) == {}


def test_scales_that_come_with_new_weights_are_found() -> None:
    model = layers(-1, -1)
    for layer in model:
        layer.k_scale_float = layer.v_scale_float = 1.0
    runner = SimpleNamespace(model=model, dtype=torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn)
    found = tuple(attention_layers(model))
    before = kv_scales(runner, found)
    check_scales(runner, found, before)
    model[1].v_scale_float = 0.5
    with pytest.raises(LocalProtocolError, match=r"expected \(1.0, 1.0\) in layer 1, .* found \(1.0, 0.5\)"):
        check_scales(runner, found, before)


def test_a_model_without_a_file_needs_the_setting(tmp_path: Path) -> None:
    """It is then compared by that name, and by what the server computes with."""
    with pytest.raises(ConfigError, match=r"expected a config\.json, or DISAGG_MODEL"):
        read_source(config(tmp_path), None, name=None)
    found = identity(read_source(config(tmp_path), None, name="mine"), name="mine")
    assert found.name == "mine"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    assert identity(read_source(config(tmp_path), None, name="mine"), name="mine") == found


@pytest.mark.parametrize(
    "option",
    [
        "dllm_algorithm",
        "enable_mis",
        "debug_tensor_dump_input_file",
        "language_only",
        "enable_memory_saver",
        "is_encoder_decoder",
        "use_ngram_embedding",
    ],
)
def test_options_that_change_states_or_their_memory_are_refused(option: str) -> None:
    given = {
        "dllm_algorithm": None,
        "enable_mis": False,
        "debug_tensor_dump_input_file": None,
        "language_only": False,
        "enable_memory_saver": False,
        "is_encoder_decoder": False,
        "use_ngram_embedding": False,
        "speculative_algorithm": None,
    }
    parallel = SimpleNamespace(
        enable_kv_cache_sharding=False,
        enable_dsa_cache_layer_split=False,
        enable_cp_tp_group_sharing=False,
        attn_dcp_size=1,
        pp_size=1,
    )

    def check(*, has_hicache: bool = False, is_decode: bool = True, **options: Any) -> None:
        args = SimpleNamespace(**{**given, **options})
        scheduler = SimpleNamespace(
            enable_hisparse=False,
            enable_decode_hicache=has_hicache,
            server_args=args,
            model_config=args,
            spec_algorithm=SpeculativeAlgorithm.from_string(args.speculative_algorithm),
        )
        check_options(scheduler, parallel, args, is_decode=is_decode)

    check(has_hicache=True)
    parallel.pp_size = 2
    check()
    with pytest.raises(ConfigError, match="expected no --enable-hierarchical-cache on a decode server with --pp-size above 1"):
        check(has_hicache=True)
    named = {"is_encoder_decoder": "encoder-decoder model", "use_ngram_embedding": "n-gram embeddings on a decode server"}.get(
        option, f"--{option.replace('_', '-')}"
    )
    one: dict[str, Any] = {option: "x"}
    with pytest.raises(ConfigError, match=f"expected no {named}"):
        check(**one)

    for algorithm in ("EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK"):
        check(speculative_algorithm=algorithm)
    for algorithm in ("NGRAM", "STANDALONE"):
        with pytest.raises(ConfigError, match=f"expected no --speculative-algorithm {algorithm} on a decode server"):
            check(speculative_algorithm=algorithm)
        check(speculative_algorithm=algorithm, is_decode=False)


def test_every_option_is_in_the_table() -> None:
    """A new option of SGLang must get a row: it is compared, refused, or does not matter."""
    listed, options = Counter(names(SGLANG)), set(ServerArgs.__struct_fields__)
    assert options - listed.keys() == set(), "in no row"
    assert listed.keys() - options == set(), "unknown to SGLang"
    assert max(listed.values()) == 1
