"""`disagg-bench` over real engines with one process per rank on loopback, and how it ends on errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from disagg.commands.bench import driver, processes
from disagg.commands.bench.fleet import Remote
from disagg.commands.bench.main import main
from disagg.commands.bench.processes import RankDied, RankProcess, RankThread
from disagg.commands.cases.instructions import Describe
from disagg.commands.rank.rank import RankConfig, boot_id
from disagg.commands.rank.raw import Sink, pour
from disagg.commands.rank.serve import Stop, _driver_socket
from disagg.models import load_model
from tests.backends.conftest import require_engine
from tests.commands.conftest import BYTES_PER_TOKEN, ENGINES, Bench, said
from tests.commands.test_report import description
from tests.support.grid import CONTEXT_SIDES, ENGINE_PRESETS, ENGINE_SIDES

TOKENS = 70
QUICK = ("--tokens", str(TOKENS), "--repeat", "1", "--no-ceiling", "--warm-up", "0", "--timeout", "30")
SHORT = ("--backend", "mooncake", *QUICK, "--prefill", "tp=2", "--decode", "tp=1,page=64")
WAIT_S = 30.0


def some(cases: Sequence[Any], chosen: Iterable[int]) -> list[Any]:
    """The cases. `make test` runs the chosen ones, `make test-models` all: engines only see other addresses."""
    wanted = set(chosen)
    return [each if n in wanted else pytest.param(*each, marks=pytest.mark.nightly) for n, each in enumerate(cases)]


@pytest.mark.parametrize(("prefill", "decode"), some(ENGINE_SIDES, [2]))
def test_every_byte_arrives(bench: Bench, engine: str, model: str, prefill: str, decode: str) -> None:
    sides = ("--prefill", prefill, "--decode", decode, "--requests", "2", "--concurrency", "2")
    ended = bench("--backend", engine, "--model", model, *QUICK, *sides)
    assert ended.status == 0, ended.err
    (row,) = ended.rows
    assert row["verified"] is True
    assert row["backend"] == engine
    assert row["bytes"] == 2 * TOKENS * BYTES_PER_TOKEN
    assert ended.out.splitlines()[1].split()[-2:] == ["yes", "well"]
    assert "WARNING" not in ended.out


@pytest.mark.parametrize(
    ("name", "preset", "layers", "prefill", "decode"),
    some(ENGINE_PRESETS, [n for n, (_, preset, *_) in enumerate(ENGINE_PRESETS) if preset == "qwen3-next-80b"]),
)
def test_every_kind_of_state_arrives(bench: Bench, name: str, preset: str, layers: int, prefill: str, decode: str) -> None:
    require_engine(*ENGINES[name])
    how = ("--layers", str(layers), "--requests", "2", "--concurrency", "2", "--prefill", prefill, "--decode", decode)
    ended = bench("--backend", name, "--model", preset, *QUICK, "--tokens", "150", *how)
    assert ended.status == 0, ended.err
    (row,) = ended.rows
    model = load_model(preset, num_layers=layers)
    assert row["verified"] is True
    assert row["components"] == sorted(state.name for state in model.states)
    assert row["bytes"] >= 2 * model.nbytes(150)


@pytest.mark.parametrize(("prefill", "decode"), some(CONTEXT_SIDES, [1]))
def test_context_parallel_sides_exchange_hybrid_state(bench: Bench, engine: str, prefill: str, decode: str) -> None:
    sides = ("--layers", "4", "--prefill", prefill, "--decode", decode)
    ended = bench("--backend", engine, "--model", "qwen3-next-80b", *QUICK, "--tokens", "150", *sides)
    assert ended.status == 0, ended.err
    assert [row["verified"] for row in ended.rows] == [True]


def test_two_cases_and_the_ceiling(bench: Bench, mooncake: str, model: str) -> None:
    sides = ("--prefill", "tp=2", "--decode", "tp=1", "--prefill", "tp=1,page=8", "--decode", "tp=1")
    ended = bench("--backend", mooncake, "--model", model, "--tokens", "40", "--repeat", "2", *sides)
    assert ended.status == 0, ended.err
    assert [row["verified"] for row in ended.rows] == [True, True]
    assert all(row["ceiling_gbps"] > 0 and row["ratio"] > 0 for row in ended.rows)
    assert all(row["raw"] == "socket" and row["raw_gbps"] > 0 and row["core_s_per_gb"] > 0 for row in ended.rows)


def test_an_injected_fault_is_detected(bench: Bench, mooncake: str, model: str) -> None:
    ended = bench("--model", model, *SHORT, "--fault", "byte")
    assert ended.status == 1
    assert [row["verified"] for row in ended.rows] == [False]
    assert "not verified: rank decode/0: request 0, component 'kv'" in ended.err


def test_a_rank_that_is_killed_is_reported(bench: Bench, mooncake: str, model: str) -> None:
    ended = bench("--model", model, *SHORT, "--fault", "kill")
    assert ended.status == 1
    assert "rank prefill/1 ended with signal SIGKILL" in ended.err
    assert "Traceback" not in ended.err


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_ranks_do_not_outlive_their_driver(mooncake: str, model: str) -> None:
    chatty = "from disagg.commands.bench import command; command.QUIET_S = 0; command.bench()"  # a line for each run
    command = [sys.executable, "-c", chatty, "--model", model, *SHORT, "--repeat", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        while "run 3 of" not in driver.stderr.readline():
            assert driver.poll() is None
        children = _children(driver.pid)
        assert len(children) == 3
        driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, children))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--backend", "no-such-engine"), "local, mooncake, nixl"),
        (("--decode", "tpp=1", "--prefill", "tp=1"), "'tpp=1'"),
        (("--decode", "tp=1"), "as many --decode as --prefill"),
        (("--verify", "some"), "verify"),
        (("--plot", "rows.nothing"), "'rows.nothing'"),
        (("--connect", "127.0.0.1"), "tcp://host:port"),
        (("--connect", "tcp://127.0.0.1:1", "--verify", "full"), "verify: running ranks keep"),
        (("--connect", "tcp://127.0.0.1:1", "--transport", "tcp"), "transport: running ranks keep"),
        (("--duration", "nan"), "nan is not a finite number"),
        (("--rate", "inf"), "inf is not a finite number"),
        (("--timeout", "1e300"), "range 1<=x<=1000000"),
        (("--json", "-"), "standard output has the table"),
        (("--json", "rows", "--csv", "./rows"), "expected another file for each option"),
        (("--compare", "a.json", "b.json", "--json", "rows"), "compare: expected no file to write"),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, ...], named: str) -> None:
    ended = said(main, "--model", "tiny", *SHORT, *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("disagg-bench: ")
    assert named in sentence


def test_an_unavailable_transport_ends_every_rank(bench: Bench, mooncake: str) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has RDMA devices")
    ended = bench("--model", "tiny", *SHORT, "--transport", "rdma")
    assert ended.status == 1
    assert "exit status 1" in ended.err
    assert "'rdma'" in ended.err
    assert "Traceback" not in ended.err


CONFIG = RankConfig(role="prefill", model="tiny", backend="mooncake", driver="tcp://127.0.0.1:0")


def test_a_rank_must_start_and_end_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(_: RankConfig, *, stop: Stop, report: Callable[[str], None]) -> None:
        del report
        stop.wait(60)

    monkeypatch.setattr(processes, "serve", serve)
    for rank in (RankProcess([CONFIG], timeout_s=0.0).ranks[0], RankThread(CONFIG, timeout_s=0.0)):
        try:
            with pytest.raises(RankDied, match=r"^starting: rank prefill/0 was not up within 0 s \(--timeout\)"):
                rank.addresses()
            with pytest.raises(RankDied, match=r"did not end within 0 s \(--timeout\)"):
                rank.end(until=time.monotonic())
        finally:
            rank.kill()


def _without(folder: Path, *modules: str) -> dict[str, str]:
    """An environment in which these modules cannot be imported."""
    for module in modules:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(f"raise ModuleNotFoundError('not installed', name={module!r})\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(
    ("backend", "modules", "package"),
    [
        ("mooncake", ("mooncake",), "mooncake-transfer-engine-non-cuda"),
        ("nixl", ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"), "pip install nixl"),
    ],
)
def test_a_missing_engine_names_its_package(tmp_path: Path, backend: str, modules: tuple[str, ...], package: str) -> None:
    command = [sys.executable, "-m", "disagg.commands", "prefill", "--model", "tiny", "--backend", backend]
    environment = _without(tmp_path, *modules)
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    assert ended.returncode == 1
    assert package in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--listen", "--driver"):
            command = [
                sys.executable,
                "-m",
                "disagg.commands",
                "prefill",
                "--model",
                "tiny",
                "--backend",
                "local",
                option,
                address,
            ]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            assert ended.returncode == 2
            assert f"cannot bind '{address}'" in ended.stderr
            assert len(ended.stderr.splitlines()) == 1


def test_ranks_and_sockets_at_ipv6_addresses_are_reached() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    listening = _driver_socket("tcp://[::1]:0")
    remote = Remote(listening.getsockopt_string(zmq.LAST_ENDPOINT), None)
    try:
        remote.send(Describe())
        assert listening.poll(10_000)
    finally:
        remote.socket.close()
        listening.close()
    arena = np.zeros(8, np.uint8)
    sink = Sink("::1", [(100, 8)], base=100, arena=arena, timeout_s=10.0)
    pour(("::1", sink.port), 0, memoryview(bytes(range(8))), 10.0)
    assert arena.tolist() == list(range(8))


@pytest.mark.parametrize(("namespaces", "boots", "is_measured"), [("aa", 1, True), ("ab", 1, False), ("aa", 2, False)])
def test_the_systems_copy_is_measured_between_processes_that_know_each_other_by_their_ids(
    namespaces: str, boots: int, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere an id is another process's, into which it would write."""
    abouts = [
        msgspec.structs.replace(description("prefill"), transport="shm", boot_id=boot_id(), pid_namespace=each)
        for each in namespaces
    ]
    abouts[1] = msgspec.structs.replace(abouts[1], boot_id=boot_id() if boots == 1 else "other")
    remotes: list[Any] = [SimpleNamespace(about=about) for about in abouts]
    prepared: Any = SimpleNamespace(
        case=SimpleNamespace(device="cpu", timeout_s=1.0),
        ranks=SimpleNamespace(sources=remotes[:1], destinations=remotes[1:], all=remotes),
        blocks={},
    )
    monkeypatch.setattr(driver, "_moved", lambda *_: 3.0)
    assert driver._raw(prepared) == (3.0 if is_measured else None)
