"""Two instances with any kinds of state in memory: components, elections, plans and raw copies, against the reference.

`Kind` joins a state as the reference tells it with the component that the library makes of the same tensors. A `Scene` has
the pools of every rank of both instances, and beside each pool its image: what the reference says that it must hold after
every request so far. Requests come and go, rows are reused, images are compared whole.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from disagg.core.copies import CopyBatch
from disagg.core.memory import RawTensor, raw_tensor
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.layout.binding import bind, check_rows
from disagg.layout.election import Election, elect
from disagg.layout.placement import Component
from disagg.layout.plan import ComponentPlan, make_plan
from disagg.layout.tables import LayoutTable, layout_table
from disagg.state import adapter, declare, mamba, paged, sparse, window
from disagg.testing import reference_states as naive
from disagg.testing.reference import CANARY, STALE, Context, PageList, pages_needed
from disagg.testing.reference_states import Form, GlobalAxis, Memory, Place, Ring, Slots, StateModel, StateRank, StateRows

Range = tuple[int, int]

# ------------------------------------------------------------------------------------------------------------------ kinds


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What a server knows when it declares a component: its tensors, its topology, which stage has which layers."""

    tensors: dict[str, dict[int, RawTensor]]
    topology: Topology
    stages: tuple[tuple[int, ...], ...]
    form: Form
    tokens: declare.Rule
    pages: dict[int, Any]

    @property
    def common(self) -> dict[str, Any]:
        return {"topology": self.topology, "layers_by_stage": self.stages}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A state of the model, by the reference and by the library. `window`: tokens before the next one that are needed."""

    model: StateModel
    layers: tuple[int, ...]
    build: Callable[[Pools], Component]
    form: Form
    window: int | None = None

    @property
    def name(self) -> str:
        return self.model.name


def _dtypes(model: StateModel) -> tuple[str, str]:
    return model.tensors[0].dtype, model.tensors[-1].dtype


def gqa_kind(
    *,
    num_kv_heads: int = 4,
    dims: tuple[int, int] = (3, 2),
    layers: Sequence[int] = (0, 1),
    name: str = "kv",
    scales: int = 0,
    **more: Any,
) -> Kind:
    """Full attention, with `scales` block scales per head and token, or with a name of its own and `window` sliding."""
    model = naive.gqa(num_kv_heads=num_kv_heads, dims=dims, name=name, scales=scales)
    make: Callable[..., Component] = window.swa if "window" in more else paged.gqa

    def pairs(pools: Pools, suffix: str = "") -> dict[int, Any]:
        keys, values = pools.tensors[f"k{suffix}"], pools.tensors[f"v{suffix}"]
        return {layer: (keys[layer], values[layer]) for layer in keys}

    def build(pools: Pools) -> Component:
        axes = pools.form.orders.get("k", paged.ORDERS["nhd"])
        sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "dims": dims, "dtype": "uint16"}
        if scales:
            sizes |= {"scales": pairs(pools, "_scale"), "scales_per_head": scales, "scales_dtype": "float32"}
        return make(pairs(pools), axes=axes, name=name, tokens=pools.tokens, **sizes, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=4))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def mla_kind(*, dim: int = 5, scales: int = 0, layers: Sequence[int] = (0, 1), name: str = "mla", **more: Any) -> Kind:
    model = naive.mla(dim=dim, scales=scales, name=name)
    optional = more.pop("optional", False)

    def build(pools: Pools) -> Component:
        given: dict[str, Any] = {"dtype": "uint16", "optional": optional, "tokens": pools.tokens}
        if scales:
            given |= {"scales": pools.tensors["latent_scale"], "scales_dim": scales, "scales_dtype": "float32"}
        axes = pools.form.orders.get("latent", "page token dim")
        return paged.mla(pools.tensors["latent"], dim=dim, axes=axes, name=name, **given, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=4))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def slot_kind(model: StateModel, roles: Sequence[declare.Role], *, layers: Sequence[int] = (0, 1), **more: Any) -> Kind:
    """Any recurrent state."""

    def build(pools: Pools) -> Component:
        axes = dict(pools.form.orders)
        return mamba.recurrent(roles, pools.tensors, axes=axes, name=model.name, **pools.common)

    return Kind(model=model, layers=tuple(layers), build=build, form=more.pop("form", Form(num_rows=5)), **more)


def gdn_kind(
    *, num_key_heads: int = 4, num_value_heads: int = 8, dims: tuple[int, int] = (2, 3), kernel: int = 4, **more: Any
) -> Kind:
    shape: dict[str, Any] = {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "key_head_dim": dims[0],
        "value_head_dim": dims[1],
        "kernel": kernel,
    }
    model = naive.gdn(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.gdn_roles(**shape, dtypes=_dtypes(model)), **more)


def kda_kind(
    *, num_heads: int = 4, dims: tuple[int, int] = (2, 3), kernel: int = 4, separate: bool = False, **more: Any
) -> Kind:
    shape: dict[str, Any] = {"num_heads": num_heads, "key_head_dim": dims[0], "value_head_dim": dims[1], "kernel": kernel}
    model = naive.kda(**shape, separate=separate, name=more.pop("name", "ssm"))
    usual = {tensor.role: "slot width channel" for tensor in model.tensors if tensor.role.startswith("conv")}
    form = more.pop("form", Form(num_rows=5))
    form = Form(**{**vars(form), "orders": {**usual, **form.orders}})
    return slot_kind(model, mamba.kda_roles(**shape, fused=not separate, dtypes=_dtypes(model)), form=form, **more)


def mamba2_kind(
    *, num_heads: int = 8, head_dim: int = 2, num_groups: int = 2, state_size: int = 3, kernel: int = 4, **more: Any
) -> Kind:
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_groups": num_groups,
        "state_size": state_size,
        "kernel": kernel,
    }
    model = naive.mamba2(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.mamba2_roles(**shape, dtypes=_dtypes(model)), **more)


def mamba1_kind(*, inner: int = 8, state_size: int = 3, kernel: int = 4, **more: Any) -> Kind:
    model = naive.mamba1(inner=inner, state_size=state_size, kernel=kernel, name=more.pop("name", "ssm"))
    roles = mamba.mamba1_roles(inner_size=inner, state_size=state_size, kernel=kernel, dtypes=_dtypes(model))
    return slot_kind(model, roles, **more)


def lightning_kind(*, num_heads: int = 8, dims: tuple[int, int] = (2, 3), **more: Any) -> Kind:
    shape: dict[str, Any] = {"num_heads": num_heads, "key_head_dim": dims[0], "value_head_dim": dims[1]}
    model = naive.lightning(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.lightning_roles(**shape, dtype="float32"), **more)


def index_kind(
    *,
    key_nbytes: int = 6,
    scale_nbytes: int = 2,
    granule: int = 1,
    layers: Sequence[int] = (0, 1),
    name: str = "index",
    **more: Any,
) -> Kind:
    """Index keys and then their scales in one page; as rings, the open pool."""
    model = naive.index_keys(key_nbytes=key_nbytes, scale_nbytes=scale_nbytes, granule=granule, name=name)
    form = more.pop("form", Form(num_rows=12, page_size=4, one_page=True))

    def build(pools: Pools) -> Component:
        sizes: dict[str, Any] = {"key_nbytes": key_nbytes, "scale_nbytes": scale_nbytes, "name": name, **pools.common}
        if pools.form.ring:
            return sparse.index_tail(pools.pages, tail=pools.form.page_size, **sizes)
        page_size = pools.form.page_size
        return sparse.index_keys(pools.pages, page_size=page_size, tokens_per_key=granule, tokens=pools.tokens, **sizes)

    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def compressed_kind(*, ratio: int, name: str, dim: int = 3, layers: Sequence[int] = (0, 1), **more: Any) -> Kind:
    model = naive.compressed(dim=dim, ratio=ratio, name=name)

    def build(pools: Pools) -> Component:
        sizes: dict[str, Any] = {"ratio": ratio, "dim": dim, "dtype": "uint16", "name": name, "tokens": pools.tokens}
        return sparse.compressed(pools.tensors["latent"], **sizes, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=2 * ratio))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def adapter_kind(
    role: str,
    *,
    order: str,
    sizes: Mapping[str, int],
    name: str = "adapter",
    layers: Sequence[int] = (0, 1),
    dtype: str = "uint16",
) -> Kind:
    """One module of a mixture-of-experts adapter; axes `expert` and `intermediate` are cut, others are whole."""
    rules: dict[str, Callable[[int], GlobalAxis]] = {"expert": naive.experts, "intermediate": naive.intermediate}
    axes = {axis: rules.get(axis, naive.replicated)(size) for axis, size in sizes.items()}
    model = StateModel(name=f"{name}.{role}", tensors=(naive.StateTensor(role=role, axes=axes, dtype=dtype),))

    def build(pools: Pools) -> Component:
        (component,) = adapter.moe_lora(
            pools.tensors,
            axes={role: pools.form.orders.get(role, order)},
            sizes={role: dict(sizes)},
            num_experts=sizes["expert"],
            name=name,
            dtype=dtype,
            **pools.common,
        )
        return component

    return Kind(model=model, layers=tuple(layers), build=build, form=Form(num_rows=3, orders={role: order}))


# ------------------------------------------------------------------------------------------------------------------ sides


@dataclass(frozen=True, kw_only=True)
class Side:
    """One instance. Stage `s` has the layers of `edges[s]` to `edges[s + 1]`; `forms` by state where they are not usual;
    it lacks the states named in `without`.
    """

    tp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 1
    edges: tuple[int, ...] = (0, 1000)
    context: Context = Context.WHOLE
    forms: Mapping[str, Form] = field(default_factory=dict)
    descending: bool = False
    without: frozenset[str] = frozenset()

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, ep=self.ep, cp=self.cp, dp=self.dp, pp=len(self.edges) - 1)

    def stages(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """The layer ids of every stage that have this state."""
        cut = (
            [layer for layer in kind.layers if first <= layer < last]
            for first, last in zip(self.edges[:-1], self.edges[1:], strict=True)
        )
        return tuple(tuple(sorted(layers, reverse=self.descending)) for layers in cut)

    def form(self, kind: Kind) -> Form:
        return self.forms.get(kind.name, kind.form)

    def rule(self, form: Form) -> declare.Rule:
        """The library's ownership of tokens for what `context` says in words."""
        match self.context:
            case Context.WHOLE:
                return declare.all_tokens
            case Context.PAGE_BLOCKS:
                return declare.page_blocks(form.page_size)
            case Context.TOKENS_IN_TURN:
                return declare.tokens_in_turn
            case Context.PAGES_IN_TURN:
                return declare.pages_in_turn(form.page_size)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank with memory: by state, its share by the reference, pools, their image, and the component over them."""

    topology: Topology
    states: dict[str, StateRank]
    memory: dict[str, Memory]
    image: dict[str, Memory]
    components: dict[str, Component]
    free: dict[str, list[int]]

    def take(self, rng: np.random.Generator, kind: Kind, num_tokens: int, tokens: Range) -> StateRows:
        """Free rows for a request's `tokens`, in random order."""
        state = self.states[kind.name]
        free = self.free[kind.name]
        count = 1
        if kind.model.paged and not state.form.ring:
            count = pages_needed(state.kv_rank, num_tokens=num_tokens, first_token=tokens[0])
        chosen = [free.pop(int(rng.integers(len(free)))) for _ in range(count)] if state.layers else [0] * count
        if not kind.model.paged:
            return Slots(chosen[0])
        return Ring(chosen[0]) if state.form.ring else PageList(tuple(chosen), tokens[0])

    def give_back(self, kind: Kind, rows: StateRows) -> None:
        if self.states[kind.name].layers:
            self.free[kind.name] += rows.ids if isinstance(rows, PageList) else [rows.id]


