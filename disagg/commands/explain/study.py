"""Who would send what to whom, and why that way: everything that `disagg explain` shows, as values.

Requests get their rows as `disagg-bench` deals them, so that its bytes, pieces and posts for the same case are these.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from disagg.backends import registry as backends
from disagg.backends.abilities import SaysStaging
from disagg.backends.base import BackendOptions, StagingShape, Transport
from disagg.commands.cases.instructions import Item
from disagg.commands.cases.places import rows_of, streams
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of, rows_needed
from disagg.commands.explain.counting import PieceCounter, SpanCount, count, placed, size, why_so_long
from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import Rows
from disagg.layout.binding import BoundRows, Stream, bind_rows
from disagg.layout.election import elect
from disagg.layout.ownership import Share
from disagg.layout.placement import Placement
from disagg.layout.plan import ComponentPlan, TransferPlan, make_plan
from disagg.layout.tables import ComponentLayout, LayoutTable, layout_table
from disagg.models import ModelSpec, load_model
from disagg.runtime.paths import MIN_PIECES, Way, is_small, way_of
from disagg.runtime.streams import destination_stream

BUSY = 1.5
"""A rank that moves so many times the mean of its side is a hot spot."""


# -- what engines cost -------------------------------------------------------------------------------------------------


class Costs(msgspec.Struct, frozen=True):
    """What moving costs one rank: seconds per piece and 1e9 bytes per second directly, and packed all in all."""

    piece_s: float
    gbps: float
    packed_gbps: float

    def seconds(self, way: str, nbytes: int, descriptors: int) -> float:
        """Of so many bytes that travel one way; packed at the source, or collected, is taken to cost as much as by a ring."""
        if way != "direct":
            return nbytes / self.packed_gbps / 1e9
        return nbytes / self.gbps / 1e9 + descriptors * self.piece_s


class Engine(NamedTuple):
    """An engine over one transport: how it stages, and its costs as measured (`docs/engines.md`); `None`: nobody has."""

    name: str
    transport: str
    staging: StagingShape
    costs: Costs | None


_COSTS: Mapping[tuple[str, str], Costs | None] = {
    ("nixl", "shm"): Costs(0.5e-6, 5.9, 5.5),
    ("nixl", "tcp"): Costs(3.7e-6, 6.5, 4.0),
    ("nixl", "rdma"): None,
    ("mooncake", "tcp"): Costs(14e-6, 4.4, 3.5),
    ("mooncake", "rdma"): None,
    ("nvlink", "peer memory"): None,
    ("local", "memory"): Costs(2e-8, 12.0, 6.0),
}
_AUTO = {"nixl": "shm", "mooncake": "tcp", "nvlink": "peer memory", "local": "memory"}
"""What an engine takes by itself between two processes of one host."""


_OWN = ("nvlink", "local")
"""Engines with a transport of their own: nothing can be asked of them."""


def engine_of(backend: str, transport: str) -> Engine:
    """What is known of an engine and a transport, without starting it. Raises `ConfigError` for what there is not."""
    if backend not in ("auto", *backends.available()):
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(backends.available())}, found {backend!r}")
    name = backends.AUTO[0] if backend == "auto" else backend
    known = [of for engine, of in _COSTS if engine == name]
    chosen = _AUTO.get(name, transport) if transport == "auto" or name in _OWN else transport
    if known and chosen not in known:
        raise ConfigError(f"transport: backend {name!r} has {', '.join(known)}, found {transport!r}")
    return Engine(name, chosen, declared_staging(name, transport), _COSTS.get((name, chosen)))


def declared_staging(backend: str, transport: str) -> StagingShape:
    """The backend's staging for those options; one that can say it only once it runs is taken not to pack."""
    (entry,) = importlib.metadata.entry_points(group=backends.ENTRY_POINTS, name=backend)
    kind = entry.load()
    return kind.staging_for(BackendOptions(transport=Transport(transport))) if isinstance(kind, SaysStaging) else StagingShape()


