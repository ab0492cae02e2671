"""Requests that wait until their peer is ready."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

from disagg.runtime.openings import LOOK_S, Openings

NUM_PEERS = 50


class Waiting:
    """One request for each of `NUM_PEERS` peers. `asked`: the peers that were asked for, whether they are ready."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ready: set[str] = set()
        self.run: list[str] = []
        directory: Any = Mock(is_ready=self.is_ready, refusal=lambda _: "", problem=lambda _: "it does not answer")
        self.openings = Openings(directory, Mock(), Mock())
        for number in range(NUM_PEERS):
            self.openings.wait(f"p{number}", None, partial(self.run.append, f"p{number}"), 60.0)
        self.openings.tick(0.0)
        self.asked.clear()

    def is_ready(self, peer: str) -> bool:
        self.asked.append(peer)
        return peer in self.ready


def test_a_change_of_a_peer_costs_the_same_for_any_number_that_waits() -> None:
    waiting = Waiting()
    waiting.ready.add("p7")
    waiting.openings.advance("p7")
    waiting.openings.tick(LOOK_S / 2)
    assert (waiting.asked, waiting.run) == (["p7"], ["p7"])
    assert len(waiting.openings) == NUM_PEERS - 1


def test_a_peer_that_becomes_ready_without_a_word_is_seen_by_the_next_look() -> None:
    waiting = Waiting()
    waiting.ready.add("p7")
    waiting.openings.tick(LOOK_S)
    assert waiting.run == ["p7"]


def test_a_request_that_is_late_waits_no_longer() -> None:
    waiting = Waiting()
    waiting.openings.tick(60.0)
    assert (waiting.run, len(waiting.openings)) == ([], 0)
