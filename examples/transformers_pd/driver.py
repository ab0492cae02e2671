"""A process with the whole model. It computes for all ranks."""

from collections.abc import Sequence
from typing import Any

from .content import CacheContent, Generation
from .shards import Shard, Sharding, assemble


class Driver:
    """Builds models by name, from the same seed in every driver."""

    def __init__(self, *, dtype: str) -> None:
        from transformers.utils import logging

        from . import model  # only drivers load torch, not the parent or ranks

        logging.set_verbosity_error()
        self._dtype = dtype
        self._library = model
        self._models: dict[str, Any] = {}

    def prefill(self, name: str, prompt: Sequence[int]) -> tuple[int, CacheContent]:
        """Return the first new token, and the state of the prompt."""
        return self._library.prefill(self._model(name), prompt)

    def undivided(self, name: str, prompt: Sequence[int], *, num_new_tokens: int) -> Generation:
        """Compute the reference: prompt and new tokens in one run."""
        return self._library.undivided(self._model(name), prompt, num_new_tokens=num_new_tokens)

    def decode(
        self, name: str, *, num_tokens: int, sharding: Sharding, shards: Sequence[Shard], first_token: int, num_new_tokens: int
    ) -> Generation:
        """Continue from the shards of all decode ranks."""
        content = assemble(name, num_tokens, self._dtype, sharding=sharding, shards=shards)
        return self._library.decode(self._model(name), content, first_token=first_token, num_new_tokens=num_new_tokens)

    def close(self) -> None:
        self._models.clear()

    def _model(self, name: str) -> Any:
        if name not in self._models:
            self._models[name] = self._library.build(name, dtype=self._dtype)
        return self._models[name]
