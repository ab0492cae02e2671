"""What prefill tells decode about a request besides its state: the payload of `Sender.finish`.

vLLM's decode computes the last prompt token, and reads only `prompt` and `beginnings`. SGLang's decode starts from prefill's
first token, which another SGLang gives in its own rows, any other server as `first_token`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from disagg.core.errors import RemoteProtocolError

VERSION = 1
BEGINNING = 64
"""A kept request's digests are that many tokens apart."""
MAX_BEGINNINGS = 4000
"""So many fit into a payload."""
DIGEST_NBYTES = 16
OTHER_PROMPT = (
    "expected the state of this request's prompt, found that of other tokens, adapter weights, salt, items or embeddings"
)


def prompt_digest(token_ids: Iterable[int], beside: Iterable[tuple[str, str]] = ()) -> str:
    """128 bits of BLAKE2b in hexadecimal. A request with another digest cannot use the state.

    `beside` has what else shapes the state, or keeps others from using it: `"adapter"` (the digest of its weights),
    `"salt"`, `"item"` (such as an image), `"embeddings"`, or an engine's own kinds.
    """
    tokens = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_NBYTES)
    return _digest(tokens.digest(), beside)


def beginnings(
    token_ids: Sequence[int], beside: Callable[[int], Iterable[tuple[str, str]]] = lambda _: ()
) -> Iterator[tuple[int, str]]:
    """The `prompt_digest` of the first 64 tokens, the first 128 and so on, each with its number of tokens, for which
    `beside` is called.
    """
    tokens = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    for stop in range(BEGINNING, len(token_ids) + 1, BEGINNING):
        tokens.update(array("q", token_ids[stop - BEGINNING : stop]).tobytes())
        yield stop, _digest(tokens.digest(), beside(stop))


def _digest(tokens: bytes, beside: Iterable[tuple[str, str]]) -> str:
    others = list(beside)
    if not others:
        return tokens.hex()
    return hashlib.blake2b(msgspec.msgpack.encode((tokens, others)), digest_size=DIGEST_NBYTES).hexdigest()


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """One prefilled request. `engine` is the server and its version, which alone reads `native`. The state of `num_tokens`
    prompt tokens was handed over. `prompt` is their `prompt_digest` without the last prompt token, `whole_prompt` that of
    all: decode takes nothing that it cannot compare. `first_token` was drawn after them. Of a kept request a part may be
    taken: `beginnings` has the joined digests. Fields may be added with a default; unknown ones are ignored.
    """

    engine: str
    num_tokens: int
    first_token: int | None = None
    native: tuple[bytes, ...] = ()
    prompt: str = ""
    whole_prompt: str = ""
    beginnings: bytes = b""
    version: int = VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def digest(self, num_tokens: int) -> str:
        """The digest of the first `num_tokens` if it is one of `beginnings`, else `prompt`."""
        index, rest = divmod(num_tokens, BEGINNING)
        found = self.beginnings[(index - 1) * DIGEST_NBYTES : index * DIGEST_NBYTES] if index and not rest else b""
        return found.hex() or self.prompt

    def check(self, found: str, expected: str) -> None:
        """Compare a digest of this payload with decode's. Raises `RemoteProtocolError`."""
        if not found:
            raise RemoteProtocolError(f"payload: expected the digest of a prompt, found none from {self.engine}")
        if found != expected:
            raise RemoteProtocolError(f"payload: {OTHER_PROMPT}")

    @classmethod
    def decode(cls, data: bytes) -> Payload:
        """Raises `RemoteProtocolError`."""
        try:
            payload = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"payload of {len(data)} bytes: {error}") from error
        if payload.version != VERSION:
            raise RemoteProtocolError(f"payload: expected version {VERSION}, found {payload.version} of {payload.engine}")
        return payload
