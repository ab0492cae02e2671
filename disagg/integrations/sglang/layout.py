"""SGLang's `KVArgs` and `Facts` as components.

`KVArgs` list addresses, lengths and row sizes: K of all layers, then V, then draft layers; likewise for each kind of state.
Every size is compared with the facts, so that a misread layout is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE, RawTensor
from disagg.core.topology import Topology
from disagg.integrations.sglang.facts import Facts, IndexFacts, PageFacts, SlotFacts, draft_name
from disagg.layout.placement import Component
from disagg.state import paged, sparse
from disagg.state.declare import Inner, Role, State, blocks_by_tp, by_tp, whole

SUPPORTED = (
    *("mamba", "swa", "dsa", "dsa_tail", "block_scale", "block_scale_swa", "minimax_index_k", "minimax_dense_kv"),
    *("qsa_pending", "qsa_compressed"),
)
TAIL_DTYPE = "bfloat16"


class KVArgs(Protocol):
    """State lists have one list per kind in `state_types`."""

    page_size: int
    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    num_draft_entries: int
    state_types: list[Any]
    state_data_ptrs: list[list[int]]
    state_data_lens: list[list[int]]
    state_item_lens: list[list[int]]
    state_dim_per_tensor: list[list[int]]


@dataclass(frozen=True)
class _Entry:
    what: str
    pointer: int
    nbytes: int
    row_nbytes: int

    def rows(self, expected_nbytes: int) -> int:
        """Raises `ConfigError` if a row has another size."""
        if self.row_nbytes != expected_nbytes:
            raise ConfigError(f"{self.what}: expected {expected_nbytes} bytes a row, found {self.row_nbytes}")
        return self.nbytes // self.row_nbytes


def components(kv_args: KVArgs, own: Facts) -> list[Component]:
    """One rank's components. Raises `ConfigError` for an unsupported kind of state, and where sizes contradict the facts."""
    states = _state_entries(kv_args)
    num_draft = kv_args.num_draft_entries
    entries = _entries("kv", kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens)
    split = len(entries) - num_draft
    _check_count("draft", entries[split:], len(own.drafts[0].buffers) if own.drafts else 0)
    found: list[Component | None] = [
        *_kv(own, entries[:split], kv_args.page_size),
        *_drafts(own, kv_args.page_size),
        _pages("window", own.window_kv, states.pop("swa", []), kv_args.page_size, own),
        _scales("kv_scales", own.kv, states.pop("block_scale", []), kv_args.page_size, own),
        _scales("window_scales", own.window_kv, states.pop("block_scale_swa", []), kv_args.page_size, own),
        _pages("index_k", own.index_k, states.pop("minimax_index_k", []), kv_args.page_size, own),
        *_compressed(own, states.pop("qsa_compressed", []), states.pop("qsa_pending", []), kv_args.page_size),
        *_slots(own, states.pop("mamba", [])),
        *_index(own, states.pop("dsa", []), kv_args.page_size),
        *_index_tails(own, states.pop("dsa_tail", [])),
    ]
    return [component for component in found if component is not None]


