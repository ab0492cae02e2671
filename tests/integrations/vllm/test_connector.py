"""What the connector refuses, logs and tells vLLM, without an engine."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.mamba import MambaBackendEnum
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import disagg.integrations.vllm
from disagg.core.errors import ConfigError
from disagg.integrations.handoff import HandOff
from disagg.integrations.vllm.connector import DisaggConnector
from disagg.integrations.vllm.formats import Format, read_format
from disagg.integrations.vllm.groups import check_engine, read_groups
from disagg.integrations.vllm.metadata import StepMetadata, share_logging
from disagg.integrations.vllm.neighbours import check_others
from disagg.integrations.vllm.worker import WorkerHalf
from harness.servers import OURS, Server


def test_vllm_finds_the_connector_by_its_name() -> None:
    """`MultiConnector` looks up statistics so. The module may be imported twice."""
    importlib.reload(disagg.integrations.vllm)
    found = KVConnectorFactory.get_connector_class_by_name("DisaggConnector")
    assert found is disagg.integrations.vllm.DisaggConnector
    assert not found.supports_sleep_mode(KVTransferConfig(**OURS))


def test_integers_that_a_protobuf_has_made_floats() -> None:
    params = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_address": "tcp://127.0.0.1:9"}
    params |= {"remote_request_id": "00" * 16, "remote_num_tokens": 70.0, "remote_attempt": 1.0}
    hand_off = HandOff.of(params)
    assert hand_off is not None
    assert (hand_off.remote_num_tokens, hand_off.remote_attempt) == (70, 1)
    with pytest.raises(ValueError, match="remote_num_tokens"):
        HandOff.of({**params, "remote_num_tokens": 70.5})


@pytest.mark.parametrize("other", ["NixlPullConnector", "MooncakeConnector", "DisaggConnector"])
def test_another_connector_that_hands_over_is_refused(other: str) -> None:
    """Both would answer prefill's request with the same keys, over which vLLM ends."""
    ours, stored, found = (type(name, (), {})() for name in ("DisaggConnector", "OffloadingConnector", other))
    check_others([stored, ours], recomputes=True)
    with pytest.raises(ConfigError, match=f"expected one connector that hands requests over, found DisaggConnector, {other}"):
        check_others([stored, ours, found], recomputes=True)


@pytest.mark.parametrize("name", ["LMCacheMPConnector", "LMCacheMPConnectorUpstream"])
def test_lmcache_is_refused_where_failed_loads_are_computed(name: str) -> None:
    """It would store the blocks of the failed load, which others have by then."""
    pair = [type(each, (), {})() for each in ("DisaggConnector", name)]
    check_others(pair, recomputes=False)
    with pytest.raises(ConfigError, match="expected kv_load_failure_policy 'fail' beside LMCacheMPConnector"):
        check_others(pair, recomputes=True)


def test_another_vllms_cache_in_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is not known what it waits for before blocks are used again."""
    pair = [type(each, (), {})() for each in ("DisaggConnector", "OffloadingConnector")]
    monkeypatch.setattr("disagg.integrations.vllm.neighbours.FENCE", "another")
    with pytest.raises(ConfigError, match="when this one's OffloadingConnector copies blocks is unknown"):
        check_others(pair, recomputes=False)


SLEEPING = """
from vllm.platforms.interface import Platform

def register():
    Platform.is_sleep_mode_available = Platform.is_cumem_allocator_available = lambda _: True
"""
"""A plug-in of vLLM with which every platform has what GPUs have."""
PLAIN = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
REPLAYED = MambaStateShapeCalculator.append_replayssm_ring(
    ((96, 3), (4, 8, 16)), n_groups=2, tp_world_size=1, logical_window=16, backend=MambaBackendEnum.TRITON
)
STATES: dict[str, Any] = {"block_size": 16, "shapes": REPLAYED, "dtypes": (torch.float32,) * len(REPLAYED)}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (
            CrossAttentionSpec(**PLAIN),
            "expected full, sliding-window or chunked attention, MLA or recurrent state, found Cross",
        ),
        (
            CircularBufferSpec(**{**PLAIN, "block_size": 8}),
            "expected full, sliding-window or chunked attention, MLA or recurrent state, found Circular",
        ),
        (RSWASpec(**PLAIN, rswa_window=64), "expected full, sliding-window or chunked attention or MLA, found RSWA"),
        (
            ChunkedLocalAttentionSpec(**PLAIN, attention_chunk_size=64, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC),
            "expected a KV cache format whose bytes",
        ),
        (FullAttentionSpec(**PLAIN, state_content_bytes=130), "expected a KV cache format whose bytes are described"),
        (SlidingWindowSpec(**PLAIN, sliding_window=4, state_content_bytes=9), "expected a KV cache format whose bytes are"),
        (FullAttentionSpec(**PLAIN, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC), "expected a KV cache format whose bytes"),
        (MLAAttentionSpec(**PLAIN, tokens_per_state=4), "expected one state per token, found one per 4 tokens"),
        (MLAAttentionSpec(**{**PLAIN, "dtype": torch.uint8}), "expected a KV cache format whose bytes are described"),
        (MambaSpec(**STATES), "found 5 of MAMBA2, of shapes"),
        (MambaSpec(**{**STATES, "shapes": STATES["shapes"][:2]}, tp_replicated=True), r"found 2 of MAMBA2, .* every rank$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_caches_that_are_not_described(spec: KVCacheSpec, found: str) -> None:
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["model.layers.0"], spec)])
    with pytest.raises(ConfigError, match=found):
        read_groups(config)


def test_vllm_replays_no_states_beside_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses such a server before this connector does."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    options = CacheConfig(use_replayssm=True)
    assert VllmConfig(cache_config=options).cache_config.use_replayssm
    with pytest.raises(ValueError, match="--use-replayssm is incompatible with KV connectors"):
        VllmConfig(cache_config=options, kv_transfer_config=KVTransferConfig(**OURS))


def test_shuffled_caches_of_rocm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same specs as others."""
    planes = FullAttentionSpec(**PLAIN, num_head_slots=2, state_content_bytes=256)
    index = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    for spec in (planes, index):
        assert read_format(spec, "layer 0") is not Format.PLAIN
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    for spec in (planes, index):
        with pytest.raises(ConfigError, match="layer 0: ROCm's kernels shuffle"):
            read_format(spec, "layer 0")


