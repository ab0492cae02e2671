"""`KVArgs` and facts as components, without SGLang: every byte of a request between two ranks' memories."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from disagg import ConfigError, LocalProtocolError, Topology
from disagg.integrations.sglang.layout import components
from disagg.integrations.sglang.rows import full_pages, needs, request_id, state_rows
from disagg.layout.agreement import LocalRank
from disagg.layout.binding import bind
from disagg.layout.election import elect
from disagg.layout.plan import make_plan
from disagg.layout.stages import join_stages
from disagg.state.declare import Block
from tests.integrations.sglang.memory import Memory, Model, Request

GDN = Model(layers=(1, 3), heads=2, slot_layers=(0, 2), conv_blocks=(Block(4, 4), Block(4, 4), Block(8, 2)), temporal=(8, 2, 4))
MAMBA2 = replace(GDN, conv_blocks=(Block(8, 4), Block(1, 6, groups=True), Block(1, 6, groups=True)), temporal=(8, 4, 6))
MAMBA = Model(layers=(), heads=0, slot_layers=(0, 1, 2), conv_blocks=(Block(16, 1),), temporal=(16, 1, 4))
KDA = replace(GDN, conv_axes=("width", "channel"))
DSA = Model(heads=None, dims=(24,), index_layers=(0, 2), tokens_per_key=4, tail=6)
MODELS = {
    "heads": Model(dims=(8, 4)),
    "latents": Model(heads=None, dims=(24,)),
    "draft": Model(draft_layers=(0,)),
    "draft with fewer heads": Model(draft_layers=(0, 1), draft_heads=1, draft_dims=(4, 8)),
    "draft of heads beside latents": Model(heads=None, dims=(24,), draft_layers=(0,)),
    "draft of latents beside heads": Model(draft_layers=(0,), draft_heads=None, draft_dims=(24,)),
    "draft with windows": Model(window_layers=(3,), draft_layers=(0,), draft_window_layers=(1, 2)),
    "window": Model(layers=(0,), window_layers=(1, 2), window_heads=2),
    "window in whole pages": Model(windows=(0, 2)),
    "gdn": GDN,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "kda": KDA,
    "index": DSA,
    "index with a draft": replace(DSA, draft_layers=(0, 1), draft_heads=None, draft_dims=(24,), draft_index_layers=(0,)),
}


def request(memory: Memory, num_tokens: int, *, seed: int, prefix: int = 0) -> Request:
    random = np.random.default_rng(seed)
    pages, window_pages = random.permutation(memory.num_pages), random.permutation(memory.num_pages)
    return Request(num_tokens, pages, window_pages, int(random.integers(memory.num_slots)), prefix)


def rank(memory: Memory) -> LocalRank:
    """What a manager knows of this rank and of the others."""

    def gather(_: object) -> list[object]:
        return [{part.name: part.layouts for part in components(each.kv_args(), each.facts())} for each in memory.stages()]

    own = join_stages(lambda: components(memory.kv_args(), memory.facts()), topology=memory.topology, gather=gather)
    return LocalRank.of(memory.topology, own)


def copy(sources: Sequence[Memory], destinations: Sequence[Memory], at: Sequence[Request], to: Sequence[Request]) -> None:
    """Carry out the plans between all ranks."""
    ranks = [rank(m) for m in sources], [rank(m) for m in destinations]
    election = elect(ranks[0][0].table, ranks[1][0].table)
    for source, local, here in zip(sources, ranks[0], at, strict=True):
        for destination, remote, there in zip(destinations, ranks[1], to, strict=True):
            plan = make_plan(
                election,
                source=(source.topology.group_rank, local.table, local.placements),
                destination=(destination.topology.group_rank, remote.table, remote.placements),
            )
            rows = [
                full_pages(m.kv_list(r, r.prefix, r.num_tokens), r.prefix, facts=m.facts())
                | state_rows(m.kv_args().state_types, m.state_lists(r), num_tokens=r.num_tokens, prefix=r.prefix,
                             page_size=m.page_size, facts=m.facts())
                for m, r in ((source, here), (destination, there))
            ]  # fmt: skip
            need = needs(rows[1], num_tokens=there.num_tokens, prefix=there.prefix, facts=destination.facts())
            for name, component in plan.components.items():
                copies = bind(component, source=rows[0][name], destination=rows[1][name], tokens=need.get(name, (0, 1)))
                for read, write, nbytes in zip(copies.source, copies.destination, copies.nbytes, strict=True):
                    ctypes.memmove(int(write), int(read), int(nbytes))


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_a_request(name: str, tp: tuple[int, int]) -> None:
    sources, destinations = (
        [Memory(MODELS[name], Topology(tp=size, tp_rank=r), page_size=page) for r in range(size)]
        for size, page in zip(tp, (16, 16 if name.startswith("index") else 32), strict=True)
    )
    for num_tokens, prefix in ((1, 0), (64, 0), (117, 0), (117, 64)):
        at = [request(m, num_tokens, seed=1, prefix=prefix) for m in sources]
        to = [request(m, num_tokens, seed=2, prefix=prefix) for m in destinations]
        for memory, each in zip(sources, at, strict=True):
            memory.fill(each, seed=num_tokens + prefix)
        missing = [memory.differences(each, seed=num_tokens + prefix) for memory, each in zip(destinations, to, strict=True)]
        assert all(missing), "the destinations have the bytes before they are copied"
        copy(sources, destinations, at, to)
        for memory, each in zip(destinations, to, strict=True):
            assert memory.differences(each, seed=num_tokens + prefix) == []


def test_two_pipeline_stages_to_one() -> None:
    model = replace(MODELS["window"], layers=(0, 3), window_layers=(1, 2))
    sources = [Memory(model, Topology(pp=2, pp_rank=stage), page_size=16) for stage in range(2)]
    (destination,) = (Memory(model, Topology(), page_size=64, num_pages=16),)
    at, to = [request(m, 100, seed=1) for m in sources], request(destination, 100, seed=2)
    for memory, each in zip(sources, at, strict=True):
        memory.fill(each, seed=5)
    copy(sources, [destination], at, [to])
    assert destination.differences(to, seed=5) == []


def test_components_have_the_names_of_other_servers() -> None:
    """A model with several kinds of layers has one component for each, whatever the number of pools."""
    names = {
        name: [part.name for part in components(memory.kv_args(), memory.facts())]
        for name, memory in ((name, Memory(MODELS[name], Topology())) for name in ("heads", "latents", "window in whole pages"))
    }
    assert names == {"heads": ["kv"], "latents": ["mla"], "window in whole pages": ["kv.0", "kv.1", "kv.2"]}


@pytest.mark.parametrize("room", [-1, 0, 2**63, 2**128, None, [5], "5"])
def test_a_room_that_cannot_be_is_refused(room: object) -> None:
    with pytest.raises(LocalProtocolError, match=re.escape(f"expected an integer from 1 to 2**63 - 1, found {room!r}")):
        request_id(room)


def test_pages_that_later_requests_use_are_needed_whole() -> None:
    memory = Memory(MODELS["window in whole pages"], Topology())
    rows = full_pages(range(7), 0, facts=memory.facts())
    found = [needs(rows, num_tokens=100, prefix=16, facts=replace(memory.facts(), reuses_pages=each)) for each in (False, True)]
    assert found[0] == {"kv.0": (76, 100), "kv.1": (16, 100), "kv.2": (76, 100)}
    assert set(found[1].values()) == {(16, 100)}


@pytest.mark.parametrize("has_draft", [(True, False), (False, True)], ids=["on prefill", "on decode"])
@pytest.mark.parametrize("name", [name for name in MODELS if "draft" in name])
def test_draft_layers_on_one_side_only(name: str, has_draft: tuple[bool, bool]) -> None:
    """The model's own state moves. A draft on decode keeps what it has."""
    model = MODELS[name]
    alone = replace(model, draft_layers=(), draft_window_layers=(), draft_index_layers=())
    source, destination = (Memory(model if each else alone, Topology()) for each in has_draft)
    at, to = request(source, 42, seed=1), request(destination, 42, seed=2)
    source.fill(at, seed=5)
    copy([source], [destination], [at], [to])
    drafts = [key for key in destination.buffers if key[0].startswith("draft")]
    assert {each.split()[0] for each in destination.differences(to, seed=5)} == {component for component, _, _ in drafts}
    assert not any(destination.buffers[key].any() for key in drafts)


