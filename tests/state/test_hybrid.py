"""Several kinds of state of one model at once: every combination that matters, long runs, and whole managers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg import KVManager, ModelId, Pages, new_request_id
from disagg.core.errors import LayoutError
from disagg.core.rows import Rows
from disagg.layout.election import elect
from disagg.protocol.types import Event
from disagg.requests import Receiver, Sender
from disagg.state import declare
from disagg.testing import reference_states as naive
from disagg.testing.reference import STALE, Context, PageList
from disagg.testing.reference_states import Form, Slots, StateRows
from disagg.testing.strategies import pairwise
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS
from tests.support.instances import InstanceSpec, Range, Rank, library_rows
from tests.support.kinds import (
    Kind,
    adapter_kind,
    compressed_kind,
    gdn_kind,
    gqa_kind,
    index_kind,
    kda_kind,
    lightning_kind,
    mamba1_kind,
    mamba2_kind,
    mla_kind,
)
from tests.support.states import Request, Scene, moved, runs_by_writer

# --------------------------------------------------------------------------------------------------------------- pairwise

LAYERS = (1, 2, 4, 7)
EXPERT_SIZES = {"expert": 6, "rank": 2, "intermediate": 5}

KINDS: dict[str, Callable[[], Kind]] = {
    "gqa": lambda: gqa_kind(num_kv_heads=4, layers=LAYERS),
    "window": lambda: gqa_kind(name="window", window=9, num_kv_heads=2, layers=LAYERS),
    "mla": lambda: mla_kind(scales=2, layers=LAYERS),
    "index": lambda: index_kind(layers=LAYERS),
    "pooled index": lambda: index_kind(granule=2, layers=LAYERS),
    "compressed": lambda: compressed_kind(ratio=4, name="kv_4", layers=LAYERS),
    "gdn": lambda: gdn_kind(num_key_heads=4, num_value_heads=8, layers=LAYERS),
    "kda": lambda: kda_kind(num_heads=8, layers=LAYERS),
    "kda in four tensors": lambda: kda_kind(num_heads=4, separate=True, layers=LAYERS),
    "mamba2": lambda: mamba2_kind(num_heads=8, num_groups=3, layers=LAYERS),
    "mamba1": lambda: mamba1_kind(inner=16, layers=LAYERS),
    "lightning": lambda: lightning_kind(num_heads=8, layers=LAYERS),
    "adapter": lambda: adapter_kind("w2_a", order="slot expert rank intermediate", sizes=EXPERT_SIZES, layers=LAYERS),
}
EDGES = {1: (0, 9), 2: (0, 4, 9), 3: (0, 1, 5, 9)}
"""Layer ids where stages begin; with three stages the first has no layer of any state."""
CONTEXTS = (Context.PAGE_BLOCKS, Context.PAGES_IN_TURN)

SETTINGS: dict[str, Sequence[Any]] = {
    "kind": tuple(KINDS),
    "source_tp": (1, 2, 4, 8),
    "destination_tp": (1, 2, 4, 8),
    "source_pp": (1, 2, 3),
    "destination_pp": (1, 2, 3),
    "source_cp": (1, 2, 3),
    "destination_cp": (1, 2),
    "source_context": CONTEXTS,
    "destination_context": CONTEXTS,
    "source_page": (4, 8, 12),
    "destination_page": (4, 8, 12),
    "num_tokens": (1, 8, 23),
    "prefix": (0, 5),
}


def test_the_settings_together_see_every_pair() -> None:
    rows = pairwise(SETTINGS)
    for one, other in itertools.combinations(SETTINGS, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(SETTINGS[one], SETTINGS[other]))


@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_state_kind_and_settings_of_the_two_sides(part: int) -> None:
    """State kind x TP x PP x CP x page size x length x prefix."""
    for row in pairwise(SETTINGS)[part::4]:
        kind = KINDS[row["kind"]]()
        sides = []
        for side in ("source", "destination"):
            form = kind.form
            if kind.model.paged:
                form = Form(**{**vars(form), "page_size": row[f"{side}_page"], "num_rows": 14})
            tp = row[f"{side}_tp"]
            sides.append(
                InstanceSpec(
                    tp=tp,
                    ep=min(2, tp) if row["kind"] == "adapter" else 1,
                    cp=row[f"{side}_cp"],
                    edges=EDGES[row[f"{side}_pp"]],
                    context=row[f"{side}_context"],
                    forms={kind.name: form},
                )
            )
        moved(kind, sides[0], sides[1], row["num_tokens"], prefix=min(row["prefix"], row["num_tokens"]))


# ------------------------------------------------------------------------------------------------------- several at a time


def hybrid() -> list[Kind]:
    """Full attention, a window, linear attention and index keys, each in its own layers of eight."""
    return [
        gqa_kind(num_kv_heads=2, layers=(3, 7)),
        mamba2_kind(num_heads=8, num_groups=3, layers=(0, 1, 2, 4)),
        gqa_kind(name="window", window=6, num_kv_heads=4, layers=(5, 6)),
        index_kind(layers=(3,)),
    ]


@pytest.mark.parametrize(("source", "destination"), [(4, 2), (2, 8), (8, 1), (1, 4)])
def test_all_kinds_of_a_hybrid_model_in_one_request(source: int, destination: int) -> None:
    for edges in ((0, 8), (0, 4, 8), (0, 0, 3, 8)):
        moved(hybrid(), InstanceSpec(tp=source, edges=edges), InstanceSpec(tp=destination), 13)
        moved(hybrid(), InstanceSpec(tp=source), InstanceSpec(tp=destination, edges=edges, descending=True), 13, prefix=4)


@pytest.mark.parametrize("readers", [1, 2])
def test_ranks_that_write_no_mla_still_write_their_state(readers: int) -> None:
    """Case 15: KDA beside a replicated latent, P > D. Few latent runs, many ranks: all of them send their heads."""
    kinds = [mla_kind(layers=(3,)), kda_kind(num_heads=8, layers=(0, 1, 2))]
    scene = Scene(kinds, InstanceSpec(tp=8), InstanceSpec(tp=readers))
    moves = scene.transfer()
    latent = {move.source for move in moves if move.component == "mla"}
    state = Counter(dict.fromkeys(range(8), 0))
    for move in moves:
        state[move.source] += move.copies.total_nbytes if move.component == "ssm" else 0
    assert len(latent) == readers
    assert len(set(state.values())) == 1
    assert all(state.values())


def test_replicas_take_their_turns_over_all_replicated_components_together() -> None:
    """Latent and index keys on 4 ranks: 7 runs per reader, shared out as one list."""
    kinds = [mla_kind(layers=range(4)), index_kind(layers=range(3)), kda_kind(num_heads=4, layers=(5, 6))]
    for readers in (1, 2, 4):
        scene = Scene(kinds, InstanceSpec(tp=4), InstanceSpec(tp=readers))
        moves = scene.transfer()
        runs = runs_by_writer(scene, [move for move in moves if move.component != "ssm"])
        assert sum(runs.values()) == 7 * readers
        assert max(runs.values()) - min(runs.values()) <= 1


def test_a_required_component_that_one_side_lacks_is_refused_by_name() -> None:
    """Case 22 at the handshake: what is not declared on one side is no success."""
    scene = Scene(hybrid(), InstanceSpec(without=frozenset({"ssm"})), InstanceSpec())
    for tables in ((scene.source.table, scene.destination.table), (scene.destination.table, scene.source.table)):
        with pytest.raises(LayoutError, match="component 'ssm': required"):
            elect(*tables)


@pytest.mark.parametrize("wrong", ["conv cut flat", "stages shifted", "a token too many"])
def test_the_reference_catches_a_wrong_declaration(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides agree on what is wrong, shapes fit, every byte arrives: only content from global coordinates shows it."""
    kinds = hybrid()
    if wrong == "conv cut flat":
        monkeypatch.setattr("disagg.state.mamba.blocks_by_tp", lambda blocks: declare.by_tp(sum(b.size for b in blocks)))
        kinds = [mamba2_kind(num_heads=8, num_groups=2)]
    scene = Scene(kinds, InstanceSpec(tp=2), InstanceSpec(tp=1))
    if wrong == "stages shifted":
        image = scene.destination.ranks[0].image["kv"]
        image.buffers["k", 3], image.buffers["k", 7] = image.buffers["k", 7], image.buffers["k", 3]
    if wrong == "a token too many":
        request = scene.open(12, needs={"index": (0, 12)})
        moves = scene.moves(request)
        request.needs["index"] = (0, 11)
        scene.run(request, moves)
        assert "index: tensor pages, layer 3" in str(scene.difference(request))
        return
    with pytest.raises(AssertionError, match="bytes differ"):
        scene.transfer(12)