# -- what comes out ----------------------------------------------------------------------------------------------------


class WayShare(msgspec.Struct, frozen=True):
    """What of a component goes one way: `descriptors` are what the engine is given, for packed ones in slots, and for those
    packed at the source in runs that lie together at the destination, cut where a slot ends.
    """

    bytes: int
    runs: int
    descriptors: int


class Part(msgspec.Struct, frozen=True):
    """One component between a pair of ranks. `runs` are pieces with neighbours joined, `descriptors` what the engine gets."""

    name: str
    bytes: int
    runs: int
    run_bytes_mean: float
    descriptors: int
    way: str
    reason: str
    ways: dict[str, WayShare]
    seconds: float | None


class Pair(msgspec.Struct, frozen=True):
    """What one prefill rank writes to one decode rank; ranks by their numbers inside their instances."""

    source: int
    destination: int
    components: tuple[Part, ...]
    bytes: int
    seconds: float | None


class Explanation(msgspec.Struct, frozen=True):
    """A request, explained. `seconds` is the busiest rank's, if every rank has a core and a link of its own."""

    model: str
    tokens: int
    prefill: str
    decode: str
    backend: str
    transport: str
    pack_below: int
    slot_bytes: int
    costs: Costs | None
    pairs: tuple[Pair, ...]
    total_bytes: int
    covered: bool
    runs: int
    descriptors: int
    seconds: float | None
    fan_out: dict[int, tuple[int, ...]]
    fan_in: dict[int, tuple[int, ...]]
    hot_spots: tuple[str, ...]


# -- a case ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a case of the benchmark, and how it would travel. `decode_model` only where it is another one.

    `consecutive`: every request's pages follow each other, in place of the benchmark's random ones.
    """

    case: Case
    decode_model: str | None = None
    consecutive: bool = False
    costs: Costs | None = None

    @property
    def setting(self) -> Setting:
        """Raises `ConfigError` for an engine or a transport that there is not."""
        engine = engine_of(self.case.backend, self.case.transport)
        given = self.case.pack_below
        staging = engine.staging if given is None else replace(engine.staging, pack_below=given, measure=False)
        return Setting(engine.name, engine.transport, staging, self.costs or engine.costs)


@dataclass(frozen=True)
class Setting:
    """What it would travel by."""

    backend: str
    transport: str
    staging: StagingShape
    costs: Costs | None

    @property
    def threshold(self) -> str:
        """In words: below what it packs. Ranks that are connected measure that; without an engine it is as declared."""
        where = f"where packing begins to pay with {self.backend} over {self.transport}"
        return f"{size(self.staging.pack_below)}, {where}{', as declared' if self.staging.measure else ''}"

    def seconds(self, ways: Mapping[str, WayShare]) -> float | None:
        """What those bytes take one rank; `None` where nobody knows the costs."""
        if self.costs is None:
            return None
        return sum(self.costs.seconds(way, share.bytes, share.descriptors) for way, share in ways.items())


@dataclass(frozen=True, eq=False)
class Half:
    """One instance: its table, and of every rank of its first group where its pools would be and the request's rows."""

    side: Side
    spec: ModelSpec
    table: LayoutTable
    placements: tuple[Mapping[str, Placement], ...]
    items: tuple[Item, ...]
    _known: dict[tuple[str, tuple[int, ...]], Rows] = field(default_factory=dict)

    def rows(self, rank: int, name: str) -> Rows:
        """The request's rows of a component on a rank; the same object on ranks that have the same ones."""
        key = name, self.items[rank].rows[name]
        if key not in self._known:
            self._known[key] = rows_of(self.spec.state(name), self.items[rank])
        return self._known[key]


@dataclass(frozen=True, eq=False)
class Study:
    """Both instances, what each pair's plan is, and the explanation."""

    source: Half
    destination: Half
    plans: Mapping[tuple[int, int], TransferPlan]
    explanation: Explanation


