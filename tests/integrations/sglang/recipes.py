"""Published deployments of SGLang's prefill-decode disaggregation and their tests. `docs/evidence/sglang.md` lists them.

They are those of SGLang's own tests and documents, and of llm-d and Dynamo.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Proof(enum.Enum):
    """How a deployment is tested without a GPU."""

    SERVERS = "servers: tokens and log-probabilities of one undivided server"
    RANKS = "ranks in processes of their own: every byte"
    POOLS = "SGLang's pools at TP 1 and 2: every byte"
    REFUSED = "refused at the start"


class Recipe(NamedTuple):
    """`by` names tests: functions of `test_servers`, `test_options` and `test_ranks`, cases of `test_answers` and `test_turns`,
    builders of pools in `test_pools` and `test_special_pools`, and for what is refused the option or class in `test_recipes`.
    """

    models: str
    state: str
    setting: str
    proof: Proof
    by: tuple[str, ...]


SERVERS, RANKS, POOLS, REFUSED = Proof
GQA = "multi-head, grouped-query attention"

RECIPES = (
    Recipe("Llama 3.1, Qwen3, GLM-4, MiniMax-M2", GQA, "TP 2 → 1, 1 → 1, 1 → 2; other page sizes; decode radix cache; a server "
           "replaced under load; retraction", SERVERS, ("test_tp_2_to_1", "test_prefill_is_replaced_under_load",
                                                        "test_decode_is_replaced_under_load")),
    Recipe("Llama 3.1", GQA, "prefill and decode change roles", SERVERS, ("test_roles_are_switched_while_servers_run",)),
    Recipe("Gemma 3", "windows in one pool", "windows that SGLang applies", SERVERS, ("windows in one pool",)),
    Recipe("Mistral", "windows in one pool", "windows that SGLang ignores; conversations", SERVERS, ("mistral",)),
    Recipe("gpt-oss", "windows in a pool of their own", "other page sizes", SERVERS, ("windows in a pool of their own",)),
    Recipe("Qwen3-Next", "GDN and GQA", "TP 2 → 1, other page sizes", SERVERS, ("GDN",)),
    Recipe("Llama 3.1, Qwen3", GQA, "PP 2 → attention DP 2", SERVERS, ("stages to data-parallel attention",)),
    Recipe("Llama 3.1", GQA, "attention DP; prefill CP; PP 2 → 1; prefill and decode change roles", RANKS,
           ("test_attention_data_parallelism", "test_context_parallelism", "test_two_pipeline_stages_to_one",
            "test_instances_change_roles")),
    Recipe("Llama 3.1, Qwen3-VL, GLM-4", GQA, "EAGLE, EAGLE3, DFLASH, MTP: a draft with the model's heads, or fewer", POOLS,
           ("heads", "few_draft_heads")),
    Recipe("DeepSeek-V3, R1, Kimi K2", "latents", "", POOLS, ("latents",)),
    Recipe("DeepSeek-V3, Kimi K2.5, Kimi K2", "latents", "MTP or EAGLE3: a draft of latents, or of heads", POOLS,
           ("latents_with_draft", "latents_with_head_draft")),
    Recipe("DeepSeek-V3.2, GLM-5", "latents, index keys", "without a draft; MTP; a draft of latents", POOLS,
           ("index", "index_with_draft", "index_with_latent_draft")),
    Recipe("GLM-5 with pooled keys", "latents, index keys, tails", "MTP", POOLS, ("pooled_index_with_draft",)),
    Recipe("Qwen3.5, Qwen3-Next", "GDN and GQA", "", POOLS, ("gdn",)),
    Recipe("Nemotron", "Mamba2 and GQA", "", POOLS, ("mamba2",)),
    Recipe("Kimi-Linear, Kimi K3", "KDA and latents", "", POOLS, ("kda",)),
    Recipe("gpt-oss, MiMo-V2, Step 3.5, Llama 4", "windows in a pool of their own", "without a draft; MTP with sliding layers",
           POOLS, ("window", "window_draft")),
    Recipe("Inkling, its attention", "windows, MXFP8", "pages of 128 tokens", POOLS, ("mxfp8 with windows",)),
    Recipe("Llama 3.1, Qwen3", "MXFP8", "a draft in MXFP8", POOLS, ("mxfp8", "mxfp8, interleaved scales")),
    Recipe("Llama 3.1, Qwen3", "FP8", "a draft in bfloat16", POOLS, ("FP8",)),
    Recipe("DeepSeek-V3, V3.2", "latents in FP8, also packed with scales", "", POOLS,
           ("latents in FP8", "latents in FP8, packed")),
    Recipe("dots3 without an index", "latents, windows in a pool of their own", "", POOLS, ("latents with windows",)),
    Recipe("DeepSeek-V3, Kimi K2", "latents in FP4", "MTP", POOLS, ("latents in FP4",)),
    Recipe("MiniMax-M3", "GQA, index keys", "", POOLS, ("minimax",)),
    Recipe("Qwen4-Exp", "GDN, compressed index keys, n-gram context", "MTP", POOLS, ("qsa",)),
    Recipe("Kimi K3, Kimi-Linear", "latents", "decode DCP", REFUSED, ("dcp_size",)),
    Recipe("Kimi-Linear, Qwen3.5, Inkling", "", "unified memory pool", REFUSED, ("enable_unified_memory",)),
    Recipe("DeepSeek-V4", "compressed latents", "HiSparse, or without", REFUSED,
           ("--enable-hisparse", "DeepSeekV4TokenToKVPool")),
    Recipe("Llama 3.1", GQA, "decode's pages allocated after prefill", REFUSED, ("prefill_complete",)),
    Recipe("any with heads", "NVFP4, FP4 in blocks of 16", "", REFUSED, ("NVFP4KVCacheMethod", "FP4MXBlock16KVCacheMethod")),
)  # fmt: skip