# ----------------------------------------------------------------------------------------------------------- recycled pools


def test_150_requests_of_pp4_tp4_to_four_groups_through_recycled_pools() -> None:
    """Case 10, scaled down from PP 4 x TP 8 to TP 8 x DP 8: every byte of every pool after every request.

    Rows stay taken for a few requests and are then given to others; whatever anyone wrote before must still be there.
    """
    kinds = [
        gqa_kind(num_kv_heads=2, dims=(2, 1), layers=(1, 3, 5, 7), form=Form(num_rows=11, page_size=4)),
        gdn_kind(num_key_heads=2, num_value_heads=4, dims=(1, 2), layers=(0, 2, 4), form=Form(num_rows=4)),
    ]
    forms = {"kv": Form(num_rows=9, page_size=8, orders=dict.fromkeys("kv", "page kv_head token dim"))}
    scene = Scene(kinds, InstanceSpec(tp=4, edges=(0, 2, 4, 6, 8)), InstanceSpec(tp=4, dp=4, forms=forms), seed=10)
    taken: Counter[tuple[int, int]] = Counter()
    live: list[Request] = []
    rng = np.random.default_rng(10)
    for number in range(150):
        if len(live) == 3:
            scene.close(live.pop(int(rng.integers(3))))
        num_tokens = int(rng.integers(1, 13))
        prefix = int(rng.integers(num_tokens)) if number % 3 == 0 else 0
        request = scene.open(num_tokens, prefix=prefix, destination_group=int(rng.integers(4)))
        live.append(request)
        scene.run(request, scene.moves(request))
        assert scene.difference(request) is None, number
        rows = request.source_rows[0]["kv"]
        assert isinstance(rows, PageList)
        taken.update((0, page) for page in rows.ids)
    assert min(taken[0, page] for page in range(11)) >= 10


