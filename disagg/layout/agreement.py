"""What this rank and a peer instance compute from each other's layouts, and the plans that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from disagg.core.errors import ConfigError, LayoutError, RemoteProtocolError
from disagg.core.memory import RemoteRegion
from disagg.core.rows import TokenRange, is_text
from disagg.core.topology import Topology
from disagg.layout.checksums import ChecksumPlan, reader_plan, writer_plans
from disagg.layout.election import Election, elect
from disagg.layout.encoding import encode
from disagg.layout.ownership import Owned, Periodic
from disagg.layout.placement import Component, Placement, check_placement
from disagg.layout.plan import TransferPlan, make_plan
from disagg.layout.tables import LayoutTable, layout_table

MAX_MODEL = 4096
"""Characters of a model's name, and of its revision."""


@dataclass(frozen=True)
class ModelId:
    """The model whose state moves. Both sides must give the same `name` and `revision`. A revision may have several words,
    such as `dtype=bfloat16 rope=default`, so that an error can name those that differ. Raises `ConfigError` for more than
    `MAX_MODEL` characters, or text that UTF-8 cannot encode.
    """

    name: str
    revision: str = ""

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("revision", self.revision)):
            if not is_text(text, MAX_MODEL, least=0):
                raise ConfigError(f"model {what}: expected a str of at most {MAX_MODEL} characters, found {text!r:.100}")
            object.__setattr__(self, what, str(text))  # messages cannot have a subclass


def differing_words(found: str, expected: str) -> tuple[str, str]:
    """The words that only one of two revisions has; all words if their order alone differs."""
    theirs, ours = found.split(), expected.split()
    if set(theirs) == set(ours):
        return found, expected
    return " ".join(word for word in theirs if word not in ours), " ".join(word for word in ours if word not in theirs)


MAX_PLACEMENTS_NBYTES = 4 << 20
"""A layer takes about 20 bytes in each tensor."""
_PLACEMENTS = msgspec.msgpack.Decoder(tuple[Placement, ...])


def encode_placements(components: Sequence[Component]) -> bytes:
    return encode([c.placement for c in components if c.placement is not None])


def decode_placements(data: bytes) -> dict[str, Placement]:
    if len(data) > MAX_PLACEMENTS_NBYTES:
        raise RemoteProtocolError(f"placements: expected at most {MAX_PLACEMENTS_NBYTES} bytes, found {len(data)}")
    try:
        return {placement.component: placement for placement in _PLACEMENTS.decode(data)}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"placements of {len(data)} bytes cannot be read: {error}") from error


@dataclass(frozen=True)
class LocalRank:
    """This rank, and its instance's table."""

    topology: Topology
    components: tuple[Component, ...]
    table: LayoutTable
    placements: Mapping[str, Placement]

    @classmethod
    def of(cls, topology: Topology, components: Sequence[Component]) -> LocalRank:
        """Raises `ConfigError` for a component that describes one pipeline stage only."""
        for component in components:
            if not component.joined:
                expected = "layers_by_stage, the layer ids of each pipeline stage, or what join_stages returns"
                raise ConfigError(f"component {component.name!r}: expected {expected}, found stage {topology.pp_rank} only")
        table = layout_table(topology, [component.layouts for component in components])
        placements = {c.name: c.placement for c in components if c.placement is not None}
        return cls(topology, tuple(components), table, placements)

    @cached_property
    def checksum_plans(self) -> dict[str, ChecksumPlan]:
        """What this rank checks of received state, by component."""
        held = self.table.ranks[self.topology.group_rank].by_name
        return {name: reader_plan(held[name], placement) for name, placement in self.placements.items()}


