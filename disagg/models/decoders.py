"""The decoder of a config: the text side of a multimodal model, and why some model types are refused."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from disagg.core.errors import ConfigError
from disagg.models.fields import Fields

MULTIMODAL = frozenset({
    "aria", "aya_vision", "blip-2", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
    "deepseek_vl", "deepseek_vl_hybrid",
    "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "fun_asr_nano", "fuyu", "gemma3", "gemma3n", "gemma4",
    "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite4_vision",
    "granite_docling", "granite_speech", "granite_speech_plus", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3",
    "instructblip", "instructblipvideo", "internvl", "janus", "kimi_k25", "kimi_k3", "kosmos-2", "kosmos-2.5", "lfm2_vl",
    "lfm3_vl", "lighton_ocr", "llama4",
    "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "minimax_m3_vl", "mistral3", "mistral_large4", "molmo2", "moss_transcribe_diarize", "muse_glimmer", "muse_spark",
    "nemo_speechlm", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "perception_lm", "pp_chart2table",
    "qianfan_ocr", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "shieldgemma2",
    "smolvlm", "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral", "voxtral_realtime",
})  # fmt: skip
"""Models whose decoder is described by their `text_config`; other parts make embeddings and keep no state. `qwen2_5_omni`
and `qwen3_omni_moe` are described by their thinker, which has the `text_config`.
"""

_WITHOUT_STATE: Mapping[str, Mapping[str, None]] = {
    "granite_speech": {"window_size": None},
    "granite_speech_plus": {"window_size": None},
    "paligemma": {"use_bidirectional_attention": None},
}
"""Fields of other parts, and of a prompt whose tokens attend to each other."""

_SEVEN_B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
_NESTED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _SEVEN_B,
    "mistral": {**_SEVEN_B, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_SEVEN_B, "num_key_value_heads": 32},
}
"""What published `text_config`s leave out, as transformers' classes have it."""

_ENCODER = "an encoder, which attends both ways and keeps no KV between steps"
_CROSS = "its decoder attends to an encoder's states, which are not described"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
         "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blip", "florence2", "marian", "mbart", "musicgen",
         "musicgen_melody", "mvp", "pegasus", "pix2struct", "plbart", "pp_formulanet", "prophetnet", "t5gemma2", "trocr",
         "udop", "vision-encoder-decoder", "whisper"),
        _CROSS,
    ),
    **dict.fromkeys(("evolla", "idefics", "mllama"), "its cross-attention keeps states that are not described"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "a draft model that reads its target's KV and keeps none"
    ),
    "diffusion_gemma": "it generates whole blocks by diffusion, not token by token",
    "blt": "it keeps states of bytes and of patches, whose borders depend on the text",
    **dict.fromkeys(("kyutai_speech_to_text", "moshi"), "its audio codec keeps states of its own, which are not described"),
    "cpmant": "it keeps KV of prompt tokens that are not in the request",
    "pi0": "it generates actions by flow matching over a prefix, not token by token",
    "reformer": "hashed attention keeps buckets, which are not described",
    "xlnet": "memories of segments are not described",
    "openai-gpt": "it keeps no KV between steps",
    "rwkv": "the RWKV state is not described",
    "xlstm": "the xLSTM state is not described",
    "recurrent_gemma": "the RG-LRU state is not described",
    "qwen4_exp": "the states of its n-gram embeddings and compressed index keys are not described",
    "qwen4_exp_text": "the states of its n-gram embeddings and compressed index keys are not described",
    **dict.fromkeys(
        ("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text"), "its four convolutions per layer are not described"
    ),
    "zaya": "the convolutions of its compressed attention are not described",
    **dict.fromkeys(("glm5_next", "glm5_next_text"), "pooled index keys beside linear attention are not described"),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "latents of two sizes are not described"),
    "unlimited_ocr": "windows that keep reference tokens are not described",
    "step3p7": "its layers of different sizes are not described",
    "hrm_text": "its layers run several times per token, each with a KV of its own",
    "modernbert-decoder": "its file gives windows in a unit of its own",
}  # fmt: skip
"""Model types of transformers, and why they are refused."""


_FLAT = {"fuyu": "persimmon", "hunyuan_vl": "hunyuan_vl_text", "paddleocr_vl": "paddleocr_vl_text"}
"""Multimodal types, and their decoders', whose files may have the decoder's fields at their top."""


def decoder_fields(config: Mapping[str, Any], name: str, *, supported: Collection[str]) -> Fields:
    """Raises `ConfigError` unless the decoder's `model_type` is one of `supported`."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"model {name!r}: expected a JSON object, found {type(config).__name__}")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"model {name!r}: model_type {reprlib.repr(kind)} is not supported; expected the name of a type")
    thinker = config.get("thinker_config")
    if kind in MULTIMODAL and isinstance(thinker, Mapping):
        config = {key: value for key, value in {**config, **thinker}.items() if key != "thinker_config"}
    text = config.get("text_config")
    values = config
    if kind in MULTIMODAL and text is not None:
        without = _WITHOUT_STATE.get(kind, {})
        Fields(name, {**config, **without}, model_type=kind).check_all_read()
        values = {**_nested(config, text, name), **without}
        kind = values.get("model_type", kind)
        values = {**(_NESTED_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}), **values}
    elif text is not None and kind not in REFUSED:
        raise ConfigError(f"model {name!r}: a text_config is not supported with model_type {kind!r}")
    elif kind in _FLAT:
        kind = _FLAT[kind]
    elif kind in MULTIMODAL and kind not in supported:
        raise ConfigError(f"model {name!r}, text_config: expected the decoder of a {kind!r} model, found None")
    if not isinstance(kind, str) or kind not in supported:
        raise _unknown(name, kind, sorted(supported))
    return Fields(name, values, model_type=kind)


def _nested(config: Mapping[str, Any], text: object, name: str) -> Mapping[str, Any]:
    if not isinstance(text, Mapping):
        raise ConfigError(f"model {name!r}, text_config: expected an object, found {reprlib.repr(text)}")
    shared = ("dtype", "torch_dtype", "quantization_config")
    values = {**text, **{key: config[key] for key in shared if text.get(key) is None and key in config}}
    if config.get("tie_word_embeddings") is not None and not text.get("tie_word_embeddings"):
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    return values


def _unknown(name: str, kind: object, known: list[str]) -> ConfigError:
    found = f"model {name!r}: model_type {reprlib.repr(kind)} is not supported"
    reason = REFUSED.get(kind) if isinstance(kind, str) else None
    if reason is not None:
        return ConfigError(f"{found}: {reason}")
    similar = difflib.get_close_matches(str(kind), [*known, *MULTIMODAL], n=5, cutoff=0.5)
    return ConfigError(f"{found}; similar types: {', '.join(similar) or 'none'}")