# ---------------------------------------------------------------------------------------------------------------- managers


Handle = Receiver | Sender


@dataclass
class Servers:
    """A scene whose ranks have managers: prefill ranks send, decode ranks receive."""

    scene: Scene
    prefill: list[KVManager] = field(default_factory=list)
    decode: list[KVManager] = field(default_factory=list)

    def receive(self, request: Request, request_id: bytes) -> list[Receiver]:
        """Reserve a request's rows on every decode rank."""
        return [
            manager.receiver(
                request_id,
                peer="prefill-0",
                rows=self.rows(rank, rows, request.needs),
                need={kind.name: request.needs[kind.name] for kind in self.scene.kinds if kind.model.paged},
                deadline_s=DEADLINE_S,
            )
            for manager, rank, rows in zip(self.decode, self.scene.destination.ranks, request.destination_rows, strict=True)
        ]

    def send(
        self, request: Request, request_id: bytes, *, chunks: Sequence[int] = (), leave_out: frozenset[str] = frozenset()
    ) -> list[Sender]:
        """Send full attention in chunks of tokens, and everything else with `finish`."""
        senders = []
        for manager, rank, taken in zip(self.prefill, self.scene.source.ranks, request.source_rows, strict=True):
            sender = manager.sender(request_id, peer="decode-0", deadline_s=DEADLINE_S)
            rows = self.rows(rank, taken, request.held)
            last = {name: given for name, given in rows.items() if name not in leave_out | {"kv"}}
            for tokens in itertools.pairwise([*request.held["kv"][:1], *chunks, request.held["kv"][1]]):
                sender.send({"kv": rows["kv"]}, tokens=tokens)
            sender.finish(last, payload=b"token")
            senders.append(sender)
        return senders

    def rows(self, rank: Rank, taken: Mapping[str, StateRows], tokens: Mapping[str, Range]) -> dict[str, Rows]:
        """As the library takes them, for the states that the rank's instance has."""
        return {name: library_rows(rows, state=rank.states[name], tokens=tokens[name]) for name, rows in taken.items()}

    def transfer(self, num_tokens: int, *, chunks: Sequence[int] = (), **changes: Any) -> Request:
        """One request from end to end, checked; its rows stay taken."""
        request, request_id = self.scene.open(num_tokens, **changes), new_request_id()
        handles: list[Handle] = [*self.receive(request, request_id), *self.send(request, request_id, chunks=chunks)]
        for event in wait(handles):
            assert event.ok, event.error
            assert event.payload == b"token"
        assert self.scene.difference(request) is None
        return request


def wait(handles: Sequence[Handle]) -> list[Event]:
    return [handle.wait(timeout_s=DEADLINE_S) for handle in handles]


def start(ranks: Sequence[Rank], name: str) -> Iterator[KVManager]:
    """A manager for every rank of an instance, over its components."""
    leader = None
    for rank in ranks:
        manager = KVManager(
            name=name,
            topology=rank.topology,
            components=[*rank.components.values()],
            leader=leader,
            model=ModelId("toy"),
            backend="local",
            limits=FAST,
            connection_limits=FAST_LINKS,
        )
        leader = leader or manager.address
        yield manager