@dataclass(frozen=True)
class Agreement:
    """The elections with one peer instance, in both directions."""

    table_bytes: bytes
    table: LayoutTable
    outgoing: Election
    incoming: Election

    @classmethod
    def between(cls, local: LocalRank, table_bytes: bytes) -> Agreement:
        """`table_bytes` is the peer's. Raises `LayoutError` if the layouts do not match."""
        table = LayoutTable.decode(table_bytes)
        return cls(table_bytes, table, elect(local.table, table), elect(table, local.table))

    @property
    def digests(self) -> bytes:
        """A peer has the two digests in the opposite order."""
        return self.outgoing.digest + self.incoming.digest

    def check_digests(self, theirs: bytes) -> None:
        if theirs[32:] + theirs[:32] != self.digests:
            raise LayoutError(f"plans differ: digest {self.digests.hex()[:16]}… here, {theirs[32:].hex()[:16]}… at the peer")

    def left_out(self, local: LocalRank) -> list[str]:
        return sorted((local.table.components.keys() | self.table.components.keys()) - set(self.outgoing.components))

    @property
    def num_ranks(self) -> int:
        return self.table.sizes.topology.num_ranks

    @property
    def num_groups(self) -> int:
        return self.table.sizes.dp

    @cached_property
    def group_size(self) -> int:
        return self.table.sizes.topology.group_size

    def plans(
        self, local: LocalRank, rank: int, placements: Mapping[str, Placement], regions: Sequence[RemoteRegion], *, peer: str
    ) -> tuple[TransferPlan, TransferPlan]:
        """Outgoing and incoming. Raises `LayoutError` if the memory of `rank` contradicts its layouts."""
        group_rank = rank % self.group_size
        for layout in self.table.ranks[group_rank].components:
            if layout.name not in self.outgoing.components or not any(tensor.layers for tensor in layout.tensors):
                continue
            if layout.name not in placements:
                raise LayoutError(f"{peer}, component {layout.name!r}: expected memory, found none")
            check_placement(placements[layout.name], layout, regions, whose=peer)
        ours = (local.topology.group_rank, local.table, local.placements)
        theirs = (group_rank, self.table, placements)
        return (
            make_plan(self.outgoing, source=ours, destination=theirs),
            make_plan(self.incoming, source=theirs, destination=ours),
        )

    def checksum_plans(self, local: LocalRank, rank: int, placements: Mapping[str, Placement]) -> dict[str, ChecksumPlan]:
        """What this rank checks of what it writes to `rank`, by component. Raises `LayoutError` for a converted component,
        whose numbers have other bits on both sides.
        """
        for name, roles in self.outgoing.converted:
            what = f"component {name!r}, tensor {roles[0]!r}"
            raise LayoutError(f"{what}: expected verify='off', since it is converted on its way")
        ours = (local.topology.group_rank, local.table, local.placements)
        return writer_plans(self.outgoing, source=ours, destination=(rank % self.group_size, self.table, placements))

    def readers(self, local: LocalRank) -> frozenset[int]:
        return frozenset(self.outgoing.readers(local.topology.group_rank))

    def writers(self, local: LocalRank, group: int) -> list[int]:
        return [group * self.group_size + writer for writer in self.incoming.writers(local.topology.group_rank)]

    def idle_writers(self, local: LocalRank, group: int) -> list[int]:
        """Ranks of the peer's group that write to no rank of this one's. The first rank of this one's group tells them of a
        request, so the list is empty on the others.
        """
        if local.topology.group_rank:
            return []
        return [group * self.group_size + rank for rank in self._idle]

    def partners(self, local: LocalRank) -> frozenset[int]:
        """The peer's ranks that this rank connects to: those that it exchanges bytes with, those that tell it of requests or
        that it tells, and the leader. A leader connects to every rank. Both sides compute the same pairs.
        """
        if local.topology.rank == 0:
            return frozenset(range(self.num_ranks))
        me = local.topology.group_rank
        readers = self.outgoing.readers(me)
        found = {*readers, *self.incoming.writers(me)}
        if me == 0:
            found.update(self._idle)
        if not readers:
            found.add(0)
        return frozenset({0, *(group * self.group_size + rank for group in range(self.num_groups) for rank in found)})

    @cached_property
    def _idle(self) -> list[int]:
        return [rank for rank in range(self.group_size) if not self.incoming.readers(rank)]

    def expected(
        self, local: LocalRank, group: int, need: Mapping[str, TokenRange]
    ) -> dict[int, dict[str, tuple[tuple[int, ...], TokenRange]]]:
        """The layers and tokens that each writer of this rank must send, by the writer's rank and component."""
        me = local.topology.group_rank
        expected: dict[int, dict[str, tuple[tuple[int, ...], TokenRange]]] = {}
        for writer in self.incoming.writers(me):
            layers: dict[str, set[int]] = {}
            for flow in self.incoming.by_pair[writer, me]:
                layers.setdefault(flow.component, set()).update(flow.layers)
            held = self.table.ranks[writer].by_name
            expected[group * self.group_size + writer] = {
                name: (tuple(sorted(ids)), expected_tokens(held[name].tokens, need[name])) for name, ids in layers.items()
            }
        return expected


def expected_tokens(owned: Owned | None, need: tuple[int, int]) -> tuple[int, int]:
    """The hull of a writer's tokens inside `need`; all of `need` for a slot and for periodic ownership."""
    start, stop = need
    if owned is None or isinstance(owned, Periodic):
        return need
    parts = [(max(p.start, start), min(p.stop, stop)) for p in owned.within(stop).parts]
    parts = [part for part in parts if part[0] < part[1]]
    return (min(p[0] for p in parts), max(p[1] for p in parts)) if parts else (start, start)
