"""State and tokens of a model as plain arrays in global terms, for processes that never load the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architectures import describe
from .components import ComponentSpec, TensorSpec

Array = NDArray[Any]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}
"""The NumPy dtype of each tensor dtype. NumPy has no bfloat16: its bits are carried as `uint16`."""


@dataclass(frozen=True)
class CacheContent:
    """The state of one request of `num_tokens` prompt tokens: `arrays[component][layer][role]`.

    Axes and sizes are those of `describe(name)`: KV `[token, kv_head, dim]`, latents and index keys `[token, dim]`, conv
    `[channel, width]`, temporal `[head, ...]`. A token axis has a row for each granule of `component.tokens(num_tokens)`.
    """

    name: str
    num_tokens: int
    arrays: dict[str, dict[int, dict[str, Array]]]

    @classmethod
    def empty(cls, name: str, num_tokens: int, dtype: str) -> "CacheContent":
        """Zeros of the right shapes and dtypes; `dtype` is that of the weights."""
        arrays: dict[str, dict[int, dict[str, Array]]] = {}
        for component in describe(name):
            held = component.num_rows(component.tokens(num_tokens))
            arrays[component.name] = {
                layer: {t.role: np.zeros(t.shape(held), NUMPY_DTYPES[t.dtype or dtype]) for t in component.tensors}
                for layer in component.layers
            }
        return cls(name, num_tokens, arrays)

    def walk(self) -> Iterator[tuple[ComponentSpec, int, TensorSpec, Array]]:
        """Every array with its component, layer and declaration."""
        for component in describe(self.name):
            for layer in component.layers:
                for tensor in component.tensors:
                    yield component, layer, tensor, self.arrays[component.name][layer][tensor.role]

    def identical(self, other: "CacheContent") -> bool:
        """Whether both hold the same bytes."""
        return (self.name, self.num_tokens) == (other.name, other.num_tokens) and all(
            np.array_equal(mine.view(np.uint8), theirs.view(np.uint8))
            for (*_, mine), (*_, theirs) in zip(self.walk(), other.walk(), strict=True)
        )


@dataclass(frozen=True)
class Generation:
    """Greedy tokens. Row `i` of `logits` `[len(tokens) - 1, vocabulary]` chose `tokens[i + 1]`."""

    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
