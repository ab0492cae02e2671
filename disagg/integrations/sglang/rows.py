"""SGLang's lists of pages and state indices as rows, and the tokens that decode needs.

The lists carry no positions. Those of pages end at the request's last page, so the number of tokens says where a list starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disagg.core.errors import LayoutError, LocalProtocolError
from disagg.core.rows import Pages, Rows, Slot, TokenRange
from disagg.integrations.sglang.facts import Facts, IndexFacts, draft_name
from disagg.state.window import ring_rows


def request_id(room: Any) -> bytes:
    """Raises `LocalProtocolError` for an invalid room. To SGLang 0 means that no room was written; from 2**63 on its
    scheduler ends.
    """
    if not isinstance(room, int) or not 1 <= room < 2**63:
        raise LocalProtocolError(f"bootstrap_room: expected an integer from 1 to 2**63 - 1, found {room!r:.80}")
    return room.to_bytes(16, "big")


def to_the_end(ids: Any, num_tokens: int, *, page_size: int) -> Pages:
    """Pages that end with the last of `num_tokens` tokens. Raises `LayoutError` if there are too many."""
    listed = np.asarray(ids).reshape(-1)
    first_page = -(-num_tokens // page_size) - len(listed)
    if first_page < 0:
        raise LayoutError(f"state list: expected at most {-(-num_tokens // page_size)} pages for {num_tokens} tokens of "
                          f"{page_size} a page, found {len(listed)}")  # fmt: skip
    return Pages(listed, first_token=first_page * page_size)


def state_rows(
    kinds: Sequence[Any], lists: Sequence[Any] | None, *, num_tokens: int, prefix: int = 0, page_size: int, facts: Facts
) -> dict[str, Rows]:
    """A request's rows by component. Some lists have pages for decode's first `prefix` tokens, which other requests may
    share. Raises `LayoutError` for a list that is missing or cannot be the request's.
    """
    if len(kinds) != len(lists or ()):
        raise LayoutError(f"state lists: expected {len(kinds)}, one for each kind of state, found {len(lists or ())}")
    rows: dict[str, Rows] = {}
    for kind, listed in zip(kinds, lists or (), strict=True):
        name = str(getattr(kind, "value", kind))
        if listed is None:
            raise LayoutError(f"state list of {name!r}: expected indices, found none")
        if name == "dsa_tail":
            slot = int(listed[0]) if len(listed) else 0
            for tail, index in _tails(facts).items():
                need = num_tokens - num_tokens % index.tokens_per_key, num_tokens
                rows[tail] = ring_rows(slot, need=need, stride=index.tail)
        elif name in _SLOTS:
            rows |= dict.fromkeys(_components(name, facts), Slot(int(np.asarray(listed).reshape(-1)[0])))
        elif names := _components(name, facts):
            pages = to_the_end(listed, num_tokens, page_size=page_size)
            rows |= dict.fromkeys(names, _without(pages, prefix, page_size=page_size))
    return rows


_SLOTS = ("mamba", "qsa_pending")
_COMPONENTS = {
    "swa": ("window",),
    "dsa": ("index",),
    "block_scale": ("kv_scales",),
    "block_scale_swa": ("window_scales",),
    "minimax_index_k": ("index_k",),
    "minimax_dense_kv": (),  # also in the pages of full attention
    "qsa_compressed": ("compressed",),
    "qsa_pending": ("pending", "positions"),
}
"""By SGLang's kinds of state. Those of "mamba" are in the facts."""


def _components(kind: str, facts: Facts) -> list[str]:
    if kind == "mamba":
        return list(dict.fromkeys(slot.component for slot in facts.slots))
    found = list(_COMPONENTS[kind])
    for number, draft in enumerate(facts.drafts):
        has = {
            "swa": draft.window_kv is not None and not draft.has_full_ids,
            "block_scale": bool(draft.scale_buffers),
            "block_scale_swa": bool(draft.window_scale_buffers),
            "dsa": draft.index is not None,
            "qsa_compressed": draft.compressed is not None,
            "qsa_pending": draft.compressed is not None,
        }
        if has.get(kind):
            found += [draft_name(number, name.removeprefix("kv_")) for name in _COMPONENTS[kind]]
    return found


def needs(rows: Mapping[str, Rows], *, num_tokens: int, prefix: int, facts: Facts) -> dict[str, TokenRange]:
    """The tokens that decode needs of each component, if it has the first `prefix`."""
    found: dict[str, TokenRange] = {}
    is_partial = facts.by_layer and not facts.reuses_pages
    windows = {facts.kv_name(layer): window for layer, window in facts.windows.items()} if is_partial else {}
    for number, draft in enumerate(facts.drafts):
        if draft.window is not None and not (draft.has_full_ids and facts.reuses_pages):
            windows[draft_name(number, "window")] = draft.window
    tails, scales = _tails(facts), scale_blocks(facts)
    for name, each in rows.items():
        if isinstance(each, Slot):
            continue
        start, stop = max(prefix, each.first_token), num_tokens
        if name in ("window", "window_scales") and facts.window is not None:
            start = max(start, num_tokens - facts.window)
        elif name in windows:
            start = max(start, num_tokens - windows[name])
        elif name in tails:
            start = num_tokens - num_tokens % tails[name].tokens_per_key
        if name in scales:  # a block is needed whole
            start, stop = start // scales[name] * scales[name], -(-stop // scales[name]) * scales[name]
        found[name] = (min(start, stop), stop)
    return found


def full_pages(ids: Any, first_token: int, *, facts: Facts) -> dict[str, Rows]:
    """The pages of full attention. Draft layers share the ids."""
    pages = Pages(np.asarray(ids).reshape(-1), first_token=first_token)
    names = [facts.kv_name(layer) for layer in facts.kv.layers] if facts.kv is not None else []
    for number, draft in enumerate(facts.drafts):
        names += [draft_name(number)] * (draft.kv is not None)
        names += [draft_name(number, "window")] * (draft.window_kv is not None and draft.has_full_ids)
    return dict.fromkeys(names, pages)


def _without(pages: Pages, num_tokens: int, *, page_size: int) -> Pages:
    num = max(num_tokens - pages.first_token, 0) // page_size
    return Pages(pages.ids[num:], first_token=pages.first_token + num * page_size)


def scale_blocks(facts: Facts) -> dict[str, int]:
    """The tokens of a block, by component of block scales."""
    found = {"kv_scales": facts.kv, "window_scales": facts.window_kv}
    for number, draft in enumerate(facts.drafts):
        found |= {draft_name(number, "scales"): draft.kv, draft_name(number, "window_scales"): draft.window_kv}
    return {name: pages.scales.granule for name, pages in found.items() if pages is not None and pages.scales is not None}


def _tails(facts: Facts) -> dict[str, IndexFacts]:
    """Index keys with rings of tokens without a key, by the rings' names."""
    draft = facts.drafts[0].index if facts.drafts else None
    found = {"index_tail": facts.index, draft_name(0, "index_tail"): draft}
    return {name: index for name, index in found.items() if index is not None and index.tail}
