"""What the tests of engines share: a skip where an engine is missing, a peer process, an opened backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

import pytest

from disagg.backends.base import Backend, BackendOptions
from disagg.testing.contract import REGION_NBYTES, Arena, BackendFactory, ProcessTarget
from disagg.testing.contract.targets import SPAWN, StartContext

PATIENCE_S = 60.0


def require_engine(module: str, package: str) -> ModuleType:
    """`module`, imported; without it the test module is skipped, or fails with TEST_REQUIRE_ENGINES=1."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        reason = f"{module} cannot be imported (pip install {package}): {error}"
        if os.environ.get("TEST_REQUIRE_ENGINES") == "1":
            pytest.fail(f"TEST_REQUIRE_ENGINES=1, but {reason}", pytrace=False)
        pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def target_process(
    factory: BackendFactory, options: BackendOptions, stack: ExitStack, *, context: StartContext = SPAWN
) -> ProcessTarget:
    """A peer in a process of its own, with random bytes in its memory; ends with `stack`."""
    target = ProcessTarget(factory, options, patience_s=PATIENCE_S, context=context)
    stack.callback(target.close)
    target.arena.scramble(2)
    return target


def opened(factory: BackendFactory, options: BackendOptions, stack: ExitStack) -> tuple[Backend, Arena]:
    """A backend of this process, with registered memory of random bytes; both end with `stack`."""
    arena = Arena.create(REGION_NBYTES)
    stack.callback(os.close, arena.fd)
    arena.scramble(1)
    backend = factory(options)
    stack.callback(backend.close)
    backend.register(arena.regions)
    return backend, arena
