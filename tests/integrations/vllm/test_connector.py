"""What the connector refuses, logs and tells vLLM, without an engine."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import disagg.integrations.vllm
from disagg.core.errors import ConfigError
from disagg.integrations.vllm.groups import check_engine, read_groups
from disagg.integrations.vllm.metadata import HandOff, share_logging


def test_vllm_finds_the_connector_by_its_name() -> None:
    """`MultiConnector` looks up statistics so. The module may be imported twice."""
    importlib.reload(disagg.integrations.vllm)
    found = KVConnectorFactory.get_connector_class_by_name("DisaggConnector")
    assert found is disagg.integrations.vllm.DisaggConnector
    assert not found.supports_sleep_mode()


def test_integers_that_a_protobuf_has_made_floats() -> None:
    params = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_address": "tcp://127.0.0.1:9"}
    params |= {"remote_request_id": "00" * 16, "remote_num_tokens": 70.0, "remote_attempt": 1.0}
    hand_off = HandOff.of(params)
    assert hand_off is not None
    assert (hand_off.remote_num_tokens, hand_off.remote_attempt) == (70, 1)
    with pytest.raises(ValueError, match="remote_num_tokens"):
        HandOff.of({**params, "remote_num_tokens": 70.5})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"attention_chunk_size": 8192}, "expected no chunked local attention, found chunks of 8192 tokens"),
        ({"sliding_window": 512}, "expected vLLM's hybrid KV cache manager, found it disabled for a window of 512 tokens"),
    ],
)
def test_full_attention_that_is_none(given: dict[str, int], found: str) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, **given)
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["model.layers.0"], spec)])
    with pytest.raises(ConfigError, match=found):
        read_groups(config)


@pytest.mark.parametrize("option", ["sleep-mode", "cumem-allocator"])
def test_what_lets_vllm_free_the_kv_cache_is_refused(option: str) -> None:
    """VLLM sets the second option with the first one, and frees the cache with either."""
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    name = f"enable_{option.replace('-', '_')}"
    model = SimpleNamespace(**{"enable_sleep_mode": False, "enable_cumem_allocator": False, name: True})
    config: Any = SimpleNamespace(parallel_config=parallel, speculative_config=None, diffusion_config=None, model_config=model)
    with pytest.raises(ConfigError, match=f"--enable-{option}"):
        check_engine(config)
    setattr(model, name, False)
    check_engine(config)


@pytest.fixture
def fresh_logging() -> Iterator[None]:
    """Loggers of this library as they are in a new process, and vLLM's at its default level."""
    loggers = [logging.getLogger(name) for name in ("disagg", "disagg.requests", "vllm")]
    before = [(each.handlers, each.level, each.propagate) for each in loggers]
    loggers[0].handlers = []
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
