"""What prefill tells decode about a request besides its state: SGLang's metadata buffers.

They are about a dozen small rows in host memory: the first token, its log-probabilities, hidden states for drafts, and the
request's room, which is how decode's scheduler sees that they are written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from disagg.core.errors import RemoteProtocolError

VERSION = 1


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """`native` are SGLang's rows in order, without the zeros at their ends. They mean something to the same engine only."""

    version: int
    engine: str
    num_tokens: int
    native: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class MetadataBuffers:
    """SGLang's metadata buffers of this rank, as `KVArgs` describe them: addresses, and bytes per request."""

    pointers: Sequence[int]
    row_nbytes: Sequence[int]

    def read(self, index: int, *, engine: str, num_tokens: int) -> bytes:
        """The rows of request `index`, as a payload."""
        rows = [
            ctypes.string_at(pointer + index * nbytes, nbytes).rstrip(b"\0")
            for pointer, nbytes in zip(self.pointers, self.row_nbytes, strict=True)
        ]
        return msgspec.msgpack.encode(Payload(VERSION, engine, num_tokens, tuple(rows)))

    def write(self, index: int, data: bytes, *, engine: str) -> None:
        """Write a payload as the rows of request `index`.

        Raises `RemoteProtocolError`, with nothing written, if it is another engine's, or does not fit these buffers.
        """
        try:
            payload = msgspec.msgpack.decode(data, type=Payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"payload of {len(data)} bytes: {error}") from error
        if payload.version != VERSION or payload.engine != engine:
            raise RemoteProtocolError(
                f"payload: expected version {VERSION} of {engine}, found version {payload.version} of {payload.engine}"
            )
        if len(payload.native) != len(self.pointers):
            raise RemoteProtocolError(
                f"payload: expected {len(self.pointers)} metadata buffers, found {len(payload.native)}; an option that adds "
                "one, such as --disaggregation-enable-kv-checksum, must be given on both sides"
            )
        for number, (row, nbytes) in enumerate(zip(payload.native, self.row_nbytes, strict=True)):
            if len(row) > nbytes:
                raise RemoteProtocolError(
                    f"payload: metadata buffer {number}: expected at most {nbytes} bytes, found {len(row)}"
                )
        for pointer, nbytes, row in zip(self.pointers, self.row_nbytes, payload.native, strict=True):
            ctypes.memmove(pointer + index * nbytes, row.ljust(nbytes, b"\0"), nbytes)
