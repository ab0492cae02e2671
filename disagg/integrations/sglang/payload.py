"""SGLang's metadata buffers, which prefill hands over with a request's state: small rows in host memory, such as the first
token and hidden states. Decode's scheduler waits for the room in them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.core.errors import RemoteProtocolError


@dataclass(frozen=True)
class MetadataBuffers:
    """Addresses and bytes per request. Rows for addresses in `unread` are dropped."""

    pointers: Sequence[int]
    row_nbytes: Sequence[int]
    unread: Collection[int] = ()

    def read(self, index: int) -> tuple[bytes, ...]:
        """The rows of request `index`, without trailing zeros."""
        return tuple(
            ctypes.string_at(pointer + index * nbytes, nbytes).rstrip(b"\0")
            for pointer, nbytes in zip(self.pointers, self.row_nbytes, strict=True)
        )

    def write(self, index: int, rows: Sequence[bytes]) -> None:
        """Raises `RemoteProtocolError`, with nothing written, if the rows do not fit."""
        if len(rows) != len(self.pointers):
            raise RemoteProtocolError(
                f"payload: expected {len(self.pointers)} metadata buffers, found {len(rows)}; an option that adds "
                "one, such as --disaggregation-enable-kv-checksum, must be given on both sides"
            )
        rows = [b"" if pointer in self.unread else row for pointer, row in zip(self.pointers, rows, strict=True)]
        for number, (row, nbytes) in enumerate(zip(rows, self.row_nbytes, strict=True)):
            if len(row) > nbytes:
                raise RemoteProtocolError(
                    f"payload: metadata buffer {number}: expected at most {nbytes} bytes, found {len(row)}"
                )
        for pointer, nbytes, row in zip(self.pointers, self.row_nbytes, rows, strict=True):
            ctypes.memmove(pointer + index * nbytes, row.ljust(nbytes, b"\0"), nbytes)


def write_first_token(rows: Any, index: int, token: int, *, room: int, vocabulary: int) -> None:
    """Raises `RemoteProtocolError` for a token outside the vocabulary, over which decode's scheduler would end."""
    if not 0 <= token < vocabulary:
        raise RemoteProtocolError(f"payload: first_token: expected 0 to {vocabulary - 1}, found {token}")
    rows.cached_tokens[index] = 0
    for name in ("output_token_logprobs", "output_top_logprobs"):
        getattr(rows, f"{name}_val")[index] = math.nan  # unknown; answered as null
        getattr(rows, f"{name}_idx")[index] = token
    for draft in (rows.output_topk_p, rows.output_topk_index, rows.output_hidden_states):
        draft[index] = 0
    for given in (
        rows.output_token_sampling_mask_len,
        rows.output_token_sampling_mask_idx,
        rows.output_token_sampling_logprobs,
    ):
        if given is not None:
            given[index] = 0
    if rows.output_dsa_topk_indices is not None:
        rows.output_dsa_topk_indices[index] = -1  # SGLang's value for no seed
    rows.output_ids[index, 0] = token
    rows.bootstrap_room[index, 0] = room


def check_metadata(rows: Any, index: int, *, room: int, vocabulary: int) -> None:
    """Raise `RemoteProtocolError` if another SGLang's rows are of another room, or have values over which decode's scheduler
    would end.
    """
    given = int(rows.bootstrap_room[index, 0])
    if given != room:
        raise RemoteProtocolError(f"payload: bootstrap_room: expected {room}, found {given}")
    limits = {
        "output_ids": vocabulary,
        "output_token_logprobs_idx": vocabulary,
        "output_top_logprobs_idx": vocabulary,
        "output_topk_index": vocabulary,
    }
    masks = rows.output_token_sampling_mask_idx
    if masks is not None:
        limits |= {"output_token_sampling_mask_idx": vocabulary, "output_token_sampling_mask_len": masks.shape[1] + 1}
    for name, limit in limits.items():
        row = getattr(rows, name)[index]
        first, last = int(row.min()), int(row.max())
        if first < 0 or last >= limit:
            raise RemoteProtocolError(f"payload: {name}: expected 0 to {limit - 1}, found {first} to {last}")
