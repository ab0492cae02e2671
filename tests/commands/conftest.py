"""A small model, and the programs: as processes, and in this one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.backends.conftest import require_engine

ENGINES = {"nixl": ("nixl._bindings", "nixl"), "mooncake": ("mooncake.engine", "mooncake-transfer-engine-non-cuda")}
NUM_HEADS, HEAD_DIM, NUM_LAYERS = 6, 16, 3
BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * 2


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """Each real engine: skipped if it is missing, failed if it is required."""
    require_engine(*ENGINES[request.param])
    return str(request.param)


@pytest.fixture
def mooncake() -> str:
    """The engine that starts fastest."""
    require_engine(*ENGINES["mooncake"])
    return "mooncake"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a config.json: six KV heads, so that three ranks divide them and four do not."""
    path = tmp_path_factory.mktemp("six-heads") / "config.json"
    config = {
        "model_type": "llama",
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "hidden_size": NUM_HEADS * HEAD_DIM,
        "head_dim": HEAD_DIM,
    }
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a config.json with every kind of pages and rings: windows, compressed groups, index keys, open groups."""
    path = tmp_path_factory.mktemp("grouped") / "config.json"
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "head_dim": 24,
        "sliding_window": 16,
        "index_topk": 8,
        "index_head_dim": 20,
        "compress_ratios": [0, 4, 128, 4],
    }
    path.write_text(json.dumps(config))
    return str(path)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and the rows that it wrote."""

    status: int
    out: str
    err: str
    rows: list[dict[str, Any]]


Bench = Callable[..., Ended]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Run `disagg-bench` in its own process."""

    def run(*arguments: str, timeout_s: float = 90) -> Ended:
        rows = tmp_path / "rows.json"
        command = [sys.executable, "-m", "disagg.commands.bench", *arguments, "--json", str(rows)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        found = json.loads(rows.read_text()) if rows.exists() else []
        return Ended(ended.returncode, ended.stdout, ended.stderr, found)

    return run


def said(program: Callable[[], object], *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """How a program ends with these arguments, and what it prints. It runs in this process, which saves its start."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    handlers, level = list(logging.root.handlers), logging.root.level
    with (
        mock.patch.object(sys, "argv", [program.__module__, *arguments]),
        mock.patch.dict(os.environ, environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            program()
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:  # noqa: BLE001  as the interpreter prints it
            traceback.print_exc()
            status = 1
        finally:
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
