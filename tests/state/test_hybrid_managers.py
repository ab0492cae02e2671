"""Hybrid models between whole managers: several kinds of state in one request, and long runs."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg import Pages, new_request_id
from disagg.core.rows import Rows
from disagg.testing import reference_states as naive
from disagg.testing.reference import STALE, PageList
from disagg.testing.reference_states import Form, Slots, StateRows
from tests.state.test_hybrid import hybrid
from tests.support.cluster import DEADLINE_S
from tests.support.instances import InstanceSpec, Range, Rank
from tests.support.kinds import gdn_kind, gqa_kind, mla_kind
from tests.support.servers import Handle, Servers, servers, wait
from tests.support.states import Request

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
    """One cluster for all tests that leave its pools as their images have them."""
    with servers(hybrid(), PREFILL, DECODE) as started:
        yield started


def test_a_hybrid_model_moves_in_one_request_between_managers(made: Servers) -> None:
    """Full attention, state, window (pages to rings) and index keys: TP 4 x PP 2 to TP 2, in chunks, with prefixes."""
    for num_tokens, chunks, prefix in ((13, (), 0), (17, (4, 9), 0), (23, (8,), 5), (6, (), 6), (1, (), 0)):
        made.scene.close(made.transfer(num_tokens, chunks=chunks, prefix=prefix))


def test_both_sides_say_once_what_only_one_of_them_has(caplog: pytest.LogCaptureFixture) -> None:
    draft = mla_kind(name="draft", layers=(78,), optional=True)
    caplog.set_level(logging.INFO)
    with servers([gqa_kind(), draft], InstanceSpec(tp=2, without=frozenset({"draft"})), InstanceSpec(tp=2)):
        found = [message for message in caplog.messages if "do not share" in message]
    what = "do not share these optional components, and move none: draft"
    assert sorted(found) == [f"decode-0 and prefill-0 {what}", f"prefill-0 and decode-0 {what}"]


@pytest.mark.sweep
def test_managers_reuse_every_row_ten_times() -> None:
    """Case 10 end to end, small: requests overlap, rows are reused, and whole pools are checked after each."""
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


def test_a_missing_required_component_fails_the_request_and_is_named() -> None:
    """Case 22: other systems report success. Requests before and after succeed."""
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


def test_slots_are_read_at_finish(made: Servers) -> None:
    """Prefill changes its slot after decode has reserved. The id given to `finish` counts."""
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
    """Put the request's state into another slot of the rank, and other content into its old slot."""
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
def test_managers_do_not_change_their_arguments(made: Servers, num_tokens: int, data: st.DataObject) -> None:
    """Rows, their arrays and needs stay the same. Managers do not keep the mappings."""
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
    """Everything that a server passes for one request, with references that the server keeps."""

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
        """The values of all arguments."""
        rows = [
            (name, (rows.ids.tolist(), rows.first_token) if isinstance(rows, Pages) else rows.id)
            for by_name in [*self.sent, *self.reserved]
            for name, rows in by_name.items()
        ]
        return [rows, [array.tolist() for array in self.arrays], dict(self.need)]

    def start(self, chunks: Sequence[int]) -> list[Handle]:
        """Reserve and send. Empties each mapping once its call has returned, as a server may."""
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
    """Case 23 end to end: rows for the draft may be given, and nothing is written to them."""
    kinds = [gqa_kind(), mla_kind(name="draft", layers=(9,), optional=True), gdn_kind(layers=(2, 3))]
    with servers(kinds, InstanceSpec(tp=2, without=frozenset({"draft"})), InstanceSpec()) as made:
        made.transfer(11, needs={"draft": (0, 0)})
