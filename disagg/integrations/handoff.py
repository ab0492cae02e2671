"""What prefill tells decode about a request besides its state: the payload of `Sender.finish`.

vLLM's decode computes the last prompt token, and reads only `prompt` and `beginnings`. SGLang's decode starts from prefill's
first token, which another SGLang gives in its own rows, any other server as `first_token`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

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


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A server, as in `kv_transfer_params`. It keeps windows from a multiple of `remote_window_page` tokens on."""

    remote_engine_id: str
    remote_address: str
    remote_public_key: str | None = None
    remote_window_page: Annotated[int, msgspec.Meta(ge=1)] = 1

    @classmethod
    def parse(cls, name: str) -> Place:
        """The reverse of `str`. Raises `ValueError`."""
        engine_id, at, rest = name.rpartition("@tcp://")
        where = urlsplit(f"tcp://{rest}")
        if not at:
            raise ValueError(f"remote_engine_id: expected NAME@tcp://HOST:PORT, found {name!r:.300}")
        given = dict(parse_qsl(where.query))
        return cls(
            remote_engine_id=engine_id,
            remote_address=f"tcp://{where.netloc}",
            remote_public_key=given.get("key"),
            remote_window_page=int(given.get("window_page", 1)),
        )

    def __str__(self) -> str:
        given = {"key": self.remote_public_key} if self.remote_public_key else {}
        pages = {"window_page": self.remote_window_page} if self.remote_window_page > 1 else {}
        query = urlencode({**given, **pages})
        return f"{self.remote_engine_id}@{self.remote_address}{f'?{query}' if query else ''}"


class HandOff(Place, frozen=True, kw_only=True):
    """Where to find a request: `kv_transfer_params` of prefill's answer and of the request to decode, or their `kept` for
    one that was kept after its answer.

    `remote_num_tokens` leading tokens are handed over; without it prefill is asked at the same time, and hands over all
    prompt tokens but the last. `remote_prompt` is their digest, without the last prompt token: vLLM gives a list's prompts
    the same parameters. A kept request may be taken in part: `remote_beginnings` are joined digests.
    """

    remote_request_id: str
    remote_num_tokens: int | None = None
    remote_attempt: int = 0
    remote_prompt: str = ""
    remote_beginnings: str = ""
    remote_keep_s: float | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> HandOff | None:
        """The unused hand-off, also of MooncakeConnector's proxies. Accepts floats for integers, as in a protobuf `Struct`.
        Raises `msgspec.ValidationError` or `ValueError`.
        """
        part = cls.part(params)
        if part is None:
            return None
        found = dict(part)
        if "remote_bootstrap_addr" in found:
            found |= msgspec.structs.asdict(Place.parse(str(found.get("remote_engine_id"))))
            if request_id := transfer_id(found):
                found["remote_request_id"] = request_id.hex()
        hand_off = msgspec.convert(found, cls, strict=False)
        for digits in (hand_off.remote_request_id, hand_off.remote_beginnings):
            bytes.fromhex(digits)
        return hand_off

    @staticmethod
    def part(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """All of `params`, or their `kept`, if it is an unused hand-off."""
        for part in (params, (params or {}).get("kept")):
            if isinstance(part, dict) and part.get("do_remote_prefill"):
                return part
        return None

    @property
    def request_id(self) -> bytes:
        return bytes.fromhex(self.remote_request_id)

    @property
    def is_kept(self) -> bool:
        return self.remote_keep_s is not None

    def num_common(
        self, most: int, digest: Callable[[int], str], beginnings: Callable[[int], Iterable[tuple[int, str]]]
    ) -> int:
        """The leading tokens, at most `most`, that a request shares with this kept one, as far as digests tell. `digest(n)`
        is the request's of `n` tokens, `beginnings(n)` are those of its first `n`.
        """
        num_kept = self.remote_num_tokens or 0
        if 0 < num_kept <= most and self.remote_prompt == digest(num_kept):
            return num_kept
        digests, common = bytes.fromhex(self.remote_beginnings), 0
        for number, (stop, found) in enumerate(beginnings(min(num_kept, most))):
            if digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES].hex() != found:
                break
            common = stop
        return common

    def payload(self, engine: str, *, first_token: int | None = None) -> Payload:
        """What `engine` tells about this kept request, beside its state."""
        return Payload(
            engine=engine,
            num_tokens=self.remote_num_tokens or 0,
            first_token=first_token,
            prompt=self.remote_prompt,
            whole_prompt=self.remote_prompt,
            beginnings=bytes.fromhex(self.remote_beginnings),
        )

    def params(self) -> dict[str, Any]:
        own = msgspec.structs.asdict(self)
        if not self.is_kept:
            del own["remote_beginnings"], own["remote_keep_s"]
        return {"do_remote_prefill": True, "do_remote_decode": False, **own}


def transfer_id(params: Mapping[str, Any]) -> bytes | None:
    """The id that a proxy gave a transfer: `remote_request_id`, or any text as MooncakeConnector's `transfer_id`. Raises
    `ValueError`.
    """
    if given := params.get("remote_request_id"):
        return bytes.fromhex(str(given))
    if given := params.get("transfer_id"):
        return hashlib.blake2b(str(given).encode(), digest_size=16).digest()
    return None


def problem_of_id(request_id: str, name: str) -> str:
    """Why an id cannot be a hand-over's, if so. `name` is its parameter."""
    if len(request_id) == 32 and not set(request_id) - set("0123456789abcdef"):
        return ""
    return f"{name}: expected {'true or ' if name == 'keep' else ''}32 hexadecimal digits, found {request_id!r:.100}"
