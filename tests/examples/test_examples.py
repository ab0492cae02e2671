"""Every example as a user starts it. They run at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backends.conftest import require_engine
from tests.examples.conftest import ROOT

EXAMPLES = Path(ROOT) / "examples"
THIRD_PARTY = EXAMPLES / "third_party_backend"
COMMANDS = {
    "two_hosts": [str(EXAMPLES / "two_hosts.py"), "nixl"],
    "xpyd": [str(EXAMPLES / "xpyd.py"), "--backend", "mooncake"],
    "smallest": [str(EXAMPLES / "smallest_embed.py")],
    "asyncio": [str(EXAMPLES / "asyncio_hybrid.py")],
    "minimal": [str(EXAMPLES / "minimal_server.py"), "--backend", "nixl"],
}


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


Finish = Callable[[str], Ended]


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finish]:
    """Start all commands, and yield a function that waits for one of them."""
    for module, package in (("nixl._bindings", "nixl"), ("mooncake.engine", "mooncake-transfer-engine-non-cuda")):
        require_engine(module, package)
    folder = tmp_path_factory.mktemp("examples")
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    with ExitStack() as opened:
        started = {}
        for name, command in COMMANDS.items():
            files = [opened.enter_context((folder / f"{name}.{kind}").open("w+")) for kind in ("out", "err")]
            process = subprocess.Popen([sys.executable, *command], stdout=files[0], stderr=files[1], env=environ, cwd=folder)
            opened.callback(process.wait)
            opened.callback(process.kill)
            started[name] = process, files

        def finish(name: str) -> Ended:
            process, files = started[name]
            status = process.wait(110)
            for file in files:
                file.seek(0)
            return Ended(status, files[0].read(), files[1].read())

        yield finish


def test_the_minimal_server_answers_as_a_single_worker(finish: Finish) -> None:
    ended = finish("minimal")
    assert ended.status == 0, ended.err
    assert ended.out.startswith("8 requests, every token as expected, over shm (inferred)"), ended.out


def test_the_smallest_embed_runs(finish: Finish) -> None:
    ended = finish("smallest")
    assert ended.status == 0, ended.err
    assert ended.out == "8 tokens arrived, byte for byte\n"


def test_an_asyncio_server_of_a_hybrid_model_runs(finish: Finish) -> None:
    ended = finish("asyncio")
    assert ended.status == 0, ended.err
    assert ended.out.startswith("34 tokens and a slot arrived, byte for byte")


def test_two_hosts_serve_requests_with_keys(finish: Finish) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command 'ip'")
    ended = finish("two_hosts")
    assert ended.status == 0, ended.err
    assert "decode-0 at tcp://10.211.78.2:7000\n8 requests, every token as expected, over tcp" in ended.out


def test_workers_join_and_die_while_requests_run(finish: Finish) -> None:
    ended = finish("xpyd")
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[:2] == ["2 prefill, 2 decode workers: 8 answers", "a third decode worker joined: 6 answers"]
    assert lines[2].startswith("a prefill worker was killed: 6 answers, ")
    assert int(lines[2].split(", ")[1].split()[0]) >= 1
    assert lines[3].startswith("every token as expected")


@pytest.mark.release
def test_a_third_partys_engine_keeps_the_contract(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(THIRD_PARTY), "PYTEST_ADDOPTS": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        str(THIRD_PARTY / "test_disagg_procmem.py"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path, env=environ)
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
    for line in ended.stdout.splitlines():
        optional = (
            "closing this engine is no proof",
            "this engine cannot be started again",
            "this engine's end proves nothing",
        )
        assert not line.startswith("SKIPPED") or any(reason in line for reason in optional)  # abilities that it may lack


@pytest.mark.release
def test_a_third_partys_engine_is_found_by_its_entry_point(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    shutil.copytree(THIRD_PARTY, tmp_path / "source")
    installed = subprocess.run(
        [*pip, str(tmp_path / "site"), str(tmp_path / "source")], capture_output=True, text=True, timeout=110, check=False
    )
    assert installed.returncode == 0, installed.stderr
    case = [
        "--model",
        "tiny",
        "--tokens",
        "70",
        "--prefill",
        "tp=2",
        "--decode",
        "tp=1,page=64",
        "--repeat",
        "1",
        "--no-ceiling",
    ]
    bench = subprocess.run(
        [sys.executable, "-m", "disagg.commands.bench", "--backend", "procmem", *case],
        capture_output=True, text=True, timeout=110, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert bench.returncode == 0, bench.stderr
    rates, phases = [line.split() for line in bench.stdout.splitlines() if line.startswith("procmem")]
    assert rates[:2] == phases[:2] == ["procmem", "procmem"]
    assert rates[-2:] == ["yes", "well"]