def study(question: Question) -> Study:
    """The whole of it. Raises `ConfigError` for sides that cannot be, and for layouts that do not match, with both values."""
    setting = question.setting
    source, destination = _half(question, "prefill"), _half(question, "decode")
    try:
        election = elect(source.table, destination.table)
    except LayoutError as error:
        raise ConfigError(f"prefill {source.side} ('here') cannot serve decode {destination.side} ('peer'): {error}") from error
    plans = {
        (ours, theirs): make_plan(
            election,
            source=(ours, source.table, source.placements[ours]),
            destination=(theirs, destination.table, destination.placements[theirs]),
        )
        for ours, theirs in sorted(election.by_pair)
    }
    counter = PieceCounter()
    found = (_pair(source, destination, key, plan, setting, counter) for key, plan in plans.items())
    pairs = tuple(pair for pair in found if pair.bytes)
    return Study(source, destination, plans, _explanation(question, setting, source, destination, pairs))


def _half(question: Question, role: str) -> Half:
    """One side, dealt its request as the benchmark would."""
    case = question.case
    ours = role == "prefill"
    side, peer, prefix = (case.prefill, case.decode, 0) if ours else (case.decode, case.prefill, case.prefix_hit)
    spec = load_model(case.model if ours else question.decode_model or case.model, num_layers=case.num_layers)
    pools = {state.name: rows_needed(state, side, case, prefix=prefix) for state in spec.states}
    dealt = items_of(spec, side, peer, case, name=role, pools=pools, prefix=prefix)
    shape = side.pool_shape(max(pools.values()), rows=pools)
    group = [placed(spec, rank, shape) for rank in side.topology().group()]
    return Half(
        side,
        spec,
        layout_table(side.topology(), [component.layouts for component in group[0]]),
        tuple({c.name: c.placement for c in components if c.placement is not None} for components in group),
        tuple(_in_order(items[0]) if question.consecutive else items[0] for items in dealt[: len(group)]),
    )


def _in_order(item: Item) -> Item:
    """The same request in the first rows of every pool."""
    return msgspec.structs.replace(item, rows={name: tuple(range(len(rows))) for name, rows in item.rows.items()})


# -- one pair of ranks -------------------------------------------------------------------------------------------------


class _Sharing(NamedTuple):
    """How a component is shared out over ways: bytes and runs of each, and the reason. `at_source`: what is packed goes right
    where it belongs, in this order; `collected`: the engine collects what goes directly.
    """

    direct: tuple[int, int]
    packed: tuple[int, int]
    reason: str
    at_source: Stream | None = None
    collected: bool = False


def _pair(
    source: Half, destination: Half, key: tuple[int, int], plan: TransferPlan, setting: Setting, counter: PieceCounter
) -> Pair:
    """A pair's components. Those that stream go as one chunk, the others with the request's end: slots begin anew."""
    theirs = destination.items[key[1]]
    parts: list[Part] = []
    packed: Counter[tuple[bool, bool]] = Counter()
    for name, component in plan.components.items():
        state, needed = destination.spec.state(name), theirs.needs[name]
        if needed[0] >= needed[1]:
            continue
        rows = source.rows(key[0], name), destination.rows(key[1], name)
        counts = counter.component(component, source=rows[0], destination=rows[1], need=needed)
        small = _small(component, setting)
        chosen = None
        if small:
            chosen = bind_rows(component, source=rows[0], destination=rows[1], tokens=needed, num_tokens=needed[1], spans=small)
        sharing = _share(component, counts, setting, chosen)
        chunk = streams(state), sharing.at_source is not None
        posts = _posts(sharing, packed[chunk], setting)
        packed[chunk] += sharing.packed[0]
        if sharing.direct[0] or sharing.packed[0]:
            parts.append(_part(name, sharing, posts, setting))
    seconds = [part.seconds for part in parts if part.seconds is not None]
    return Pair(*key, tuple(parts), sum(part.bytes for part in parts), sum(seconds) if setting.costs else None)