def library_rows(rows: StateRows, *, state: StateRank, tokens: Range) -> Rows:
    """The same rows as the library takes them."""
    match rows:
        case Slots(slot):
            return Slot(slot)
        case Ring(ring):
            return window.ring_rows(ring, need=tokens, stride=state.form.page_size)
        case PageList(ids, first_token):
            return Pages(np.array(ids, dtype=np.int32), first_token)


def make_rank(side: Side, topology: Topology, kinds: Sequence[Kind], *, byte: int) -> Rank:
    """Pools for every state that the rank's stage has, full of `byte`, and the components over them."""
    place = Place(
        tp=side.tp,
        tp_rank=topology.tp_rank,
        ep=side.ep,
        cp=side.cp,
        cp_rank=topology.cp_rank,
        context=side.context,
    )
    rank = Rank(topology=topology, states={}, memory={}, image={}, components={}, free={})
    for kind in kinds:
        if kind.name in side.without:
            continue
        form = side.form(kind)
        stages = side.stages(kind)
        here = Place(tp=place.tp, tp_rank=place.tp_rank, ep=place.ep) if form.ring or not kind.model.paged else place
        state = StateRank(model=kind.model, place=here, layers=stages[topology.pp_rank], form=form)
        memory = naive.allocate(state, byte=byte)
        pages = {}
        if form.one_page:
            pages = {layer: buffer.reshape(form.num_rows, -1) for (_, layer), buffer in memory.buffers.items()}
        raw = {role: {layer: raw_tensor(pool) for layer, pool in pools.items()} for role, pools in memory.tensors.items()}
        tokens = declare.all_tokens if form.ring else side.rule(form)
        pools = Pools(tensors=raw, topology=topology, stages=stages, form=form, tokens=tokens, pages=pages)
        rank.states[kind.name], rank.memory[kind.name] = state, memory
        rank.image[kind.name] = naive.allocate(state, byte=byte)
        rank.components[kind.name] = kind.build(pools)
        rank.free[kind.name] = list(range(form.num_rows))
    return rank


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A side's ranks, by instance rank, and its layout table."""

    side: Side
    ranks: tuple[Rank, ...]
    table: LayoutTable

    def group(self, number: int) -> tuple[Rank, ...]:
        size = self.side.topology.group_size
        return self.ranks[number * size : (number + 1) * size]