FREEING = {"sleep_mode": "sleep mode", "cumem_allocator": "--enable-cumem-allocator"}
"""Options with which vLLM may free the KV cache, and what their refusal names. From 0.33 on vLLM itself refuses sleep mode,
since the connector does not support it.
"""


@pytest.mark.parametrize("option", FREEING)
def test_what_lets_vllm_free_the_kv_cache_is_refused(
    option: str, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's own configuration, on a platform that has both. VLLM sets the second option with the first one, and frees the
    cache with either.
    """
    for name in ("is_sleep_mode_available", "is_cumem_allocator_available", "is_cuda_alike"):
        monkeypatch.setattr(type(current_platform), name, lambda _: True)
    transfer = KVTransferConfig(**OURS)

    def config(**options: bool) -> VllmConfig:
        found = ModelConfig(str(model("llama")), skip_tokenizer_init=True, dtype="float32", **options)
        return VllmConfig(model_config=found, kv_transfer_config=transfer)

    with pytest.raises(ValueError, match=f"DisaggConnector does not support {FREEING[option]}"):
        check_engine(config(**{f"enable_{option}": True}))
    check_engine(config())


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_fails_hands_over_nothing(*, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's first runner ends the connector's step also while the forward pass raises, with some layers not computed."""
    connector, worker = object.__new__(DisaggConnector), MagicMock()
    connector._worker = worker
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
    step = StepMetadata()
    output = SimpleNamespace(kv_connector_metadata=step, has_sync_kv_loads=False, finished_req_ids=set())
    try:
        int("a caller handles an error, and starts the engine's step meanwhile")
    except ValueError:
        with contextlib.suppress(MemoryError), KVConnectorModelRunnerMixin._get_kv_connector_output(output):
            if fails:
                raise MemoryError from None
    worker.save.assert_called_once_with(step, has_failed=fails)


def test_sends_of_a_step_that_failed_are_aborted() -> None:
    worker: Any = object.__new__(WorkerHalf)
    handles = {name: MagicMock() for name in ("sent", "ended", "other")}
    worker._is_cuda, worker._sends = False, {name: SimpleNamespace(handle=handle) for name, handle in handles.items()}
    chunk: Any = SimpleNamespace(req_id="sent")
    finish: Any = SimpleNamespace(req_id="ended")
    worker.save(StepMetadata(chunks=[chunk], finishes=[finish]), has_failed=True)
    assert [name for name, handle in handles.items() if handle.abort.called] == ["sent", "ended"]


def test_a_server_that_returns_experts_does_not_start(model: Callable[[str], Path]) -> None:
    """VLLM refuses them beside connectors that it knows by name. With this one its worker would end at the first hand-over."""
    found = ModelConfig(str(model("llama")), skip_tokenizer_init=True, dtype="float32")
    config = VllmConfig(model_config=found, kv_transfer_config=KVTransferConfig(**OURS))
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ConfigError, match="--enable-return-routed-experts: those of tokens that another server computed"):
        check_engine(config)


@pytest.mark.parametrize("option", FREEING)
def test_a_server_that_may_free_the_kv_cache_does_not_start(option: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """A whole server, whose CPU says that it has what GPUs have."""
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    package = tmp_path / "sleeping-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeping\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nsleeping = sleeping:register\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with Server.vllm(model("llama"), f"--enable-{option.replace('_', '-')}", PYTHONPATH=path) as server:
        with pytest.raises(RuntimeError, match="does not answer"):
            server.wait_ready()
        log = server.log(length=1 << 20)
    assert f"DisaggConnector does not support {FREEING[option]}" in log, log[-3000:]


@pytest.fixture
def fresh_logging() -> Iterator[None]:
    """Loggers of this library as they are in a new process, and vLLM's at its default level."""
    loggers = [logging.getLogger(name) for name in ("disagg", "disagg.requests", "vllm")]
    before = [(each.handlers, each.level, each.propagate) for each in loggers]
    for each in loggers[:2]:
        each.handlers, each.propagate = [], True  # else pytest adds handlers of its own
        each.setLevel(logging.NOTSET)
    loggers[2].setLevel(logging.INFO)
    yield
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_the_line_of_each_request_is_for_debugging(fresh_logging: None, level: int) -> None:
    logging.getLogger("vllm").setLevel(level)
    share_logging()
    assert logging.getLogger("disagg.runtime.handshake").isEnabledFor(logging.INFO)
    assert logging.getLogger("disagg.requests").isEnabledFor(logging.INFO) is (level == logging.DEBUG)