def test_every_draft_runner_has_components_of_its_own() -> None:
    """With multi-layer EAGLE each step has a runner. Some pools of sliding layers have the page ids of full attention."""
    memory = Memory(MODELS["draft with windows"], Topology())
    other = Memory(MODELS["draft with windows"], Topology()).facts().drafts[0]
    facts = memory.facts()
    facts = replace(facts, drafts=(*facts.drafts, replace(other, has_full_ids=True)))
    names = [part.name for part in components(memory.kv_args(), facts)]
    assert names == ["kv", "draft", "draft_window", "draft.1", "draft_window.1", "window"]
    rows = full_pages(range(7), 0, facts=facts)
    rows |= state_rows(["swa"], [[3, 4]], num_tokens=100, page_size=16, facts=facts)
    assert set(rows) == set(names)
    assert rows["draft_window"] is rows["window"]
    assert rows["draft_window.1"] is rows["kv"]
    for reuses, first in ((False, 76), (True, 0)):
        found = needs(rows, num_tokens=100, prefix=0, facts=replace(facts, reuses_pages=reuses))
        assert (found["draft.1"], found["draft_window"], found["draft_window.1"]) == ((0, 100), (80, 100), (first, 100))


def test_a_draft_on_the_last_pipeline_stage() -> None:
    model = replace(MODELS["draft"], layers=(0, 1, 2, 3))
    sources, destination = [Memory(model, Topology(pp=2, pp_rank=stage)) for stage in range(2)], Memory(model, Topology())
    at, to = [request(m, 100, seed=1) for m in sources], request(destination, 100, seed=2)
    for memory, each in zip(sources, at, strict=True):
        memory.fill(each, seed=5)
    copy(sources, [destination], at, [to])
    assert destination.differences(to, seed=5) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_types": ["c128_state"]}, r"state_types\[0\]: expected one each of mamba, .* found 'c128_state'"),
        ({"state_types": ["swa_ring"]}, r"state_types\[0\]: .* found 'swa_ring'"),
        ({"state_types": ["dsa", "dsa"]}, r"state_types\[1\]: .* found 'dsa'"),
        ({"kv_item_lens": [1024] * 6}, r"kv_item_lens\[0\]: expected 2048 bytes a row, found 1024"),
        ({"num_draft_entries": 2}, r"component 'draft': expected 0 buffers in KVArgs, found 2"),
        ({"state_types": ["swa"]}, r"component 'window': expected 0 buffers in KVArgs, found 6"),
    ],
)
def test_what_contradicts_the_facts_is_refused(changes: dict[str, object], message: str) -> None:
    memory = Memory(Model(), Topology())
    args = memory.kv_args()
    lists = [[*args.kv_data_ptrs], [*args.kv_data_lens], [*args.kv_item_lens]]
    states = {f"state_{name}": [each] * 2 for name, each in zip(("data_ptrs", "data_lens", "item_lens"), lists, strict=True)}
    with pytest.raises(ConfigError, match=message):
        components(SimpleNamespace(**{**vars(args), **states, **changes}), memory.facts())


def test_a_second_buffer_of_a_role_and_layer_is_refused() -> None:
    """The first one would not be moved. SGLang's Zaya has two convolutions in a layer."""
    memory = Memory(GDN, Topology())
    facts = memory.facts()
    first, second, *others = facts.slots
    facts = replace(facts, slots=(first, replace(second, layer=first.layer), *others))
    reason = f"component 'ssm', tensor 'conv': expected one buffer for layer {first.layer}, found several"
    with pytest.raises(ConfigError, match=reason):
        components(memory.kv_args(), facts)
