"""Models that are written once, and engines that are stopped whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.vllm.engine import ENVIRONMENT, Engine

os.environ.update(ENVIRONMENT)  # before vLLM is imported

import vllm  # noqa: F401  (engines are forked from this process)

from harness.vllm.models import OPTIONS, missing, write_model

Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, by name."""
    folder = tmp_path_factory.mktemp("models")
    return lambda name: folder / name if (folder / name).exists() else write_model(name, folder / name)


@pytest.fixture
def start(model: Callable[[str], Path]) -> Iterator[Start]:
    """Starts engines of a model, by name and vLLM's options. They start at the same time; `wait_ready` waits for one."""
    with ExitStack() as stack:

        def begin(name: str = "llama", **options: Any) -> Engine:
            chosen = {"dtype": "float32", **OPTIONS.get(name, {}), **options}
            if reason := missing(chosen["dtype"]):
                pytest.skip(reason)
            engine = Engine(str(model(name)), **chosen)
            stack.callback(engine.stop)
            return engine

        yield begin
