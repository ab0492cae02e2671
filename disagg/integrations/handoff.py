"""What prefill tells decode about a request besides its state, whichever servers the two are.

It travels as the payload of `Sender.finish`. vLLM's decode computes the last prompt token itself and reads none of it. SGLang's
decode starts from prefill's first token: another SGLang gives it with its own rows, any other server with `first_token`.
"""

from __future__ import annotations

import msgspec

from disagg.core.errors import RemoteProtocolError

VERSION = 1


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """One prefilled request.

    `engine` is the server and its version. `num_tokens` is the number of prompt tokens whose state was handed over.
    `first_token` is the token that prefill has drawn after them; its log-probability is in prefill's own answer. `native`
    are rows that only the same engine reads. Fields may be added with a default; unknown ones are ignored.
    """

    engine: str
    num_tokens: int
    first_token: int | None = None
    native: tuple[bytes, ...] = ()
    version: int = VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Payload:
        """Raises `RemoteProtocolError` if `data` is no payload of this version."""
        try:
            payload = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"payload of {len(data)} bytes: {error}") from error
        if payload.version != VERSION:
            raise RemoteProtocolError(f"payload: expected version {VERSION}, found {payload.version} of {payload.engine}")
        return payload
