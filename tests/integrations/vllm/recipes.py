"""Published prefill/decode deployments of vLLM, and which caches their models have.

The list is the 41 models for which vLLM's recipes (github.com/vllm-project/recipes, 2026-08-21) publish prefill/decode pools.
`test_recipes.py` moves the caches of each; the table in the documentation is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model. `caches` is a key of `CACHES`, `kv_heads` those of the model, `dtypes` the formats of its KV cache.

    `drafts` is its speculative decoding, which is optional in all but three recipes. With `dcp` the recipe offers decode
    context parallelism.
    """

    model: str
    caches: str
    kv_heads: int = 1
    dtypes: tuple[str, ...] = ("auto",)
    drafts: str = ""
    dcp: bool = False


@dataclass(frozen=True)
class Caches:
    """The caches of an architecture: what they are, whether small engines run them on the CPU, and what NixlConnector of vLLM
    0.33 does with another tensor parallelism on each side (read in its source, not run).
    """

    what: str
    nixl: str
    engine: str = ""


_SIZES = "yes, if one size divides the other"
CACHES = {
    "gqa": Caches("attention by head", _SIZES, engine="Llama"),
    "mla": Caches("latents (MLA)", "yes", engine="DeepSeek-V2"),
    "windows": Caches("attention by head, full and with windows", _SIZES, engine="Gemma 3"),
    "mimo": Caches("the same, with other numbers of heads and K wider than V", _SIZES),
    "gdn": Caches("gated delta nets and attention", _SIZES + "; convolutions in the order DS", engine="Qwen3-Next"),
    "dsa": Caches("latents and index keys (DSA)", "yes"),
    "m3": Caches("attention by head and index keys", _SIZES),
    "kimi_k3": Caches("Kimi delta attention and latents", "convolutions of some layouts only"),
    "ring": Caches("linear attention and latents", "refused"),
    "inkling": Caches("full attention, windows and short convolutions", _SIZES),
    "v4": Caches("compressed latents, index keys, windows and states of compressors", "yes"),
}
"""What `Recipe.caches` names."""

