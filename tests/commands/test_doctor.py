"""`disagg doctor`: simulated problems are found and explained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.commands.doctor import children, engines, network
from disagg.commands.doctor.environment import environment
from disagg.commands.doctor.examination import examine, worst
from disagg.commands.doctor.machine import cma_refused, congestion, descriptors, gpus, ptrace, retransmission, shared_memory
from disagg.core.errors import ConfigError
from disagg.machine.findings import Finding, Level, Machine, ok
from disagg.machine.rdma import memlock, rdma, rdma_refusal
from disagg.runtime.channel import Channel
from harness.ports import held_port
from tests.backends.conftest import require_engine
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S
from tests.support.tcp import full_port

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "disagg.commands", "doctor"]
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "MC_"))}


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=90, check=False, env=PLAIN | (environ or {})
    )


def put(root: Path, files: dict[str, str]) -> Machine:
    """A machine with these files."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return Machine(root=root, environ={})


def complete(finding: Finding) -> bool:
    """Whether a finding that is not OK has a cause, a consequence and a fix."""
    return finding.level is Level.OK or bool(finding.cause and finding.consequence and finding.fix)


MLX = "sys/class/infiniband/mlx5_0/ports/1"
RDMA = {
    f"{MLX}/state": "4: ACTIVE", f"{MLX}/rate": "400 Gb/sec (4X NDR)", f"{MLX}/link_layer": "Ethernet",
    f"{MLX}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001", f"{MLX}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0002",
    f"{MLX}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
    f"{MLX}/gid_attrs/types/0": "IB/RoCE v1", f"{MLX}/gid_attrs/types/3": "RoCE v2", "dev/infiniband/uverbs0": "",
}  # fmt: skip


def unlimited(machine: Machine) -> Machine:
    return Machine(root=machine.root, environ=machine.environ, memlock=None)


# -- the whole command -------------------------------------------------------------------------------------------------