def _entries(what: str, pointers: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> list[_Entry]:
    return [_Entry(f"{what}_item_lens[{i}]", *each) for i, each in enumerate(zip(pointers, lengths, rows, strict=True))]


def _state_entries(kv_args: KVArgs) -> dict[str, list[_Entry]]:
    """Without the empty buffers of layers that use another layer's index keys. Raises `ConfigError` for a kind that is
    unsupported or comes twice.
    """
    found: dict[str, list[_Entry]] = {}
    for i, kind in enumerate(kv_args.state_types):
        name = str(getattr(kind, "value", kind))
        if name not in SUPPORTED or name in found:
            raise ConfigError(f"state_types[{i}]: expected one each of {', '.join(SUPPORTED)}, found {name!r}")
        lists = kv_args.state_data_ptrs[i], kv_args.state_data_lens[i], kv_args.state_item_lens[i]
        found[name] = [entry for entry in _entries(f"state_item_lens[{i}]", *lists) if entry.row_nbytes]
    return found


def _check_count(name: str, entries: Sequence[_Entry], expected: int) -> None:
    if len(entries) != expected:
        raise ConfigError(f"component {name!r}: expected {expected} buffers in KVArgs, found {len(entries)}")


def _kv(own: Facts, entries: Sequence[_Entry], page_size: int) -> list[Component | None]:
    if not own.by_layer:
        return [_pages(own.kv_name(0), own.kv, entries, page_size, own)]
    layers = own.kv.layers if own.kv is not None else ()
    _check_count("kv", entries, 2 * len(layers))
    found = []
    for layer in sorted(layers):
        assert own.kv is not None
        chosen = [entry for entry, each in zip(entries, (*layers, *layers), strict=True) if each == layer]
        found.append(_pages(own.kv_name(layer), replace(own.kv, layers=(layer,)), chosen, page_size, own))
    return found


def _pages(
    name: str, facts: PageFacts | None, entries: Sequence[_Entry], page_size: int, rank: Facts, *, optional: bool = False
) -> Component | None:
    if facts is None:
        _check_count(name, entries, 0)
        return None
    given: dict[str, Any] = {"name": name, "topology": rank.topology, "dtype": facts.dtype, "optional": optional}
    if facts.num_kv_heads is None:
        _check_count(name, entries, len(facts.layers))
        (dim,) = facts.dims
        tensors = {
            layer: _paged(entry, (page_size, dim), facts.dtype, rank)
            for layer, entry in zip(facts.layers, entries, strict=True)
        }
        if facts.latent_scales is None:
            return paged.mla(tensors, dim=dim, **given)
        nbytes, buffers = facts.latent_scales.nbytes, facts.latent_scales.buffers
        scales = {
            layer: _paged(_Entry(f"{name}, scales of layer {layer}", *buffer), (page_size, nbytes), "uint8", rank)
            for layer, buffer in zip(facts.layers, buffers, strict=True)
        }
        return paged.mla(tensors, dim=dim, scales=scales, scales_dim=nbytes, scales_dtype="uint8", **given)
    _check_count(name, entries, 2 * len(facts.layers))
    k_dim, v_dim = facts.dims
    heads = by_tp(facts.num_kv_heads).local_size(rank.topology)
    pairs = {
        layer: tuple(
            _paged(entry, (page_size, heads, dim), facts.dtype, rank)
            for entry, dim in zip((entries[i], entries[len(facts.layers) + i]), facts.dims, strict=True)
        )
        for i, layer in enumerate(facts.layers)
    }
    if facts.kv_scales:
        k_scale, v_scale = ({layer: scales[i] for layer, scales in facts.kv_scales.items()} for i in range(2))
        given |= {"k_scale": k_scale, "v_scale": v_scale, "rounding": facts.rounding}
    return paged.gqa(pairs, axes="nhd", num_kv_heads=facts.num_kv_heads, dims=(k_dim, v_dim), **given)


def _drafts(own: Facts, page_size: int) -> Iterator[Component | None]:
    """All are optional: a peer may have no draft model, or fewer layers of one."""
    for number, draft in enumerate(own.drafts):
        for describe, kind, pages, buffers in (
            (_pages, "", draft.kv, draft.buffers),
            (_pages, "window", draft.window_kv, draft.window_buffers),
            (_scales, "scales", draft.kv, draft.scale_buffers),
            (_scales, "window_scales", draft.window_kv, draft.window_scale_buffers),
        ):
            name = draft_name(number, kind)
            entries = [_Entry(f"{name}, buffer {i}", *buffer) for i, buffer in enumerate(buffers)]
            yield describe(name, pages, entries, page_size, own, optional=True)


def _scales(
    name: str, facts: PageFacts | None, entries: Sequence[_Entry], page_size: int, rank: Facts, *, optional: bool = False
) -> Component | None:
    """A component of its own, since a block's scale exists as soon as its first token does."""
    if facts is None or facts.scales is None or facts.num_kv_heads is None:
        _check_count(name, entries, 0)
        return None
    _check_count(name, entries, 2 * len(facts.layers))
    heads, granule = by_tp(facts.num_kv_heads), facts.scales.granule
    halves, tensors, roles = (entries[: len(facts.layers)], entries[len(facts.layers) :]), {}, []
    for role, nbytes, half in zip(("k_scale", "v_scale"), facts.scales.nbytes, halves, strict=True):
        inner = {"kv_head": heads, "byte": whole(nbytes)}
        roles.append(Role(name=role, axes="page token kv_head byte", inner=inner, dtype="uint8", granule=granule))
        shape = (page_size // granule, heads.local_size(rank.topology), nbytes)
        tensors[role] = {layer: _paged(entry, shape, "uint8", rank) for layer, entry in zip(facts.layers, half, strict=True)}
    state = State(name=name, rows="pages", layers=(), roles=tuple(roles), optional=optional)
    return state.component(tensors, topology=rank.topology)


def _compressed(own: Facts, entries: Sequence[_Entry], pending: Sequence[_Entry], page_size: int) -> Iterator[Component]:
    """The rings of all layers come first, then their positions. The draft's follow the model's."""
    keys, rings = list(entries), list(pending)
    drafts = [("draft_", own.drafts[0].compressed)] if own.drafts else []
    for prefix, facts in (("", own.compressed), *drafts):
        if facts is None:
            continue
        num = len(facts.layers)
        _check_count(f"{prefix}compressed", keys[:num], num)
        _check_count(f"{prefix}pending", rings[: num + 1], num + 1)
        shape = (page_size // facts.ratio, facts.dim)
        tensors = {layer: _paged(entry, shape, facts.dtype, own) for layer, entry in zip(facts.layers, keys, strict=False)}
        yield sparse.compressed(tensors, ratio=facts.ratio, dim=facts.dim, topology=own.topology, dtype=facts.dtype,
                                name=f"{prefix}compressed", optional=bool(prefix))  # fmt: skip
        shape = (facts.ratio, facts.dim)
        tensors = {
            layer: _paged(entry, shape, facts.ring_dtype, own) for layer, entry in zip(facts.layers, rings, strict=False)
        }
        positions = {0: _paged(rings[num], (facts.ratio, 3), "int64", own)}
        for name, role, slots in (("pending", "key", tensors), ("positions", "position", positions)):
            yield _whole_slots(f"{prefix}{name}", role, slots, topology=own.topology, optional=bool(prefix))
        keys, rings = keys[num:], rings[num + 1 :]
    _check_count("compressed", keys, 0)
    _check_count("pending", rings, 0)


def _whole_slots(name: str, role: str, tensors: Mapping[int, RawTensor], *, topology: Topology, optional: bool) -> Component:
    sample = next(iter(tensors.values()))
    inner = {"ring": whole(sample.shape[1]), "dim": whole(sample.shape[2])}
    roles = (Role(name=role, axes="slot ring dim", inner=inner, dtype=sample.dtype),)
    state = State(name=name, rows="slot", layers=(), roles=roles, optional=optional)
    return state.component({role: tensors}, topology=topology)


def _paged(entry: _Entry, shape: tuple[int, ...], dtype: str, rank: Facts) -> RawTensor:
    rows = entry.rows(math.prod(shape) * ITEMSIZE[dtype])
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * size)
    return RawTensor(entry.pointer, (rows, *shape), tuple(reversed(strides)), dtype, rank.device)


def _slots(own: Facts, entries: Sequence[_Entry]) -> Iterator[Component]:
    """The facts are in the order of the buffers."""
    _check_count("ssm", entries, len(own.slots))
    found: dict[str, tuple[dict[str, Role], dict[str, dict[int, RawTensor]]]] = {}
    for slot, entry in zip(own.slots, entries, strict=True):
        roles, tensors = found.setdefault(slot.component, ({}, {}))
        if slot.role not in roles:
            roles[slot.role] = _slot_role(slot)
            tensors[slot.role] = {}
        if slot.layer in tensors[slot.role]:
            raise ConfigError(
                f"component {slot.component!r}, tensor {slot.role!r}: expected one buffer for layer {slot.layer}, found several"
            )
        tensors[slot.role][slot.layer] = _paged(entry, slot.shape, slot.dtype, own)
    for name, (roles, tensors) in found.items():
        state = State(name=name, rows="slot", layers=(), roles=tuple(roles.values()))
        yield state.component(tensors, topology=own.topology)


def _slot_role(slot: SlotFacts) -> Role:
    inner: dict[str, Inner] = {axis: whole(size) for axis, size in zip(slot.axes, slot.shape, strict=True)}
    if slot.sharded is not None:
        inner[slot.sharded] = blocks_by_tp(slot.blocks)
    return Role(name=slot.role, axes=" ".join(("slot", *slot.axes)), inner=inner, dtype=slot.dtype)


def _indices(own: Facts) -> list[tuple[str, IndexFacts | None]]:
    """In the order of `KVArgs`."""
    return [("index", own.index), (draft_name(0, "index"), own.drafts[0].index if own.drafts else None)]


def _index(own: Facts, entries: Sequence[_Entry], page_size: int) -> list[Component]:
    rest, found = list(entries), []
    for name, facts in _indices(own):
        num = len(facts.layers) if facts is not None else 0
        buffers, rest = rest[:num], rest[num:]
        _check_count(name, buffers, num)
        if facts is None:
            continue
        shape = (page_size // facts.tokens_per_key * (facts.key_dim + 4),)
        found.append(
            sparse.index_keys(
                {layer: _paged(buffer, shape, "uint8", own) for layer, buffer in zip(facts.layers, buffers, strict=True)},
                page_size=page_size,
                topology=own.topology,
                key_nbytes=facts.key_dim,
                tokens_per_key=facts.tokens_per_key,
                name=name,
                optional=name != "index",
            )
        )
    _check_count("index", rest, 0)
    return found


def _index_tails(own: Facts, entries: Sequence[_Entry]) -> list[Component]:
    """All keys, then all scores, of the model and then of its draft layers."""
    rest, found = list(entries), []
    for name, facts in _indices(own):
        if facts is None or not facts.tail:
            continue
        num = len(facts.layers)
        keys, scores, rest = rest[:num], rest[num : 2 * num], rest[2 * num :]
        _check_count(f"{name}_tail", keys + scores, 2 * num)
        shape = (facts.tail, facts.key_dim)
        tensors = {
            role: {layer: _paged(entry, shape, TAIL_DTYPE, own) for layer, entry in zip(facts.layers, half, strict=True)}
            for role, half in (("key", keys), ("score", scores))
        }
        roles = tuple(
            Role(name=role, axes="page token dim", inner={"dim": whole(facts.key_dim)}, dtype=TAIL_DTYPE) for role in tensors
        )
        state = State(name=f"{name}_tail", rows="pages", layers=(), roles=roles, optional=name != "index")
        found.append(state.component(tensors, topology=own.topology))
    _check_count("index_tail", rest, 0)
    return found
