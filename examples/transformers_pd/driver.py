"""The model, undivided, in a process of its own: it computes what ranks would compute together."""

from collections.abc import Sequence
from typing import Any

from .content import CacheContent, Generation
from .shards import Shard, Side, assemble


class Driver:
    """Models by name, built from the same seed in every driver."""

    def __init__(self, *, dtype: str) -> None:
        from transformers.utils import logging

        from . import model  # torch is loaded where a driver is made, never by the parent or by ranks

        logging.set_verbosity_error()
        self._dtype = dtype
        self._library = model
        self._models: dict[str, Any] = {}

    def prefill(self, name: str, prompt: Sequence[int]) -> tuple[int, CacheContent]:
        """The first new token, and the state of the prompt."""
        return self._library.prefill(self._model(name), prompt)

    def undivided(self, name: str, prompt: Sequence[int], *, num_new_tokens: int) -> Generation:
        """The reference: prompt and new tokens in one run."""
        return self._library.undivided(self._model(name), prompt, num_new_tokens=num_new_tokens)

    def decode(
        self, name: str, *, num_tokens: int, side: Side, shards: Sequence[Shard], first_token: int, num_new_tokens: int
    ) -> Generation:
        """Go on from the shards of all decode ranks."""
        content = assemble(name, num_tokens, self._dtype, side=side, shards=shards)
        return self._library.decode(self._model(name), content, first_token=first_token, num_new_tokens=num_new_tokens)

    def close(self) -> None:
        self._models.clear()

    def _model(self, name: str) -> Any:
        if name not in self._models:
            self._models[name] = self._library.build(name, dtype=self._dtype)
        return self._models[name]