_FP8 = ("auto", "fp8")
_DSA_FP8 = ("auto", "fp8", "fp8_ds_mla")
RECIPES = (
    Recipe(model="MiniMax-M2", caches="gqa", kv_heads=8, dtypes=_FP8),
    Recipe(model="MiniMax-M2.1", caches="gqa", kv_heads=8),
    Recipe(model="MiniMax-M2.5", caches="gqa", kv_heads=8, dtypes=_FP8),
    Recipe(model="MiniMax-M2.7", caches="gqa", kv_heads=8, dtypes=_FP8),
    Recipe(model="MiniMax-M3", caches="m3", kv_heads=4, dtypes=_FP8, drafts="EAGLE3"),
    Recipe(model="Qwen3-235B-2507", caches="gqa", kv_heads=4, dtypes=_FP8),
    Recipe(model="Qwen3-Coder-480B", caches="gqa", kv_heads=8, dtypes=_FP8),
    Recipe(model="Qwen3-VL-235B", caches="gqa", kv_heads=4, dtypes=_FP8, drafts="EAGLE3"),
    Recipe(model="Qwen3.5-122B-A10B", caches="gdn", kv_heads=2, drafts="MTP"),
    Recipe(model="Qwen3.5-397B-A17B", caches="gdn", kv_heads=2, dtypes=_FP8, drafts="MTP"),
    Recipe(model="Qwen3.8-2.4T-A95B", caches="gdn", kv_heads=2, dtypes=_FP8, drafts="MTP"),
    Recipe(model="MiMo-V2-Flash", caches="mimo", kv_heads=4),
    Recipe(model="MiMo-V2.5-Pro", caches="mimo", kv_heads=8, drafts="MTP"),
    Recipe(model="MiMo-V2.5", caches="mimo", kv_heads=4, drafts="MTP"),
    Recipe(model="DeepSeek-V3", caches="mla", dcp=True),
    Recipe(model="DeepSeek-V3.1", caches="mla", dtypes=_FP8, dcp=True),
    Recipe(model="DeepSeek-R1", caches="mla", dtypes=_FP8, dcp=True),
    Recipe(model="DeepSeek-V3.2", caches="dsa", dtypes=_DSA_FP8, drafts="MTP", dcp=True),
    Recipe(model="DeepSeek-V4-Flash", caches="v4", dtypes=("fp8_ds_mla",), drafts="MTP, DSpark"),
    Recipe(model="DeepSeek-V4-Pro", caches="v4", dtypes=("fp8_ds_mla",), drafts="MTP, DSpark"),
    Recipe(model="Ring-1T-FP8", caches="gqa", kv_heads=8, dtypes=("fp8",)),
    Recipe(model="Ring-2.6-1T", caches="ring"),
    Recipe(model="Macaron-V1-Coding-Venti", caches="dsa", dtypes=("fp8", "fp8_ds_mla"), drafts="MTP, DSpark"),
    Recipe(model="Mistral-Large-3", caches="mla", dtypes=_FP8),
    Recipe(model="Mistral-Small-4", caches="mla", drafts="EAGLE"),
    Recipe(model="Kimi-K2-Instruct", caches="mla", dtypes=_FP8, dcp=True),
    Recipe(model="Kimi-K2-Thinking", caches="mla", dtypes=_FP8, dcp=True),
    Recipe(model="Kimi-K2.5", caches="mla", dtypes=_FP8, drafts="EAGLE3", dcp=True),
    Recipe(model="Kimi-K2.6", caches="mla", dtypes=_FP8, drafts="EAGLE3", dcp=True),
    Recipe(model="Kimi-K2.7-Code", caches="mla", drafts="EAGLE3", dcp=True),
    Recipe(model="Kimi-K3", caches="kimi_k3", dtypes=_FP8, drafts="DSpark"),
    Recipe(model="Step-3.5-Flash", caches="windows", kv_heads=8, drafts="MTP"),
    Recipe(model="Step-3.7-Flash", caches="windows", kv_heads=8, dtypes=_FP8, drafts="MTP"),
    Recipe(model="Inkling-Small", caches="inkling", kv_heads=8, drafts="MTP"),
    Recipe(model="Inkling", caches="inkling", kv_heads=8, drafts="MTP"),
    Recipe(model="GLM-4.5", caches="gqa", kv_heads=8, drafts="MTP"),
    Recipe(model="GLM-4.6", caches="gqa", kv_heads=8, drafts="MTP"),
    Recipe(model="GLM-4.7", caches="gqa", kv_heads=8, dtypes=_FP8, drafts="MTP"),
    Recipe(model="GLM-5", caches="dsa", dtypes=_DSA_FP8, drafts="MTP"),
    Recipe(model="GLM-5.1", caches="dsa", dtypes=_DSA_FP8, drafts="MTP"),
    Recipe(model="GLM-5.2", caches="dsa", dtypes=("fp8", "fp8_ds_mla"), drafts="MTP, DSpark"),
)
"""The models. Numbers of heads that a recipe does not give are those of the models' published files."""

POOLS: tuple[tuple[dict[str, int], dict[str, int]], ...] = (
    ({"tp": 4}, {"tp": 4}),
    ({"tp": 8}, {"tp": 1}),
    ({"tp": 1}, {"tp": 4}),
)
"""Prefill and decode as the recipes have them: tensor parallelism over half a node or a node, or data parallelism of TP 1."""
DCP_POOLS: tuple[tuple[dict[str, int], dict[str, int]], ...] = (
    ({"tp": 8, "dcp": 8}, {"tp": 8, "dcp": 8}),
    ({"tp": 1}, {"tp": 8, "dcp": 8, "interleave": 64}),
)
"""The same with decode context parallelism, on both sides and on decode only."""
