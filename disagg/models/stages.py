"""Pipeline stages: which layers each owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.models.spec import ModelSpec


def split_layers(num_layers: int, num_stages: int, counts: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """The layer ids of every pipeline stage: even shares, the remainder to the later stages, one each; or by `counts`.

    Raises `ConfigError` where `counts` do not add up to `num_layers` over `num_stages`.
    """
    if counts is None:
        base, rest = divmod(num_layers, num_stages)
        counts = [base + (stage >= num_stages - rest) for stage in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts, default=0) < 0:
        raise ConfigError(f"layer counts: expected {num_stages} that add up to {num_layers}, found {list(counts)}")
    starts = np.cumsum([0, *counts]).tolist()
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=False))


_PREFIXES = ("model", "language_model", "text_model", "backbone", "transformer")
"""What checkpoints put before a decoder's parts; under another name (a vision tower, say) parts are none of a stage's."""
_FIRST = ("embed_tokens", "embeddings", "embedding", "embed", "word_embeddings", "wte")
_LAST = ("norm", "norm_f", "final_layernorm", "ln_f", "lm_head", "head", "mtp")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `[start_layer, end_layer)` of `num_layers`. Draft layers have ids from `num_layers` on and follow the last.

    Raises `ConfigError` where that is no range of the model's layers.
    """

    start_layer: int
    end_layer: int
    num_layers: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start_layer <= self.end_layer <= self.num_layers:
            found = f"[{self.start_layer}, {self.end_layer})"
            raise ConfigError(f"stage: expected start_layer and end_layer within [0, {self.num_layers}], found {found}")

    @property
    def is_first(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    def owns_layer(self, layer: int) -> bool:
        """Whether a layer is the stage's; draft layers are the last one's."""
        return self.start_layer <= layer < self.end_layer or (layer >= self.num_layers and self.is_last)

    def owns_weight(self, name: str) -> bool:
        """Whether a checkpoint's weight is needed here.

        Layers, with all below them (`model.layers.3.mlp.experts.7.up_proj.weight`), go by their id, embeddings to the first
        stage, final norm, head and draft layers to the last, which needs tied embeddings too. Any other name: everywhere.
        """
        parts = name.split(".")
        while parts and parts[0] in _PREFIXES:
            parts.pop(0)
        head, below = (parts[0], parts[1:]) if parts else ("", [])
        if head == "layers" and below and below[0].isascii() and below[0].isdecimal():
            return self.owns_layer(int(below[0]))
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
    """This rank's stage. `start_layer` and `end_layer` are what the server knows of it; without them it follows from the
    topology. Without pipeline parallelism they may be any range; with it they must be the split's.

    Raises `ConfigError` where they are not, since every rank's layers must be known: give `layer_counts`.
    """
    layers = split_layers(model.num_layers, topology.pp, layer_counts)
    counted = np.cumsum([0, *map(len, layers)]).tolist()
    split = counted[topology.pp_rank], counted[topology.pp_rank + 1]
    start, end = (own if given is None else given for own, given in zip(split, (start_layer, end_layer), strict=True))
    if topology.pp > 1 and (start, end) != split:
        raise ConfigError(
            f"stage {topology.pp_rank} of {topology.pp}: expected layers [{split[0]}, {split[1]}), found [{start}, {end}); "
            "layer_counts must say an uneven split"
        )
    return Stage(start_layer=start, end_layer=end, num_layers=model.num_layers, tied_embeddings=model.tied_embeddings)
