"""Pipeline stages: the layers and checkpoint weights that each owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.models.spec import ModelSpec


def split_layers(num_layers: int, num_stages: int, counts: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """The layer ids of every pipeline stage. By default shares are even, and the last stages have one layer more if layers
    remain. Raises `ConfigError` unless there are `num_stages` `counts` that add up to `num_layers`.
    """
    if counts is None:
        base, rest = divmod(num_layers, num_stages)
        counts = [base + (stage >= num_stages - rest) for stage in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts, default=0) < 0:
        raise ConfigError(f"layer counts: expected {num_stages} counts that add up to {num_layers}, found {list(counts)}")
    starts = np.cumsum([0, *counts]).tolist()
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=False))


_PREFIXES = ("model", "language_model", "text_model", "backbone", "transformer")
"""Weights under other prefixes, such as a vision tower's, have no stage."""
_FIRST = ("embed_tokens", "embeddings", "embedding", "embed", "word_embeddings", "wte")
_SHARED = frozenset(("shared_transf", "shared_transformer"))
_LAST = ("norm", "norm_f", "final_layernorm", "ln_f", "lm_head", "head", "mtp")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `[start_layer, end_layer)` of `num_layers`. Draft layers, with ids from `num_layers` on, are in the last stage.
    Raises `ConfigError` if this is not a range of whole blocks of the model.
    """

    start_layer: int
    end_layer: int
    num_layers: int
    tied_embeddings: bool = False
    layers_per_block: int = 1

    def __post_init__(self) -> None:
        found = f"[{self.start_layer}, {self.end_layer})"
        if not 0 <= self.start_layer <= self.end_layer <= self.num_layers:
            raise ConfigError(f"stage: expected start_layer and end_layer within [0, {self.num_layers}], found {found}")
        if self.start_layer % self.layers_per_block or self.end_layer % self.layers_per_block:
            raise ConfigError(f"stage: expected whole blocks of {self.layers_per_block} layers, found {found}")

    @property
    def is_first(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    def owns_layer(self, layer: int) -> bool:
        return self.start_layer <= layer < self.end_layer or (layer >= self.num_layers and self.is_last)

    def owns_weight(self, name: str) -> bool:
        """Whether the stage needs a checkpoint's weight.

        Weights of a layer belong to its stage, embeddings to the first stage. The final norm, the head and draft layers
        belong to the last, and so do embeddings that are tied to the head. Every stage needs weights with any other name, and
        those that layers share, which a checkpoint names by the first of them.
        """
        parts = name.split(".")
        while parts and parts[0] in _PREFIXES:
            parts.pop(0)
        head, below = (parts[0], parts[1:]) if parts else ("", [])
        if head == "layers" and below and below[0].isascii() and below[0].isdecimal():
            is_shared = not _SHARED.isdisjoint(below)
            return is_shared or self.owns_layer(int(below[0]) * self.layers_per_block)
        if head in _FIRST:
            return self.is_first or (self.tied_embeddings and self.is_last)
        return self.is_last if head in _LAST else True


def stage_of(
    model: ModelSpec,
    topology: Topology,
    *,
    layer_counts: Sequence[int] | None = None,
    start_layer: int | None = None,
    end_layer: int | None = None,
) -> Stage:
    """This rank's stage, by `layer_counts`, which count blocks, unless the server gives its first and last layer. Without
    pipeline parallelism these may be any range. With it every rank's layers must be known, so this raises `ConfigError` if
    they differ from the split.
    """
    blocks = split_layers(model.num_layers // model.layers_per_block, topology.pp, layer_counts)
    counted = (np.cumsum([0, *map(len, blocks)]) * model.layers_per_block).tolist()
    split = counted[topology.pp_rank], counted[topology.pp_rank + 1]
    start, end = (own if given is None else given for own, given in zip(split, (start_layer, end_layer), strict=True))
    if topology.pp > 1 and (start, end) != split:
        raise ConfigError(
            f"stage {topology.pp_rank} of {topology.pp}: expected layers [{split[0]}, {split[1]}), found [{start}, {end}); "
            "give layer_counts for an uneven split"
        )
    return Stage(
        start_layer=start,
        end_layer=end,
        num_layers=model.num_layers,
        tied_embeddings=model.tied_embeddings,
        layers_per_block=model.layers_per_block,
    )