def _small(component: ComponentPlan, setting: Setting) -> tuple[int, ...]:
    """The span classes whose pieces are below the threshold."""
    return tuple(i for i, span in enumerate(component.spans) if is_small(component, span, setting.staging.pack_below))


def _posts(sharing: _Sharing, before: int, setting: Setting) -> int:
    """What the engine is given for what goes packed, `before` bytes of the same chunk having gone before it."""
    room, stop = setting.staging.slot_nbytes, before + sharing.packed[0]
    if sharing.at_source is None:
        return -(-stop // room) - -(-before // room)
    edges = [before, *range((before // room + 1) * room, stop, room), stop]
    return sum(len(sharing.at_source.copies(start - before, end - start, 0)[2]) for start, end in itertools.pairwise(edges))


def _part(name: str, sharing: _Sharing, posts: int, setting: Setting) -> Part:
    ways = {}
    if sharing.direct[0]:
        ways["direct"] = WayShare(*sharing.direct, sharing.direct[1])
    if sharing.packed[0]:
        ways["packed" if sharing.at_source is None else "source"] = WayShare(*sharing.packed, posts)
    nbytes, runs = sharing.direct[0] + sharing.packed[0], sharing.direct[1] + sharing.packed[1]
    return Part(
        name=name,
        bytes=nbytes,
        runs=runs,
        run_bytes_mean=nbytes / runs,
        descriptors=sum(share.descriptors for share in ways.values()),
        way="mixed" if len(ways) > 1 else next(iter(ways)),
        reason=sharing.reason,
        ways=ways,
        seconds=setting.seconds({"collected" if sharing.collected else way: share for way, share in ways.items()}),
    )


def _share(
    component: ComponentPlan, counts: Sequence[SpanCount | None], setting: Setting, small_ones: BoundRows | None
) -> _Sharing:
    """What the manager would do: small pieces packed, unless there are few (`disagg.runtime.paths`)."""
    below = setting.staging.pack_below
    nbytes, runs = count(counts)
    spans = [span for span, found in zip(component.spans, counts, strict=True) if found] or list(component.spans)
    widest = max(spans, key=lambda span: span.nbytes)
    mean = f"runs of {size(nbytes / runs)}" if runs else "nothing"
    why = f"{mean}: {why_so_long(widest, component)}"
    small = [is_small(component, span, below) for span in component.spans]
    if not below:
        return _Sharing((nbytes, runs), (0, 0), f"{why}; nothing is packed with {setting.backend} unless it is asked for")
    way = Way.DIRECT if small_ones is None else way_of(small_ones, below, setting.staging.gathers_from)
    if not any(small) or (all(small) and way is Way.DIRECT and runs >= MIN_PIECES):
        return _Sharing((nbytes, runs), (0, 0), f"{why}; not below {setting.threshold}")
    if runs < MIN_PIECES:
        return _Sharing((nbytes, runs), (0, 0), f"{why}; fewer than {MIN_PIECES} runs are not worth a slot's two messages")
    if way is Way.DIRECT:
        return _Sharing((nbytes, runs), (0, 0), f"{why}; most of them are not below {setting.threshold}")
    at_source = None
    if way in (Way.COLLECTED, Way.SOURCE) and small_ones is not None:
        at_source = destination_stream([(component.name, small_ones)])
        why = f"{why}; at the destination {size(at_source.total / at_source.num_pieces)} lie together"
    if way is Way.COLLECTED:
        why = f"{why}, and the engine collects them from where they lie"
        return _Sharing((nbytes, runs), (0, 0), why, collected=True)
    if at_source is not None:
        why = f"{why}, so that nothing is unpacked there"
    if all(small):
        return _Sharing((0, 0), (nbytes, runs), f"{why}; below {setting.threshold}", at_source)
    parts = [count(found for found, is_so in zip(counts, small, strict=True) if is_so is wanted) for wanted in (False, True)]
    return _Sharing(parts[0], parts[1], f"{why}; only some tensors' pieces are below {setting.threshold}", at_source)


# -- all pairs ---------------------------------------------------------------------------------------------------------


def _explanation(question: Question, setting: Setting, source: Half, destination: Half, pairs: tuple[Pair, ...]) -> Explanation:
    case = question.case
    readers, writers = _partners(pairs, of="source"), _partners(pairs, of="destination")
    received = {rank: sum(p.bytes for p in pairs if p.destination == rank) for rank in range(len(destination.items))}
    parts = [part for pair in pairs for part in pair.components]
    return Explanation(
        model=source.spec.name,
        tokens=case.tokens,
        prefill=str(source.side),
        decode=str(destination.side),
        backend=setting.backend,
        transport=setting.transport,
        pack_below=setting.staging.pack_below,
        slot_bytes=setting.staging.slot_nbytes,
        costs=setting.costs,
        pairs=pairs,
        total_bytes=sum(received.values()),
        covered=all(needed_nbytes(destination, rank) == found for rank, found in received.items()),
        runs=sum(part.runs for part in parts),
        descriptors=sum(part.descriptors for part in parts),
        seconds=_busiest(pairs) if setting.costs else None,
        fan_out=readers,
        fan_in=writers,
        hot_spots=tuple(_hot_spots(pairs, len(source.items), len(destination.items))),
    )


def _partners(pairs: Sequence[Pair], *, of: str) -> dict[int, tuple[int, ...]]:
    """Who each rank of one side moves bytes to or from."""
    found: dict[int, list[int]] = defaultdict(list)
    for pair in pairs:
        one, other = (pair.source, pair.destination) if of == "source" else (pair.destination, pair.source)
        found[one].append(other)
    return {rank: tuple(sorted(found[rank])) for rank in sorted(found)}


def _busiest(pairs: Sequence[Pair]) -> float:
    """Seconds of the rank, of either side, that moves for longest."""
    spent: Counter[tuple[str, int]] = Counter()
    for pair in pairs:
        for rank in (("prefill", pair.source), ("decode", pair.destination)):
            spent[rank] += pair.seconds or 0.0  # type: ignore[assignment]
    return float(max(spent.values(), default=0.0))


def _hot_spots(pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> Iterator[str]:
    """Ranks that move far more than the others of their side, and prefill ranks that move nothing."""
    for role, verb, num_ranks in (("prefill", "writes", num_sources), ("decode", "receives", num_destinations)):
        moved = dict.fromkeys(range(num_ranks), 0)
        for pair in pairs:
            moved[pair.source if role == "prefill" else pair.destination] += pair.bytes
        mean = sum(moved.values()) / num_ranks
        for rank, nbytes in moved.items():
            if nbytes > BUSY * mean:
                yield f"{role} rank {rank} {verb} {size(nbytes)}, {nbytes / mean:.1f} times the mean of its side"
        idle = [rank for rank, nbytes in moved.items() if not nbytes]
        if idle and role == "prefill":
            yield f"prefill ranks {', '.join(map(str, idle))} write nothing"


def needed_nbytes(half: Half, rank: int) -> int:
    """Bytes that a decode rank's own layouts say it needs, whoever writes them."""
    return sum(_layout_nbytes(layout, half.items[rank].needs[layout.name]) for layout in half.table.ranks[rank].components)


def _layout_nbytes(layout: ComponentLayout, need: tuple[int, int]) -> int:
    total = 0
    for tensor in layout.tensors:
        inner = math.prod(axis.owned.within(axis.size or 0).count_below(axis.size or 0) for axis in tensor.inner_axes)
        positions = 1
        if tensor.token is not None:
            granule = tensor.token.granule
            edges = [edge // granule * granule for edge in need]
            owned = tensor.token.owned.within(need[1]) if isinstance(tensor.token.owned, Share) else tensor.token.owned
            positions = (owned.count_below(edges[1]) - owned.count_below(edges[0])) // granule
        total += len(tensor.layers) * inner * positions * ITEMSIZE[tensor.dtype]
    return total