def make_instance(side: Side, kinds: Sequence[Kind], *, byte: int = CANARY) -> Instance:
    """Every rank of a side. Raises `AssertionError` where two ranks do not declare one table."""
    topology = side.topology
    ranks = tuple(make_rank(side, topology.at(number), kinds, byte=byte) for number in range(topology.num_ranks))
    tables = {layout_table(topology, [c.layouts for c in rank.components.values()]).encode() for rank in ranks}
    assert len(tables) == 1, "ranks of one instance declare different tables"
    return Instance(side=side, ranks=ranks, table=LayoutTable.decode(tables.pop()))


# ------------------------------------------------------------------------------------------------------------------ scene


@dataclass(frozen=True)
class Move:
    """The copies of one state from one group rank to another."""

    source: int
    destination: int
    component: str
    copies: CopyBatch


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: its rows at both groups, by group rank and state."""

    number: int
    num_tokens: int
    needs: dict[str, Range]
    held: dict[str, Range]
    source_group: int
    destination_group: int
    source_rows: list[dict[str, StateRows]] = field(default_factory=list)
    destination_rows: list[dict[str, StateRows]] = field(default_factory=list)


class Scene:
    """Two instances of one model; `transfer` moves requests and checks every byte of every pool."""

    def __init__(self, kinds: Sequence[Kind], source: Side, destination: Side, *, seed: int = 0) -> None:
        self.kinds = tuple(kinds)
        self.rng = np.random.default_rng(seed)
        self.source = make_instance(source, kinds, byte=STALE)
        self.destination = make_instance(destination, kinds)
        self.requests = 0
        self._plans: dict[tuple[int, int, int, int], dict[str, ComponentPlan]] = {}

    @cached_property
    def election(self) -> Election:
        return elect(self.source.table, self.destination.table)

    def transfer(self, num_tokens: int = 9, *, keep: bool = False, **changes: Any) -> list[Move]:
        """Move one request, check both instances, and give its rows back unless they are to be kept."""
        request = self.open(num_tokens, **changes)
        moves = self.moves(request)
        self.run(request, moves)
        found = self.difference(request)
        assert found is None, found
        if not keep:
            self.close(request)
        return moves

    def open(
        self,
        num_tokens: int,
        *,
        needs: Mapping[str, Range] | None = None,
        held: Mapping[str, Range] | None = None,
        prefix: int = 0,
        ahead: int = 0,
        source_group: int = 0,
        destination_group: int = 0,
    ) -> Request:
        """Rows for a new request on both sides, and its content in the source's pools.

        `needs` are the tokens that the destination asks for (default: from `prefix` or the window's start on), `held` those
        that the source lists rows for (default: what is needed). The destination has allocated `ahead` tokens too many.
        """
        self.requests += 1
        needed = {kind.name: (needs or {}).get(kind.name, usual_need(kind, num_tokens, prefix)) for kind in self.kinds}
        request = Request(
            number=self.requests,
            num_tokens=num_tokens,
            needs=needed,
            held={name: (held or {}).get(name, need) for name, need in needed.items()},
            source_group=source_group,
            destination_group=destination_group,
        )
        for rank in self.source.group(source_group):
            request.source_rows.append(self._take(rank, num_tokens, request.held))
            for kind in self.on(rank):
                self._fill(rank, kind, request, request.source_rows[-1][kind.name])
        for rank in self.destination.group(destination_group):
            listed = {name: (start, stop + ahead) for name, (start, stop) in needed.items()}
            request.destination_rows.append(self._take(rank, num_tokens, listed))
        return request

    def _take(self, rank: Rank, num_tokens: int, tokens: Mapping[str, Range]) -> dict[str, StateRows]:
        return {
            kind.name: rank.take(self.rng, kind, max(num_tokens, tokens[kind.name][1]), tokens[kind.name])
            for kind in self.on(rank)
        }

    def on(self, rank: Rank) -> list[Kind]:
        """The states that a rank's instance has."""
        return [kind for kind in self.kinds if kind.name in rank.states]

    def _fill(self, rank: Rank, kind: Kind, request: Request, rows: StateRows) -> None:
        start, stop = request.held[kind.name]
        for memory in (rank.memory[kind.name], rank.image[kind.name]):
            naive.write(
                rank.states[kind.name],
                memory,
                rows,
                request=request.number,
                num_tokens=max(request.num_tokens, stop),
                tokens=(start, stop),
            )

    def moves(self, request: Request) -> list[Move]:
        """The copies of every pair that the election names."""
        found = []
        for source, destination in self.election.by_pair:
            for name, plan in self._plan(request, source, destination).items():
                found.append(Move(source, destination, name, self.bind(request, plan, source, destination)))
        return found

    def _plan(self, request: Request, source: int, destination: int) -> dict[str, ComponentPlan]:
        key = (request.source_group, request.destination_group, source, destination)
        if key not in self._plans:
            ours = self.source.group(request.source_group)[source]
            theirs = self.destination.group(request.destination_group)[destination]
            self._plans[key] = make_plan(
                self.election,
                source=(source, self.source.table, _placements(ours)),
                destination=(destination, self.destination.table, _placements(theirs)),
            ).components
        return self._plans[key]

    def bind(self, request: Request, plan: ComponentPlan, source: int, destination: int) -> CopyBatch:
        """The copies of one state between two ranks."""
        name = plan.name
        ours = self.source.group(request.source_group)[source].states[name]
        theirs = self.destination.group(request.destination_group)[destination].states[name]
        need = request.needs[name]
        return bind(
            plan,
            source=library_rows(request.source_rows[source][name], state=ours, tokens=request.held[name]),
            destination=library_rows(request.destination_rows[destination][name], state=theirs, tokens=need),
            tokens=need if ours.model.paged else None,
        )

    def run(self, request: Request, moves: Iterable[Move]) -> None:
        """Make the copies; `AssertionError` where one leaves the pools of its ranks, or a byte is written twice."""
        sources = self.source.group(request.source_group)
        destinations = self.destination.group(request.destination_group)
        written: dict[int, list[CopyBatch]] = {}
        for move in moves:
            copies = move.copies
            assert (copies.nbytes > 0).all()
            assert _inside(sources[move.source].memory[move.component], copies.source, copies.nbytes), move
            assert _inside(destinations[move.destination].memory[move.component], copies.destination, copies.nbytes), move
            written.setdefault(move.destination, []).append(copies)
            columns = (copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist())
            for target, where, nbytes in zip(*columns, strict=True):
                ctypes.memmove(target, where, nbytes)
        for batches in written.values():
            copies = CopyBatch.concatenate(batches)
            order = np.argsort(copies.destination)
            starts, sizes = copies.destination[order], copies.nbytes[order]
            assert (starts[1:] >= starts[:-1] + sizes[:-1]).all(), "a byte has two writers"

    def difference(self, request: Request) -> str | None:
        """Where a pool of either group is not what the reference says it must be after this request."""
        for rank, rows in zip(self.destination.group(request.destination_group), request.destination_rows, strict=True):
            for kind in self.on(rank):
                naive.write(
                    rank.states[kind.name],
                    rank.image[kind.name],
                    rows[kind.name],
                    request=request.number,
                    num_tokens=max(request.num_tokens, request.needs[kind.name][1]),
                    tokens=request.needs[kind.name],
                )
        for what, ranks in (
            ("source", self.source.group(request.source_group)),
            ("destination", self.destination.group(request.destination_group)),
        ):
            for number, rank in enumerate(ranks):
                for name, image in rank.image.items():
                    found = naive.first_difference(image, rank.memory[name])
                    if found:
                        return f"{what} rank {number}, {name}: {found}"
        return None

    def start_over(self) -> None:
        """The destination's pools and their images as they were made: after a request that failed half-way."""
        for rank in self.destination.ranks:
            for memory in [*rank.memory.values(), *rank.image.values()]:
                memory.clear()

    def close(self, request: Request) -> None:
        """Rows are free for other requests; what is in them stays."""
        for ranks, rows in (
            (self.source.group(request.source_group), request.source_rows),
            (self.destination.group(request.destination_group), request.destination_rows),
        ):
            for rank, taken in zip(ranks, rows, strict=True):
                for kind in self.on(rank):
                    rank.give_back(kind, taken[kind.name])


def usual_need(kind: Kind, num_tokens: int, prefix: int = 0) -> Range:
    """`[max(prefix, n - window), n)`; a slot is needed whole."""
    if not kind.model.paged:
        return 0, num_tokens
    start = max(prefix, 0 if kind.window is None else num_tokens - kind.window)
    return min(max(start, 0), num_tokens), num_tokens


def check_every_row(scene: Scene, request: Request) -> None:
    """That the library's own check before a reservation accepts the destination's rows."""
    for rank, rows in zip(scene.destination.group(request.destination_group), request.destination_rows, strict=True):
        for name, component in rank.components.items():
            layout = component.layouts[rank.topology.group_rank]
            if layout is None or component.placement is None:
                continue
            need = request.needs[name]
            check_rows(layout, component.placement, library_rows(rows[name], state=rank.states[name], tokens=need), need)


def _placements(rank: Rank) -> dict[str, Any]:
    return {name: component.placement for name, component in rank.components.items() if component.placement is not None}


def _inside(memory: Memory, addresses: Any, nbytes: Any) -> bool:
    buffers = list(memory.buffers.values())
    starts = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
    stops = starts + np.array([buffer.nbytes for buffer in buffers], dtype=np.uint64)
    inside = (addresses[:, None] >= starts) & (addresses[:, None] + nbytes[:, None] <= stops)
    return bool(inside.any(axis=1).all())


def runs_by_writer(scene: Scene, moves: Iterable[Move], *, source_group: int = 0) -> Counter[int]:
    """How many runs of (component, layer, reader) each source rank writes, told by the addresses that it reads."""
    ranks = scene.source.group(source_group)
    runs: set[tuple[int, str, int, int]] = set()
    for move in moves:
        for (_, layer), buffer in ranks[move.source].memory[move.component].buffers.items():
            start = np.uint64(buffer.ctypes.data)
            inside = (move.copies.source >= start) & (move.copies.source < start + np.uint64(buffer.nbytes))
            if inside.any():
                runs.add((move.source, move.component, layer, move.destination))
    return Counter(dict.fromkeys(range(len(ranks)), 0) | Counter(run[0] for run in runs))


def moved(kinds: Sequence[Kind] | Kind, source: Side, destination: Side, num_tokens: int = 9, **changes: Any) -> list[Move]:
    """One request between two new instances, checked."""
    return Scene([kinds] if isinstance(kinds, Kind) else kinds, source, destination).transfer(num_tokens, **changes)


def tp_pairs(largest: int = 8) -> Iterator[tuple[Side, Side]]:
    """Every tensor-parallel size to every other."""
    for source in range(1, largest + 1):
        for destination in range(1, largest + 1):
            yield Side(tp=source), Side(tp=destination)