@contextmanager
def servers(kinds: Sequence[Kind], source: InstanceSpec, destination: InstanceSpec) -> Iterator[Servers]:
    """Both instances, ready for each other; at the end no thread is dead."""
    made = Servers(Scene(kinds, source, destination))
    try:
        for manager in start(made.scene.source.ranks, "prefill-0"):
            made.prefill.append(manager)
        for manager in start(made.scene.destination.ranks, "decode-0"):
            made.decode.append(manager)
        for managers, peer, others in (
            (made.prefill, "decode-0", made.decode),
            (made.decode, "prefill-0", made.prefill),
        ):
            for manager in managers:
                manager.add_peer(peer, address=others[0].address)
        for managers, peer in ((made.prefill, "decode-0"), (made.decode, "prefill-0")):
            for manager in managers:
                manager.wait_ready(peer, timeout_s=DEADLINE_S)
        yield made
        for manager in made.prefill + made.decode:
            assert manager.health().ok, manager.health().problem
    finally:
        for manager in made.prefill + made.decode:
            manager.close()


PREFILL = InstanceSpec(tp=4, edges=(0, 4, 8))
DECODE = InstanceSpec(
    tp=2,
    forms={
        "kv": Form(num_rows=9, page_size=8),
        "window": Form(num_rows=5, page_size=7, ring=True),
        "index": Form(num_rows=10, page_size=6, one_page=True),
        "ssm": Form(num_rows=4, orders={"conv": "slot width channel"}, spare={"width": 2}),
    },
)


@pytest.fixture(scope="module")
def made() -> Iterator[Servers]:
    """One cluster for every test after which its pools are what their images say."""
    with servers(hybrid(), PREFILL, DECODE) as started:
        yield started


def test_a_hybrid_model_moves_in_one_request_between_managers(made: Servers) -> None:
    """Full attention, state, window (pages to rings) and index keys: TP 4 x PP 2 to TP 2, in chunks, with prefixes."""
    for num_tokens, chunks, prefix in ((13, (), 0), (17, (4, 9), 0), (23, (8,), 5), (6, (), 6), (1, (), 0)):
        made.scene.close(made.transfer(num_tokens, chunks=chunks, prefix=prefix))


def test_pools_recycle_ten_times_and_more_under_managers() -> None:
    """Case 10 end to end, small: requests overlap, rows go round, whole pools are checked after each."""
    with servers(hybrid(), InstanceSpec(tp=2, edges=(0, 4, 8)), DECODE) as made:
        taken: Counter[int] = Counter()
        live: list[Request] = []
        for number in range(60):
            if len(live) == 2:
                made.scene.close(live.pop(number % 2))
            live.append(made.transfer(9 + number % 7, chunks=(4,)))
            rows = live[-1].source_rows[0]["kv"]
            if isinstance(rows, PageList):
                taken.update(rows.ids)
        kv_stage = next(rank for rank in made.scene.source.ranks if rank.states["kv"].layers)
        assert min(taken[page] for page in range(kv_stage.states["kv"].form.num_rows)) >= 10


def test_a_required_component_that_is_not_sent_fails_the_request_by_name() -> None:
    """Case 22: fluent, wrong and successful elsewhere. Requests before and after it are well."""
    with servers(hybrid(), InstanceSpec(tp=2, edges=(0, 4, 8)), DECODE) as made:
        made.scene.close(made.transfer(13))
        for missing in ("ssm", "window", "index"):
            request, request_id = made.scene.open(13), new_request_id()
            receivers = made.receive(request, request_id)
            senders = made.send(request, request_id, leave_out=frozenset({missing}))
            for event in wait(receivers):
                assert not event.ok
                assert f"{missing!r}" in str(event.error)
            assert not any(event.ok for event in wait(senders))
            made.scene.start_over()
            made.scene.close(request)
        made.scene.close(made.transfer(13))


def test_a_complete_prefix_hit_still_moves_the_state(made: Servers) -> None:
    request = made.transfer(12, prefix=12)
    assert request.needs["kv"] == (12, 12)
    assert request.needs["ssm"] == (0, 12)
    made.scene.close(request)


def test_slots_are_resolved_when_the_request_is_finished(made: Servers) -> None:
    """The prefill side moves its slot after the decode side has reserved: what counts is the id given to `finish`."""
    scene = made.scene
    request, request_id = scene.open(13), new_request_id()
    receivers = made.receive(request, request_id)
    senders = [manager.sender(request_id, peer="decode-0", deadline_s=DEADLINE_S) for manager in made.prefill]
    before = [dict(rows) for rows in request.source_rows]
    for rank, rows in zip(scene.source.ranks, request.source_rows, strict=True):
        move_slot(rank, rows, number=request.number)
    for sender, rank, taken in zip(senders, scene.source.ranks, request.source_rows, strict=True):
        sender.finish(made.rows(rank, taken, request.held))
    assert all(event.ok for event in wait([*receivers, *senders]))
    assert scene.difference(request) is None
    request.source_rows[:] = before
    scene.close(request)


