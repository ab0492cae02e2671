"""Model descriptions against transformers' own configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.core.topology import Topology
from disagg.models import from_config
from tests.support.configs import spec_of

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from examples.transformers_pd.architectures import ARCHITECTURES, Architecture  # noqa: E402
from examples.transformers_pd.components import ComponentSpec  # noqa: E402


@pytest.fixture(scope="module")
def hf_config() -> Callable[[Architecture], dict[str, Any]]:
    """A small model's `config.json`, as transformers would write it."""
    transformers = pytest.importorskip("transformers")

    def build(architecture: Architecture) -> dict[str, Any]:
        config = transformers.AutoConfig.for_model(**architecture.config)
        return dict(json.loads(config.to_json_string(use_diff=False)))

    return build


def declared(component: ComponentSpec) -> tuple[int, int | None]:
    """Elements of one token or slot in one layer, and the first of 100 tokens that is kept."""
    elements = 0
    for tensor in component.tensors:
        count = 1
        for axis, size in zip(tensor.axes, tensor.sizes, strict=True):
            count *= 1 if axis == "token" else size
        elements += count
    return elements, component.tokens(100)[0] if component.paged else None


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "deepseek-v4"])  # see the next test
def test_transformers_configs_give_what_the_example_declares(
    name: str, hf_config: Callable[[Architecture], dict[str, Any]]
) -> None:
    """The example's own tests check its declarations against the caches of the real models."""
    architecture = ARCHITECTURES[name]
    spec = spec_of(hf_config(architecture), kv_dtype="bfloat16")
    assert spec.num_layers == architecture.num_layers
    assert {s.name: s.layers for s in spec.states} == {c.name: c.layers for c in architecture.components}
    for component in architecture.components:
        state = spec.state(component.name)
        elements, first = declared(component)
        found = 0
        for role in state.roles:
            if role.name != "scale":  # FP8 index keys have scales; those of transformers are not quantised
                count = 1
                for inner in role.inner.values():
                    count *= inner.size
                found += count
        assert found == elements
        assert (state.rows == "pages") == component.paged
        if first is not None:
            assert state.needed(100) == (first, 100)
        for tensor in component.tensors:
            if tensor.split is None:
                continue
            role = state.role(tensor.role)
            axis = role.inner[tensor.split]
            assert axis.size == sum(block.size for block in tensor.blocks)
            if tensor.role != "temporal":
                continue
            sizes = dict(zip(tensor.axes, tensor.sizes, strict=True))
            assert sorted(inner.size for inner in role.inner.values()) == sorted(sizes.values())
            assert role.dtype == (tensor.dtype or "bfloat16")


def test_deepseek_v4_covers_the_layers_that_transformers_caches(
    hf_config: Callable[[Architecture], dict[str, Any]],
) -> None:
    """The states differ: servers keep compressed entries and open rings in separate pools, transformers in one cache."""
    architecture = ARCHITECTURES["deepseek-v4"]
    spec = from_config(hf_config(architecture), name="deepseek-v4")
    cached = {layer for component in architecture.components for layer in component.layers}
    assert {layer for state in spec.states for layer in state.layers} == cached


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if any(c.name == "ssm" for c in a.components)])
def test_blocks_of_convolutions_are_split_as_the_example_splits_them(
    name: str, hf_config: Callable[[Architecture], dict[str, Any]]
) -> None:
    architecture = ARCHITECTURES[name]
    ssm = next(c for c in architecture.components if c.name == "ssm")
    conv = next((t for t in ssm.tensors if t.role == "conv"), None)
    if conv is None:
        return
    role = spec_of(hf_config(architecture)).state("ssm").role("conv")
    for rank in range(2):
        owned: list[int] = []
        start = 0
        for block in conv.blocks:
            first = rank * block.num_units // 2
            last = max(first + 1, (rank + 1) * block.num_units // 2)
            owned += range(start + first * block.unit_size, start + last * block.unit_size)
            start += block.size
        found = role.inner["channel"].owned(Topology(tp=2, tp_rank=rank)).within(start)
        assert np.flatnonzero(found.locate(np.arange(start)) >= 0).tolist() == sorted(set(owned))
