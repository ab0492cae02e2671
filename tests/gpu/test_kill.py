"""A dead process, or its `cuMemFree`, does not cost a survivor its CUDA context: holds the results of `benchmarks.gpu.kill`."""

from __future__ import annotations

import pytest

from benchmarks.gpu.kill import run

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
