"""Checks of a request's arguments, in the server's thread. They raise `LocalProtocolError` unless said otherwise."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.core.errors import LocalProtocolError
from disagg.core.ranges import Ranges
from disagg.core.rows import MAX_TOKEN, Pages, Rows, Slot, TokenRange, token_range
from disagg.layout.agreement import LocalRank
from disagg.layout.binding import check_rows
from disagg.layout.tables import MAX_LAYERS
from disagg.protocol.messages import MAX_PAYLOAD_NBYTES
from disagg.protocol.types import Chunk, RequestKey

Ids = npt.NDArray[np.integer[Any]]


def request_key(request_id: bytes, attempt: int) -> RequestKey:
    if type(request_id) is not bytes or len(request_id) != 16:
        raise LocalProtocolError(f"request id: expected 16 bytes (new_request_id()), found {request_id!r}")
    return RequestKey(request_id, check_number(attempt, "attempt", 2**31))


def check_number(given: int, what: str, stop: int) -> int:
    """At least 0 and below `stop`, as an `int`."""
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if not 0 <= number < stop:
        raise LocalProtocolError(f"{what}: expected 0 to {stop - 1}, found {given!r}")
    return number


def check_deadline(given: float | None) -> float:
    if given is None:
        return math.inf
    seconds = _finite(given)
    if seconds is None or seconds <= 0:
        raise LocalProtocolError(f"deadline_s: expected a finite number of seconds above 0, found {given!r}")
    return seconds


def check_timeout(given: float) -> float:
    seconds = _finite(given)
    if seconds is None or seconds < 0:
        raise LocalProtocolError(f"timeout_s: expected a finite number of seconds of at least 0, found {given!r}")
    return seconds


def _finite(given: object) -> float | None:
    """A finite real number as a `float`; `None` for everything else."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def check_text(given: object, what: str) -> None:
    if not isinstance(given, str):
        raise LocalProtocolError(f"{what}: expected a str, found {given!r}")


def check_ready(ready: object) -> None:
    if ready is not None and not callable(getattr(ready, "query", None)):
        raise LocalProtocolError(f"ready: expected None or an event with query(), found {ready!r}")


def check_declared(local: LocalRank, name: object, what: str) -> None:
    known = local.table.components
    if not isinstance(name, str) or name not in known:
        raise LocalProtocolError(f"{what}: no component {name!r} was declared; there are {', '.join(sorted(known))}")


GivenRows = Mapping[str, Rows | Sequence[int] | Ids | int]
"""Rows by component: pages as `Pages` or as a sequence of ids from token 0 on, a slot as `Slot` or as its id."""


def as_rows(local: LocalRank, rows: GivenRows) -> dict[str, Rows]:
    """Also raises `LayoutError` for invalid ids."""
    if not isinstance(rows, Mapping):
        raise LocalProtocolError(f"rows: expected a mapping from components to rows, found {type(rows).__name__}")
    found: dict[str, Rows] = {}
    for name, given in rows.items():
        check_declared(local, name, "rows")
        kind = next(layout.rows for layout in local.table.components[name] if layout is not None)
        expected = Pages if kind == "pages" else Slot
        if kind == "pages" and isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes):
            given = Pages(given)  # noqa: PLW2901
        elif kind == "slot" and isinstance(given, int | np.integer) and not isinstance(given, bool):
            given = Slot(int(given))  # noqa: PLW2901
        if not isinstance(given, expected):
            raise LocalProtocolError(f"rows of {name!r}: expected {expected.__name__}, found {type(given).__name__}")
        if isinstance(given, Pages) and given.first_token > MAX_TOKEN:
            raise LocalProtocolError(f"rows of {name!r}: expected a first token of 0 to 2**40, found {given.first_token}")
        assert isinstance(given, Pages | Slot)
        found[name] = given
    return found