def test_a_plain_host_is_examined_and_both_engines_measured(tmp_path: Path) -> None:
    for engine in ("nixl", "mooncake"):
        require_engine({"nixl": "nixl._bindings", "mooncake": "mooncake.engine"}[engine], engine)
    ended = run("--json", str(tmp_path / "findings.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for engine in ("nixl", "mooncake"):
        (line,) = [text for text in ended.stdout.splitlines() if text.startswith(f"ok       {engine}")]
        assert "GB/s" in line
        assert "32 MiB registered, transport " in line
    found = json.loads((tmp_path / "findings.json").read_text())
    assert found["ok"] is True
    assert all(complete(Finding(**{**each, "level": Level(each["level"])})) for each in found["findings"])


def test_a_closed_port_a_tiny_mount_and_a_wrong_setting_are_one_report(tmp_path: Path) -> None:
    with tiny_mount(tmp_path) as mount, held_port() as port:
        ended = run(
            "--no-engines", "--shm", str(mount), "--peer", f"127.0.0.1:{port}", environ={"UCX_TLS": "cma"}
        )  # fmt: skip
    assert ended.returncode == 1
    for text in ("refuses connections", "has 1 MiB", "--shm-size", "UCX_TLS='cma'", "unset UCX_TLS", "3 errors"):
        assert text in ended.stdout
    assert "Traceback" not in ended.stderr


def test_errors_are_one_sentence() -> None:
    for arguments, named in (
        (("--peer", "nowhere"), "expected HOST:PORT, found 'nowhere'"),
        (("--engine", "nixl"), "--no-engines starts none"),
        (("--json", "/nonexistent/x"), "there is no folder /nonexistent"),
    ):
        ended = run("--no-engines", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        (sentence,) = ended.stderr.splitlines()
        assert named in sentence
    assert "disagg doctor --peer" in run("--help").stdout
    assert json.loads(run("--no-engines", "--json", "-").stdout)["findings"]


def test_the_traffic_of_rdma_devices_is_shown_while_it_is_watched(tmp_path: Path) -> None:
    machine = put(tmp_path, RDMA | {f"{MLX}/counters/port_xmit_data": "7", f"{MLX}/counters/port_rcv_data": "7"})
    causes = [finding.cause for finding in examine(unlimited(machine), watch_s=0.01, start_engines=False)]
    assert "RDMA device mlx5_0 port 1, within 0.01 s: 0.0 MB sent, 0.0 MB received" in causes
    shown = run("--no-engines", "--watch", "0.25").stdout
    assert ("within 0.25 s: " if Machine().rdma_devices else "its traffic cannot be shown") in shown


# -- engines -----------------------------------------------------------------------------------------------------------


def test_without_libibverbs_the_library_and_its_package_are_named(tmp_path: Path) -> None:
    require_engine("mooncake.engine", "mooncake")
    (tmp_path / "libibverbs.so.1").write_bytes(b"")  # found first, and no library
    ended = run("--engine", "mooncake", environ={"LD_LIBRARY_PATH": str(tmp_path)})
    assert ended.returncode == 1
    assert "error    mooncake     engine 'mooncake' is installed, but libibverbs.so.1 cannot be loaded" in ended.stdout
    assert "fix: apt install libibverbs1 ibverbs-providers" in ended.stdout
    assert "no network engine works here, of mooncake" in ended.stdout


def test_a_library_missing_only_at_engine_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise children.ChildFailed(
            "BackendUnavailable: libnuma.so.1: cannot open shared object file: No such file or directory"
        )

    monkeypatch.setattr(engines, "installed", lambda _: {"nixl": "1"})
    monkeypatch.setattr(engines, "child", refuse)
    (finding,) = engines.engine("nixl", Machine())
    assert finding.level is Level.ERROR
    assert finding.fix == "apt install libnuma1"


@pytest.mark.parametrize(("load", "level"), [(0.2, Level.ERROR), (40.0, Level.WARNING)])
def test_a_late_answer_on_a_busy_machine_is_no_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: float, level: Level
) -> None:
    def late(*_: object, **__: object) -> None:
        raise children.ChildLate("no output within 25 s")

    monkeypatch.setattr(engines, "installed", lambda _: {"nixl": "1"})
    monkeypatch.setattr(engines, "child", late)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(f"{load * (os.cpu_count() or 1)} 1 1 1/1 1\n")
    (finding,) = engines.engine("nixl", Machine(root=tmp_path, environ=PLAIN))
    assert finding.level is level
    assert ("could not be tested" in finding.cause) == (level is Level.WARNING)


def test_a_failing_start_of_ucx_is_found() -> None:
    require_engine("nixl._bindings", "nixl")
    ended = run("--engine", "nixl", environ={"UCX_TLS": "cma"})
    assert ended.returncode == 1
    assert "does not work between two processes here" in ended.stdout
    assert "unset UCX_TLS, and try again" in ended.stdout


def test_an_engine_that_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error only where it was asked for by name, or nothing else works."""
    monkeypatch.setattr(engines, "installed", lambda _: {})
    on_one_host = {"fine": ok("cma", "they may"), "refused": cma_refused("ptrace scope: 3")}
    for cma, names, level in (
        ("fine", (), Level.WARNING),
        ("refused", (), Level.ERROR),
        ("fine", ("nixl",), Level.ERROR),
    ):
        monkeypatch.setattr(engines, "cma", lambda _, cma=cma: on_one_host[cma])
        found = [each for each in examine(Machine(environ=PLAIN), names=names) if each.topic in ("nixl", "mooncake", "engines")]
        assert found[0].fix == "pip install '.[nixl]', in a clone of disagg"
        assert found[0].level is Level.WARNING
        assert (found[-1].topic, found[-1].level) == ("engines", level)
        assert ("between processes of this host cma works" in found[-1].cause) == (cma == "fine")
        assert worst(found) is level


def test_the_packages_that_fixes_name_are_extras_of_this_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for shipped in engines.ENGINES.values():
        named = re.findall(r"'\.\[([\w-]+)\]'", shipped.install)
        assert named
        assert set(named) <= set(extras)
        assert all(re.split("[>=]", package)[0] in shipped.packages for extra in named for package in extras[extra])


def test_two_wheels_with_one_import_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engines, "installed", lambda _: {"mooncake-transfer-engine": "1", "mooncake-transfer-engine-cuda13": "2"}
    )
    monkeypatch.setattr(engines, "_missing", lambda *_: iter(()))
    monkeypatch.setattr(engines, "_measured", lambda *_: Finding("mooncake", Level.OK, "fine"))
    first = next(engines.engine("mooncake", Machine()))
    assert first.level is Level.WARNING
    assert "pip uninstall" in first.fix


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "with signal SIGSEGV"),
        ("raise SystemExit(3)", "with exit status 3"),
        ("import time; time.sleep(60)", "no output within 3 s"),
        ("print('talk'); print('{\"error\": \"no\"}')", "^no$"),
    ],
)
def test_a_child_that_crashes_or_hangs_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, named: str
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "child.py").write_text(script)
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {os.path.realpath('/proc/self/exe')} {tmp_path}/child.py\n")
    (tmp_path / "python").chmod(0o755)
    timeout_s = 3 if "within" in named else 20
    with children.child("owner:nixl", PLAIN, timeout_s=timeout_s) as started, pytest.raises(children.ChildFailed, match=named):
        started.answer()


@pytest.mark.parametrize(
    ("library", "fix"),
    [
        ("libibverbs.so.1", "apt install libibverbs1 ibverbs-providers"),
        ("libnuma.so.1", "apt install libnuma1"),
        ("libcurl.so.4", "apt install libcurl4"),
        ("libmlx5.so.1", "apt install ibverbs-providers"),
        ("libcudart.so.12", "CUDA of that major version"),
        ("libwhatever.so.9", "apt-file search libwhatever.so.9"),
    ],
)
def test_every_library_has_a_fix(library: str, fix: str) -> None:
    assert fix in engines.library_fix(library)


def test_missing_nvlink_packages_are_named_on_machines_with_gpus(tmp_path: Path) -> None:
    assert list(engines.nvlink(put(tmp_path / "none", {"proc/modules": ""}))) == []
    if Machine().gpus:
        pytest.skip("this machine has GPUs: what is missing cannot be shown on it")
    machine = put(tmp_path, {"proc/driver/nvidia/gpus/0000:01:00.0/information": ""})
    (finding,) = engines.nvlink(Machine(root=machine.root, environ=PLAIN))
    assert finding.level is Level.WARNING
    assert "'cuda-bindings'" in finding.cause
    assert "pip install '.[nvlink]'" in finding.fix
    assert complete(finding)


def test_cma_is_tested_between_two_processes() -> None:
    assert engines.cma(Machine(environ=PLAIN)).topic == "cma"


# -- the machine -------------------------------------------------------------------------------------------------------


def test_no_rdma_device_is_a_warning_or_an_error_if_required(tmp_path: Path) -> None:
    machine = put(tmp_path, {})
    (warning,), (error,) = rdma(machine), rdma(machine, required=True)
    assert (warning.level, error.level) == (Level.WARNING, Level.ERROR)
    assert warning.cause == error.cause
    refusal = rdma_refusal(machine=machine)
    assert refusal is not None
    assert error.cause in refusal
    assert error.fix in refusal


def test_working_rdma_is_reported_with_its_gids(tmp_path: Path) -> None:
    machine = unlimited(put(tmp_path, RDMA))
    assert rdma_refusal(machine=machine) is None
    (finding,) = rdma(machine)
    assert finding.level is Level.OK
    assert "400 Gb/sec" in finding.cause
    assert "2 GIDs; RoCE v2 at index 3" in finding.cause


@pytest.mark.parametrize(
    ("change", "devices", "named"),
    [
        ({f"{MLX}/state": "1: DOWN"}, (), "1: DOWN"),
        ({f"{MLX}/gids/0": "0000:0000:0000:0000:0000:0000:0000:0000", f"{MLX}/gids/3": ""}, (), "no GID"),
        ({}, ("mlx5_7",), "'mlx5_7' was asked for, and this machine has mlx5_0"),
    ],
)
def test_unusable_rdma_is_reported_with_the_reason(
    tmp_path: Path, change: dict[str, str], devices: tuple[str, ...], named: str
) -> None:
    zero = {path: text or "0000:0000:0000:0000:0000:0000:0000:0000" for path, text in change.items()}
    refusal = rdma_refusal(devices, unlimited(put(tmp_path, {**RDMA, **zero})))
    assert refusal is not None
    assert named in refusal


def test_a_container_without_device_files_and_with_a_low_limit(tmp_path: Path) -> None:
    machine = put(tmp_path, {path: text for path, text in RDMA.items() if not path.startswith("dev/")})
    found = list(rdma(Machine(root=machine.root, environ={}, memlock=65536)))
    assert [f.level for f in found] == [Level.WARNING, Level.ERROR, Level.OK]
    assert "--device /dev/infiniband" in found[0].fix
    assert "64 KiB" in found[1].cause
    assert all(map(complete, found))
    assert memlock(Machine(memlock=65536), rdma=False).level is Level.OK
    put(tmp_path, {"proc/meminfo": "MemTotal:       8388608 kB\nMemFree: 1 kB"})
    large = [memlock(Machine(root=tmp_path, memlock=limit << 30), rdma=True).level for limit in (4, 8)]
    assert large == [Level.WARNING, Level.OK]


def test_one_port_that_is_up_is_enough(tmp_path: Path) -> None:
    down = {path.replace("mlx5_0", "mlx5_1"): text for path, text in RDMA.items()}
    down["sys/class/infiniband/mlx5_1/ports/1/state"] = "1: DOWN"
    machine = unlimited(put(tmp_path, {**RDMA, **down}))
    assert rdma_refusal(machine=machine) is None
    assert rdma_refusal(["mlx5_0:1"], machine) is None
    assert "mlx5_1 port 1 is not up" in str(rdma_refusal(["mlx5_1"], machine))


def test_gpus_peer_memory_and_expandable_segments(tmp_path: Path) -> None:
    assert "no NVIDIA driver" in next(gpus(put(tmp_path, {}))).cause
    machine = put(tmp_path, {**RDMA, "proc/driver/nvidia/gpus/0000:01:00.0/information": "", "proc/modules": "mlx5_core 1 0 -"})
    machine = Machine(root=machine.root, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    found = list(gpus(machine))
    assert [finding.level for finding in found] == [Level.OK, Level.WARNING, Level.WARNING]
    assert "expandable_segments:False" in found[1].fix
    assert found[2].fix == "modprobe nvidia_peermem"
    put(tmp_path, {"proc/modules": "nvidia_peermem 16384 0 - Live 0x0"})
    assert list(gpus(machine))[2].level is Level.OK


@contextlib.contextmanager
def tiny_mount(folder: Path) -> Iterator[Path]:
    """A shared-memory mount of 1 MiB; skipped if mounting is not allowed."""
    mount = folder / "shm"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_tiny_shared_memory_mount_is_an_error(tmp_path: Path) -> None:
    with tiny_mount(tmp_path) as mount:
        finding = shared_memory(Machine(shm=mount))
    assert finding.level is Level.ERROR
    assert "1 MiB" in finding.cause
    assert "SIGBUS" in finding.consequence
    assert f"remount,size=8g {mount}" in finding.fix
    assert shared_memory(Machine(shm=tmp_path / "nowhere")).level is Level.ERROR


@pytest.mark.parametrize(
    ("limit", "level", "ranks"), [(1024, Level.WARNING, 96), (65536, Level.OK, 8160), (100, Level.WARNING, 0)]
)
def test_the_limit_of_descriptors_says_for_how_many_peers_it_is_enough(
    limit: int, level: Level, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = descriptors()
    assert finding.level is level
    assert finding.cause == f"at most {limit} descriptors (ulimit -n), enough for {ranks} ranks of peers"


def test_ptrace_scope_and_congestion_control(tmp_path: Path) -> None:
    assert ptrace(put(tmp_path, {})).level is Level.OK
    machine = put(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": "1", "proc/sys/net/ipv4/tcp_congestion_control": "bbr",
                             "proc/sys/net/ipv4/tcp_available_congestion_control": "reno bbr"})  # fmt: skip
    assert "kernel.yama.ptrace_scope is 1" in ptrace(machine).cause
    assert congestion(machine).fix == "sysctl -w net.ipv4.tcp_congestion_control=reno"
    assert congestion(put(tmp_path, {"proc/sys/net/ipv4/tcp_congestion_control": "cubic"})).level is Level.OK


def test_how_long_tcp_waits_after_a_cut(tmp_path: Path) -> None:
    assert "Linux 6.15 and newer" in retransmission(put(tmp_path, {})).cause
    newer = put(tmp_path, {"proc/sys/net/ipv4/tcp_rto_max_ms": "120000"})
    assert "waits at most 1 s, and keeps its connections for 900 s" in retransmission(newer).cause


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "level", "named"),
    [
        ("UCX_TLS", "cma", Level.ERROR, "no active messages transport"),
        ("UCX_TLS", "tcp", Level.WARNING, "excludes shared memory"),
        ("UCX_TLS", "^tcp", Level.ERROR, "excludes tcp"),
        ("UCX_TLS", "tcp,shm,pigeon", Level.WARNING, "pigeon"),
        ("UCX_TLS", "shm,tcp", Level.OK, "no problem found"),
        ("UCX_TLS", "all", Level.OK, ""),
        ("UCX_NET_DEVICES", "eth9", Level.ERROR, "no device eth9"),
        ("UCX_NET_DEVICES", "lo", Level.WARNING, "loopback only"),
        ("UCX_MODULES", "all", Level.WARNING, "SIGSEGV"),
        ("UCX_MODULES", "^ib", Level.OK, ""),
        ("UCX_LOG_LEVEL", "info", Level.OK, "does not know it"),
        ("MC_TCP_PROTO", "1", Level.ERROR, "refuses to start"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "0", Level.ERROR, "refuses to start"),
        ("MC_TRANSFER_TIMEOUT", "30", Level.WARNING, "quarantined"),
        ("MC_USE_IPV6", "1", Level.OK, "IPv6 addresses only"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "8", Level.WARNING, "slow"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535", Level.OK, ""),
        ("MC_INTRANODE_NVLINK", "1", Level.ERROR, "no GPU"),
        ("MC_FORCE_TCP", "1", Level.OK, ""),
    ],
)
def test_settings_of_engines(tmp_path: Path, name: str, value: str, level: Level, named: str) -> None:
    machine = put(tmp_path, {"sys/class/net/lo/flags": "0x9", "sys/class/net/eth0/flags": "0x1"})
    found = list(environment(Machine(root=machine.root, environ={name: value, "HOME": "/"})))
    assert worst(found) is level
    assert any(named in str(finding) for finding in found)
    assert all(map(complete, found))
    assert all(name in finding.cause for finding in found)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("UCX_TLS", "tcp,shm", "excludes ib"),
        ("MC_FORCE_TCP", "1", "does not use mlx5_0"),
        ("UCX_TLS", "ib,shm", "excludes cuda"),
    ],
)
def test_settings_that_exclude_rdma_or_gpus(tmp_path: Path, name: str, value: str, named: str) -> None:
    machine = put(tmp_path, {**RDMA, "proc/driver/nvidia/gpus/0000:01:00.0/information": ""})
    found = list(environment(Machine(root=machine.root, environ={name: value})))
    assert any(named in str(finding) for finding in found)


# -- peers -------------------------------------------------------------------------------------------------------------


def test_a_closed_port_is_explained() -> None:
    with held_port() as port:
        finding = network.peer("127.0.0.1", port)
    assert finding.level is Level.ERROR
    assert "refuses connections" in finding.cause
    assert f"ss -tlnp 'sport = :{port}'" in finding.fix
    assert complete(finding)


def test_a_port_that_drops_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.3)
    with full_port() as port:
        finding = network.peer("127.0.0.1", port)
    assert finding.level is Level.ERROR
    assert "firewall" in finding.cause


def test_a_control_port_is_told_apart_from_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "GREETING_S", DEADLINE_S)
    channel = Channel("tcp://127.0.0.1:0")
    try:
        assert network.peer(*network.parse_peer(channel.address)).level is Level.OK
    finally:
        channel.close()
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-x\n")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        finding = network.peer(*other.getsockname())
        thread.join()
        assert finding.level is Level.WARNING
        assert "SSH-2.0" in finding.cause
        monkeypatch.setattr(network, "GREETING_S", 0.1)
        assert "sent nothing" in network.peer(*other.getsockname()).cause


def test_a_rank_without_keys_counts_no_refusal_of_a_probe() -> None:
    with contextlib.closing(Channel("tcp://127.0.0.1:0")) as rank, contextlib.closing(Channel("tcp://127.0.0.1:0")) as other:
        assert network.peer(*network.parse_peer(rank.address)).level is Level.OK
        other.connect(1, rank.address)
        other.send(1, b"after the probe")
        other.flush()
        until(lambda: list(rank.poll(0)))
        assert rank.refused == 0


def test_invalid_names_and_addresses() -> None:
    assert "cannot be resolved" in network.peer("no-such-host.invalid", 7000).cause
    with pytest.raises(ConfigError, match="expected HOST:PORT, found 'nowhere'"):
        next(examine(Machine(), peers=("127.0.0.1:7000", "nowhere")))
