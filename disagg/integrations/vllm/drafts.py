"""The draft layers of speculative decoding. Their KV is optional: without it drafts are worse, and the target model rejects
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.core.errors import ConfigError
from disagg.integrations.vllm.groups import Group, Kind

MODULES = re.compile(r"(^|\.)(draft_model|mtp|mtp_layers|eagle_layers)\.")
"""Modules of draft models that vLLM does not number after the model's own layers."""


class Drafts:
    def __init__(self, config: VllmConfig, kv: KVCacheConfig) -> None:
        speculation = config.speculative_config
        is_in_cache = speculation is not None and speculation.uses_draft_kv_cache()
        names = {name for group in kv.kv_cache_groups for name in group.layer_names}
        self._names = _draft_names(config, names) if is_in_cache else set()

    def target(self, groups: Iterable[Group]) -> tuple[Group, ...]:
        """The groups of the model's own layers. A pipeline stage may have no layer of a group."""
        own = (group for group in groups if not group.specs or group.specs.keys() - self._names)
        return tuple(group.only(group.specs.keys() - self._names) for group in own)

    def draft(self, groups: Iterable[Group]) -> tuple[Group, ...]:
        """The groups of draft layers. Raises `ConfigError` for recurrent states."""
        found = tuple(group.only(self._names) for group in groups if group.specs.keys() & self._names)
        states = [name for group in found if group.kind is Kind.STATE for name in group.specs]
        if states:
            raise ConfigError(f"draft layers: expected attention, found recurrent state in {', '.join(states[:2])}")
        return found


def _draft_names(config: VllmConfig, names: set[str]) -> set[str]:
    """Layers that vLLM marks, or, if it marks none, those that their names show to draft."""
    layers = config.compilation_config.static_forward_context
    marked = {name for name in names if getattr(layers.get(name), "is_draft_layer", False)}
    num_layers = config.model_config.get_total_num_hidden_layers()
    # A looped model numbers its second pass so. All layers of a draft model are in a module of that name.
    by_number = not config.speculative_config.uses_draft_model()
    return marked or {
        name for name in names if MODULES.search(name) or (by_number and _is_later(name, layers.get(name), num_layers))
    }


def _is_later(name: str, layer: Any, num_layers: int) -> bool:
    """Whether a layer is numbered after the model's own, whose recurrent states may have such numbers too."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return number is not None and int(number[1]) >= num_layers and not isinstance(layer, MambaBase)
