"""Fixtures of the GPU tests. The tests are skipped, with the reason, without an NVIDIA GPU.

With one GPU, both processes share it; what needs two is marked `two_gpus`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from disagg.backends.cuda.driver import load_bindings, num_gpus, second_gpu
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.core.errors import BackendUnavailable
from tests.gpu.pieces import opened
from tests.gpu.targets import Memory, Target


def missing() -> str | None:
    """What this machine lacks for the tests, or `None`."""
    try:
        load_bindings()
    except BackendUnavailable as error:
        return str(error)
    return None if num_gpus() else "expected an NVIDIA GPU, found none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if marked and not reason and num_gpus() < 2:
        for item in marked:
            if item.get_closest_marker("two_gpus"):
                item.add_marker(pytest.mark.skip(reason="expected two NVIDIA GPUs, found one"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def local(stack: ExitStack) -> Memory:
    memory = Memory(0)
    stack.callback(memory.close)
    memory.scramble(1)
    return memory


@pytest.fixture
def backend(local: Memory, stack: ExitStack) -> NvlinkBackend:
    return opened(local, stack)


@pytest.fixture(scope="module")
def shared_target() -> Iterator[Target]:
    target = Target(second_gpu())
    yield target
    target.close()


@pytest.fixture
def target(shared_target: Target) -> Target:
    shared_target.ask("scramble", 2)
    return shared_target
