"""Models with random weights for vLLM servers on a GPU, in bfloat16. Nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NUM_PRINTABLE = 94
"""The first tokens of the vocabulary: the printable characters of ASCII, without the space."""


def _llama(transformers: Any, common: Mapping[str, Any]) -> Any:
    """0.7 billion parameters. Each of 32 layers has 8 KV heads of 128 elements: 128 KiB for each token."""
    config = transformers.LlamaConfig(
        **common, intermediate_size=2816, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    return transformers.LlamaForCausalLM(config)


def _falcon_h1(transformers: Any, common: Mapping[str, Any]) -> Any:
    """Mamba2 beside attention in each of 24 layers: 24 KiB for each token, and 0.5 MiB in each layer for each request."""
    config = transformers.FalconH1Config(
        **common, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        mamba_d_ssm=2048, mamba_n_heads=32, mamba_d_head=64, mamba_n_groups=2, mamba_d_state=128, mamba_d_conv=4,
        mamba_chunk_size=128,
    )  # fmt: skip
    return transformers.FalconH1ForCausalLM(config)


def _deepseek_v2(transformers: Any, common: Mapping[str, Any]) -> Any:
    """Multi-head latent attention with the head sizes of published models, without experts: 27 KiB for each token."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = transformers.DeepseekV2Config(
        **common, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=24,
        rope_parameters=yarn,
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


def _gpt_oss(transformers: Any, common: Mapping[str, Any]) -> Any:
    """Windows of 128 tokens in every other of 12 layers, a sink for each head, and 8 experts: 24 KiB for each token."""
    config = transformers.GptOssConfig(
        **common, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        sliding_window=128, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


MODELS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "llama": _llama,
    "falcon-h1": _falcon_h1,
    "deepseek-v2": _deepseek_v2,
    "gpt-oss": _gpt_oss,
}
"""Makers of models by name."""


def answer_in_ascii(model: Path) -> None:
    """Change a model, so that its greedy answers have printable ASCII only: each token is a text of its own."""
    files = importlib.import_module("safetensors.torch")
    weights = files.load_file(model / "model.safetensors")
    weights["lm_head.weight"][NUM_PRINTABLE:] = 0  # of the others some logit is positive
    files.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def model_writer(gpus: int) -> Callable[[str, Path], Path]:
    """What writes a model of a name to a folder: a large one for GPUs, a small one for the CPU."""
    small: Callable[[str, Path], Path] = importlib.import_module("harness.vllm.models").write_model
    return write_large_model if gpus else small


def write_large_model(name: str, folder: Path) -> Path:
    """Write the model `name` and its tokenizer to `folder`, the same weights each time."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    models = importlib.import_module("harness.vllm.models")
    torch.manual_seed(0)
    common = {
        "vocab_size": models.VOCABULARY, "bos_token_id": models.BOS, "eos_token_id": models.EOS, "pad_token_id": models.EOS,
        "hidden_size": 1024, "max_position_embeddings": 32768, "initializer_range": 0.04, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.device("cuda"):
        model = MODELS[name](transformers, common).to(torch.bfloat16)
    found: Path = models.save_model(model, folder)
    del model
    torch.cuda.empty_cache()
    return found