def check_needs(
    local: LocalRank, group_rank: int, agreed: Iterable[str], rows: Mapping[str, Rows], need: Mapping[str, TokenRange]
) -> tuple[dict[str, TokenRange], dict[str, Ids]]:
    """The tokens that this rank needs of each `agreed` component that it holds, and the ids of their rows. Also raises
    `LayoutError` for rows that do not fit.
    """
    if not isinstance(need, Mapping):
        raise LocalProtocolError(f"need: expected a mapping from components to tokens, found {type(need).__name__}")
    for name in sorted(need, key=repr):
        check_declared(local, name, "need")
    held = local.table.ranks[group_rank].by_name
    needed: dict[str, TokenRange] = {}
    ids: dict[str, Ids] = {}
    for name in agreed:
        layout, placement = held.get(name), local.placements.get(name)
        if layout is None or placement is None:
            continue
        if layout.rows == "pages" and name not in need:
            raise LocalProtocolError(f"need of {name!r}: expected its tokens, need={{{name!r}: (start, stop)}}, found none")
        tokens = (0, 1) if layout.rows == "slot" else token_range(need[name])
        if tokens is None:
            raise LocalProtocolError(f"need of {name!r}: expected integers 0 <= start <= stop <= 2**40, found {need[name]}")
        needed[name] = tokens
        if tokens[0] == tokens[1]:
            continue
        if name not in rows:
            raise LocalProtocolError(f"rows: component {name!r} is needed, but no rows are given for it")
        ids[name] = check_rows(layout, placement, rows[name], tokens)
    return needed, ids


def check_layers(layers: Sequence[int]) -> tuple[int, ...]:
    try:
        chosen = tuple(operator.index(layer) for layer in itertools.islice(layers, MAX_LAYERS + 1))
    except TypeError as error:
        raise LocalProtocolError(f"layers: expected layer ids, found {layers!r}") from error
    if len(chosen) > MAX_LAYERS:
        raise LocalProtocolError(f"layers: expected at most {MAX_LAYERS} ids, found more")
    if any(not 0 <= layer < 2**31 for layer in chosen):
        raise LocalProtocolError(f"layers: expected ids of 0 to 2**31 - 1, found {list(chosen)}")
    return chosen


def check_payload(payload: object) -> None:
    if type(payload) is not bytes or len(payload) > MAX_PAYLOAD_NBYTES:  # subclasses cannot be encoded
        found = f"{len(payload)} bytes" if type(payload) is bytes else type(payload).__name__
        raise LocalProtocolError(f"payload: expected at most {MAX_PAYLOAD_NBYTES} bytes, found {found}")


class SentTokens:
    """The tokens that a request has sent, by component and layer (`None`: all)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, dict[int | None, Ranges]] = {}

    def add(self, key: RequestKey, chunk: Chunk) -> None:
        """If a token of a component's layer was already sent, this raises and adds nothing."""
        layers = None if chunk.layers is None else sorted(set(chunk.layers))
        if layers == []:
            return
        with self._lock:
            found = {name: _sent_range(rows, chunk.tokens) for name, rows in chunk.rows.items()}
            for name, tokens in found.items():
                sent = self._sent.get(name, {})
                named = sent if layers is None else [layer for layer in (None, *layers) if layer in sent]
                again = [token for layer in named if (token := sent[layer].first_in(*tokens)) is not None]
                if again:
                    which = "" if layers is None else f" of layers {layers}"
                    raise LocalProtocolError(
                        f"request {key}: expected tokens that were not sent before, found token {min(again)} of "
                        f"component {name!r}{which} a second time"
                    )
            for name, tokens in found.items():
                for layer in [None] if layers is None else layers:
                    self._sent.setdefault(name, {}).setdefault(layer, Ranges()).add(*tokens)


def _sent_range(rows: Rows, tokens: TokenRange | None) -> TokenRange:
    """What the rows may hold, before the receivers' need is known."""
    if isinstance(rows, Slot):
        return 0, 1
    return tokens or (rows.first_token, MAX_TOKEN)