def move_slot(rank: Rank, rows: dict[str, StateRows], *, number: int) -> None:
    """Put the request's state into another slot of the rank, and rubbish into the one that it had."""
    state, old = rank.states["ssm"], rows["ssm"]
    assert isinstance(old, Slots)
    new = Slots((old.id + 1) % state.form.num_rows)
    for memory in (rank.memory["ssm"], rank.image["ssm"]):
        memory.clear(STALE)
        naive.write(state, memory, new, request=number, num_tokens=13)
        naive.write(state, memory, old, request=number + 1000, num_tokens=13)
    rows["ssm"] = new


@settings(max_examples=12)
@given(num_tokens=st.integers(1, 20), data=st.data())
def test_requests_are_never_changed(made: Servers, num_tokens: int, data: st.DataObject) -> None:
    """Whatever is given to a manager is the same afterwards: rows, their arrays, and the needs; mappings are not kept."""
    chunks = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=2)) - {num_tokens})
    request = made.scene.open(num_tokens)
    handed_over = Given(made, request)
    before = handed_over.snapshot()
    handles = handed_over.start(chunks)
    assert all(event.ok for event in wait(handles))
    assert handed_over.snapshot() == before
    assert made.scene.difference(request) is None
    made.scene.close(request)


class Given:
    """Everything that a server hands over for one request, kept by the server."""

    def __init__(self, made: Servers, request: Request) -> None:
        self.made = made
        self.request = request
        scene = made.scene
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.sent = [
            self._rows(rank, rows, request.held) for rank, rows in zip(scene.source.ranks, request.source_rows, strict=True)
        ]
        self.reserved = [
            self._rows(rank, rows, request.needs)
            for rank, rows in zip(scene.destination.ranks, request.destination_rows, strict=True)
        ]
        self.need = {kind.name: request.needs[kind.name] for kind in scene.kinds if kind.model.paged}

    def _rows(self, rank: Rank, taken: Mapping[str, StateRows], tokens: Mapping[str, Range]) -> dict[str, Rows]:
        """Rows over arrays that the server keeps."""
        rows = self.made.rows(rank, taken, tokens)
        for name, listed in rows.items():
            if isinstance(listed, Pages):
                self.arrays.append(listed.ids.copy())
                rows[name] = Pages(self.arrays[-1], listed.first_token)
        return rows

    def snapshot(self) -> list[Any]:
        """The values of all of it."""
        rows = [
            (name, (rows.ids.tolist(), rows.first_token) if isinstance(rows, Pages) else rows.id)
            for by_name in [*self.sent, *self.reserved]
            for name, rows in by_name.items()
        ]
        return [rows, [array.tolist() for array in self.arrays], dict(self.need)]

    def start(self, chunks: Sequence[int]) -> list[Handle]:
        """Reserve and send; once a call has returned, its mapping is the server's to use again, and is emptied here."""
        request_id = new_request_id()
        handles: list[Handle] = []
        for manager, rows in zip(self.made.decode, self.reserved, strict=True):
            mapping, need = dict(rows), dict(self.need)
            handles.append(manager.receiver(request_id, peer="prefill-0", rows=mapping, need=need, deadline_s=DEADLINE_S))
            mapping.clear()
            need.clear()
        start, stop = self.request.held["kv"]
        for manager, rows in zip(self.made.prefill, self.sent, strict=True):
            sender = manager.sender(request_id, peer="decode-0", deadline_s=DEADLINE_S)
            for tokens in itertools.pairwise([start, *chunks, stop]):
                mapping = {"kv": rows["kv"]}
                sender.send(mapping, tokens=tokens)
                mapping.clear()
            mapping = {name: each for name, each in rows.items() if name != "kv"}
            sender.finish(mapping)
            mapping.clear()
            handles.append(sender)
        return handles


def test_an_optional_draft_model_that_only_decode_has() -> None:
    """Case 23 end to end: agreed at the handshake; rows for it may be given, and nothing is written to them."""
    kinds = [gqa_kind(), mla_kind(name="draft", layers=(9,), optional=True), gdn_kind(layers=(2, 3))]
    with servers(kinds, InstanceSpec(tp=2, without=frozenset({"draft"})), InstanceSpec()) as made:
        made.transfer(11, needs={"draft": (0, 0)})
