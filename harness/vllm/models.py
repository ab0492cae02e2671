"""Small models with random weights and a byte tokenizer, written to a folder. Nothing is downloaded.

vLLM on the CPU asks for head sizes from 32, for blocks of a multiple of 32 tokens, and for a latent of 512 + 64 elements in
blocks of 16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY, BOS, EOS, MAX_TOKENS = 320, 256, 257, 2048
ADAPTER_RANK = 8
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.04,
}
_SMALL: Mapping[str, Any] = {**_COMMON, "hidden_size": 256, "intermediate_size": 512}
_PLAIN: Mapping[str, Any] = {
    **_SMALL,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    config = transformers.LlamaConfig(**_PLAIN)
    return transformers.LlamaForCausalLM(config)


def _mistral() -> Any:
    """A window that vLLM applies in each layer, and SGLang in none."""
    config = transformers.MistralConfig(**_PLAIN, sliding_window=64)
    return transformers.MistralForCausalLM(config)


def _qwen3() -> Any:
    """In SGLang with attention that is data-parallel, which its Llama is not made for."""
    config = transformers.Qwen3Config(**_PLAIN)
    return transformers.Qwen3ForCausalLM(config)


def _gpt_oss() -> Any:
    """Windows in every other layer, and a sink for each head."""
    config = transformers.GptOssConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4)  # otherwise every prompt has much the same answer
    return model


def small_gemma3() -> Any:
    """The configuration of the model `gemma3`: windows in two of three layers."""
    return transformers.Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=64,
        sliding_window_pattern=3,
        query_pre_attn_scalar=32,
    )


def _gemma3() -> Any:
    model = transformers.Gemma3ForCausalLM(small_gemma3())
    with torch.no_grad():  # tied embeddings of this size repeat the last token
        model.model.embed_tokens.weight.mul_(0.2)
    return model


def _llama4() -> Any:
    """Three of four layers attend within chunks of 128 tokens. The other one has no rotary embeddings."""
    config = transformers.Llama4TextConfig(
        **_COMMON,
        hidden_size=256,
        intermediate_size=512,
        intermediate_size_mlp=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        attention_chunk_size=128,
        num_local_experts=4,
        interleave_moe_layer_step=4,
        tie_word_embeddings=False,
    )
    return transformers.Llama4ForCausalLM(config)


def _falcon_h1() -> Any:
    config = transformers.FalconH1Config(
        **_SMALL,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        tie_word_embeddings=False,
    )
    return transformers.FalconH1ForCausalLM(config)


def _qwen3_next() -> Any:
    """Each token goes to all experts: of experts that are about equally likely, bfloat16 chooses others in another batch."""
    config = transformers.Qwen3NextConfig(
        **_SMALL,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        tie_word_embeddings=False,
    )
    config.full_attention_interval = 4  # SGLang reads it, as published files have it, and not the types of layers
    return transformers.Qwen3NextForCausalLM(config).to(torch.bfloat16)


def _deepseek_v2() -> Any:
    config = transformers.DeepseekV2Config(
        **_SMALL,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=3,
        rope_parameters={  # as published models have it; vLLM's CPU kernel for plain rotary embeddings misreads strided keys
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_TOKENS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        tie_word_embeddings=False,
    )
    return transformers.DeepseekV2ForCausalLM(config)


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "llama4": _llama4,
    "falcon-h1": _falcon_h1,
    "qwen3-next": _qwen3_next,
    "qwen3-next-mtp": _qwen3_next,
    "deepseek-v2": _deepseek_v2,
}
"""Makers of models by name."""


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-next": {"dtype": "bfloat16"},  # vLLM's CPU kernels of GDN need it
    "qwen3-next-mtp": {"dtype": "bfloat16"},
    "deepseek-v2": {"attention_backend": "CPU_MLA"},  # that of CPUs with AMX takes bfloat16 only
}
"""The options of vLLM that a model needs on the CPU."""


def missing(dtype: str) -> str:
    """Why a model of this dtype cannot be handed over on this machine; empty if it can."""
    is_refused = dtype == "bfloat16" and "amx_tile" in Path("/proc/cpuinfo").read_text()
    return "vLLM keeps bfloat16 in tiles on CPUs with AMX, which the connector refuses" if is_refused else ""


def write_model(name: str, folder: Path) -> Path:
    """Write the model `name` and its tokenizer to `folder`, the same weights each time."""
    torch.manual_seed(7)
    save_model(MODELS[name](), folder)
    if name in PREDICTING:
        _add_prediction(folder, PREDICTING[name])
    return folder


def _add_prediction(folder: Path, add: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Let `add` change a model's configuration and weights, so that one more layer predicts the token after next."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    add(config, weights)
    save_file({name: value.clone() for name, value in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def _layer_of_its_own_predicts(config: dict[str, Any], weights: dict[str, Any]) -> None:
    """As in Qwen3-Next: `mtp`, here with the weights of the model's last layer."""
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    weights |= {name.replace(last, "mtp.layers.0."): value for name, value in weights.items() if name.startswith(last)}
    norms = {name: torch.zeros(hidden) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    added = {**norms, "fc": torch.randn(hidden, 2 * hidden) * config["initializer_range"]}
    weights |= {f"mtp.{name}.weight": value.to(torch.bfloat16) for name, value in added.items()}


PREDICTING: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "qwen3-next-mtp": _layer_of_its_own_predicts,
}
"""Models with a layer for multi-token prediction, which transformers does not have."""


