"""Plan agreement: both instances compute the same elections, and each rank's plans in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError, RemoteProtocolError
from disagg.core.memory import RemoteRegion
from disagg.core.topology import Topology
from disagg.layout.agreement import (
    MAX_PLACEMENTS_NBYTES,
    Agreement,
    LocalRank,
    ModelId,
    decode_placements,
    differing_words,
    encode_placements,
    expected_tokens,
)
from disagg.layout.encoding import encode
from disagg.layout.ownership import EVERYTHING, Owned, Periodic, Share
from disagg.layout.placement import MAX_AXES, Placement, TensorPlacement
from disagg.layout.tables import MAX_LAYERS
from disagg.state import paged

NHD = "page token kv_head dim"


def rank_of(tp: int, tp_rank: int, *, num_kv_heads: int = 4) -> LocalRank:
    topology = Topology(tp=tp, tp_rank=tp_rank)
    shape = (3, 4, num_kv_heads // tp, 2)
    tensors = {layer: (np.zeros(shape, np.float16), np.zeros(shape, np.float16)) for layer in (0, 1)}
    return LocalRank.of(topology, [paged.gqa(tensors, axes=NHD, num_kv_heads=num_kv_heads, topology=topology)])


def regions_of(rank: LocalRank) -> list[RemoteRegion]:
    return [RemoteRegion(r.address, r.nbytes) for component in rank.components for r in component.regions]


@pytest.mark.parametrize("text", [None, 5, "m" * 4097, "m\ud800"])
def test_a_model_that_no_message_can_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="model name: expected a str of at most 4096 characters"):
        ModelId(text)
    with pytest.raises(ConfigError, match="model revision: expected a str of at most 4096 characters"):
        ModelId("m", text)


def test_both_sides_agree_and_have_the_same_plans() -> None:
    ours, theirs = rank_of(2, 1), rank_of(1, 0)
    here, there = Agreement.between(ours, theirs.table.encode()), Agreement.between(theirs, ours.table.encode())
    here.check_digests(there.digests)
    there.check_digests(here.digests)
    assert (here.num_ranks, here.num_groups, here.group_size) == (1, 1, 1)
    assert (here.readers(ours), there.readers(theirs)) == (frozenset({0}), frozenset({0, 1}))
    placements = decode_placements(encode_placements(theirs.components))
    assert placements == theirs.placements
    outgoing, incoming = here.plans(ours, 0, placements, regions_of(theirs), peer="decode-0")
    their_outgoing, their_incoming = there.plans(theirs, 1, ours.placements, regions_of(ours), peer="prefill-0")
    for mine, other in ((outgoing, their_incoming), (incoming, their_outgoing)):
        for one, same in zip(mine.components["kv"].spans, other.components["kv"].spans, strict=True):
            assert (one.source_bases == same.source_bases).all()
            assert (one.destination_bases == same.destination_bases).all()
    assert here.expected(ours, 0, {"kv": (2, 9)}) == {0: {"kv": ((0, 1), (2, 9))}}
    assert there.expected(theirs, 1, {"kv": (2, 9)}) == {rank: {"kv": ((0, 1), (2, 9))} for rank in (2, 3)}


def test_the_ranks_that_write_to_a_rank_and_those_that_write_to_nobody() -> None:
    ours, theirs = rank_of(2, 1), rank_of(1, 0)
    there = Agreement.between(theirs, ours.table.encode())
    assert (there.writers(theirs, 0), there.writers(theirs, 1)) == ([0, 1], [2, 3])
    assert there.idle_writers(theirs, 1) == []
    tensors = {0: (np.zeros((3, 4, 1, 2), np.float16), np.zeros((3, 4, 1, 2), np.float16))}
    first, second, replicas = (
        LocalRank.of(topology, [paged.gqa(tensors, axes=NHD, num_kv_heads=1, topology=topology)])
        for topology in (Topology(tp=2), Topology(tp=2, tp_rank=1), Topology(tp=8))
    )
    known = Agreement.between(first, replicas.table.encode())
    writers = {*known.writers(first, 1), *known.writers(second, 1)}
    assert sorted({*writers, *known.idle_writers(first, 1)}) == list(range(8, 16))
    assert writers.isdisjoint(known.idle_writers(first, 1))
    assert known.idle_writers(second, 1) == []


def ranks_of(tp: int, dp: int, num_kv_heads: int) -> list[LocalRank]:
    """Every rank of an instance; ranks share heads where there are fewer than ranks."""
    shape = (3, 4, max(1, num_kv_heads // tp), 2)
    tensors = {layer: (np.zeros(shape, np.float16), np.zeros(shape, np.float16)) for layer in (0, 1)}
    return [
        LocalRank.of(topology, [paged.gqa(tensors, axes=NHD, num_kv_heads=num_kv_heads, topology=topology)])
        for topology in (
            Topology(tp=tp, tp_rank=tp_rank, dp=dp, dp_rank=dp_rank) for dp_rank in range(dp) for tp_rank in range(tp)
        )
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize(("ours", "theirs"), [((2, 1), (4, 1)), ((4, 2), (2, 2)), ((4, 1), (1, 3)), ((4, 2), (4, 1))])
def test_ranks_connect_to_whom_they_exchange_bytes_or_messages_with(
    ours: tuple[int, int], theirs: tuple[int, int], num_kv_heads: int
) -> None:
    here, there = ranks_of(*ours, num_kv_heads), ranks_of(*theirs, num_kv_heads)
    assert [rank.topology.rank for rank in here] == list(range(len(here)))
    near, far = (Agreement.between(own, other.table.encode()) for own, other in ((here[0], there[0]), (there[0], here[0])))
    connects = {(us, them) for us, rank in enumerate(here) for them in near.partners(rank)}
    assert connects == {(us, them) for them, rank in enumerate(there) for us in far.partners(rank)}
    needs = {(0, them) for them in range(len(there))} | {(us, 0) for us in range(len(here))}
    for (known, some), others, add in (
        ((near, here), len(there), lambda us, them: (us, them)),
        ((far, there), len(here), lambda them, us: (us, them)),
    ):
        for number, rank in enumerate(some):
            size = known.group_size
            for group in range(others // size):
                told = {*known.writers(rank, group), *known.idle_writers(rank, group)}
                told.update(group * size + reader for reader in known.readers(rank))
                needs.update(add(number, other) for other in told)
    assert connects == needs


def test_equal_sides_connect_each_rank_to_one_rank_and_the_leader() -> None:
    ranks = ranks_of(8, 1, 8)
    known = Agreement.between(ranks[0], ranks[0].table.encode())
    assert [sorted(known.partners(rank)) for rank in ranks] == [list(range(8)), *([0, number] for number in range(1, 8))]


def test_checksum_plans_of_the_writer_and_the_reader() -> None:
    ours, theirs = rank_of(2, 1), rank_of(1, 0)
    written = Agreement.between(ours, theirs.table.encode()).checksum_plans(ours, 0, theirs.placements)["kv"]
    received = theirs.checksum_plans["kv"]
    assert written.layers == received.layers == (0, 1)
    assert [box.axes[1][0] for box in written.boxes] == [2, 2]  # heads of K and of V
    assert [box.axes[1][0] for box in received.boxes] == [4, 4]


def test_different_elections_and_layouts_are_rejected() -> None:
    ours, theirs = rank_of(2, 1), rank_of(1, 0)
    here = Agreement.between(ours, theirs.table.encode())
    with pytest.raises(LayoutError, match="plans differ: digest"):
        here.check_digests(here.digests)
    with pytest.raises(LayoutError, match="global size: 4 here, 8 at the peer"):
        Agreement.between(ours, rank_of(1, 0, num_kv_heads=8).table.encode())


def test_a_peers_memory_must_match_its_layouts() -> None:
    ours, theirs = rank_of(2, 1), rank_of(1, 0)
    here = Agreement.between(ours, theirs.table.encode())
    with pytest.raises(LayoutError, match="decode-0, component 'kv': expected memory, found none"):
        here.plans(ours, 0, {}, regions_of(theirs), peer="decode-0")
    with pytest.raises(LayoutError, match=r"decode-0, component 'kv', tensor 'k', layer 0: .* is not inside"):
        here.plans(ours, 0, theirs.placements, [], peer="decode-0")


def test_optional_components_of_one_side_need_no_memory() -> None:
    ours, draft = rank_of(1, 0), np.zeros((3, 4, 2), np.float16)
    kv = rank_of(1, 0).components[0]
    theirs = LocalRank.of(Topology(), [kv, paged.mla({9: draft}, dim=2, topology=Topology(), name="draft", optional=True)])
    here = Agreement.between(ours, theirs.table.encode())
    outgoing, incoming = here.plans(ours, 0, {"kv": theirs.placements["kv"]}, regions_of(theirs), peer="decode-0")
    assert set(outgoing.components) == set(incoming.components) == {"kv"}
    assert here.left_out(ours) == Agreement.between(theirs, ours.table.encode()).left_out(theirs) == ["draft"]
    assert Agreement.between(theirs, theirs.table.encode()).left_out(theirs) == []


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x80", b"\x91\xa1\xff"])
def test_unreadable_placements_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"placements of {len(data)} bytes cannot be read"):
        decode_placements(data)


MANY = tuple(range(MAX_LAYERS + 1))


@pytest.mark.parametrize(
    "data",
    [
        bytes(MAX_PLACEMENTS_NBYTES + 1),
        encode([Placement("kv", 1, 1, (TensorPlacement("k", (), (), 1, {str(each): 1 for each in range(MAX_AXES + 1)}),))]),
        encode([Placement("kv", 1, 1, (TensorPlacement("k", MANY, MANY, 1, {}),))]),
    ],
    ids=["bytes", "axes", "layers"],
)
def test_placements_of_any_size_are_not_built(data: bytes) -> None:
    """Each byte may become an object, and nothing else runs meanwhile."""
    with pytest.raises(RemoteProtocolError, match=f"expected at most {MAX_PLACEMENTS_NBYTES} bytes|length <="):
        decode_placements(data)


@pytest.mark.parametrize(
    ("owned", "need", "wanted"),
    [
        (None, (0, 9), (0, 9)),
        (EVERYTHING, (3, 9), (3, 9)),
        (Periodic(1, 1, 2), (3, 9), (3, 9)),
        (Share(0, 2, 4), (3, 16), (3, 8)),
        (Share(1, 2, 4), (3, 16), (8, 16)),
        (Share(0, 2, 4), (9, 16), (9, 9)),
        (Share(1, 2, 4), (3, 3), (3, 3)),
    ],
)
def test_a_writer_must_send_the_hull_of_its_tokens(owned: Owned | None, need: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert expected_tokens(owned, need) == wanted


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        ("window=64 rope=yarn", "rope=yarn window=none more", ("window=64", "window=none more")),
        ("a b", "b a", ("a b", "b a")),
    ],
)
def test_revisions_that_differ_name_their_own_words(found: str, expected: str, words: tuple[str, str]) -> None:
    assert differing_words(found, expected) == words
