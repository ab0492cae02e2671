"""SGLang's metadata buffers, which prefill hands over with a request's state.

They are about a dozen small rows in host memory: the first token, its log-probabilities, hidden states for drafts, and the
request's room, which is how decode's scheduler sees that they are written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from disagg.core.errors import RemoteProtocolError


@dataclass(frozen=True)
class MetadataBuffers:
    """SGLang's metadata buffers of this rank, as `KVArgs` describe them: addresses, and bytes per request.

    `unread` are the addresses of those that this server does not read: rows for them are dropped.
    """

    pointers: Sequence[int]
    row_nbytes: Sequence[int]
    unread: Collection[int] = ()

    def read(self, index: int) -> tuple[bytes, ...]:
        """The rows of request `index`, in order, without the zeros at their ends."""
        return tuple(
            ctypes.string_at(pointer + index * nbytes, nbytes).rstrip(b"\0")
            for pointer, nbytes in zip(self.pointers, self.row_nbytes, strict=True)
        )

    def write(self, index: int, rows: Sequence[bytes]) -> None:
        """Write the rows of request `index`. Raises `RemoteProtocolError`, with nothing written, if they do not fit."""
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
