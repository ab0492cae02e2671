"""Small models of transformers: one line per architecture, used by the tests of descriptions and by the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every size differs from the others and from what a default would give: heads of 16, not of hidden_size / heads = 8.
SIZES: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 128,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BY_HIDDEN = {"head_dim": None}
WINDOW = {"sliding_window": 5}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {**EXPERTS, **BY_HIDDEN, "num_key_value_heads": 6, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 20, "v_head_dim": 12}  # fmt: skip
USED = {**WINDOW, "use_sliding_window": True, "max_window_layers": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GPT = {"n_inner": 32}
INDEXED = {"index_topk": 4, "index_head_dim": 12, "index_n_heads": 2}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
MAMBA1: Mapping[str, Any] = {"state_size": 7, "conv_kernel": 4, "expand": 2, "time_step_rank": 8}
MAMBA2: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 7,
                             "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8}  # fmt: skip
ZAMBA: Mapping[str, Any] = {"mamba_d_state": 7, "mamba_d_conv": 4, "mamba_expand": 2, "head_dim": None,
                            "num_key_value_heads": 6, "use_mamba_kernels": False}  # fmt: skip
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 10,
         "linear_value_head_dim": 14, "linear_conv_kernel_dim": 4}  # fmt: skip
TOWER: Mapping[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "num_blocks": 1}  # fmt: skip
KINDS = ["full_attention", "sliding_attention", "sliding_attention"] * 2

CASES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "apertus": BY_HIDDEN,
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": LATENT,
    "axk2": {**LATENT, **INDEXED},
    "bailing_hybrid": {**LATENT, "short_conv_kernel_size": 4, "linear_head_dim": 10, "head_dim": 10, "layer_group_size": 3},
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 4]},
    "beam": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "biogpt": BY_HIDDEN,
    "bitnet": BY_HIDDEN,
    "bloom": BY_HIDDEN,
    "chameleon": {**BY_HIDDEN, "vocabulary_map": {"<image>": 4}},
    "codegen": {**GPT, "num_attention_heads": 4, "rotary_dim": 4},
    "cohere": BY_HIDDEN,
    "cohere2": WINDOW,
    "cohere2_moe": {**EXPERTS, **WINDOW},
    "cohere_compass_text": {**BY_HIDDEN, **WINDOW, "layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, ROPE)},
    "cosmos3_edge_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "ctrl": {**GPT, "dff": 32},
    "cwm": WINDOW,
    "dbrx": {
        "hidden_size": None,
        "d_model": 48,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {**EXPERTS, **BY_HIDDEN, "mlp_layer_types": ["dense", "sparse"] * 3},
    "deepseek_v2": {**LATENT, "hidden_size": 96},  # a multiple of its class's 32 heads
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, **INDEXED},
    "diffllama": {},
    "doge": {**WINDOW, **BY_HIDDEN, "keep_window_size": 16},
    "dots1": {**EXPERTS, **WINDOW, "max_window_layers": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "emu3_text_model": BY_HIDDEN,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "ernie4_5_vl_moe_text": {
        **BY_HIDDEN,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "exaone4": WINDOW,
    "exaone_moe": {**EXPERTS, **WINDOW},
    "falcon": BY_HIDDEN,
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 96},
    "falcon_mamba": MAMBA1,
    "flex_olmo": EXPERTS,
    "flint": {**EXPERTS, **WINDOW},
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gemma3n_text": {
        **WINDOW,
        **PER_LAYER,
        "num_kv_shared_layers": 2,
        "layer_types": KINDS,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": 32,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **WINDOW,
        **PER_LAYER,
        "num_kv_shared_layers": 2,
        "layer_types": KINDS[::-1],
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gemma4_unified_text": {**WINDOW, "global_head_dim": 24, "num_global_key_value_heads": 1},
    "git": {**BY_HIDDEN, "vision_config": TOWER},
    "glm": {},
    "glm4": {},
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT,
    "glm4v_moe_text": {
        **EXPERTS,
        "head_dim": 16,
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    },
    "glm4v_text": {**BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "glm_moe_dsa": {**LATENT, **INDEXED, "index_topk_freq": 2, "index_topk": 4},
    "glm_ocr_text": {"head_dim": 16, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {**BY_HIDDEN, "attention_types": [[["global", "local"], 3]], "window_size": 4},
    "gpt_neox": BY_HIDDEN,
    "gpt_neox_japanese": BY_HIDDEN,
    "gpt_oss": {**EXPERTS, **WINDOW},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {},
    "granite4_vision_text": BY_HIDDEN,
    "granite_docling_text": {},
    "granite_swa": {**WINDOW, "layer_types": KINDS},
    "granitemoe": EXPERTS,
    "granitemoe_swa": {**EXPERTS, **WINDOW},
    "granitemoehybrid": {**EXPERTS, **MAMBA2, "layer_types": ["linear_attention", "full_attention"] * 3},
    "granitemoeshared": EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}},
    "hy_v3": EXPERTS,
    "hy_v4": {**LATENT, **INDEXED},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jamba": {
        **EXPERTS,
        **BY_HIDDEN,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 7,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "jetmoe": {**EXPERTS, "num_attention_heads": 4},
    "kimi_linear": {
        **LATENT,
        "linear_attn_config": {
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "head_dim": 10,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "kolibri1": {**EXPERTS, **WINDOW},
    "kosmos_2_5_text_model": {**BY_HIDDEN, "ffn_dim": 32},
    "kosmos_2_text_model": {**BY_HIDDEN, "ffn_dim": 32},
    "laguna": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "lfm2": {**BY_HIDDEN, "conv_L_cache": 4, "full_attn_idxs": [1, 4], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 3, "conv_L_cache": 4, "head_dim": None},
    "lfm3": {**WINDOW, "conv_L_cache": 5},
    "llama": {},
    "llama4_text": {**EXPERTS, "attention_chunk_size": 5, "intermediate_size_mlp": 32, "attention_dropout": 0.0},
    "longcat_flash": {
        **LATENT,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 1,
        "head_dim": 8,
    },
    "mamba": MAMBA1,
    "mamba2": {"num_heads": 4, "head_dim": 24, "state_size": 7, "n_groups": 2, "expand": 2, "conv_kernel": 4, "chunk_size": 8},
    "mellum": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "mimo_v2_flash": {**EXPERTS, **WINDOW, "v_head_dim": 12, "num_attention_heads": 8},
    "minicpm3": LATENT,
    "minimax_m2": EXPERTS,
    "ministral": WINDOW,
    "ministral3": WINDOW,
    "mistral": WINDOW,
    "mistral4": LATENT,
    "mistral_large4_text": {
        **LATENT,
        **INDEXED,
        "kv_source_layers": [0, 0, 2, 2, 4, 5],
        "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
        "no_rope_layers": [1] * 6,
    },
    "mixtral": {**EXPERTS, **WINDOW},
    "molmo2_text": {},
    "mpt": {"num_attention_heads": 4, "expansion_ratio": 2},
    "muse_glimmer_text": WINDOW,
    "muse_spark_text": {**EXPERTS, **WINDOW, "moe_hidden_size": 16},
    "nanochat": BY_HIDDEN,
    "nemotron": {},
    "nemotron_h": {
        **EXPERTS,
        "hybrid_override_pattern": "M*-ME*",
        "num_hidden_layers": None,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 7,
        "conv_kernel": 4,
        "moe_shared_expert_intermediate_size": 16,
        "chunk_size": 8,
    },
    "olmo": BY_HIDDEN,
    "olmo2": {},
    "olmo3": WINDOW,
    "olmo_hybrid": {**BY_HIDDEN, **DELTA},
    "olmoe": {**EXPERTS, **BY_HIDDEN},
    "opt": {**BY_HIDDEN, "ffn_dim": 32, "word_embed_proj_dim": 48},
    "paddleocr_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "persimmon": BY_HIDDEN,
    "phi": BY_HIDDEN,
    "phi3": WINDOW,
    "phi4_multimodal": {**WINDOW, **BY_HIDDEN, "vision_config": TOWER, "audio_config": TOWER},
    "phimoe": {**EXPERTS, **WINDOW},
    "qwen2": USED,
    "qwen2_5_omni_text": {**USED, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen2_5_vl_text": {**USED, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen2_moe": {**EXPERTS, **USED},
    "qwen2_vl_text": {**USED, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen3": USED,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_moe": {**EXPERTS, **USED},
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_omni_moe_text": {**EXPERTS, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen3_vl_moe_text": EXPERTS,
    "qwen3_vl_text": {},
    "seed_oss": {},
    "smollm3": {**USED, "no_rope_layers": [1, 0] * 3},
    "solar_open": EXPERTS,
    "stablelm": BY_HIDDEN,
    "starcoder2": WINDOW,
    "vaultgemma": WINDOW,
    "voxtral_realtime_text": WINDOW,
    "xglm": {"ffn_dim": 32},
    "youtu": LATENT,
    "zamba": {
        **ZAMBA,
        "layers_block_type": [
            "linear_attention",
            "linear_attention",
            "hybrid",
            "linear_attention",
            "linear_attention",
            "hybrid",
        ],
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        **ZAMBA,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
    },
}
NESTED = {
    "cosmos3_edge": "cosmos3_edge_text", "cosmos3_omni": "qwen3_vl_text", "kosmos-2": "kosmos_2_text_model",
    "kosmos-2.5": "kosmos_2_5_text_model",
    "aria": "aria_text", "aya_vision": "cohere2", "blip-2": "opt", "cohere2_vision": "cohere2", "cohere_compass":
    "cohere_compass_text", "deepseek_ocr2": "deepseek_ocr2_text", "deepseek_vl": "llama", "deepseek_vl_hybrid": "llama",
    "emu3": "emu3_text_model", "ernie4_5_vl_moe": "ernie4_5_vl_moe_text", "exaone4_5": "exaone4", "fast_vlm": "qwen2",
    "fun_asr_nano": "qwen3", "fuyu": "persimmon", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4":
    "gemma4_text", "gemma4_unified": "gemma4_unified_text", "glm46v": "glm4v_text", "glm4v": "glm4v_text", "glm4v_moe":
    "glm4v_moe_text", "glm_ocr": "glm_ocr_text", "glmasr": "llama", "glmga": "glm4v_text", "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text", "granite_docling": "granite_docling_text", "granite_speech": "granite",
    "granite_speech_plus": "granite", "hunyuan_vl": "hunyuan_vl_text", "hyperclovax_vision_v2": "hyperclovax", "idefics2":
    "mistral", "idefics3": "llama", "instructblip": "opt", "instructblipvideo": "opt", "internvl": "qwen2", "janus":
    "llama", "kimi_k25": "deepseek_v3", "lfm2_vl": "lfm2", "lfm3_vl": "lfm3", "lighton_ocr": "qwen3", "llama4":
    "llama4_text", "llava": "llama", "llava_next": "mistral", "llava_next_video": "llama", "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text", "minicpmv4_6": "qwen3_5_text", "minicpmv4_7": "qwen3_5_text", "mistral3": "mistral",
    "mistral_large4": "mistral_large4_text", "molmo2": "molmo2_text", "moss_transcribe_diarize": "qwen3", "muse_glimmer":
    "muse_glimmer_text", "muse_spark": "muse_spark_text", "nemo_speechlm": "nemotron_h", "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2", "paddleocr_vl": "paddleocr_vl_text", "paligemma": "gemma", "perception_lm": "llama", "pp_chart2table":
    "qwen2", "qianfan_ocr": "qwen3", "qwen2_5_omni": "qwen2_5_omni_text", "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen2_audio": "qwen2", "qwen2_vl": "qwen2_vl_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_asr": "qwen3", "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text",
    "shieldgemma2": "gemma3_text", "smolvlm": "llama", "vibevoice_asr": "qwen2", "video_llama_3": "qwen2", "video_llava":
    "llama", "vipllava": "llama", "voxtral": "llama", "voxtral_realtime": "voxtral_realtime_text",
}  # fmt: skip
"""Multimodal models and their decoders."""
IN_EXAMPLES = ("deepseek_v4", "minimax", "minimax_m3_vl_text")
"""Architectures with caches of their own, which `examples/transformers_pd` compares instead."""
OTHER_PARTS: Mapping[str, Mapping[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 48, "intermediate_size": 12}},
    "granite_docling": {"vision_config": {"out_hidden_size": 48}},
    "muse_spark": {"audio_config": {"out_hidden_size": 48}},
}
"""What other parts of a multimodal model need to fit a small decoder."""
EVERY_RUN = frozenset({
    "apertus", "axk2", "bailing_hybrid", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone4",
    "falcon", "falcon_h1", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4_moe", "glm_moe_dsa", "gpt2", "gpt_oss",
    "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "llama", "llama4_text", "longcat_flash", "mamba2", "mimo_v2_flash",
    "minimax_m2", "ministral3", "mistral_large4_text", "mixtral", "nemotron_h", "olmo3", "olmo_hybrid", "phi3", "qwen2_moe",
    "qwen3_next", "qwen3_vl_text", "zamba2",
})  # fmt: skip
"""The architectures whose tokens `make test` compares. `make test-models` compares all."""
