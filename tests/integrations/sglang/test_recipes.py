"""Every published deployment is tested by what its row names, or refused with a reason."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization import fp4_kv_cache_quant_method
from sglang.srt.mem_cache import deepseek_v4_memory_pool, memory_pool
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from disagg import ConfigError, Topology
from disagg.integrations.sglang import plugin
from disagg.integrations.sglang.host import check_options
from disagg.integrations.sglang.pools import Pools, read_facts
from harness.vllm.models import write_model
from tests.integrations.sglang import (
    test_answers,
    test_options,
    test_pools,
    test_ranks,
    test_servers,
    test_special_pools,
    test_turns,
)
from tests.integrations.sglang.recipes import RECIPES, Proof

TESTS = {
    Proof.SERVERS: {**vars(test_servers), **vars(test_options), **test_answers.CASES, **test_turns.NUM_ANSWERS},
    Proof.RANKS: vars(test_ranks),
    Proof.POOLS: {**{build.__name__: build for build in test_pools.MODELS}, **test_special_pools.BUILDS},
}
REFUSED = [name for recipe in RECIPES if recipe.proof is Proof.REFUSED for name in recipe.by]
SGLANG_REFUSES: dict[str, tuple[dict[str, Any], str]] = {
    "dcp_size": ({"dcp_size": 2, "tp_size": 2}, "PD decode DCP requires --disaggregation-transfer-backend"),
    "enable_unified_memory": (
        {"enable_unified_memory": True, "attention_backend": "triton"},
        "supports only these transfer backends: mooncake",
    ),
    "prefill_complete": (
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
        "transfer backends other than Mooncake",
    ),
}
"""Options that SGLang refuses for backends which it does not list, and a part of its reason."""


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each.proof is not Proof.REFUSED], ids=lambda each: each.by[0])
def test_what_a_row_names_is_tested(recipe: Any) -> None:
    assert set(recipe.by) <= TESTS[recipe.proof].keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plugin.register()
    return write_model("llama", tmp_path_factory.mktemp("models") / "llama")


def resolve(model: Path, **options: Any) -> None:
    """SGLang's check of a decode server's arguments, in the environment of a server on the CPU."""
    given: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True}
    given |= {"disaggregation_transfer_backend": "disagg", "disaggregation_decode_retraction_backup": "cpu_tensor"}
    ServerArgs(model_path=str(model), disaggregation_mode="decode", **{**given, **options}).resolve_once()


@pytest.mark.parametrize("name", SGLANG_REFUSES)
def test_sglang_refuses(name: str, model: Path) -> None:
    options, reason = SGLANG_REFUSES[name]
    resolve(model)
    with pytest.raises((ValueError, AssertionError), match=reason):
        resolve(model, **options)


def test_staging_buffers_are_ignored(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this backend only. SGLang refuses others that it does not list."""
    for backend, is_ignored in (("disagg", True), ("nixl", False)):
        monkeypatch.setenv(plugin.STAGING, "1")
        monkeypatch.delenv(plugin.APP, raising=False)
        resolve(model, disaggregation_transfer_backend=backend)
        assert (plugin.STAGING not in os.environ) == is_ignored
        assert (plugin.APP in os.environ) == is_ignored
    with pytest.raises(ValueError, match="SGLANG_DISAGG_STAGING_BUFFER requires"):
        resolve(model, disaggregation_transfer_backend="mori")


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in SGLANG_REFUSES])
def test_the_plug_in_refuses(name: str) -> None:
    if name.startswith("--"):
        options = SimpleNamespace(
            dllm_algorithm=None,
            enable_mis=False,
            debug_tensor_dump_input_file=None,
            language_only=False,
            speculative_algorithm=None,
        )
        parallel = SimpleNamespace(
            enable_kv_cache_sharding=False,
            enable_dsa_cache_layer_split=False,
            enable_cp_tp_group_sharing=False,
            attn_dcp_size=1,
            pp_size=1,
        )
        scheduler = SimpleNamespace(
            server_args=options,
            enable_hisparse=False,
            enable_decode_hicache=True,
            model_config=SimpleNamespace(is_encoder_decoder=False, use_ngram_embedding=False),
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        features = SimpleNamespace(enable_memory_saver=False)
        check_options(scheduler, parallel, features, is_decode=True)
        scheduler.enable_hisparse = name == "--enable-hisparse"
        with pytest.raises(ConfigError, match=f"expected no {name}"):
            check_options(scheduler, parallel, features, is_decode=True)
        return
    if method := getattr(fp4_kv_cache_quant_method, name, None):
        pool: Any = memory_pool.MHATokenToKVPool(
            size=64, page_size=16, dtype=torch.float4_e2m1fn_x2, head_num=2, head_dim=64, layer_num=1, device="cpu",
            enable_memory_saver=False, quant_method=method(num_layers=1, device="cpu", page_size=16),
        )  # fmt: skip
        reason = f"quant_method: expected none, found {name}"
    else:
        pool = object.__new__(getattr(deepseek_v4_memory_pool, name))
        reason = f"expected one of .*, found {name}"
    with pytest.raises(ConfigError, match=f"token_to_kv_pool.*{reason}"):
        read_facts(Pools(kv=pool, config=None), Topology())