def write_head(folder: Path, method: str = "eagle", *, num_kv_heads: int = 4) -> Path:
    """Write a head for a speculative method, `eagle`, `eagle3` or `dflash`, of the model `llama` to `folder`, with random
    weights: what it drafts depends on the prompt, and the model rejects it.
    """
    config = _llama().config.to_dict()
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_layers, num_combined, described = HEADS[method]
    rows = {"q": config["num_attention_heads"] * dim, "k": num_kv_heads * dim, "v": num_kv_heads * dim}
    attended = 2 * hidden if method == "eagle3" else hidden  # the token's embedding beside the model's hidden state
    sizes = {"fc": (hidden, num_combined * hidden)}
    for layer in (f"layers.{number}." for number in range(num_layers)):
        sizes |= {f"{layer}self_attn.{name}_proj": (size, attended) for name, size in rows.items()}
        sizes |= {f"{layer}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        sizes |= {f"{layer}self_attn.o_proj": (hidden, rows["q"]), f"{layer}mlp.down_proj": (hidden, inner)}
    random = torch.Generator().manual_seed(5)
    weights = {f"{name}.weight": torch.randn(size, generator=random) * 0.2 for name, size in sizes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    given = {**described, "num_hidden_layers": num_layers, "num_key_value_heads": num_kv_heads}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, **given}))
    save_file(weights, folder / "model.safetensors")
    return folder


HEADS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "eagle": (1, 2, {"architectures": ["LlamaForCausalLM"]}),
    "eagle3": (1, 3, {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
    "dflash": (
        2,
        2,
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": EOS},
        },
    ),
}
"""Of each method: its layers, how many of the model's hidden states it combines, and what its configuration says of it."""


def save_model(model: Any, folder: Path) -> Path:
    """Write a model with this module's vocabulary, and the tokenizer, to `folder`."""
    model.generation_config = transformers.GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(
    folder: Path, more: Mapping[str, int] = {}, added: Sequence[AddedToken] = (), *, template: str = TEMPLATE, **names: str
) -> Any:
    """Write a tokenizer with one token for each byte, two special tokens, and those of `more`. `added` tokens are found in a
    text before it is split. `names` are what a processor calls some of them.
    """
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<s>": BOS, "</s>": EOS, **more}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=MAX_TOKENS,
        extra_special_tokens=names,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def write_adapter(folder: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of the model `llama` to `folder`, with random weights that change its answers."""
    config = _llama().config
    rows = {"q_proj": config.num_attention_heads * config.head_dim, "v_proj": config.num_key_value_heads * config.head_dim}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, size in rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            weights[f"{name}A.weight"] = torch.randn(ADAPTER_RANK, config.hidden_size, generator=random) * 0.2
            weights[f"{name}B.weight"] = torch.randn(size, ADAPTER_RANK, generator=random) * 0.2
    described = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": list(rows)}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**described, "task_type": "CAUSAL_LM", "bias": "none"}))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
