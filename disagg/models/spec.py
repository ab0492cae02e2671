"""A model's layers, and the state that a request leaves in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.core.errors import ConfigError
from disagg.state.declare import State


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Draft layers, if any, have ids from `num_layers` on. With `tied_embeddings` the model's head is its embedding, so the
    last pipeline stage needs the embedding too. `layers_per_block`: layers with state in one block of the model, which a
    checkpoint counts and no pipeline stage divides.
    """

    name: str
    num_layers: int
    states: tuple[State, ...]
    tied_embeddings: bool = False
    layers_per_block: int = 1

    def state(self, name: str) -> State:
        """Raises `ConfigError` if there is none."""
        for state in self.states:
            if state.name == name:
                return state
        raise ConfigError(f"model {self.name!r}: expected one of {', '.join(s.name for s in self.states)}, found {name!r}")

    def nbytes(self, num_tokens: int, *, prefix: int = 0) -> int:
        """Bytes that decode needs for a request of `num_tokens` if it has the first `prefix`, without replicas."""
        return sum(state.nbytes(num_tokens, prefix=prefix) for state in self.states)


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Draft layers are left out."""
    if not 0 < num_layers <= spec.num_layers or num_layers % spec.layers_per_block:
        whole = "" if spec.layers_per_block == 1 else f", a multiple of {spec.layers_per_block},"
        raise ConfigError(f"num_layers: expected 1 to {spec.num_layers}{whole} for model {spec.name!r}, found {num_layers}")
    states = tuple(replace(s, layers=tuple(layer for layer in s.layers if layer < num_layers)) for s in spec.states)
    return replace(spec, num_layers=num_layers, states=tuple(state for state in states if state.layers))
