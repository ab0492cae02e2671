"""What a dead process costs a survivor: holds the results of `benchmarks.gpu.kill` and of `benchmarks.gpu.lost_peers`."""

from __future__ import annotations

import pytest

from benchmarks.gpu.kill import run
from benchmarks.gpu.lost_peers import CASES, lose_all

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_owner_is_killed(kind: str) -> None:
    outcome = run("owner killed", kind)
    assert outcome["kernel went on writing"] is True
    assert outcome["writing kernel"] == outcome["context afterwards"] == outcome["unmapping"] == "works"


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_owner_frees_and_allocates_again(kind: str) -> None:
    outcome = run("owner frees", kind)
    assert outcome["owner"].startswith("no error")
    assert outcome["owner"].endswith("untouched")
    assert outcome["writing kernel"] == outcome["context afterwards"] == "works"


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_writer_is_killed(kind: str) -> None:
    outcome = run("writer killed", kind)
    assert outcome["owner's context"] == "works"


@pytest.mark.parametrize("ordinals", [pytest.param((1, 0), marks=pytest.mark.two_gpus), (0, 0)])
def test_decode_gets_the_rows_of_a_lost_peer_back(ordinals: tuple[int, int]) -> None:
    """On two GPUs and on one: the rows are released once, the next request over them is right, and nothing is written later."""
    losses, failures = lose_all(ordinals, list(CASES), workers=1, seconds=60.0)
    assert not failures
    assert [loss.case for loss in losses] == list(CASES)
    assert [(loss.wrong_nbytes, loss.early) for loss in losses] == [(0, False)] * len(CASES)
